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

function draw(element, name, rows, change = () => {}) {
  const spec = structuredClone(data.specs[name]);
  spec.datasets = { rows };
  spec.width = "container";
  if (spec.height?.step) spec.height = spec.height.step * lines(spec, rows); // Vega-Lite warns of steps beside a container
  change(spec);
  const before = views.get(element) ?? Promise.resolve(null);
  const now = before
    .then((old) => old?.finalize())
    .then(() => vegaEmbed(element, spec, { ...options, config: data.config }))
    .catch((error) => report(`${name}: ${error}`));
  views.set(element, now);
  return now;
}

const encodings = (spec) => [spec, ...(spec.layer ?? [])].map((part) => part.encoding ?? {});

function lines(spec, rows) {
  const field = encodings(spec).find(({ y }) => y?.field).y.field;
  return unique(rows.map((row) => (field === "label" ? `${row.collective} ${row.backend}` : row[field]))).length;
}

// Ticks at sizes that were measured, at most seven.
function tickAtSizes(spec, rows) {
  const sizes = unique(rows.map((row) => row.column)).sort((a, b) => a - b);
  const step = Math.ceil(sizes.length / 7);
  const values = sizes.filter((_, i) => i % step === 0);
  for (const { x } of encodings(spec)) if (x?.axis) x.axis.values = values;
}

// Over less than a decade Vega's own ticks are better than 1, 2, 5.
function tickAtTimes(spec, low, high) {
  if (!(high < 10 * low)) return;
  for (const { y } of encodings(spec)) if (y?.axis) delete y.axis.values;
}
const extent = (rows, of) => [Math.min(...rows.map((row) => of(row)[0])), Math.max(...rows.map((row) => of(row)[1]))];

function tickCurves(spec, rows) {
  tickAtSizes(spec, rows);
  tickAtTimes(spec, ...extent(rows, (row) => [row.low, row.high]));
}

// At most ten of the sizes, evenly spaced, the first and the last included.
function fewSizes(rows) {
  const columns = unique(rows.map((row) => row.column)).sort((a, b) => a - b);
  const last = columns.length - 1;
  const kept = last < 10 ? columns : [...Array(10).keys()].map((i) => columns[Math.round((i * last) / 9)]);
  return rows.filter((row) => kept.includes(row.column));
}

const tickSpread = (spec, rows) =>
  tickAtTimes(spec, ...extent(rows, (row) => [row.min / row.median, row.max / row.median]));

// In cells narrower than about 50 points the text is small and bare.
function dense(spec, rows, plot) {
  const columns = unique(rows.map((row) => row.column)).length;
  for (const param of spec.params ?? []) if (param.name === "dense") param.value = plot.clientWidth - 120 < 50 * columns;
}

function figure(parent, title, detail = "") {
  const plot = make("div", { className: "plot" });
  const caption = make("figcaption", {}, title);
  if (detail) caption.append(make("small", { textContent: detail }));
  parent.append(make("figure", {}, caption, plot));
  return plot;
}

const nothing = (parent, message = "Nothing was measured for this selection.") =>
  parent.replaceChildren(make("p", { className: "empty", textContent: message }));

function drawHeat() {
  const parent = byId("heat");
  parent.replaceChildren();
  const chosen = cells.filter((cell) => fits(cell, selection, ["mode", "memory"]));
  const jobs = [];
  for (const mode of unique(chosen.map((cell) => cell.mode))) {
    const memories = unique(chosen.map((cell) => cell.memory).filter((memory) => memory !== null));
    for (const memory of memories.length ? memories : [null]) {
      const rows = chosen.filter((cell) => cell.mode === mode && (cell.memory === memory || cell.memory === null));
      if (!rows.some((cell) => cell.memory === memory)) continue;
      const plot = figure(parent, mode, memory === null ? "" : `${memory} buffers`);
      jobs.push(draw(plot, "heat", rows, (spec) => dense(spec, rows, plot)));
    }
  }
  if (!jobs.length) nothing(parent, "There is no pair of results to compare in this selection.");
  return jobs;
}

function drawPanels(id, name, keep, height, change, thin = (rows) => rows) {
  const parent = byId(id);
  parent.replaceChildren();
  const rows = sweep.filter((row) => fits(row, selection) && keep(row));
  const jobs = unique(rows.map((row) => row.collective)).map((collective) => {
    const own = thin(rows.filter((row) => row.collective === collective));
    const plot = figure(parent, collective, unique(own.map((row) => row.op).filter(Boolean)).join(", "));
    return draw(plot, name, own, (spec) => {
      spec.height = height;
      change(spec, own);
    });
  });
  if (!jobs.length) nothing(parent);
  return jobs;
}

function drawGrid(id, name) {
  const rows = sweep.filter((row) => fits(row, selection) && row[name] !== null);
  const parent = byId(id);
  const plot = make("div", { className: "plot" });
  parent.replaceChildren(plot);
  if (!rows.length) return nothing(parent), [];
  return [draw(plot, name, rows, (spec) => dense(spec, rows, plot))];
}

function drawSelection() {
  return [
    ...drawHeat(),
    ...drawPanels("bandwidth-panels", "bandwidth", (row) => row.bytes > 0, 210, tickCurves),
    ...drawPanels("latency-panels", "latency", (row) => row.bytes > 0, 210, tickCurves),
    ...drawPanels("spread-panels", "spread", () => true, 170, tickSpread, fewSizes),
    ...drawGrid("cv", "cv"),
    ...drawGrid("sol-grid", "sol"),
    ...pickCases(),
  ];
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
    draw(plot, "distribution", [...shown, ...curve], (spec) => {
      delete spec.width; // "container" is for single charts; should the window shrink, page.css fits these in
      for (const part of spec.vconcat) part.width = Math.max(plot.clientWidth - axis, 160);
      for (const { x } of spec.vconcat.flatMap(encodings)) if (x) x.scale = { ...x.scale, type: "log", nice: false, domain };
    }),
  ];
}
