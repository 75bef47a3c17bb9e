// The page's own script: fills the charts and tables from the data block, and redraws them when the selection changes.
// Text reaches the document through textContent and through Vega's own escaping only.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const errors = byId("script-errors");
  const report = (message) => {
    const item = document.createElement("li");
    item.textContent = String(message);
    errors.append(item);
  };
  window.addEventListener("error", (event) => report(event.message));
  window.addEventListener("unhandledrejection", (event) => report(event.reason));
  document.addEventListener("securitypolicyviolation", (event) => report(`policy: ${event.violatedDirective} ${event.blockedURI}`));

  const data = JSON.parse(byId("report-data").textContent);
  const expand = (table) =>
    table.rows.map((row) => Object.fromEntries(table.columns.map((name, i) => [name, row[i]])));
  const results = expand(data.results);
  const cells = expand(data.heat);
  const inSweep = new Set(data.sweep);
  const sweep = results.filter((row) => inSweep.has(row.id));
  const selection = Object.fromEntries(data.dimensions.map((d) => [d.name, d.first]));

  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const unique = (values) => [...new Set(values)];
  const words = (name) => String(name).replaceAll("_", " ");

  // A row without a property (the op of a broadcast) fits every choice of it.
  const fits = (row, choice, except = []) =>
    data.dimensions.every(({ name }) => except.includes(name) || row[name] === null || row[name] === choice[name]);

  // --- charts -------------------------------------------------------------------------------------------------------
  const views = new Map(); // element -> the newest drawing's promise
  const options = {
    mode: "vega-lite",
    ast: true, // Vega's expression interpreter: no eval, so the page's policy need not allow it
    renderer: "svg",
    actions: false,
    defaultStyle: false,
    config: data.config,
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
      .then(() => vegaEmbed(element, spec, options))
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
        const plot = figure(parent, words(mode), memory === null ? "" : `${words(memory)} buffers`);
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
      for (const id of ["pick", "box"]) nothing(byId(id), "");
      nothing(byId("cdf"));
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
    const boxes = rows.map((row) => ({ ...row, kind: "box" }));
    const curve = [];
    const outside = [];
    for (const row of rows) {
      const values = data.samples[row.id];
      const last = values.length - 1;
      values.forEach((value, i) => {
        const rank = last ? Math.round((i * (row.n - 1)) / last) : 0; // as payload.order_statistics chose them
        curve.push({ backend: row.backend, value, share: (rank + 1) / row.n });
        if (value < row.wlow || value > row.whigh) outside.push({ backend: row.backend, kind: "out", value });
      });
      curve.push({ backend: row.backend, value: values[0], share: 0 });
    }
    const limit = picked.range === RANGES[0] ? 0.99 : 1;
    const shown = curve.filter((point) => point.share <= limit).map((point) => point.value);
    const values = [...shown, ...rows.flatMap((row) => [row.q1, row.q3])];
    const domain = [Math.min(...values) * 0.98, Math.max(...values) * 1.02];
    const share = (spec) => {
      for (const { x } of encodings(spec)) if (x) x.scale = { ...x.scale, type: "log", nice: false, domain };
    };
    const target = (id) => {
      const plot = make("div", { className: "plot" });
      byId(id).replaceChildren(plot);
      return plot;
    };
    return [
      draw(target("box"), "box", [...boxes, ...outside], (spec) => {
        share(spec);
        for (const { x } of encodings(spec)) if (x) x.axis = null;
      }),
      draw(target("cdf"), "cdf", curve, (spec) => {
        share(spec);
        spec.height = 220;
      }),
    ];
  }

  // --- tables -------------------------------------------------------------------------------------------------------
  const SHOWN = 400;
  // [heading, what to show, what to sort by; a number is aligned right]
  const RESULT_COLUMNS = [
    ["Collective", "collective"], ["Size", "size", "bytes"], ["Type", "dtype"], ["Op", "op"], ["Ranks", "ranks", "ranks"],
    ["Mode", "mode"], ["Memory", "memory"], ["Placement", "placement"], ["Workload", "workload"], ["Backend", "backend"],
    ["Algorithm", "algorithm"], ["Median", "t_median", "median"], ["95 % interval", "t_interval", "low"],
    ["algbw GB/s", "t_algbw", "algbw"], ["busbw GB/s", "t_busbw", "busbw"], ["SoL", "t_sol", "sol"],
    ["Variation", "t_cv", "cv"], ["Skew", "t_skew", "skew"], ["Samples", "n", "n"], ["Calls", "calls", "calls"],
    ["Converged", "converged"], ["Verified", "bound"],
  ];
  const PERCENTILE_COLUMNS = [
    ["Collective", "collective"], ["Size", "size", "bytes"], ["Backend", "backend"], ["Samples", "n", "n"],
    ["Minimum", "t_min", "min"], ["p50", "t_p50", "median"], ["p95", "t_p95", "p95"], ["p99", "t_p99", "p99"],
    ["Maximum", "t_max", "max"],
  ];
  const KEPT = ["Collective", "Size", "Backend", "Median", "95 % interval", "Samples"];
  const shownText = (row, name) => {
    const value = row[name];
    if (value === null || value === "") return "–";
    if (typeof value === "boolean") return value ? "yes" : "no";
    return name === "placement" ? words(value) : String(value);
  };

  function table(parent, columns, rowsOf) {
    // What is the same in every row is said once, above the table.
    const values = (name) => unique(results.map((row) => row[name]));
    const constant = columns.filter(([title, name]) => !KEPT.includes(title) && values(name).length < 2);
    const used = columns.filter((column) => !constant.includes(column));
    const same = constant.map(([title, name]) => `${title.toLowerCase()} ${results.length ? shownText(results[0], name) : "–"}`);
    let order = null;
    let all = false;
    const body = make("tbody");
    const search = make("input", { type: "search", placeholder: "Filter: words of a row", ariaLabel: "Filter the table" });
    const count = make("span");
    const more = make("button", { type: "button", textContent: "Show all" });
    const heads = used.map(([title, , key], i) => {
      const button = make("button", { type: "button", textContent: title });
      const head = make("th", { scope: "col", className: key ? "num" : "" }, button);
      button.onclick = () => {
        order = { index: i, down: order?.index === i ? !order.down : false };
        fill();
      };
      return head;
    });
    function fill() {
      const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let rows = rowsOf().map((row) => [row, used.map(([, name]) => shownText(row, name))]);
      rows = rows.filter(([, texts]) => {
        const line = texts.join(" ").toLowerCase();
        return wanted.every((word) => line.includes(word));
      });
      if (order) {
        const [, name, key] = used[order.index];
        const sign = order.down ? -1 : 1;
        const value = ([row]) => row[key ?? name];
        rows.sort((a, b) => {
          const [x, y] = [value(a), value(b)];
          if (x === null || y === null) return (x === null) - (y === null);
          return sign * (typeof x === "number" ? x - y : String(x).localeCompare(String(y)));
        });
      }
      heads.forEach((head, i) => {
        if (order?.index === i) head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      const shown = all ? rows : rows.slice(0, SHOWN);
      count.textContent = shown.length < rows.length ? `${shown.length} of ${rows.length} rows` : `${rows.length} rows`;
      more.hidden = shown.length === rows.length;
      body.replaceChildren(
        ...shown.map(([, texts]) =>
          make("tr", {}, ...texts.map((text, i) => make("td", { textContent: text, className: used[i][2] ? "num" : "" }))),
        ),
      );
    }
    search.oninput = fill;
    more.onclick = () => {
      all = true;
      fill();
    };
    const whole = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body);
    if (same.length) parent.append(make("p", { className: "note", textContent: `In every row: ${same.join(", ")}.` }));
    parent.append(make("div", { className: "table-tools" }, search, count, more), make("div", { className: "scroll tall" }, whole));
    fill();
    return fill;
  }

  // --- selection ----------------------------------------------------------------------------------------------------
  const SYMBOLS = {
    circle: "M5 1a4 4 0 1 0 .01 0z", square: "M1.5 1.5h7v7h-7z", "triangle-up": "M5 1l4.4 8H.6z", diamond: "M5 .5L9.5 5 5 9.5.5 5z",
    cross: "M3.5 1h3v2.5H9v3H6.5V9h-3V6.5H1v-3h2.5z", "triangle-down": "M5 9L.6 1h8.8z", stroke: "M0 4h10v2H0z", "triangle-right": "M9 5L1 9.4V.6z",
  };
  function legend() {
    const space = "http://www.w3.org/2000/svg";
    data.backends.forEach((name, i) => {
      const icon = document.createElementNS(space, "svg");
      icon.setAttribute("width", "10");
      icon.setAttribute("height", "10");
      const path = document.createElementNS(space, "path");
      path.setAttribute("d", SYMBOLS[data.shapes[i]]);
      path.setAttribute("fill", data.colours[i]);
      icon.append(path);
      byId("legend").append(make("span", {}, icon, name));
    });
  }

  let refills = [];
  function filters() {
    const shown = data.dimensions.filter((d) => d.options.length > 1);
    const selects = new Map();
    const update = () => {
      for (const [dimension, select] of selects) {
        [...select.options].forEach((option, i) => {
          const other = { ...selection, [dimension.name]: dimension.options[i].value };
          option.disabled = !sweep.some((row) => row[dimension.name] === other[dimension.name] && fits(row, other));
        });
      }
    };
    for (const dimension of shown) {
      const values = dimension.options.map((option) => option.value);
      const text = (value) => dimension.options[values.indexOf(value)].text;
      const label = choice(dimension.label, values, text, dimension.first, (value) => {
        selection[dimension.name] = value;
        update();
        drawSelection();
        refills.forEach((fill) => fill());
      });
      selects.set(dimension, label.querySelector("select"));
      byId("selects").append(label);
    }
    update();
    byId("filters").hidden = !data.backends.length;
  }

  function contents() {
    const links = new Map([...document.querySelectorAll(".toc a")].map((a) => [a.getAttribute("href").slice(1), a]));
    const seen = new IntersectionObserver(
      (entries) => {
        for (const entry of entries.filter((e) => e.isIntersecting)) {
          links.forEach((link, id) => link.classList.toggle("here", id === entry.target.id));
        }
      },
      { rootMargin: "-10% 0px -80% 0px" },
    );
    links.forEach((_, id) => seen.observe(byId(id)));
  }

  async function start() {
    legend();
    filters();
    contents();
    refills = [table(byId("percentile-table"), PERCENTILE_COLUMNS, () => sweep.filter((row) => fits(row, selection)))];
    table(byId("result-table"), RESULT_COLUMNS, () => results);
    const jobs = drawSelection();
    for (const element of document.querySelectorAll(".bars")) {
      const plot = make("div", { className: "plot" });
      element.append(plot);
      jobs.push(draw(plot, "bars", data.costs[Number(element.dataset.workload)]));
    }
    await Promise.all(jobs);
    document.documentElement.dataset.state = "ready";
  }
  start().catch(report);
})();
