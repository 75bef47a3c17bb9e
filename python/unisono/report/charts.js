// The charts of the page: everything that is drawn with Vega, for the current selection.
// One scope with page.js, which follows (html.py): its data and helpers are there once these functions are called.
const views = new Map(); // element -> the newest drawing's promise
const options = {
  mode: "vega-lite",
  ast: true, // Vega's expression interpreter: no eval, so the page's policy need not allow it
  renderer: "svg",
  actions: false,
  defaultStyle: false,
  tooltip: { disableDefaultStyle: true },
};

// Draws a figure of figures.py in an element; `change` may change the template further.
function draw(element, { template, rows, height, sizes = [], decades = true }, change = () => {}) {
  const spec = structuredClone(data.specs[template]);
  spec.datasets = { rows };
  spec.width = "container";
  if (spec.height?.step) spec.height = spec.height.step * lines(spec, rows); // Vega-Lite warns of steps beside a container
  if (height) spec.height = height;
  for (const { x, y } of encodings(spec)) {
    if (x?.axis && sizes.length) x.axis.values = sizes;
    if (y?.axis && !decades) delete y.axis.values;
  }
  // In cells narrower than about 50 points the text is small and bare.
  const columns = unique(rows.map((row) => row.column)).length;
  for (const param of spec.params ?? []) param.value = element.clientWidth - 120 < 50 * columns;
  change(spec);
  const before = views.get(element) ?? Promise.resolve(null);
  const now = before
    .then((old) => old?.finalize())
    .then(() => vegaEmbed(element, spec, { ...options, config: data.config }))
    .catch((error) => report(`${template}: ${error}`));
  views.set(element, now);
  return now;
}

const encodings = (spec) => [spec, ...(spec.layer ?? [])].map((part) => part.encoding ?? {});

function lines(spec, rows) {
  const field = encodings(spec).find(({ y }) => y?.field).y.field;
  return unique(rows.map((row) => (field === "label" ? `${row.collective} ${row.backend}` : row[field]))).length;
}

// Adds a place for a drawing to its parent, in a frame with a caption if there is a title.
function frame(parent, title, detail) {
  const plot = make("div", { className: "plot" });
  const caption = make("figcaption", {}, title);
  if (detail) caption.append(make("small", { textContent: detail }));
  parent.append(title ? make("figure", {}, caption, plot) : plot);
  return plot;
}

const nothing = (parent, message = "Nothing was measured for this selection.") =>
  parent.replaceChildren(make("p", { className: "empty", textContent: message }));

// Draws figures in place of what stood there.
function show(place, figures, message) {
  const parent = byId(place);
  parent.replaceChildren();
  if (!figures.length) nothing(parent, message);
  return figures.map((figure) => draw(frame(parent, figure.title, figure.detail), figure));
}

// A heatmap for each mode and kind of memory; what has no memory (a barrier) stands in each.
function heatmaps() {
  const chosen = cells.filter((cell) => fits({ ...cell, mode: null, memory: null }, selection));
  return unique(chosen.map((cell) => cell.mode)).flatMap((mode) => {
    const own = chosen.filter((cell) => cell.mode === mode);
    const memories = unique(own.map((cell) => cell.memory).filter((memory) => memory !== null));
    return (memories.length ? memories : [null]).map((memory) => ({
      template: "heat",
      rows: own.filter((cell) => cell.memory === memory || cell.memory === null),
      title: mode,
      detail: memory === null ? "" : `${memory} buffers`,
    }));
  });
}

function drawSelection() {
  const rows = sweep.filter((row) => fits(row, selection));
  const grid = (metric) => [{ template: metric, rows: rows.filter((row) => row[metric] !== null) }].filter((figure) => figure.rows.length);
  const panels = data.panels.filter(({ choice }) => fits(choice, selection));
  const jobs = ["bandwidth-panels", "latency-panels", "spread-panels"].flatMap((place) => {
    const own = panels.filter((panel) => panel.place === place);
    return show(place, own.map((panel) => ({ ...panel, rows: panel.rows.map((id) => results[id]) })));
  });
  jobs.push(...show("heat", heatmaps(), "There is no pair of results to compare in this selection."));
  return [...jobs, ...show("cv", grid("cv")), ...show("sol-grid", grid("sol")), ...pickCases()];
}

// --- one case's distribution --------------------------------------------------------------------------------------
const RANGES = ["99 % of the samples", "all samples"];
const picked = { collective: null, bytes: null, range: RANGES[0] };

function choice(label, values, text, current, onChange) {
  const select = make("select", { onchange: () => onChange(values[select.selectedIndex]) });
  for (const value of values) select.append(make("option", { textContent: text(value), selected: value === current }));
  return make("label", {}, label, select);
}

function pickCases() {
  const rows = sweep.filter((row) => fits(row, selection));
  if (!rows.length) {
    nothing(byId("pick"), "");
    nothing(byId("samples"));
    return [];
  }
  const collectives = unique(rows.map((row) => row.collective));
  if (!collectives.includes(picked.collective)) picked.collective = collectives[0];
  const own = rows.filter((row) => row.collective === picked.collective);
  const sizes = unique(own.map((row) => row.bytes)).sort((a, b) => a - b);
  if (!sizes.includes(picked.bytes)) picked.bytes = sizes[Math.floor(sizes.length / 2)];
  const again = (name) => (value) => {
    picked[name] = value;
    pickCases();
  };
  const sizeText = (bytes) => own.find((row) => row.bytes === bytes).size;
  byId("pick").replaceChildren(
    choice("Collective", collectives, String, picked.collective, again("collective")),
    choice("Size", sizes, sizeText, picked.bytes, again("bytes")),
    choice("Axis", RANGES, String, picked.range, again("range")),
  );
  return drawDistribution(own.filter((row) => row.bytes === picked.bytes));
}

function drawDistribution(rows) {
  const shown = rows.map((row) => ({ ...row, kind: "box" }));
  const curve = [];
  for (const row of rows) {
    const { backend } = row;
    const values = data.samples[row.id];
    const last = values.length - 1;
    values.forEach((value, i) => {
      const rank = last ? Math.round((i * (row.n - 1)) / last) : 0; // as payload.order_statistics chose them
      curve.push({ backend, kind: "curve", value, share: (rank + 1) / row.n });
      if (value < row.wlow || value > row.whigh) shown.push({ backend, kind: "out", value });
    });
    curve.push({ backend, kind: "curve", value: values[0], share: 0 });
  }
  const limit = picked.range === RANGES[0] ? 0.99 : 1;
  const values = curve.filter((point) => point.share <= limit).map((point) => point.value);
  values.push(...rows.flatMap((row) => [row.q1, row.q3]));
  const domain = [Math.min(...values) * 0.98, Math.max(...values) * 1.02];
  const axis = 20 + 7 * Math.max(6, ...rows.map((row) => row.backend.length)); // the names, and a margin
  const plot = make("div", { className: "plot" });
  byId("samples").replaceChildren(plot);
  return [
    draw(plot, { template: "distribution", rows: [...shown, ...curve] }, (spec) => {
      delete spec.width; // "container" is for single charts; should the window shrink, page.css fits these in
      for (const part of spec.vconcat) part.width = Math.max(plot.clientWidth - axis, 160);
      for (const { x } of spec.vconcat.flatMap(encodings)) if (x) x.scale = { ...x.scale, type: "log", nice: false, domain };
    }),
  ];
}
