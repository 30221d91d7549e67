"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const layers = data.layers;
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// -- small helpers -----------------------------------------------------------------------------------------------------
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") for (const [name, action] of Object.entries(value)) node.addEventListener(name, action);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  for (const child of children) node.append(child);
  return node;
}
function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  for (const child of children) node.append(child);
  return node;
}
const missing = (value) => value === null || value === undefined;
const error = (value) => missing(value) ? "–" : value === 0 ? "0" : value.toPrecision(3);
const percent = (value) => missing(value) ? "–" : value === 0 ? "0 %" : (100 * value >= 99.95 ? "100 %" : (100 * value).toPrecision(3) + " %");
const plain = (value) => missing(value) ? "–" : String(Number(value.toPrecision(4)));
const fixed = (digits) => (value) => missing(value) ? "–" : value.toFixed(digits);
const short = (name, length) => name.length <= length ? name : "…" + name.slice(1 - length);
const count = (value) => value.toLocaleString("en-GB");

// -- colours: RdYlBu reversed, one half below the centre, one half above it ----------------------------------------------
const ANCHORS = ["#313695", "#4575b4", "#74add1", "#abd9e9", "#e0f3f8", "#ffffbf", "#fee090", "#fdae61", "#f46d43", "#d73027", "#a50026"]
  .map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
function ramp(position) {
  const at = Math.min(Math.max(position, 0), 1) * (ANCHORS.length - 1);
  const low = Math.min(Math.floor(at), ANCHORS.length - 2);
  return ANCHORS[low].map((value, channel) => Math.round(value + (ANCHORS[low + 1][channel] - value) * (at - low)));
}
function scaleFor(values) {
  const sorted = values.filter((value) => !missing(value) && Number.isFinite(value)).sort((a, b) => a - b);
  const top = Math.max(2 * data.centre, sorted.length ? sorted[Math.floor(0.99 * (sorted.length - 1))] : 0);
  const position = (value) => value <= data.centre ? 0.5 * value / data.centre : 0.5 + 0.5 * (value - data.centre) / (top - data.centre);
  return { top, colour: (value) => missing(value) || !Number.isFinite(value) ? null : ramp(position(value)) };
}
const css = (rgb, alpha = 1) => `rgba(${rgb[0]}, ${rgb[1]}, ${rgb[2]}, ${alpha})`;
const inkOn = (rgb) => 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 130 ? "#1d2430" : "#ffffff";
function paint(cell, rgb) {
  if (rgb) { cell.style.background = css(rgb); cell.style.color = inkOn(rgb); }
}

// -- a table that sorts ---------------------------------------------------------------------------------------------------
// columns: {key, title, value(row), text(value, row), kind: "text" | "name" | "number", scale, help}
function sortableTable(rows, columns, options = {}) {
  const body = element("tbody");
  const head = element("tr");
  const state = { column: null, down: true, query: "" };
  const lines = rows.map((row, index) => {
    const line = element("tr", options.pick ? { class: "pick", tabindex: "0", "data-row": index } : {});
    let words = "";
    for (const column of columns) {
      const value = column.value(row);
      const text = column.text ? column.text(value, row) : String(value);
      const cell = element("td", { class: column.kind === "number" ? null : column.kind === "name" ? "text name" : "text" });
      if (column.kind === "name") { cell.title = text; cell.append(element("bdi", {}, text)); }
      else if (column.tag) cell.append(element("span", { class: "tag " + text }, text));
      else cell.append(text);
      if (column.scale) paint(cell, column.scale.colour(value));
      if (column.mark && column.mark(row)) cell.classList.add("best");
      if (column.kind !== "number") words += " " + text.toLowerCase();
      line.append(cell);
    }
    if (options.words) words += " " + options.words(row).toLowerCase();
    if (options.pick) {
      line.addEventListener("click", () => options.pick(row));
      line.addEventListener("keydown", (event) => { if (event.key === "Enter") options.pick(row); });
    }
    return { row, line, words, index };
  });
  function show() {
    const wanted = state.query.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = lines.filter((item) => wanted.every((word) => item.words.includes(word)));
    if (state.column) {
      const { value, kind } = state.column;
      kept.sort((a, b) => {
        const x = value(a.row), y = value(b.row);
        if (missing(x) || missing(y)) return missing(x) - missing(y) || a.index - b.index;
        const order = kind === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
        return (state.down ? -order : order) || a.index - b.index;
      });
    }
    body.replaceChildren(...kept.map((item) => item.line));
    if (options.shown) options.shown(kept.length, lines.length);
  }
  function sortBy(column, down) {
    state.column = column;
    state.down = down;
    for (const cell of head.children) cell.removeAttribute("aria-sort");
    head.children[columns.indexOf(column)].setAttribute("aria-sort", down ? "descending" : "ascending");
    show();
  }
  for (const column of columns) {
    const turn = () => sortBy(column, state.column === column ? !state.down : column.kind === "number" && column.key !== "order");
    // Not a <button>: browsers leave those out when they repeat a table's head on the next printed page.
    const button = element("span", { role: "button", tabindex: "0", title: column.help || null, on: {
      click: turn,
      keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); turn(); } },
    } }, column.title);
    head.append(element("th", { scope: "col", class: column.kind === "number" ? null : "text", "data-key": column.key }, button));
  }
  show();
  const table = element("table", {}, element("thead", {}, head), body);
  return { table, search: (query) => { state.query = query; show(); }, sort: (key, down) => sortBy(columns.find((c) => c.key === key), down), lines };
}

// -- histogram of one quantised tensor --------------------------------------------------------------------------------------
const MARKS = ["#c0392b", "#7b3294", "#008837", "#e66101", "#5e3c99", "#1b7837", "#b2182b", "#4d4d4d"];
function histogram(name) {
  const figures = data.activations[name];
  const width = 560, height = 190, left = 44, right = 10, top = 24, bottom = 34;
  const bins = figures.histogram.slice(0, data.bins);
  const most = Math.log10(Math.max(...bins, 1) + 1);
  const marks = [["threshold", figures.amax, "#c0392b"]];
  Object.entries(data.calibrators).forEach(([calibrator, ranges], index) => {
    if (ranges[name]) marks.push([calibrator, ranges[name][0], MARKS[(index + 1) % MARKS.length]]);
  });
  // As far right as there is something to see: values, thresholds, and a little room beyond the threshold in use.
  const seen = Math.max(1.1, 1.03 * Math.min(figures.largest / figures.amax, data.span), ...marks.map((mark) => 1.03 * mark[1] / figures.amax));
  const span = Math.min(seen, data.span);
  const x = (value) => left + Math.min(value / span, 1) * (width - left - right);
  const y = (value) => height - bottom - (Math.log10(value + 1) / most) * (height - top - bottom);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Histogram of ${name}` });
  for (let power = 0; power <= most; power += Math.max(1, Math.round(most / 4))) {
    const at = y(10 ** power - (power === 0 ? 1 : 0));
    svg.append(draw("line", { x1: left, x2: width - right, y1: at, y2: at, stroke: "#e3e7ed" }));
    svg.append(draw("text", { x: left - 5, y: at + 4, "text-anchor": "end" }, power === 0 ? "0" : "10^" + power));
  }
  const step = (width - left - right) * data.span / span / data.bins;
  bins.forEach((value, bin) => {
    if (!value || (bin + 1) * step > width - left - right + 1) return;
    const beyond = bin >= data.bins / data.span;
    svg.append(draw("rect", { x: left + bin * step, y: y(value), width: step + 0.15, height: height - bottom - y(value), fill: beyond ? "#e08e83" : "#6f9fd0" }));
  });
  const rough = span * figures.amax / 5, unit = 10 ** Math.floor(Math.log10(rough));
  const tick = unit * [1, 2, 2.5, 5, 10].find((factor) => factor * unit >= rough * 0.999);
  for (let value = 0; value <= span * figures.amax * 1.0001; value += tick) {
    svg.append(draw("text", { x: x(value / figures.amax), y: height - bottom + 14, "text-anchor": "middle" }, plain(value)));
  }
  svg.append(draw("text", { x: left, y: height - 4 }, "magnitude of the values (counts are logarithmic); red bars are clipped"));
  const legend = [];
  marks.forEach(([label, value, colour], index) => {
    const beyond = value > span * figures.amax * 1.0001;
    const at = x(value / figures.amax);
    svg.append(draw("line", { x1: at, x2: at, y1: top - 6, y2: height - bottom, stroke: colour, "stroke-width": index ? 1.3 : 2.2, "stroke-dasharray": index ? "4 3" : "none" }));
    legend.push([label + " " + plain(value) + (beyond ? " →" : ""), colour]);
  });
  let at = left;
  for (const [text, colour] of legend.slice(0, 8)) {
    if (at + text.length * 6 > width) break;
    svg.append(draw("text", { x: at, y: 11, style: `fill:${colour}` }, text));
    at += text.length * 6 + 14;
  }
  return svg;
}
function tensorFigures(name) {
  const figures = data.activations[name];
  return element("dl", { class: "figures" },
    element("dt", {}, "threshold"), element("dd", {}, plain(figures.amax) + ", largest value " + plain(figures.largest)),
    element("dt", {}, "clipped"), element("dd", {}, percent(figures.clippedShare) + " of values, " + percent(figures.clippingErrorShare) + " of the error energy"),
    element("dt", {}, "zeros"), element("dd", {}, percent(figures.values ? figures.zeros / figures.values : 0) + " of " + count(figures.values) + " values"),
    element("dt", {}, "relative L2"), element("dd", {}, error(figures.relativeL2)));
}

// -- details of one layer --------------------------------------------------------------------------------------------------------
const panel = byId("detail");
let chosen = null;
function neighbourGraph(number) {
  const before = layers[number].before, after = layers[number].after;
  const rows = Math.max(before.length, after.length, 1);
  const wide = 132, tall = 36, gap = 10, height = rows * (tall + gap) + gap, width = 3 * wide + 2 * 26;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}` });
  const place = (list, column) => list.map((index, row) => ({ index, x: column * (wide + 26), y: (height - list.length * (tall + gap) + gap) / 2 + row * (tall + gap) }));
  const boxes = [...place(before, 0), ...place([number], 1), ...place(after, 2)];
  const own = boxes.find((box) => box.index === number && box.x === wide + 26);
  for (const box of boxes) {
    if (box === own) continue;
    const [from, to] = box.x < own.x ? [box, own] : [own, box];
    const y1 = from.y + tall / 2, y2 = to.y + tall / 2, x1 = from.x + wide, x2 = to.x;
    svg.append(draw("path", { d: `M${x1} ${y1} C${x1 + 13} ${y1} ${x2 - 13} ${y2} ${x2 - 5} ${y2}`, fill: "none", stroke: "#9aa6b5" }));
    svg.append(draw("path", { d: `M${x2} ${y2} l-6 -3 v6 z`, fill: "#9aa6b5" }));
  }
  for (const box of boxes) {
    const layer = layers[box.index];
    const group = draw("g", { class: box === own ? "node own" : "node", "data-layer": box.index },
      draw("title", {}, layer.node),
      draw("rect", { x: box.x, y: box.y, width: wide, height: tall, rx: 4 }),
      draw("text", { x: box.x + 6, y: box.y + 14 }, short(layer.node, 18)),
      draw("text", { x: box.x + 6, y: box.y + 27, style: "fill:#5c6675" }, layer.op + "  " + error(layer.local)));
    group.addEventListener("click", () => select(box.index));
    svg.append(group);
  }
  return element("div", { class: "graph" }, svg);
}
function sampleStrip(number) {
  const values = [...matrix[number]].map((value, index) => [value, data.samples[index]]).filter(([value]) => Number.isFinite(value));
  values.sort((a, b) => b[0] - a[0]);
  const text = values.slice(0, 3).map(([value, sample]) => `sample ${sample}: ${error(value)}`).join(", ");
  return element("p", { class: "quiet" }, text ? "worst: " + text : "no sample has a relative error");
}
function select(number, keepHash) {
  const layer = layers[number];
  chosen = number;
  const rows = [
    ["operator", layer.op], ["output", layer.tensor],
    ["accumulated", `${error(layer.accumulated)} (worst sample ${error(layer.accumulated_max)})`],
    ["local", `${error(layer.local)} (worst sample ${error(layer.local_max)})`],
    ["weights alone", error(layer.weights)], ["activations alone", error(layer.activations)],
    ["own share", percent(layer.own_share)], ["cause", layer.cause],
    ["SQNR", !missing(layer.sqnr_db) ? layer.sqnr_db.toFixed(1) + " dB" : layer.accumulated === 0 ? "exact" : "–"], ["cosine", fixed(6)(layer.cosine)], ["max absolute", error(layer.max_abs)],
  ];
  if (layer.almost_zero) rows.push(["almost zero", `FP32, in ${layer.almost_zero} of ${data.samples.length} samples, which only the largest absolute error counts`]);
  if (data.engine) rows.push(["engine", layer.engineState.startsWith("shown") ? `${error(layer.engine)} to FP32, ${error(layer.engine_int8)} to the Q/DQ graph (${layer.engineState})` : layer.engineState]);
  const list = element("dl", { class: "figures" });
  for (const [key, value] of rows) list.append(element("dt", {}, key), element("dd", {}, value));
  const parts = [element("button", { class: "close", type: "button", on: { click: close } }, "Close"), element("h2", {}, layer.node), list, sampleStrip(number), element("h3", {}, "Quantised layers before and after"), neighbourGraph(number)];
  if (!layer.inputs.length) parts.push(element("p", { class: "quiet" }, "Only the weights of this layer are quantised."));
  for (const name of layer.inputs) parts.push(element("h3", {}, "Input " + name), element("div", { class: "histogram" }, histogram(name)), tensorFigures(name));
  panel.replaceChildren(...parts);
  panel.hidden = false;
  panel.scrollTop = 0;
  document.body.classList.add("open");
  for (const item of layerTable.lines) item.line.classList.toggle("chosen", item.row === layer);
  if (!keepHash) history.replaceState(null, "", "#layer=" + number);
  drawAlong();
}
function close() {
  chosen = null;
  panel.hidden = true;
  document.body.classList.remove("open");
  for (const item of layerTable.lines) item.line.classList.remove("chosen");
  history.replaceState(null, "", location.pathname + location.search);
  drawAlong();
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && chosen !== null) close(); });

// -- head ----------------------------------------------------------------------------------------------------------------------------
byId("title").textContent = data.title;
byId("subtitle").textContent = data.subtitle;
for (const [name, value] of data.facts) byId("facts").append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
for (const note of data.notes) byId("notes").append(element("li", {}, note));

// -- error along the network ---------------------------------------------------------------------------------------------------------
function drawAlong() {
  const width = 1400, height = 300, left = 58, right = 12, top = 12, bottom = 26;
  const values = layers.flatMap((layer) => [layer.accumulated, layer.local, layer.accumulated_max]).filter((value) => value > 0);
  const holder = byId("along-chart");
  if (!values.length) { holder.textContent = "No layer has an error."; return; }
  const low = Math.floor(Math.log10(Math.min(...values))), high = Math.ceil(Math.log10(Math.max(...values)) + 1e-9);
  const y = (value) => height - bottom - (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low) * (height - top - bottom);
  const step = (width - left - right) / layers.length;
  const middle = (index) => left + (index + 0.5) * step;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Error along the network" });
  for (let power = low; power <= high; power++) {
    svg.append(draw("line", { x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power), stroke: "#dfe4ea" }));
    svg.append(draw("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, power < -3 ? "10^" + power : String(10 ** power)));
  }
  const shade = [], back = [], line = [];
  layers.forEach((layer, index) => {
    if (missing(layer.accumulated)) return;
    line.push(`${middle(index)},${y(layer.accumulated)}`);
    shade.push(`${middle(index)},${y(layer.accumulated_max)}`);
    back.unshift(`${middle(index)},${y(layer.accumulated)}`);
  });
  const tags = { weights: "#5b8cc8", clipping: "#d9705f", rounding: "#e0ae3c", none: "#9aa6b5" };
  layers.forEach((layer, index) => {
    if (index === chosen) svg.append(draw("rect", { x: left + index * step, y: top, width: step, height: height - top - bottom, fill: "#2166ac", opacity: 0.15 }));
    if (layer.local > 0) svg.append(draw("rect", { x: left + index * step + step * 0.12, y: y(layer.local), width: step * 0.76, height: height - bottom - y(layer.local), fill: tags[layer.cause] }));
  });
  svg.append(draw("polygon", { points: [...shade, ...back].join(" "), fill: "#1d2430", opacity: 0.1 }));
  svg.append(draw("polyline", { points: line.join(" "), fill: "none", stroke: "#1d2430", "stroke-width": 1.8 }));
  layers.forEach((layer, index) => {
    const hit = draw("rect", { x: left + index * step, y: top, width: step, height: height - top - bottom, fill: "transparent", style: "cursor:pointer", class: "hit", "data-layer": index },
      draw("title", {}, `${index + 1}. ${layer.node}\naccumulated ${error(layer.accumulated)}, local ${error(layer.local)}`));
    hit.addEventListener("click", () => select(index));
    svg.append(hit);
  });
  const every = Math.max(1, Math.ceil(layers.length / 40));
  layers.forEach((_, index) => { if (index % every === 0) svg.append(draw("text", { x: middle(index), y: height - 8, "text-anchor": "middle" }, index + 1)); });
  let at = width - 470;
  for (const [name, colour] of Object.entries(tags)) {
    if (name === "none") continue;
    svg.append(draw("rect", { x: at, y: top - 8, width: 11, height: 11, fill: colour }), draw("text", { x: at + 16, y: top + 2 }, "mostly " + name));
    at += 118;
  }
  svg.append(draw("line", { x1: at, x2: at + 22, y1: top - 2, y2: top - 2, stroke: "#1d2430", "stroke-width": 1.8 }), draw("text", { x: at + 28, y: top + 2 }, "accumulated"));
  holder.replaceChildren(svg);
}

// -- tables --------------------------------------------------------------------------------------------------------------------------------
const accumulatedScale = scaleFor(layers.flatMap((layer) => [layer.accumulated, layer.accumulated_max]));
const localScale = scaleFor(layers.flatMap((layer) => [layer.local, layer.weights, layer.activations]));
const number = (key, title, text, scale, help) => ({ key, title, kind: "number", value: (layer) => layer[key], text, scale, help });
const columns = [
  { key: "order", title: "#", kind: "number", value: (layer) => layers.indexOf(layer) + 1 },
  { key: "node", title: "Layer", kind: "name", value: (layer) => layer.node },
  { key: "op", title: "Operator", kind: "text", value: (layer) => layer.op },
  number("local", "Local", error, localScale, "only this layer in INT8"),
  number("weights", "Weights", error, localScale, "only its weights in INT8"),
  number("activations", "Activations", error, localScale, "only its activations in INT8"),
  number("accumulated", "Accumulated", error, accumulatedScale, "the whole graph in INT8"),
  number("accumulated_max", "Worst sample", error, accumulatedScale),
  number("own_share", "Own share", percent, null, "local over accumulated error energy"),
  { key: "cause", title: "Cause", kind: "text", value: (layer) => layer.cause, text: (value) => value, tag: true },
  number("clipped_share", "Clipped", percent, null, "values beyond the threshold"),
  number("clipping_error_share", "Clipping error", percent, null, "share of the input's error energy; the rest is rounding"),
  number("sqnr_db", "SQNR dB", fixed(1)),
  number("cosine", "Cosine", fixed(5)),
  number("max_abs", "Max abs", error),
];
if (data.engine) {
  const shownOr = (layer, value) => layer.engineState.startsWith("shown") ? error(value) : layer.engineState.split(":")[0];
  const engineScale = scaleFor(layers.map((layer) => layer.engine));
  columns.push(number("engine", "Engine", (value, layer) => shownOr(layer, value), engineScale, data.engine));
  columns.push(number("engine_int8", "Engine to Q/DQ", (value, layer) => shownOr(layer, value), engineScale));
}
const layerTable = sortableTable(layers, columns, {
  pick: (layer) => select(layers.indexOf(layer)),
  words: (layer) => layer.tensor + " " + layer.inputs.join(" "),
  shown: (kept, all) => { byId("count").textContent = kept === all ? `${all} layers` : `${kept} of ${all} layers`; },
});
byId("layers-table").append(layerTable.table);
byId("search").addEventListener("input", (event) => layerTable.search(event.target.value));

const per = (value) => missing(value) ? "–" : value.toPrecision(3);
byId("operators-table").append(sortableTable(data.operators, [
  { key: "op", title: "Operator", kind: "text", value: (row) => row.op },
  { key: "layers", title: "Layers", kind: "number", value: (row) => row.layers },
  ...[["local", "Local"], ["accumulated", "Accumulated"]].flatMap(([key, title]) => [["mean", "mean"], ["std", "std"], ["max", "max"]].map(([part, word]) => (
    { key: `${key}_${part}`, title: `${title} ${word} %`, kind: "number", value: (row) => row[`${key}_${part}`], text: per }))),
]).table);

for (const index of data.worst) {
  const layer = layers[index];
  const left = element("div", {},
    element("h3", {}, element("button", { class: "link", type: "button", on: { click: () => select(index) } }, layer.node)),
    element("dl", { class: "figures" },
      element("dt", {}, "operator"), element("dd", {}, layer.op),
      element("dt", {}, "local"), element("dd", {}, error(layer.local)),
      element("dt", {}, "worst sample"), element("dd", {}, error(layer.local_max)),
      element("dt", {}, "weights alone"), element("dd", {}, error(layer.weights)),
      element("dt", {}, "activations alone"), element("dd", {}, error(layer.activations)),
      element("dt", {}, "accumulated"), element("dd", {}, error(layer.accumulated)),
      element("dt", {}, "cause"), element("dd", {}, element("span", { class: "tag " + layer.cause }, layer.cause))));
  const right = element("div", { class: "histogram" });
  for (const name of layer.inputs) right.append(element("div", { class: "quiet" }, "input " + short(name, 70)), histogram(name));
  byId("worst-list").append(element("div", { class: "card" }, left, right));
}

// -- layers x calibrators ----------------------------------------------------------------------------------------------------------------------
const calibrators = Object.keys(data.calibrators);
if (!calibrators.length) byId("calibrators").hidden = true;
else {
  const names = Object.keys(data.activations).filter((name) => calibrators.some((calibrator) => data.calibrators[calibrator][name]));
  const cell = (calibrator, name) => data.calibrators[calibrator][name] ? data.calibrators[calibrator][name][1] : null;
  const scale = scaleFor(names.flatMap((name) => calibrators.map((calibrator) => cell(calibrator, name))));
  const best = (name) => Math.min(...calibrators.map((calibrator) => cell(calibrator, name)).filter((value) => !missing(value)));
  byId("calibrators-table").append(sortableTable(names, [
    { key: "tensor", title: "Tensor", kind: "name", value: (name) => name },
    { key: "used", title: "In use", kind: "number", value: (name) => data.activations[name].relativeL2, text: error, scale },
    ...calibrators.map((calibrator) => ({ key: calibrator, title: calibrator, kind: "number", value: (name) => cell(calibrator, name), text: error, scale, mark: (name) => cell(calibrator, name) === best(name) })),
  ]).table);
}

// -- further sections -----------------------------------------------------------------------------------------------------------------------------
for (const section of data.sections) {
  const numeric = section.columns.map((_, column) => section.rows.every((row) => typeof row[column] === "number" || row[column] === null));
  byId("more").append(element("section", {}, element("h2", {}, section.title), element("p", { class: "quiet" }, section.text),
    element("div", { class: "scroll" }, sortableTable(section.rows, section.columns.map((title, column) => (
      { key: "c" + column, title, kind: numeric[column] ? "number" : "text", value: (row) => row[column], text: (value) => missing(value) ? "–" : typeof value === "number" ? plain(value) : String(value) }))).table)));
}

// -- layers x samples -------------------------------------------------------------------------------------------------------------------------------
const bytes = Uint8Array.from(atob(data.errors), (char) => char.charCodeAt(0));
const numbers = new Float32Array(bytes.buffer);
const matrix = layers.map((_, row) => numbers.subarray(row * data.samples.length, (row + 1) * data.samples.length));
(function samplesMap() {
  const canvas = byId("samples-map");
  const rows = layers.length, wide = data.samples.length;
  if (!rows || !wide) { byId("samples").hidden = true; return; }
  const labelWidth = 300;
  const tall = rows <= 70 ? 14 : Math.max(3, Math.floor(970 / rows));
  const cell = Math.max(2, Math.min(24, Math.floor(1080 / wide)));
  const foot = 18, ratio = 2;
  canvas.style.width = labelWidth + cell * wide + "px";
  canvas.style.height = rows * tall + foot + "px";
  canvas.width = ratio * (labelWidth + cell * wide);
  canvas.height = ratio * (rows * tall + foot);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const scale = scaleFor(Array.from(numbers));
  for (let row = 0; row < rows; row++) for (let column = 0; column < wide; column++) {
    const rgb = scale.colour(matrix[row][column]);
    context.fillStyle = rgb ? css(rgb) : "#bfbfbf";
    context.fillRect(labelWidth + column * cell, row * tall, cell, tall);
  }
  context.fillStyle = "#1d2430";
  context.font = `${Math.min(11, Math.max(tall, 9))}px system-ui, "DejaVu Sans", sans-serif`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const everyRow = Math.ceil(11 / tall);
  for (let row = 0; row < rows; row += everyRow) context.fillText(short(layers[row].node, 46), labelWidth - 6, Math.max(6, (row + 0.5) * tall), labelWidth - 8);
  context.textAlign = "center";
  context.font = '10px system-ui, "DejaVu Sans", sans-serif';
  const everyColumn = Math.ceil(30 / cell);
  for (let column = 0; column < wide; column += everyColumn) context.fillText(data.samples[column], labelWidth + (column + 0.5) * cell, rows * tall + 9);
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) * (rows * tall + foot) / box.height / tall);
    const column = Math.floor(((event.clientX - box.left) * (labelWidth + cell * wide) / box.width - labelWidth) / cell);
    return row >= 0 && row < rows && column < wide ? [row, column] : null;
  };
  canvas.addEventListener("mousemove", (event) => {
    const place = at(event);
    if (!place) return;
    const [row, column] = place;
    byId("samples-readout").textContent = column < 0 ? layers[row].node : `${layers[row].node}, sample ${data.samples[column]}: ${error(matrix[row][column])}`;
  });
  canvas.addEventListener("click", (event) => { const place = at(event); if (place) select(place[0]); });
  const bar = draw("svg", { viewBox: "0 0 460 34", width: 460, height: 34 });
  for (let index = 0; index < 200; index++) bar.append(draw("rect", { x: 10 + index * 2, y: 2, width: 2.2, height: 13, fill: css(ramp(index / 199)) }));
  for (const [position, value, anchor] of [[0, 0, "middle"], [0.5, data.centre, "middle"], [1, scale.top, "middle"]]) {
    bar.append(draw("text", { x: 10 + position * 400, y: 29, "text-anchor": anchor }, (position === 1 ? "≥ " : "") + error(value)));
  }
  byId("samples-bar").append(bar);
})();

layerTable.sort("order", false);
drawAlong();
const wanted = /^#layer=(\d+)$/.exec(location.hash);
if (wanted && Number(wanted[1]) < layers.length) select(Number(wanted[1]), true);
document.body.dataset.ready = "true";
})();
