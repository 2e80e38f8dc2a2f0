"use strict";

// Small helpers ---------------------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);

/** An element with attributes, listeners (onclick: ...) and children. Text becomes text, never HTML. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

const td = (...children) => el("td", {}, ...children);
const left = (...children) => el("td", { class: "left" }, ...children);
const tableRow = (name, cells, attributes = {}) =>
  el("tr", attributes, el("th", { class: "token", scope: "row" }, name), cells);

function fillTable(table, corner, columns, rows) {
  const header = columns.map((column) => (typeof column === "string" ? el("th", { scope: "col" }, column) : column));
  table.replaceChildren(el("thead", {}, el("tr", {}, el("th", { class: "token", scope: "col" }, corner), header)),
    el("tbody", {}, rows));
}

/** Numbers from Python: a shape, and fp32 in base64. */
class Tensor {
  constructor({ shape, data }) {
    this.shape = shape;
    this.data = new Float32Array(Uint8Array.from(atob(data), (c) => c.charCodeAt(0)).buffer);
  }
  /** x[i, j, ...], the rest as one array. */
  row(...index) {
    const size = this.shape.slice(index.length).reduce((a, b) => a * b, 1);
    const start = index.reduce((sum, i, axis) => sum * this.shape[axis] + i, 0) * size;
    return this.data.subarray(start, start + size);
  }
  at(...index) { return this.row(...index)[0]; }
}

function unpack(x) {
  if (Array.isArray(x)) return x.map(unpack);
  if (x === null || typeof x !== "object") return x;
  if ("shape" in x) return new Tensor(x);
  return Object.fromEntries(Object.entries(x).map(([name, value]) => [name, unpack(value)]));
}

const range = (n) => Array.from({ length: n }, (_, i) => i);
const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
const largest = (values) => values.reduce((most, x) => Math.max(most, Math.abs(x)), 1e-9);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

function fixed(x, digits = 2) {
  if (Number.isNaN(x)) return "–";
  const text = Math.abs(x).toFixed(digits);
  return (x < 0 && Number(text) !== 0 ? "−" : "") + text;
}

/** Weights of many tokens are small. */
const weightDigits = () => (x.n > 20 ? 3 : 2);
const percent = (p) => (p >= 0.0995 ? (100 * p).toFixed(0) : p >= 0.00095 ? (100 * p).toFixed(1) : "<0.1") + " %";

/** softmax over the allowed; the rest gets 0. */
function softmax(scores, allowed) {
  const most = Math.max(...scores.filter((_, i) => allowed[i]));
  const powers = scores.map((x, i) => (allowed[i] ? Math.exp(x - most) : 0));
  const sum = powers.reduce((a, b) => a + b, 0);
  return { powers, sum, weights: powers.map((x) => x / sum) };
}

// Colours ---------------------------------------------------------------------------------------------------------

let palette;

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const colours = (name) => style.getPropertyValue(name).trim().split(/\s+/).map(rgb);
  palette = { heat: colours("--heat"), signed: [...colours("--low"), ...colours("--zero"), ...colours("--high")] };
  for (const name of ["--ink", "--soft", "--hatch", "--accent", "--paper", "--line"]) {
    palette[name.slice(2)] = style.getPropertyValue(name).trim();
  }
}

function ramp(stops, t) {
  const at = clamp(t, 0, 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  return stops[i].map((a, c) => Math.round(a + (stops[i + 1][c] - a) * (at - i)));
}

/** A weight in [0, 1]: by its square root, so that small ones can be told apart; the legend shows it. */
const heat = (weight) => ramp(palette.heat, Math.sqrt(weight));
const signed = (value, most) => ramp(palette.signed, 0.5 + value / most / 2);
const css = (rgb) => `rgb(${rgb.join(" ")})`;
const inkOn = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#16181d" : "#fbfaf7");
const filled = (rgb) => `background:${css(rgb)};color:${inkOn(rgb)}`;

/** A canvas of one pixel a number, which CSS makes larger. */
function pixels(rows, columns, colour, attributes) {
  const canvas = el("canvas", { width: columns, height: rows, ...attributes });
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) image.data.set([...colour(Math.floor(i / columns), i % columns), 255], 4 * i);
  context.putImageData(image, 0, 0);
  return canvas;
}

/** A vector: numbers where they fit, and colours that a pointer reads where they do not. */
function strip(values, most, name) {
  if (values.length <= 8) {
    return el("span", { class: "vector" }, Array.from(values, (x) => el("b", { style: filled(signed(x, most)) }, fixed(x))));
  }
  const low = fixed(Math.min(...values)), high = fixed(Math.max(...values));
  const canvas = pixels(1, values.length, (_, i) => signed(values[i], most), {
    class: "strip", role: "img", "aria-label": `${name}: ${values.length} numbers from ${low} to ${high}`,
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const i = clamp(Math.floor(((event.clientX - box.left) / box.width) * values.length), 0, values.length - 1);
    showTip(event, `${name}, dimension ${i}: ${fixed(values[i], 3)}`);
  });
  canvas.addEventListener("pointerleave", hideTip);
  return canvas;
}

/** A bar from 0 to the value, between low and high, and the number. */
function bar(value, low, high, colour = "var(--accent)", digits = 2) {
  const [from, to] = [Math.min(value, 0), Math.max(value, 0)].map((x) => (100 * (x - low)) / (high - low));
  const fill = `linear-gradient(90deg, var(--zero) ${from}%, ${colour} ${from}% ${to}%, var(--zero) ${to}%)`;
  return el("span", { class: "bar" }, el("i", { style: `background:${fill}` }), el("span", {}, fixed(value, digits)));
}

const signedBar = (value, most) => bar(value, -most, most, value < 0 ? "var(--low)" : "var(--high)");

function showTip(event, text) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 18}px`;
}
function hideTip() { $("tip").hidden = true; }

// What is shown ---------------------------------------------------------------------------------------------------

const { served, error, exhibits } = unpack(JSON.parse($("data").textContent));
for (const x of exhibits) {
  x.n = x.tokens.length;
  Object.assign(x, x.first, { step: 0, view: "weights", target: 0, sort: null, cell: [-1, 0] });
  for (const layer of x.layers) layer.allowed = layer.allowed.map((row) => Array.from(row, (c) => c === "1"));
}
let x = exhibits[0];
let compare = false;

/** The key that the query looks at most. */
function strongest(query) {
  const weights = x.layers[x.layer].weights.row(x.head, query);
  return weights.indexOf(Math.max(...weights));
}

/** A token's text with blanks dimmed. */
const spell = (text) => text.split(/([␣↵⇥])/).filter(Boolean).map((part) =>
  "␣↵⇥".includes(part) ? el("span", { class: "blank" }, part) : part);
const quote = (text) => el("span", { class: "q" }, "“", spell(text), "”");
const quoted = (i) => quote(x.tokens[i]);
/** d_k and e^s, with their indices lowered and raised. */
const formatted = (text) => text.split(/([_^]\w+)/).map((part) =>
  part[0] === "_" ? el("sub", {}, part.slice(1)) : part[0] === "^" ? el("sup", {}, part.slice(1)) : part);

const kvHead = (head) => Math.floor(head / (x.heads / x.kvHeads));

/** Everything about one query of one head: q . k, scaled, capped, biased, and the model's weights. */
function attend(layer, head, query) {
  const { q, k, bias, weights, allowed } = x.layers[layer];
  const mine = q.row(head, query), root = Math.sqrt(mine.length);
  const raw = range(x.n).map((j) => dot(mine, k.row(kvHead(head), j)));
  const cap = (score) => (x.softCap ? x.softCap * Math.tanh(score / x.softCap) : score);
  const biases = bias && bias.row(head, query);
  const finish = (score, j) => cap(score) + (biases ? biases[j] : 0);
  const scaled = raw.map((score) => score / root);
  return {
    root, raw, scaled, biases, capped: scaled.map(cap), scores: x.linear ? raw : scaled.map(finish), allowed: allowed[query],
    unscaled: softmax(raw.map(finish), allowed[query]).weights, weights: Array.from(weights.row(head, query)),
  };
}

/** Native radio buttons; built again only when the options change, so that focus stays. */
function choices(place, name, options, current, choose, least = 2) {
  const signature = JSON.stringify(options.map((option) => option.label ?? option));
  if (place.dataset.signature !== signature) {
    place.dataset.signature = signature;
    place.setAttribute("role", "radiogroup");
    place.setAttribute("aria-label", name);
    const radio = (option, i) => el("input", {
      type: "radio", name: place.id, "aria-label": `${name} ${option.label ?? option}`, onchange: () => choose(i),
    });
    place.replaceChildren(el("b", { "aria-hidden": "true" }, name), ...options.map((option, i) =>
      el("label", {}, radio(option, i), el("span", {}, option.nodes ?? option))));
  }
  place.hidden = options.length < least;
  place.querySelectorAll("input")[current].checked = true;
}

function show(change) {
  Object.assign(x, change);
  if ("query" in change) x.target = 0;
  if (x.query !== x.cell[0]) x.cell = [x.query, strongest(x.query)];
  render();
}

function chooseExhibit(i) {
  x = exhibits[i];
  build();
}

// Built once for an exhibit ---------------------------------------------------------------------------------------

function build() {
  document.title = `Attention lab · ${x.name}`;
  $("about").replaceChildren(...(exhibits.length > 1 ? [] : [`${x.name}. `]), ...formatted(x.about));
  choices($("exhibits"), "Shown:", exhibits.map((one) => one.name), exhibits.indexOf(x), chooseExhibit);
  $("tokens").replaceChildren(...range(x.n).map((i) =>
    el("div", { role: "option", onclick: () => show({ query: i }) }, spell(x.tokens[i]), el("small"))));
  const tabs = ["Project", "Score", x.linear ? "Normalise" : "Scale, softmax", "Mix"];
  $("step-tabs").replaceChildren(...tabs.map((name, i) => {
    const attributes = { role: "tab", id: `tab-${i}`, "aria-controls": "step", onclick: () => show({ step: i }) };
    return el("button", attributes, el("i", {}, `${i + 1}`), ` ${name}`);
  }));
  $("measures-part").hidden = !x.measures;
  $("lens-part").hidden = !x.lens;
  $("flow-part").hidden = !x.rollout;
  buildOverview();
  if (x.lens) buildLens();
  show({});
}

function buildOverview() {
  const mini = (l, h) => {
    const attributes = { role: "radio", "aria-label": `layer ${l}, head ${h}`, onclick: () => show({ layer: l, head: h }) };
    const { weights } = x.layers[l];
    return el("div", attributes, pixels(x.n, x.n, (q, k) => heat(weights.at(h, q, k)), { "aria-hidden": "true" }), `${h}`);
  };
  $("overview-part").hidden = x.layers.length * x.heads === 1;
  $("overview").replaceChildren(...range(x.layers.length).map((l) =>
    el("div", {}, el("span", {}, `Layer ${l}`), range(x.heads).map((h) => mini(l, h)))));
}

const depths = () => ["embedding", ...x.layers.map((_, l) => `after layer ${l}`)];

function buildLens() {
  const cell = (depth, i) => {
    const p = x.lens.p.at(depth, i, 0), text = x.vocabulary[x.lens.ids[depth][i][0]];
    const attributes = { style: filled(heat(p)), title: `${text}  ${percent(p)}`, onclick: () => show({ query: i }) };
    return el("td", attributes, spell(text));
  };
  fillTable($("lens"), "after",
    range(x.n).map((i) => el("th", { scope: "col", onclick: () => show({ query: i }) }, spell(x.tokens[i]))),
    depths().map((name, depth) => tableRow(name, range(x.n).map((i) => cell(depth, i)))));
}

// Drawn at every change -------------------------------------------------------------------------------------------

function render() {
  const weights = x.layers[x.layer].weights.row(x.head, x.query);
  renderTokens(weights);
  choices($("layer"), "Layer", range(x.layers.length).map(String), x.layer, (layer) => show({ layer }));
  choices($("head"), "Head", range(x.heads).map(String), x.head, (head) => show({ head }));
  const best = range(x.n).sort((a, b) => weights[b] - weights[a]).slice(0, 3).filter((i) => weights[i] >= 0.005);
  $("summary").replaceChildren(quoted(x.query), " looks at ",
    ...best.flatMap((i, place) => [place ? ", " : "", quoted(i), ` ${fixed(weights[i], weightDigits())}`]));
  renderStep();
  renderMap();
  for (const option of $("overview").querySelectorAll("[role=radio]")) {
    const chosen = option.getAttribute("aria-label") === `layer ${x.layer}, head ${x.head}`;
    option.setAttribute("aria-checked", chosen);
    option.tabIndex = chosen ? 0 : -1;
  }
  if (x.measures) renderMeasures();
  if (x.lens) renderLens();
  if (x.rollout) renderFlow(weights);
}

function renderTokens(weights) {
  const { allowed } = x.layers[x.layer];
  const bar = $("tokens");
  [...bar.children].forEach((option, i) => {
    const visible = allowed[x.query][i], weight = fixed(weights[i], weightDigits());
    option.style = visible ? filled(heat(weights[i])) : "color:var(--soft)";
    option.lastChild.textContent = visible ? weight : "hidden";
    option.setAttribute("aria-selected", i === x.query);
    const said = visible ? `weight ${weight}` : "hidden";
    option.setAttribute("aria-label", `“${x.tokens[i]}”, token ${i + 1} of ${x.n}, ${said}`);
    option.tabIndex = i === x.query ? 0 : -1;
  });
  const chosen = bar.children[x.query];
  if (bar.contains(document.activeElement)) chosen.focus({ preventScroll: true });
  const [above, below] = [chosen.offsetTop - bar.offsetTop, chosen.offsetTop - bar.offsetTop + chosen.offsetHeight];
  if (above < bar.scrollTop || below > bar.scrollTop + bar.clientHeight) bar.scrollTop = above - 4;
}

// The four steps --------------------------------------------------------------------------------------------------

const MANY = 32; // with more tokens, those that the mask hides share one line
let numbersOpen = false;

/** What the steps are about: the query, and the keys and values of its head. */
function asked() {
  const { q, k, v, output } = x.layers[x.layer], kv = kvHead(x.head);
  return {
    ...attend(x.layer, x.head, x.query), query: q.row(x.head, x.query), output: output.row(x.head, x.query),
    key: (j) => k.row(kv, j), value: (j) => v.row(kv, j), mostKey: largest(k.row(kv)), mostValue: largest(v.row(kv)),
  };
}

const askedQuery = (at) => [el("span", {}, "query of ", quoted(x.query)), strip(at.query, largest(at.query), "query")];
const keyCell = (at, j) => left(strip(at.key(j), at.mostKey, "key"));
const valueCell = (at, j) => left(strip(at.value(j), at.mostValue, "value"));
const weightBar = (weight, most, colour) => bar(weight, 0, most, colour, weightDigits());

function project(at) {
  const numbers = (name, vector) =>
    el("div", { class: "numbers" }, `${name} = ${Array.from(vector, (number) => fixed(number)).join("  ")}`);
  const details = () => el("details", { open: numbersOpen, ontoggle: (event) => { numbersOpen = event.target.open; } },
    el("summary", {}, "its numbers"),
    numbers("q", at.query), numbers("k", at.key(x.query)), numbers("v", at.value(x.query)));
  return {
    says: ["Three learned matrices turn what each token has become so far into a query (what it looks for), a key ",
      `(what it offers) and a value (what it passes on): ${at.value(0).length} numbers each in this head.`],
    formula: "q = W_Q x     k_j = W_K x_j     v_j = W_V x_j",
    note: x.notes.project,
    query: [...askedQuery(at), ...(at.query.length > 8 ? [details()] : [])],
    columns: ["key", "value"],
    cells: (j) => [keyCell(at, j), valueCell(at, j)],
  };
}

function score(at) {
  const most = largest(at.raw);
  return {
    says: ["The query of ", quoted(x.query), " meets every key in a dot product: multiply dimension by dimension and ",
      "add up. The better they match, the higher the score."],
    formula: "s_j = q · k_j",
    query: askedQuery(at),
    columns: ["key", "score q · k_j"],
    cells: (j) => [keyCell(at, j), td(signedBar(at.raw[j], most))],
  };
}

/** A weight of the query, or that there is none. */
const weightCell = (at, j, weight, most, colour) =>
  at.allowed[j] ? td(weightBar(weight, most, colour)) : el("td", { class: "hatched" }, "hidden by the mask");

function normalise(at) {
  return {
    says: ["There is no softmax in linear attention: each score is divided by the sum of those that the mask allows."],
    formula: "a_j = s_j / Σ_i s_i",
    note: x.notes.masks[x.layer],
    columns: ["score", "weight"],
    cells: (j) => [td(fixed(at.raw[j])), weightCell(at, j, at.weights[j], largest(at.weights))],
  };
}

function scaleAndSoftmax(at) {
  const { powers, sum } = softmax(at.scores, at.allowed);
  const most = largest(compare ? [...at.weights, ...at.unscaled] : at.weights);
  const between = [ // columns that only some models have
    ...(x.softCap ? [[`capped at ${x.softCap}`, at.capped]] : []),
    ...(at.biases ? [["bias", at.biases], ["sum z", at.scores]] : []),
  ];
  const z = `${x.softCap ? "c · tanh( s / √d_k / c )" : "s / √d_k"}${at.biases ? " + bias" : ""}`;
  return {
    says: formatted(`Divided by √d_k = ${fixed(at.root)}, scores keep their size however wide a head is. The softmax ` +
      "makes them weights that sum to 1: e to the power of each, divided by the sum."),
    formula: `z = ${z}     a = softmax( z )`,
    note: `${x.notes.masks[x.layer]} ${x.softCap ? `A tanh keeps scores below c = ${x.softCap}.` : ""}`,
    columns: ["score s", "÷ √d_k", ...between.map(([name]) => name), "e^z ÷ largest", "weight",
      ...(compare ? ["without ÷ √d_k"] : [])],
    cells: (j) => [
      td(fixed(at.raw[j])), td(fixed(at.scaled[j])), ...between.map(([, numbers]) => td(fixed(numbers[j]))),
      td(at.allowed[j] ? fixed(powers[j], 3) : "0"), weightCell(at, j, at.weights[j], most),
      ...(compare ? [weightCell(at, j, at.unscaled[j], most, "var(--low)")] : []),
    ],
    total: [td(), td(), ...between.map(() => td()), td(fixed(sum, 3)), td("1.00"), ...(compare ? [td("1.00")] : [])],
  };
}

function mix(at) {
  const weighted = range(x.n).map((j) => at.value(j).map((number) => number * at.weights[j]));
  const most = Math.max(largest(at.output), ...weighted.map(largest));
  const rest = at.output.map((number, i) => weighted.reduce((left, one) => left - one[i], number));
  return {
    says: ["The values are added up, each times its weight. The sum is what this head found for ", quoted(x.query),
      "; all heads together are added to its stream."],
    formula: "o = Σ_j a_j v_j",
    columns: ["weight", "value", "weight × value"],
    cells: (j) => [td(weightBar(at.weights[j], largest(at.weights))), valueCell(at, j),
      left(strip(weighted[j], most, "weight times value"))],
    total: [td(), td(largest(rest) > 1e-3 * most ? "with the vectors of distances" : ""),
      left(strip(at.output, most, "output"))],
  };
}

function renderStep() {
  const at = asked(), steps = [project, score, x.linear ? normalise : scaleAndSoftmax, mix];
  const { says, formula, note = "", query = [], columns, cells, total } = steps[x.step](at);
  [...$("step-tabs").children].forEach((tab, i) => {
    tab.setAttribute("aria-selected", i === x.step);
    tab.tabIndex = i === x.step ? 0 : -1;
  });
  $("step").setAttribute("aria-labelledby", `tab-${x.step}`);
  $("back").disabled = x.step === 0;
  $("next").disabled = x.step === 3;
  $("compare-label").hidden = x.step !== 2 || x.linear;
  $("compare").checked = compare;
  $("step-says").replaceChildren(...says);
  $("step-formula").replaceChildren(...formatted(formula));
  $("step-note").textContent = note;
  $("step-query").replaceChildren(...query);

  const shown = range(x.n).filter((j) => x.n <= MANY || at.allowed[j]);
  const rows = shown.map((j) => tableRow(spell(x.tokens[j]), cells(j),
    { class: `${at.allowed[j] ? "" : "masked"} ${j === x.query ? "asked" : ""}` }));
  if (shown.length < x.n) {
    const hidden = `${x.n - shown.length} more tokens are hidden by the mask`;
    rows.push(el("tr", { class: "masked" }, el("td", { class: "left", colspan: columns.length + 1 }, hidden)));
  }
  if (total) rows.push(tableRow("sum", total, { class: "total" }));
  const vectors = ["key", "value", "weight × value"];
  fillTable($("step-table"), "token", columns.map((name) =>
    el("th", { scope: "col", class: vectors.includes(name) ? "left" : null }, formatted(name))), rows);
}

// The heat map ----------------------------------------------------------------------------------------------------

const VIEWS = {
  weights: "weights", scores: "scores before the softmax", bias: "positional bias", mask: "mask",
  rollout: "rollout, all layers",
};

function views() {
  const there = { bias: x.layers[x.layer].bias, rollout: x.rollout };
  return Object.keys(VIEWS).filter((view) => !(view in there) || there[view]);
}

/** The numbers of the chosen map: (query, key) -> number. */
function mapValues() {
  const layer = x.layers[x.layer];
  if (x.view === "scores") {
    const rows = range(x.n).map((query) => attend(x.layer, x.head, query).scores);
    return (query, key) => rows[query][key];
  }
  if (x.view === "bias") return (query, key) => layer.bias.at(x.head, query, key);
  if (x.view === "mask") return (query, key) => Number(layer.allowed[query][key]);
  if (x.view === "rollout") return (query, key) => x.rollout.at(query, key);
  return (query, key) => layer.weights.at(x.head, query, key);
}

let map = null; // the geometry of what was drawn, for pointers

function renderMap() {
  const there = views();
  if (!there.includes(x.view)) x.view = "weights";
  const choose = (i) => show({ view: views()[i] });
  choices($("views"), "Show", there.map((view) => VIEWS[view]), there.indexOf(x.view), choose);
  const canvas = $("map"), context = canvas.getContext("2d"), { allowed } = x.layers[x.layer];
  const width = Math.floor(canvas.parentElement.clientWidth), n = x.n;
  const value = mapValues(), isSigned = x.view === "scores" || x.view === "bias";
  const most = largest(range(n).flatMap((i) => range(n).filter((j) => allowed[i][j]).map((j) => value(i, j))));
  const font = `${clamp(Math.floor(width / n / 1.5), 9, 13)}px ${getComputedStyle($("tokens").firstChild).fontFamily}`;
  context.font = font;
  const label = (text) => (Array.from(text).length > 12 ? `${Array.from(text).slice(0, 11).join("")}…` : text);
  const widest = Math.max(...x.tokens.map((text) => context.measureText(label(text)).width)) + 10;
  const labelled = (width - 60) / n >= 9, margin = labelled ? Math.min(widest, 100, width / 4) : 0;
  const side = Math.min((width - margin) / n, 88), density = devicePixelRatio || 1;
  map = { margin, side };
  canvas.width = width * density;
  canvas.height = Math.ceil(margin + side * n + 1) * density;
  canvas.style.height = `${canvas.height / density}px`;
  context.scale(density, density);
  context.font = font;
  context.textBaseline = "middle";
  for (let query = 0; query < n; query++) {
    for (let key = 0; key < n; key++) {
      const [left, top] = [margin + key * side, margin + query * side], number = value(query, key);
      if (!allowed[query][key] && x.view !== "rollout") {
        hatch(context, left, top, side);
        continue;
      }
      const colour = isSigned ? signed(number, most) : heat(x.view === "mask" ? 0.3 : number);
      context.fillStyle = css(colour);
      context.fillRect(left, top, side - (side > 6 ? 1 : 0), side - (side > 6 ? 1 : 0));
      if (side >= 40 && x.view !== "mask") {
        context.fillStyle = inkOn(colour);
        context.textAlign = "center";
        context.fillText(fixed(number), left + side / 2, top + side / 2);
      }
    }
  }
  if (labelled) {
    for (let i = 0; i < n; i++) {
      context.fillStyle = i === x.query ? palette.accent : palette.soft;
      context.textAlign = "right";
      context.fillText(label(x.tokens[i]), margin - 6, margin + (i + 0.5) * side, margin - 6);
      context.save();
      context.fillStyle = i === x.cell[1] ? palette.accent : palette.soft;
      context.translate(margin + (i + 0.5) * side, margin - 6);
      context.rotate(-Math.PI / 2);
      context.textAlign = "left";
      context.fillText(label(x.tokens[i]), 0, 0, margin - 6);
      context.restore();
    }
  }
  context.strokeStyle = palette.accent;
  context.lineWidth = 1.5;
  context.strokeRect(margin, margin + x.query * side, side * n - 1, side - 1);
  context.lineWidth = 3;
  context.strokeStyle = palette.ink;
  context.strokeRect(margin + x.cell[1] * side, margin + x.cell[0] * side, side - 1, side - 1);
  canvas.setAttribute("aria-label", `${VIEWS[x.view]} of layer ${x.layer}, head ${x.head}, ${n} queries by ${n} keys`);
  renderLegend(isSigned, most);
  renderCell();
  $("mask-note").textContent = x.notes.masks[x.layer];
}

function hatch(context, left, top, side) {
  context.strokeStyle = palette.hatch;
  context.lineWidth = 0.7;
  context.beginPath();
  const gap = Math.max(side / 3, 3);
  for (let offset = gap / 2; offset < 2 * side; offset += gap) {
    context.moveTo(left + Math.max(0, offset - side), top + Math.min(offset, side));
    context.lineTo(left + Math.min(offset, side), top + Math.max(0, offset - side));
  }
  context.stroke();
}

function renderLegend(isSigned, most) {
  const scale = pixels(1, 90, (_, i) => (isSigned ? ramp(palette.signed, i / 89) : ramp(palette.heat, i / 89)), {});
  const hidden = [el("span", { class: "hatch" }), "masked"];
  const seen = el("span", { style: `${filled(heat(0.3))};width:1.1rem;height:.8rem` });
  if (x.view === "mask") $("legend").replaceChildren(seen, "seen", ...hidden);
  else if (isSigned) $("legend").replaceChildren(fixed(-most), scale, fixed(most), ...hidden);
  else $("legend").replaceChildren("0", scale, "1 (0.25 in the middle)", ...(x.view === "rollout" ? [] : hidden));
}

function renderCell() {
  const [query, key] = x.cell, row = attend(x.layer, x.head, query), parts = [];
  if (x.view === "rollout") parts.push(`rollout ${fixed(x.rollout.at(query, key), 3)}`);
  else if (!row.allowed[key]) parts.push("hidden by the mask");
  else {
    parts.push(`weight ${fixed(row.weights[key], 3)}`, `score ${fixed(row.raw[key])}`);
    if (!x.linear) parts.push(`scaled ${fixed(row.scaled[key])}`);
    if (row.biases) parts.push(`bias ${fixed(row.biases[key])}`);
    if (row.biases || x.softCap) parts.push(`before the softmax ${fixed(row.scores[key])}`);
  }
  const [first, ...others] = parts;
  $("cell").replaceChildren("query ", quoted(query), ` (${query + 1}), key `, quoted(key), ` (${key + 1}): `,
    el("b", {}, first), ...others.map((part) => `, ${part}`));
}

function cellAt(event) {
  const box = $("map").getBoundingClientRect();
  const at = (offset) => Math.floor((offset - map.margin) / map.side);
  const cell = [at(event.clientY - box.top), at(event.clientX - box.left)];
  return cell.every((i) => i >= 0 && i < x.n) ? cell : null;
}

function moveCell(cell) {
  if (cell && String(cell) !== String(x.cell)) {
    x.cell = cell;
    renderMap();
  }
}

// Heads, predictions, attributions --------------------------------------------------------------------------------

const MEASURES = {
  previous: ["previous token", "weight on the token just before the query"],
  itself: ["itself", "weight on the query's own place"],
  first: ["first token", "weight on the start token, where heads often rest"],
  repeated: ["same token", "weight on earlier places of the query's token"],
  induction: ["induction", "weight on what followed the earlier places of the query's token"],
  noise: ["induction, random text", "the same on random tokens said twice, whatever the prompt"],
  distance: ["distance", "mean tokens between query and key"],
  entropy: ["entropy, bits", "how spread the weights are: 0 is one token, 3 as much as 8 equal ones"],
};

function renderMeasures() {
  const names = Object.keys(MEASURES).filter((name) => name in x.measures);
  const heads = x.layers.flatMap((_, l) => range(x.heads).map((h) => [l, h]));
  if (x.sort) {
    const of = ([l, h]) => x.measures[x.sort.name].at(l, h);
    heads.sort((a, b) => (x.sort.down ? of(b) - of(a) : of(a) - of(b)) || 0);
  }
  const focused = $("measures").contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const header = (name) => {
    const sorted = x.sort && x.sort.name === name;
    const sort = { name, down: !(sorted && x.sort.down) };
    const [order, arrow] = !sorted ? [null, ""] : x.sort.down ? ["descending", " ↓"] : ["ascending", " ↑"];
    return el("th", { scope: "col", title: MEASURES[name][1], "aria-sort": order },
      el("button", { "data-key": name, onclick: () => show({ sort }) }, MEASURES[name][0], arrow));
  };
  const cell = (name, l, h) => {
    const number = x.measures[name].at(l, h);
    const most = ["distance", "entropy"].includes(name) ? largest(x.measures[name].data) : 1;
    return el("td", { style: `--width:${Number.isNaN(number) ? 0 : (100 * number) / most}%` }, fixed(number));
  };
  const choose = (l, h) => el("button", {
    "data-key": `${l}.${h}`, "aria-label": `layer ${l}, head ${h}`, onclick: () => show({ layer: l, head: h }),
  }, `${l}.${h}`);
  fillTable($("measures"), "head", names.map(header), heads.map(([l, h]) => tableRow(choose(l, h),
    names.map((name) => cell(name, l, h)), { class: l === x.layer && h === x.head ? "asked" : "" })));
  if (focused) $("measures").querySelector(`[data-key="${focused}"]`)?.focus({ preventScroll: true });
  const repeats = !Number.isNaN(x.measures.repeated.data[0]);
  $("measures-note").replaceChildren(repeats ? "" : "No token comes twice in this prompt, so that two columns are empty. ",
    ...names.flatMap((name) => [el("b", {}, MEASURES[name][0]), ` ${MEASURES[name][1]}. `]));
}

function renderLens() {
  const i = x.query, came = i + 1 < x.n;
  $("expect-title").replaceChildren("After ", quoted(i));
  const likely = (depth, place) => {
    const p = x.lens.p.at(depth, i, place), text = x.vocabulary[x.lens.ids[depth][i][place]];
    return el("td", { style: filled(heat(p)) }, quote(text), " ", el("span", { class: "p" }, percent(p)));
  };
  const places = range(x.lens.p.shape[2]);
  fillTable($("expect"), "", [
    el("th", { class: "left", colspan: places.length, scope: "col" }, "likeliest next tokens"),
    ...(came ? [el("th", { class: "left", scope: "col" }, "came: ", quoted(i + 1))] : []),
  ], depths().map((name, depth) => tableRow(name,
    [...places.map((place) => likely(depth, place)), ...(came ? [td(percent(x.lens.came.at(depth, i)))] : [])])));
  for (const row of $("lens").rows) {
    [...row.cells].forEach((cell, column) => cell.classList.toggle("here", column === i + 1));
  }
}

function renderFlow(weights) {
  const found = x.explained[x.query].targets.length ? x.explained[x.query] : null;
  $("targets").hidden = true;
  if (found) {
    const options = found.targets.map((id, t) => {
      const [text, p] = [x.vocabulary[id], ` ${percent(found.p.at(t))}`];
      return { label: text + p, nodes: [...spell(text), p] };
    });
    choices($("targets"), "Next token", options, x.target, (target) => show({ target }), 1);
  }
  const rolled = x.rollout.row(x.query);
  const gradients = found && found.values.row(x.target), most = found && largest(gradients);
  fillTable($("flow"), "token", ["this head's weight", "rollout", ...(found ? ["integrated gradients"] : [])],
    range(x.query + 1).map((j) => tableRow(spell(x.tokens[j]), [
      ...[weights, rolled].map((column) => td(weightBar(column[j], largest(column)))),
      ...(found ? [td(signedBar(gradients[j], most))] : []),
    ], { class: j === x.query ? "asked" : "" })));
  $("flow-sum").replaceChildren(...(found ? sumOf(found, gradients) : [withoutGradients()]));
}

function sumOf(found, gradients) {
  const sum = gradients.reduce((a, b) => a + b, 0);
  const [here, empty] = [found.at, found.start].map((logits) => logits.at(x.target));
  return [`Integrated gradients sum to ${fixed(sum)}: the logit of `, quote(x.vocabulary[found.targets[x.target]]),
    ` is ${fixed(here)} here, and would be ${fixed(empty)} after ${x.query + 1} start tokens.`];
}

function withoutGradients() {
  const explained = x.explained.filter((place) => place.targets.length).length;
  if (!explained) return "Integrated gradients were left out (explain=0).";
  return `To save time, integrated gradients are there for the last ${explained} tokens; explain_places=${x.n} does all.`;
}

// Keys and pointers -----------------------------------------------------------------------------------------------

function moveHead(by) {
  const next = clamp(x.layer * x.heads + x.head + by, 0, x.layers.length * x.heads - 1);
  show({ layer: Math.floor(next / x.heads), head: next % x.heads });
}

const KEYS = {
  ArrowLeft: () => show({ query: Math.max(x.query - 1, 0) }),
  ArrowRight: () => show({ query: Math.min(x.query + 1, x.n - 1) }),
  "[": () => moveHead(-1),
  "]": () => moveHead(1),
  "{": () => show({ layer: Math.max(x.layer - 1, 0) }),
  "}": () => show({ layer: Math.min(x.layer + 1, x.layers.length - 1) }),
  c: () => toggleCompare(),
};
for (const i of range(4)) KEYS[i + 1] = () => show({ step: i });

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input:not([type=radio], [type=checkbox])");
  const modified = (event.ctrlKey || event.metaKey || event.altKey) && !event.getModifierState("AltGraph");
  const arrows = "[data-arrows], .choices, [role=tablist], .scroll"; // what does something of its own with arrow keys
  const ownArrows = event.key.startsWith("Arrow") && event.target.closest(arrows);
  if (typing || modified || ownArrows || event.defaultPrevented || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

$("tokens").addEventListener("keydown", (event) => {
  const ends = { Home: 0, End: x.n - 1 };
  if (!(event.key in ends)) return;
  event.preventDefault();
  show({ query: ends[event.key] });
});

$("step-tabs").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  show({ step: clamp(x.step + by, 0, 3) });
  $(`tab-${x.step}`).focus();
});

$("overview").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -x.heads, ArrowDown: x.heads }[event.key];
  if (!by) return;
  event.preventDefault();
  moveHead(by);
  $("overview").querySelector("[aria-checked=true]").focus();
});

$("map").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (by) moveCell(x.cell.map((i, axis) => clamp(i + by[axis], 0, x.n - 1)));
  else if (event.key === "Enter" || event.key === " ") show({ query: x.cell[0] });
  else return;
  event.preventDefault();
});
$("map").addEventListener("pointermove", (event) => moveCell(cellAt(event)));
$("map").addEventListener("click", (event) => {
  const cell = cellAt(event);
  if (!cell) return;
  show({ query: cell[0] });
  moveCell(cell);
});

function toggleCompare() {
  compare = !compare;
  renderStep();
}
$("compare").addEventListener("change", toggleCompare);
$("back").addEventListener("click", () => show({ step: x.step - 1 }));
$("next").addEventListener("click", () => show({ step: x.step + 1 }));

let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(renderMap, 60);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readPalette();
  build();
});

$("ask").hidden = !served;
$("prompt").value = exhibits[0].prompt ?? "";
$("error").hidden = !error;
$("error").textContent = error;
readPalette();
build();
