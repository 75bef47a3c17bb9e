// The page's own script: reads the data block, fills the tables, and redraws the charts (charts.js) when the selection
// changes. Text reaches the document through textContent and through Vega's own escaping only.
const byId = (id) => document.getElementById(id);
const errors = byId("script-errors");
const report = (message) => {
  const item = document.createElement("li");
  item.textContent = String(message);
  errors.append(item);
  errors.hidden = false;
};
window.addEventListener("error", (event) => report(event.message));
window.addEventListener("unhandledrejection", (event) => report(event.reason));
document.addEventListener("securitypolicyviolation", (event) => report(`policy: ${event.violatedDirective} ${event.blockedURI}`));

const data = JSON.parse(byId("report-data").textContent);
const expand = ({ same, words, columns, rows }) =>
  rows.map((row) => {
    const values = columns.map((name, i) => [name, words[name] ? words[name][row[i]] : row[i]]);
    return { ...same, ...Object.fromEntries(values) };
  });
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

// A row or panel without a property (the op of a broadcast) fits every choice of it.
const fits = (row, choice) => data.dimensions.every(({ name }) => (row[name] ?? choice[name]) === choice[name]);

// --- tables -------------------------------------------------------------------------------------------------------
const SHOWN = 400;
const shownText = (value) => (value === null || value === "" ? "–" : String(value));

// `columns`: [heading, what to show, what to sort by; a number is aligned right].
function table(parent, { same, columns: used }, rowsOf) {
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
    let rows = rowsOf().map((row) => [row, used.map(([, name]) => shownText(row[name]))]);
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
  if (same) parent.append(make("p", { className: "note", textContent: `In every row: ${same}.` }));
  parent.append(make("div", { className: "table-tools" }, search, count, more), make("div", { className: "scroll tall" }, whole));
  fill();
  return fill;
}

// --- selection ----------------------------------------------------------------------------------------------------
let refills = [];
function filters() {
  const shown = data.dimensions.filter((d) => d.values.length > 1);
  const selects = new Map();
  const update = () => {
    for (const [dimension, select] of selects) {
      [...select.options].forEach((option, i) => {
        const other = { ...selection, [dimension.name]: dimension.values[i] };
        option.disabled = !sweep.some((row) => row[dimension.name] === other[dimension.name] && fits(row, other));
      });
    }
  };
  for (const dimension of shown) {
    const label = choice(dimension.label, dimension.values, String, dimension.first, (value) => {
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
  filters();
  contents();
  refills = [table(byId("percentile-table"), data.tables.percentiles, () => sweep.filter((row) => fits(row, selection)))];
  table(byId("result-table"), data.tables.results, () => results);
  const jobs = drawSelection();
  for (const figure of data.fixed) {
    if (figure.rows) jobs.push(draw(frame(byId(figure.place), figure.title, figure.detail), figure));
  }
  await Promise.all(jobs);
  document.documentElement.dataset.state = "ready";
}
start().catch(report);
