"use strict";
// The live page. All text of a run is set as text, never as HTML. Drawing is on canvases, in the colours of the style.
const GIVEN = JSON.parse(document.getElementById("data").textContent);
const PAGE = document.getElementById("page");
const RUN_COLOURS = ["c0", "c1", "c2", "c3", "c7", "c4", "c5", "c6"];
const TERMS = {compute: "c0", communication: "c3", bubble: "c6", data: "c4", optimizer: "c2", other: "c5", saving: "c1"};
const state = {run: 0, from: null, to: null, log: false, smooth: true, bits: false, row: "own", sort: "rank", data: GIVEN.names.map(() => ({})), got: Date.now()};
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
let tip;

// ---- Small things

function h(tag, give, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(give || {})) {
    if (name === "on") for (const [event, f] of Object.entries(value)) made.addEventListener(event, f);
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inside.flat(9).filter(one => one !== null && one !== undefined && one !== false).map(one => one instanceof Node ? one : String(one)));
  return made;
}
const digits = v => v === 0 ? "0" : Math.abs(v) >= 100 ? v.toFixed(0) : Math.abs(v) >= 1e-3 ? String(+v.toPrecision(3)) : v.toExponential(1);
function count(v) {
  if (v === null || v === undefined || !isFinite(v)) return "–";
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(v) >= size * 0.99995) return digits(v / size) + letter;
  return digits(v);
}
function duration(s) {
  if (s === null || s === undefined || !isFinite(s)) return "–";
  if (s === 0) return "0";
  if (Math.abs(s) < 1e-3) return digits(s * 1e6) + " µs";
  if (Math.abs(s) < 1) return digits(s * 1e3) + " ms";
  if (s < 60) return digits(s) + " s";
  const w = Math.round(s), two = n => String(n).padStart(2, "0");
  if (w < 3600) return Math.floor(w / 60) + " min " + two(w % 60) + " s";
  if (w < 86400) return Math.floor(w / 3600) + " h " + two(Math.floor(w % 3600 / 60)) + " min";
  return Math.floor(w / 86400) + " d " + two(Math.floor(w % 86400 / 3600)) + " h";
}
function bytes(v) {
  if (v === null || v === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) { if (Math.abs(v) < 1023.95 || unit === "TiB") return digits(v) + " " + unit; v /= 1024; }
}
function flops(v) { for (const [size, letter] of [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"]]) if (v >= size) return digits(v / size) + " " + letter + "FLOP/s"; return digits(v / 1e6) + " MFLOP/s"; }
const percent = v => v === null || v === undefined ? "–" : (v * 100).toFixed(1) + " %";
const whole = v => v === null || v === undefined ? "–" : Math.round(v).toLocaleString("en");
const perplexity = loss => loss === null || loss === undefined ? "" : "perplexity " + count(Math.exp(Math.min(loss, 700)));
const four = v => v === null || v === undefined ? "–" : v.toFixed(4);

function showTip(event, text) {
  if (!text) { tip.style.display = "none"; return; }
  tip.textContent = text; tip.style.display = "block";
  const wide = tip.offsetWidth, tall = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - wide - 6)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tall - 6)) + "px";
}
function ticks(low, high, most) {
  const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(m => m >= raw) || raw, found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6 && found.length < 40; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

// ---- Drawings: a canvas with an axis of steps, over which the pointer shows values and drags a part to look at

class Plot {
  constructor(height) {
    this.canvas = h("canvas", {tabindex: 0, role: "img"});
    this.height = height; this.left = 54; this.right = 10; this.top = 8; this.bottom = 22; this.drag = null; this.at = null;
    const place = e => e.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointermove", e => { this.at = place(e); this.draw(); showTip(e, this.drag === null ? this.tell(this.at, e.clientY - this.canvas.getBoundingClientRect().top) : null); });
    this.canvas.addEventListener("pointerleave", () => { this.at = null; this.drag = null; this.draw(); showTip(null, null); });
    this.canvas.addEventListener("pointerdown", e => { if (e.pointerType === "mouse") this.drag = place(e); });
    this.canvas.addEventListener("pointerup", e => {
      const from = this.drag, to = place(e); this.drag = null;
      if (from !== null && Math.abs(to - from) > 6) zoom(Math.floor(this.step(Math.min(from, to))), Math.ceil(this.step(Math.max(from, to))));
      else this.pick(to, e.clientY - this.canvas.getBoundingClientRect().top);
    });
    this.canvas.addEventListener("dblclick", () => zoom(null, null));
    new ResizeObserver(() => requestAnimationFrame(() => this.draw())).observe(this.canvas);
  }
  begin() {
    const wide = this.canvas.clientWidth, scale = devicePixelRatio || 1;
    if (!wide) return null;
    this.wide = wide;
    this.canvas.style.height = this.height + "px";
    if (this.canvas.width !== Math.round(wide * scale) || this.canvas.height !== Math.round(this.height * scale)) { this.canvas.width = Math.round(wide * scale); this.canvas.height = Math.round(this.height * scale); }
    const g = this.canvas.getContext("2d");
    g.setTransform(scale, 0, 0, scale, 0, 0); g.clearRect(0, 0, wide, this.height);
    g.font = '11px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif';
    return g;
  }
  get inner() { return this.wide - this.left - this.right; }
  step(x) { return this.x0 + (x - this.left) / this.inner * (this.x1 - this.x0); }
  place(step) { return this.left + (step - this.x0) / (this.x1 - this.x0 || 1) * this.inner; }
  axis(g) {
    g.fillStyle = css("muted"); g.textAlign = "center"; g.textBaseline = "top";
    for (const tick of ticks(this.x0, this.x1, Math.max(2, this.inner / 110))) {
      const x = this.place(tick);
      if (x < this.left - 1 || x > this.wide - 12) continue;
      g.fillText(tick >= 1e5 ? count(tick) : whole(tick), x, this.height - this.bottom + 7);
    }
  }
  over(g) {
    if (this.drag !== null && this.at !== null) { g.fillStyle = css("c0"); g.globalAlpha = 0.16; g.fillRect(Math.min(this.drag, this.at), this.top, Math.abs(this.at - this.drag), this.height - this.top - this.bottom); g.globalAlpha = 1; }
  }
  tell() { return null; }
  pick() {}
}

class Curves extends Plot {
  // series: {name, colour, x, y, low, high, piece, faint, dots}
  constructor(height, form, options) { super(height); this.form = form; this.series = []; this.marks = []; this.options = options || {}; }
  set(series, marks) { this.series = series; this.marks = marks || []; this.draw(); }
  draw() {
    const g = this.begin();
    if (!g) return;
    const log = this.options.log && this.options.log(), bottom = this.height - this.bottom;
    let x0 = Infinity, x1 = -Infinity, low = Infinity, high = -Infinity;
    for (const s of this.series) s.x.forEach(x => { if (x < x0) x0 = x; if (x > x1) x1 = x; });
    if (state.from !== null) { x0 = state.from; x1 = state.to; }
    if (!isFinite(x0)) { g.fillStyle = css("muted"); g.textAlign = "center"; g.fillText("nothing to draw yet", this.wide / 2, this.height / 2); return; }
    if (x0 === x1) x1 = x0 + 1;
    const values = [];
    for (const s of this.series) s.x.forEach((x, i) => {
      const v = s.y[i];
      if (v === null || x < x0 || x > x1 || (log && v <= 0)) return;
      values.push(v); if (v < low) low = v; if (v > high) high = v;
    });
    if (!isFinite(low)) { low = log ? 1 : 0; high = log ? 10 : 1; }
    if (!log && values.length > 50) { // a few spikes must not press all the rest flat
      values.sort((a, b) => a - b);
      const top = values[Math.floor(values.length * 0.99)], foot = values[Math.floor(values.length * 0.5)];
      if (high - foot > 6 * (top - foot) && top > foot) high = top + (top - foot);
    }
    if (this.options.zero && !log) low = Math.min(0, low);
    if (log) { low = Math.log(low); high = Math.log(high); }
    if (low === high) { low -= Math.abs(low) * 0.05 || 0.5; high += Math.abs(high) * 0.05 || 0.5; }
    const room = (high - low) * 0.06; high += room; if (!(this.options.zero && low === 0)) low -= room;
    Object.assign(this, {x0, x1});
    const y = v => bottom - ((log ? Math.log(v) : v) - low) / (high - low) * (bottom - this.top);
    const marks = log ? logTicks(Math.exp(low), Math.exp(high)) : ticks(low, high, Math.max(2, this.height / 38));
    const words = marks.map(v => this.form(v));
    this.left = Math.max(34, ...words.map(w => g.measureText(w).width + 12));
    g.textBaseline = "middle"; g.textAlign = "right"; g.lineWidth = 1;
    marks.forEach((v, i) => { const at = Math.round(y(v)) + 0.5; g.strokeStyle = css("grid"); g.beginPath(); g.moveTo(this.left, at); g.lineTo(this.wide - this.right, at); g.stroke(); g.fillStyle = css("muted"); g.fillText(words[i], this.left - 7, at); });
    this.axis(g);
    g.save(); g.beginPath(); g.rect(this.left, this.top, this.inner, bottom - this.top + 1); g.clip();
    for (const mark of this.marks) {
      if (mark.step < x0 || mark.step > x1) continue;
      g.strokeStyle = css(mark.kind === "start" ? "muted" : mark.kind === "skipped" ? "warn" : "bad"); g.globalAlpha = 0.55; g.setLineDash(mark.kind === "start" ? [3, 3] : []);
      const at = Math.round(this.place(mark.step)) + 0.5;
      g.beginPath(); g.moveTo(at, this.top); g.lineTo(at, bottom); g.stroke(); g.setLineDash([]); g.globalAlpha = 1;
    }
    for (const s of this.series) this.one(g, s, y);
    if (this.at !== null && this.at >= this.left) { g.strokeStyle = css("muted"); g.globalAlpha = 0.5; g.beginPath(); g.moveTo(this.at, this.top); g.lineTo(this.at, bottom); g.stroke(); g.globalAlpha = 1; }
    g.restore(); this.over(g);
  }
  one(g, s, y) {
    const colour = css(s.colour);
    if (s.low) {
      g.fillStyle = colour; g.globalAlpha = s.faint ? 0.14 : 0.2;
      for (let i = 0; i < s.x.length; i++) {
        if (s.low[i] === null || s.high[i] === null) continue;
        const from = i && s.piece[i] === s.piece[i - 1] ? this.place(s.x[i - 1]) : this.place(s.x[i]) - 1, a = y(s.low[i]), b = y(s.high[i]);
        g.fillRect(from, b, Math.max(this.place(s.x[i]) - from, 1), Math.max(a - b, 1));
      }
      g.globalAlpha = 1;
    }
    g.setLineDash(s.dash ? [6, 4] : []);
    g.strokeStyle = colour; g.fillStyle = colour; g.lineWidth = s.faint ? 1 : 1.8; g.globalAlpha = s.faint ? 0.35 : 1; g.lineJoin = "round";
    g.beginPath();
    let open = false;
    for (let i = 0; i < s.x.length; i++) {
      if (s.y[i] === null) { open = false; continue; }
      const x = this.place(s.x[i]), at = y(s.y[i]);
      if (open && s.piece && s.piece[i] !== s.piece[i - 1]) open = false; // the run went back to an earlier step
      if (open) g.lineTo(x, at); else g.moveTo(x, at);
      open = true;
    }
    g.stroke(); g.setLineDash([]);
    if (s.dots || s.x.length === 1) s.x.forEach((x, i) => { if (s.y[i] !== null) { g.beginPath(); g.arc(this.place(x), y(s.y[i]), 2.6, 0, 7); g.fill(); } });
    g.globalAlpha = 1; g.lineWidth = 1;
  }
  tell(x) {
    if (this.x0 === undefined || x < this.left) return null;
    const step = this.step(x), lines = [];
    let near = null;
    for (const s of this.series) {
      if (s.faint || !s.x.length) continue;
      let best = 0;
      s.x.forEach((at, i) => { if (s.y[i] !== null && Math.abs(at - step) <= Math.abs(s.x[best] - step)) best = i; });
      if (near === null) near = s.x[best];
      if (s.y[best] !== null) lines.push(s.name + "  " + this.form(s.y[best], true) + (s.low && s.low[best] !== null ? "  (" + this.form(s.low[best]) + " to " + this.form(s.high[best]) + ")" : "") + (s.dots && s.x[best] !== near ? "  at step " + whole(s.x[best]) : ""));
    }
    for (const mark of this.marks) if (Math.abs(this.place(mark.step) - x) < 5) lines.push(mark.words.slice(0, 160));
    return near === null ? null : "step " + whole(near) + "\n" + lines.join("\n");
  }
}
function logTicks(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) for (const m of [1, 2, 5]) { const v = m * 10 ** p; if (v >= low && v <= high) found.push(v); }
  return found.length > 1 ? found : ticks(low, high, 4).filter(v => v > 0);
}

function rgb(colour) { const c = colour.replace("#", ""); return [0, 2, 4].map(i => parseInt(c.slice(i, i + 2), 16)); }
function mix(a, b, t) { return a.map((v, i) => Math.round(v + (b[i] - v) * t)); }

class Heat extends Plot {
  constructor() { super(220); this.left = 62; this.bottom = 24; this.found = null; }
  colours(found) { // code -> colour
    const calm = rgb(css("calm")), warm = rgb(css("warm")), hot = rgb(css("hot")), cool = rgb(css("cool")), deep = rgb(css("deep"));
    return Array.from({length: 256}, (_, code) => {
      const octaves = (code - 1) * found.octaves / 254 - found.zero;
      if (!code) return null;
      if (found.row !== "own" && found.row !== "memory") return mix(calm, deep, Math.min(1, 2 ** octaves / 1.2));
      if (octaves < 0) return mix(calm, cool, Math.min(1, Math.max(0, -octaves - 0.06) / 0.8));
      const t = Math.max(0, octaves - 0.06) / 0.6;
      return t < 0.4 ? mix(calm, warm, t / 0.4) : mix(warm, hot, Math.min(1, (t - 0.4) / 0.6));
    });
  }
  set(found) {
    this.found = found;
    if (!found || !found.ranks) { this.draw(); return; }
    const raw = atob(found.codes), rows = found.rows.length, columns = found.step.length;
    this.cells = Uint8Array.from(raw, c => c.charCodeAt(0));
    this.image = h("canvas", {}); this.image.width = columns; this.image.height = rows;
    this.paint(); this.height = Math.max(120, Math.min(rows <= 16 ? rows * 22 + 32 : 420, 420)); this.draw();
  }
  paint() {
    const found = this.found, rows = found.rows.length, columns = found.step.length, colours = this.colours(found);
    const g = this.image.getContext("2d"), data = g.createImageData(columns, rows);
    for (let i = 0; i < this.cells.length; i++) { const c = colours[this.cells[i]]; if (c) { data.data[4 * i] = c[0]; data.data[4 * i + 1] = c[1]; data.data[4 * i + 2] = c[2]; data.data[4 * i + 3] = 255; } }
    g.putImageData(data, 0, 0);
  }
  draw() {
    const g = this.begin(), found = this.found;
    if (!g) return;
    if (!found || !found.ranks) { g.fillStyle = css("muted"); g.textAlign = "center"; g.fillText(found ? "not known: see below" : "…", this.wide / 2, this.height / 2); return; }
    const rows = found.rows.length, columns = found.step.length, tall = this.height - this.top - this.bottom;
    this.x0 = 0; this.x1 = columns;
    g.imageSmoothingEnabled = false;
    g.fillStyle = css("soft"); g.fillRect(this.left, this.top, this.inner, tall);
    g.drawImage(this.image, this.left, this.top, this.inner, tall);
    g.fillStyle = css("muted"); g.textAlign = "right"; g.textBaseline = "middle";
    const each = tall / rows, every = Math.max(1, Math.ceil(13 / each));
    let last = null;
    found.rows.forEach((row, i) => {
      const axis = {node: "node", stage: "pipeline", data: "data"}[state.sort], here = axis && row[axis];
      if (axis && here !== last) {
        g.fillText(state.sort + " " + (here === undefined ? "" : here), this.left - 7, this.top + (i + 0.5) * each);
        if (i) { g.strokeStyle = css("panel"); g.lineWidth = 2; g.beginPath(); g.moveTo(this.left, this.top + i * each); g.lineTo(this.wide - this.right, this.top + i * each); g.stroke(); g.lineWidth = 1; }
        last = here;
      } else if (!axis && i % every === 0) g.fillText((rows <= 24 ? "rank " : "") + row.ranks[0], this.left - 7, this.top + (i + 0.5) * each);
    });
    g.textBaseline = "top"; g.textAlign = "center";
    const number = Math.max(2, Math.min(columns, Math.floor(this.inner / 110)));
    for (let k = 0; k < number; k++) { const i = Math.floor((k + 0.5) * columns / number); g.fillText(whole(found.step[i]), this.place(i + 0.5), this.height - this.bottom + 8); }
    for (let i = 1; i < columns; i++) if (found.piece[i] !== found.piece[i - 1]) { g.strokeStyle = css("ink"); g.setLineDash([2, 3]); g.beginPath(); g.moveTo(this.place(i), this.top); g.lineTo(this.place(i), this.top + tall); g.stroke(); g.setLineDash([]); }
    this.over(g);
  }
  step(x) { const at = Math.max(0, Math.min(this.found.step.length - 1, Math.floor((x - this.left) / this.inner * this.found.step.length))); return this.found.step[at]; }
  row(y) { return Math.floor((y - this.top) / (this.height - this.top - this.bottom) * this.found.rows.length); }
  pick(x, y) { const row = this.found && this.found.ranks ? this.found.rows[this.row(y)] : undefined; if (row && GIVEN.live) whatIf(row); }
  tell(x, y) {
    const found = this.found;
    if (!found || !found.ranks || x < this.left) return null;
    const i = Math.floor((x - this.left) / this.inner * found.step.length), r = this.row(y);
    if (i < 0 || i >= found.step.length || r < 0 || r >= found.rows.length) return null;
    const row = found.rows[r], code = this.cells[r * found.step.length + i], share = 2 ** ((code - 1) * found.octaves / 254 - found.zero), base = found.base[i];
    const who = row.of > 1 ? "slowest of " + row.of + " ranks from " + row.ranks[0] : "rank " + row.ranks[0];
    const where = Object.entries({stage: row.pipeline, data: row.data, tensor: row.tensor, node: row.node}).filter(([, v]) => v !== undefined).map(([k, v]) => k + " " + v).join(", ");
    const when = found.first[i] === found.step[i] ? "step " + whole(found.step[i]) : "steps " + whole(found.first[i]) + " to " + whole(found.step[i]);
    const what = !code ? "not known" : found.row === "memory" ? bytes(share * base) + ", " + share.toFixed(2) + " of the median" : found.row === "own" ? share.toFixed(2) + " × its peers, about " + duration(share * base) : duration(share * base) + " of " + found.row;
    return who + "\n" + where + "\n" + when + "\n" + what;
  }
}

// ---- Panels: made once, filled whenever there is news

const panels = {};
function card(kind, title, tools, ...inside) { return h("section", {class: "card " + kind}, h("header", {}, h("h2", {}, title), h("div", {class: "tools"}, tools || [])), inside); }
function button(words, f, on) { const made = h("button", {type: "button", on: {click: () => { f(); }}}, words); if (on) toggles.push([made, on]); return made; }
const toggles = [];
const legend = rows => h("div", {class: "legend"}, rows.map(([name, colour]) => h("span", {}, h("i", {style: {background: "var(--" + colour + ")"}}), name)));
const points = (found, name, more) => Object.assign({x: found.step, y: found[name].mean, low: found[name].low, high: found[name].high, piece: found.piece}, more);
const now = () => state.data[state.run];

function smoothed(y, piece) { // the mean of neighbours on both sides, within one piece
  const reach = Math.max(2, Math.floor(y.length / 60)), found = [];
  for (let i = 0; i < y.length; i++) {
    let sum = 0, n = 0;
    for (let k = Math.max(0, i - reach); k <= Math.min(y.length - 1, i + reach); k++) if (piece[k] === piece[i] && y[k] !== null) { sum += y[k]; n++; }
    found.push(n ? sum / n : null);
  }
  return found;
}

function build() {
  tip = h("div", {class: "tip"});
  panels.runs = h("div", {});
  panels.loss = new Curves(260, (v, fine) => fine ? v.toFixed(4) : digits(v), {log: () => state.log});
  panels.norm = new Curves(150, v => digits(v), {log: () => state.log});
  panels.lr = new Curves(150, v => v ? v.toExponential(1) : "0", {zero: true});
  panels.rate = new Curves(190, count, {zero: true});
  panels.split = h("div", {}); panels.ratelegend = h("div", {});
  panels.heat = new Heat(); panels.heatwhy = h("div", {class: "muted"}); panels.without = h("div", {class: "without"}); panels.scale = h("span", {class: "scale"});
  panels.causes = h("div", {}); panels.memory = h("div", {}); panels.incidents = h("div", {}); panels.samples = h("div", {}); panels.about = h("div", {}); panels.losslegend = h("div", {});
  panels.load = new Curves(150, v => v.toFixed(2), {}); panels.experts = card("", "Experts: largest load over the mean, in the least balanced layer", [], panels.load.canvas);
  panels.rounding = new Curves(150, v => v.toPrecision(3), {log: () => state.log}); panels.errors = h("div", {}); panels.precision = card("", "Precision: relative error of gradients compared with wide products", [], panels.rounding.canvas, panels.errors);
  panels.apart = new Curves(150, v => v.toPrecision(3), {log: () => state.log}); panels.merged = h("div", {}); panels.waits = new Curves(110, v => v ? duration(v) : "0", {zero: true}); panels.waited = h("div", {}); panels.sites = card("", "Sites: distance between their weights at each merge", [], panels.apart.canvas, panels.merged, panels.waits.canvas, panels.waited);
  panels.samplecard = card("", "Text that the model generated", [], panels.samples);
  const rows = h("select", {"aria-label": "what is shown", on: {change: e => { state.row = e.target.value; fetchNow(["rank-heatmap"]); }}}, [["own", "own work"], ["forward", "forward"], ["backward", "backward"], ["communication", "communication"], ["bubble", "waiting"], ["data", "data"], ["optimizer", "optimizer"], ["other", "other"], ["memory", "memory"]].map(([v, w]) => h("option", {value: v}, w)));
  const sorts = h("select", {"aria-label": "order of ranks", on: {change: e => { state.sort = e.target.value; fetchNow(["rank-heatmap"]); }}}, ["rank", "node", "stage", "data", "slowest"].map(v => h("option", {value: v}, "by " + v)));
  PAGE.append(
    panels.runs,
    h("div", {class: "grid"},
      card("two", "Loss", [button("smooth", () => { state.smooth = !state.smooth; fill(); }, () => state.smooth), button("log", () => { state.log = !state.log; fill(); }, () => state.log), button("bits a byte", () => { state.bits = !state.bits; fill(); }, () => state.bits), button("all steps", () => zoom(null, null), () => state.from === null)], panels.loss.canvas, panels.losslegend),
      card("one", "What would make a step shorter", [], panels.causes),
      card("wide", "Every rank, step by step", GIVEN.live ? [rows, sorts] : [], panels.heat.canvas, h("div", {class: "legend"}, panels.scale), panels.without, panels.heatwhy),
      card("", "Where a step's time goes: measured, and predicted", [], panels.split),
      card("", "Tokens a second", [], panels.rate.canvas, panels.ratelegend),
      card("", "Gradient norm, before clipping", [], panels.norm.canvas),
      card("", "Learning rate", [], panels.lr.canvas),
      card("", "Memory of each rank at its peak", [], panels.memory),
      card("", "Incidents, and where the time went", [], panels.incidents),
      panels.sites, panels.experts, panels.precision, panels.samplecard,
      card("wide", "The run", [], panels.about)),
    h("footer", {}, "Click on a rank to see how long a step would take if this rank were not slow. Drag over a chart to zoom in; double-click or ", h("kbd", {}, "r"), " to zoom out. ", h("kbd", {}, "l"), " log axes, ", h("kbd", {}, "s"), " smooth, ", h("kbd", {}, "b"), " bits a byte, ", h("kbd", {}, "1"), "–", h("kbd", {}, "9"), " another run."),
    tip);
  document.addEventListener("keydown", e => {
    if (e.target.tagName === "SELECT" || e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.key === "r") zoom(null, null);
    else if (e.key === "l") { state.log = !state.log; fill(); }
    else if (e.key === "s") { state.smooth = !state.smooth; fill(); }
    else if (e.key === "b") { state.bits = !state.bits; fill(); }
    else if (e.key >= "1" && e.key <= "9" && +e.key <= GIVEN.names.length) choose(+e.key - 1);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (panels.heat.image) panels.heat.paint(); fill(); });
}

function fact(name, value, note) { return h("div", {}, h("b", {}, name), h("strong", {}, value), note ? h("small", {}, note) : null); }

function fillRuns() {
  panels.runs.replaceChildren(...GIVEN.names.map((name, at) => {
    const a = state.data[at].alive, many = GIVEN.names.length > 1;
    if (!a) return h("div", {class: "run"}, h("h1", {}, name), h("p", {class: "muted"}, "reading the log …"));
    const peak = state.data[at].run && state.data[at].run.peak && state.data[at].run.peak.flops;
    const age = a.age === null ? null : a.age + (GIVEN.live ? (Date.now() - state.got) / 1000 : 0);
    const badge = {running: {good: "WELL", warn: "LOOK AT IT", bad: "IN TROUBLE"}[a.health]}[a.state] || a.state.toUpperCase();
    const done = a.total && a.step !== null ? Math.min(1, a.step / a.total) : 0;
    const made = h("div", {class: "run " + (a.state === "stopped" ? "" : a.health) + (many ? " pick" : "") + (many && at === state.run ? " chosen" : ""), on: {click: () => { if (many) choose(at); }}},
      h("div", {class: "top"}, h("h1", {}, name), h("span", {class: "badge"}, badge), h("span", {class: "muted"}, a.phase !== a.state ? a.phase : ""),
        h("span", {class: "right"}, a.behind ? "reading the log …" : a.state === "running" ? (a.step_age === null ? "" : "last step " + duration(a.step_age + age - a.age) + " ago" + (a.step_age - a.age > 2 ? ", " : "")) + (a.step_age === null || a.step_age - a.age > 2 ? "last sign " + duration(age) + " ago" : "") : age === null ? "" : "ended " + duration(age) + " ago")),
      h("ul", {class: "says"}, a.says.slice(0, 6).map(([level, words]) => h("li", {class: level}, words))),
      h("div", {class: "bar"}, h("i", {style: {width: (done * 100).toFixed(2) + "%"}})),
      h("div", {class: "facts"},
        fact("step", whole(a.step), a.total ? "of " + whole(a.total) + ", " + percent(done) : ""),
        a.state === "running" ? fact("time left", duration(a.left), a.elapsed ? duration(a.elapsed) + " so far" : "") : fact("time", duration(a.elapsed), ""),
        fact("loss", four(a.loss), perplexity(a.loss)),
        a.validation !== null ? fact("validation loss", four(a.validation), perplexity(a.validation)) : null,
        fact("tokens a second", count(a.tokens_per_second), count(a.tokens) + " tokens so far"),
        a.mfu !== null ? fact("MFU", percent(a.mfu), peak ? "of " + flops(peak) : "") : null,
        fact("a step", duration(a.seconds), a.predicted ? "predicted " + duration(a.predicted) : ""),
        fact("goodput", percent(a.goodput), (a.starts > 1 ? "started " + a.starts + " times, " : "") + a.incidents + (a.incidents === 1 ? " incident" : " incidents")),
        a.checkpoint !== null ? fact("next checkpoint", "in " + whole(a.checkpoint), a.saved !== null ? "steps; last one " + duration(a.saved_age) + " ago" : "steps; none saved yet") : a.saved !== null ? fact("checkpoint", "step " + whole(a.saved), "") : null,
        a.dollars !== null ? fact("cost", "$" + whole(a.dollars), a.kilowatt_hours !== null ? count(a.kilowatt_hours) + " kWh, of the devices" : "") : a.kilowatt_hours !== null ? fact("energy", count(a.kilowatt_hours) + " kWh", "of the devices") : null),
      at === state.run ? actions() : null);
    return made;
  }));
}

const bitsOf = (found, domain) => (state.bits && found.tokens_a_byte && found.tokens_a_byte[domain] ? found.tokens_a_byte[domain] / Math.LN2 : state.bits ? null : 1);
function lawWords(found) {
  const law = found.law, factor = bitsOf(found, "");
  if (factor === null) return "";
  const now = Math.abs(law.off) < 0.005 ? "the loss is on it" : `the loss is ${(100 * Math.abs(law.off)).toFixed(1)} % ${law.off > 0 ? "above" : "below"} it`;
  return `; by the scaling law of ${law.of} the loss ends at ${(law.end * factor).toFixed(3)}; ${now}`;
}
function fillLoss() {
  const series = [], rows = [], many = GIVEN.names.length > 1;
  GIVEN.names.forEach((name, at) => {
    const found = state.data[at].loss;
    if (!found) return;
    const factor = bitsOf(found, ""), times = y => y && y.map(v => v === null || factor === null ? null : v * factor);
    const colour = many ? RUN_COLOURS[at % 8] : "c0", own = points(found, "loss");
    const y = times(own.y), smooth = state.smooth && y.length >= 60;
    series.push({...own, y, low: times(own.low), high: times(own.high), name: many ? name : "training", colour, faint: smooth});
    if (smooth) series.push({name: many ? name : "training", x: own.x, y: smoothed(y, own.piece), piece: own.piece, colour});
    rows.push([many ? name : "training", colour]);
    if (found.law) {
      series.push({name: (many ? name + " " : "") + "law of " + found.law.of, x: found.law.step, y: times(found.law.loss), colour: many ? colour : "c6", dash: true});
      if (!many) rows.push(["scaling law of " + found.law.of, "c6"]);
    }
    if (found.validation.length) {
      const one = many ? colour : "c1", domains = Object.keys(found.validation[found.validation.length - 1].domains);
      series.push({name: (many ? name + " " : "") + "validation", x: found.validation.map(v => v.step), y: times(found.validation.map(v => v.loss)), colour: one, dots: true});
      if (!many) rows.push(["validation", one]);
      if (!many && domains.length > 1) domains.slice(0, 5).forEach((domain, i) => {
        const f = bitsOf(found, domain);
        series.push({name: "  " + domain, x: found.validation.map(v => v.step), y: found.validation.map(v => v.domains[domain] == null || f === null ? null : v.domains[domain] * f), colour: ["c2", "c3", "c4", "c5", "c7"][i], dots: true});
        rows.push([domain, ["c2", "c3", "c4", "c5", "c7"][i]]);
      });
    }
  });
  const found = now().loss;
  panels.loss.set(series, found ? found.marks : []);
  panels.losslegend.replaceChildren(legend(rows), h("div", {class: "muted", style: {fontSize: "12px", marginTop: "3px"}}, state.bits ? (found && found.tokens_a_byte[""] ? "bits a byte" : "bits a byte are not known: the data's manifest cannot be read, or has no held-out text") : "nats a token", found && found.marks.length ? "; lines: dashed where the run was started again, others at incidents, spikes, skipped updates and phases" : "", found && found.law ? lawWords(found) : ""));
  if (!found) return;
  panels.norm.set([points(found, "grad_norm", {name: "gradient norm", colour: "c2"})], found.marks);
  panels.lr.set([points(found, "lr", {name: "learning rate", colour: "c7"})]);
}

function fillSpeed() {
  const found = now().speed;
  if (!found) return;
  const rate = found.expected.tokens_per_second, steps = found.step, mfu = found.expected.mfu, here = now().alive;
  panels.rate.set([points(found, "tokens_per_second", {name: "tokens a second", colour: "c0"}), ...(rate && steps.length ? [{name: "predicted", x: [steps[0], steps[steps.length - 1]], y: [rate, rate], colour: "c6", dash: true}] : [])]);
  panels.ratelegend.replaceChildren(rate ? legend([["measured" + (here && here.mfu !== null ? ", MFU " + percent(here.mfu) : ""), "c0"], ["predicted " + count(rate) + (mfu ? ", MFU " + percent(mfu) : ""), "c6"]]) : "");
  const measured = found.now, predicted = found.predicted, most = Math.max(measured ? measured.step : 0, predicted ? predicted.step : 0) || 1;
  const rows = [];
  if (measured) for (const name of ["step", ...Object.keys(TERMS)]) {
    if (measured[name] === null) continue; // nothing was saved yet
    const a = measured[name], b = predicted ? predicted[name] : undefined, colour = name === "step" ? "ink" : TERMS[name];
    const bars = h("div", {class: "pair"}, h("div", {class: "track"}, h("i", {style: {width: 100 * a / most + "%", background: "var(--" + colour + ")"}})), predicted ? h("div", {class: "track"}, h("i", {style: {width: 100 * (b || 0) / most + "%", background: "var(--" + colour + ")", opacity: 0.42}})) : null);
    rows.push(h("span", {}, name), bars, h("span", {class: "num"}, duration(a), h("span", {class: "muted"}, predicted && b !== undefined ? "  /  " + duration(b) : "  " + percent(a / measured.step))));
  }
  panels.split.replaceChildren(h("div", {class: "rows"}, rows), h("div", {class: "legend"}, predicted ? "above measured on the first rank, mean of the last 50 steps; below, paler, predicted as if reading data and saving took no time" : measured ? "measured on the first rank, mean of the last 50 steps" : "no step yet", measured && measured.saving !== null ? ". Saving comes on top of a step" : "", !predicted && found.why ? ". Prediction: " + found.why : ""));
}

function fillHeat() {
  const found = now()["rank-heatmap"];
  panels.heat.set(found);
  panels.heatwhy.textContent = found && found.why || "";
  if (!found || !found.ranks) { panels.scale.replaceChildren(); return; }
  const bar = h("canvas", {}); bar.width = 150; bar.height = 1;
  const g = bar.getContext("2d"), colours = panels.heat.colours(found), single = found.row !== "own" && found.row !== "memory";
  for (let i = 0; i < 150; i++) {
    const octaves = single ? Math.log2(Math.max(0.004, i / 149 * 1.2)) : -0.9 + i / 149 * 1.9, code = Math.max(1, Math.min(255, Math.round((octaves + found.zero) * 254 / found.octaves + 1))), c = colours[code];
    g.fillStyle = "rgb(" + c.join(",") + ")"; g.fillRect(i, 0, 1, 1);
  }
  panels.scale.replaceChildren(h("span", {}, single ? "0" : "half"), bar, h("span", {}, single ? "1.2 times the median rank's own work" : found.row === "memory" ? "twice the median" : "twice the median of ranks with the same part of the model"), h("span", {}, " · " + whole(found.ranks) + " ranks" + (found.rows.some(r => r.of > 1) ? ", a row shows the slowest of its ranks" : "") + (found.first.some((f, i) => f !== found.step[i]) ? ", a column the slowest of its steps" : "")));
}

function fillCauses() {
  const found = now()["what-if"];
  if (!found) return;
  const others = found.without.filter(w => w.what !== "rank" || !found.causes.some(c => c.who.includes(w.which))); // a cause has said it
  panels.causes.replaceChildren(...(found.causes.length ? found.causes.map(c => h("div", {class: "cause"}, h("span", {class: "gain"}, "−" + percent(c.gain)), h("strong", {}, c.words + "."), h("small", {}, c.change, c.seconds ? " Without this delay, a step would take " + duration(c.seconds) + " less." : ""))) : [h("p", {class: "muted"}, found.why ? "No causes are known yet: " + found.why + "." : "Nothing stands out: no rank, pipeline rank or node is much slower than its peers, and waiting for data, saving and the network is short.")]), ...(others.length ? [h("ul", {class: "withouts"}, others.map(w => h("li", {}, w.words)))] : []), ...(found.plans && found.plans.length ? [h("p", {class: "muted"}, "Plans that the planner expects to be faster: " + found.plans.map(p => p.change + " (−" + percent(p.gain) + ")").join("; ") + ".")] : []));
}

let questions = 0;
async function whatIf(row) { // of the row's rank; of its node, stage or data rank where the rows are sorted by these
  const axis = {node: "node", stage: "pipeline", data: "data"}[state.sort], here = axis && row[axis], mine = ++questions;
  const question = here === undefined ? {rank: row.slowest} : {[state.sort]: here};
  panels.without.textContent = "…";
  const answer = await fetch("panel/what-if?" + new URLSearchParams({run: state.run, ...question}), {cache: "no-store"}).catch(() => null);
  const found = answer && answer.ok ? await answer.json() : null;
  if (mine === questions) panels.without.textContent = found && found.without.length ? found.without[0].words : "No answer yet: too few steps of all ranks are known.";
}

function fillMemory() {
  const found = now().memory;
  if (!found) return;
  const state_of = r => r.weights + r.gradients + r.optimizer;
  const predicted = r => { const p = found.predicted[r.stage]; return p ? Object.values(p).reduce((a, b) => a + b, 0) : null; };
  const rows = found.rows.slice(0, 64), most = Math.max(1, found.limit || 0, ...rows.map(r => Math.max(r.peak || 0, state_of(r), predicted(r) || 0)));
  const made = rows.flatMap(r => {
    const part = (size, colour) => h("i", {style: {width: 100 * size / most + "%", background: "var(--" + colour + ")"}}), p = predicted(r);
    return [h("span", {}, "rank " + r.rank), h("div", {class: "track"}, part(r.weights, "c0"), part(r.gradients, "c1"), part(r.optimizer, "c2"), r.peak ? part(Math.max(0, r.peak - state_of(r)), "c6") : null, p ? h("u", {style: {left: 100 * p / most + "%"}}) : null), h("span", {class: "num"}, bytes(r.peak || state_of(r)), h("span", {class: "muted"}, p ? "  /  " + bytes(p) : ""))];
  });
  panels.memory.replaceChildren(rows.length ? h("div", {class: "rows scroll"}, made) : h("p", {class: "muted"}, "not known yet"), rows.length ? legend([["weights", "c0"], ["gradients", "c1"], ["optimizer", "c2"], ["activations and all else", "c6"], ["line: prediction for the rank's state and activations", "ink"]]) : "");
}

function fillIncidents() {
  const found = now().incidents;
  if (!found) return;
  const when = t => new Date(t * 1000).toLocaleTimeString("en-GB"), chip = (names, out) => (names || []).filter(n => n).slice(0, 24).map(n => h("span", {class: out ? "out" : ""}, n));
  const nodes = found.placement ? [h("div", {class: "chips"}, h("small", {class: "muted"}, "nodes "), chip(found.placement), found.spares.length ? [h("small", {class: "muted"}, "spares "), chip(found.spares)] : null, found.quarantined.length ? [h("small", {class: "muted"}, "out "), chip(found.quarantined, true)] : null)] : [];
  const list = found.incidents.slice().reverse().map(i => h("tr", {}, h("td", {class: "short"}, whole(i.step)), h("td", {class: "short"}, when(i.time)), h("td", {}, i.reason), h("td", {class: "short"}, i.recovery === null ? "not over" : duration(i.detection + i.recovery) + (i.lost_steps ? ", " + i.lost_steps + " steps" : ""))));
  const problems = found.problems.slice().reverse().map(p => h("tr", {}, h("td", {class: "short " + (p.severity === "error" ? "error" : "warning")}, p.severity), h("td", {class: "short"}, when(p.time)), h("td", {colspan: 2}, p.message.split("\n")[0], p.rank === null ? "" : " (rank " + p.rank + ")")));
  const went = found.went.filter(w => w.share >= 0.0005);
  const colour = {useful: "good", "start-up": "c5", checkpoint: "c0", validation: "c7", "lost steps": "bad", recovery: "c1", detection: "c3", away: "line", data: "c4", straggling: "warn", other: "c6"};
  panels.incidents.replaceChildren(...nodes,
    went.length ? h("div", {class: "track"}, went.map(w => h("i", {title: w.cause + " " + percent(w.share), style: {width: 100 * w.share + "%", background: "var(--" + (colour[w.cause] || "c6") + ")"}}))) : "",
    went.length ? h("div", {class: "legend"}, went.map(w => h("span", {}, h("i", {style: {background: "var(--" + (colour[w.cause] || "c6") + ")"}}), w.cause + " " + percent(w.share)))) : "",
    list.length + problems.length ? h("div", {class: "scroll", style: {marginTop: "9px"}}, h("table", {}, h("tbody", {}, list.length ? h("tr", {}, ["step", "when", "what", "cost"].map(w => h("th", {}, w))) : null, list, problems))) : h("p", {class: "muted"}, "None."));
}

function fillRest() {
  const experts = now().experts, samples = now().samples, about = now().run;
  const has = experts && experts.max_load.mean.some(v => v !== null);
  panels.experts.style.display = has ? "" : "none";
  if (has) panels.load.set([points(experts, "max_load", {name: "busiest over the mean", colour: "c4"}), points(experts, "entropy", {name: "evenness", colour: "c2"})]);
  const merged = now().sites, merges = merged ? merged.merges : [];
  panels.sites.style.display = merges.length ? "" : "none";
  if (merges.length) {
    const x = merges.map(m => m.step), last = merges[merges.length - 1];
    const moves = merges.flatMap(m => [...m.left.map(s => s + " left at step " + whole(m.step)), ...m.joined.map(s => s + " joined at step " + whole(m.step))]).slice(-6);
    panels.apart.set([{name: "norm of the mean difference", x, y: merges.map(m => m.norm), colour: "c0", dots: true}, {name: "distance of the sites' differences from their mean", x, y: merges.map(m => m.spread), colour: "c1", dots: true}]);
    panels.waits.set([{name: "wait of the first site", x, y: merges.map(m => m.waited), colour: "c3", dots: true}]);
    panels.waited.replaceChildren(legend([["wait of the first site for others at each merge", "c3"]]));
    panels.merged.replaceChildren(legend([["norm of the mean difference", "c0"], ["root mean square distance of the sites' differences from their mean", "c1"]]), h("p", {class: "muted"}, whole(merged.count) + " merges of " + merged.sites + " sites, last with losses " + last.losses.map((v, i) => (last.merged[i] ? last.merged[i] + " " : "") + (v === null ? "?" : v.toFixed(3))).join(", ") + ". The first site sent " + bytes(merged.sent) + (merged.instead ? ", where gradients in fp32 after each step would be " + bytes(merged.instead) : "") + ". Its ranks waited " + duration(merged.waited) + " for others." + (moves.length ? " Newest changes: " + moves.join(", ") + "." : "")));
  }
  const errors = now().precision, looked = errors ? Object.entries(errors.errors) : [];
  panels.precision.style.display = looked.length ? "" : "none";
  if (looked.length) {
    const end = e => { const v = e[e.length - 1]; return v === null ? Infinity : v; };
    const most = looked.sort((a, b) => end(b[1]) - end(a[1])).slice(0, 8).map(([part, y], i) => ({name: part, x: errors.step, y, colour: RUN_COLOURS[i], dots: true}));
    panels.rounding.set(most);
    panels.errors.replaceChildren(legend(most.map(m => [m.name, m.colour])), h("p", {class: "muted"}, "The parts with the largest errors" + (errors.limit ? "; a block above precision.auto = " + errors.limit + " becomes wide" : "") + "."));
  }
  const texts = samples ? samples.samples : [];
  const also = +!!has + (merges.length > 0) + (looked.length > 0) + (texts.length > 0);  // cards that share rows of two: one alone takes its row
  for (const one of [panels.sites, panels.experts, panels.precision]) one.className = also === 1 ? "card wide" : "card";
  panels.samplecard.className = also === 2 || also === 4 ? "card" : "card wide";
  panels.samplecard.style.display = texts.length ? "" : "none";
  panels.samples.replaceChildren(...texts.slice().reverse().slice(0, 4).map(s => h("blockquote", {}, h("small", {class: "muted"}, "step " + whole(s.step)), h("p", {}, h("b", {}, s.prompt), s.text))));
  if (!about) return;
  const plan = about.plan ? Object.entries(about.plan).filter(([k, v]) => (typeof v === "number" && v !== 1) || ["data", "zero", "schedule"].includes(k) || v === true).map(([k, v]) => k + " " + v) : [];
  panels.about.replaceChildren(h("div", {class: "chips"}, [...about.said, ...plan, ...Object.entries(about.versions).map(([k, v]) => k + " " + v)].map(w => h("span", {}, w))), h("p", {class: "muted", style: {overflowWrap: "anywhere", margin: "4px 0"}}, ["host", "folder", "commit", "command"].filter(k => about.origin[k]).map(k => k + " " + about.origin[k]).join(" · ")), about.peak && about.peak.flops ? h("p", {class: "muted", style: {margin: "4px 0", fontSize: "12.5px"}}, "MFU is relative to " + flops(about.peak.flops) + " (" + about.peak.source + "); " + about.peak.convention) : "", h("details", {}, h("summary", {}, "every value of the run"), h("pre", {}, JSON.stringify(about.spec, null, 1))));
}

function fill() {
  for (const [made, on] of toggles) made.className = on() ? "on" : "";
  for (const one of [fillRuns, fillLoss, fillSpeed, fillHeat, fillCauses, fillMemory, fillIncidents, fillRest]) one();
}

// ---- Data

let asking = false, again = null, later = null;
const pending = new Set(); // panels that there was news for since they were asked for last
const standing = new Map(); // run and panel -> what was asked, and until when the server would answer the same
const QUICK = ["alive", "loss", "speed", "rank-heatmap"], REST = 5000; // the others are asked for at most so often
const EVERY = ["alive", "loss"], OF_ONE = ["speed", "rank-heatmap", "what-if", "memory", "experts", "precision", "sites", "incidents", "samples", "run"];
async function ask(run, name) {
  const asked = new URLSearchParams({run});
  if (state.from !== null && ["loss", "speed", "rank-heatmap", "memory", "experts"].includes(name)) { asked.set("from", state.from); asked.set("to", state.to); }
  if (name === "rank-heatmap") { asked.set("row", state.row); asked.set("sort", state.sort); asked.set("columns", Math.max(60, Math.min(400, Math.floor((panels.heat.canvas.clientWidth || 400) / 3)))); }
  const query = name + "?" + asked, key = run + " " + name, stands = standing.get(key);
  if (stands && stands.query === query && performance.now() < stands.until) return stands.until - performance.now();
  const answer = await fetch("panel/" + query, {cache: "no-store"});
  if (!answer.ok) throw new Error(answer.status);
  state.data[run][name] = await answer.json();
  standing.set(key, {query, until: performance.now() + 1000 * Number(answer.headers.get("X-Megalith-Stands"))});
  if (name === "alive") state.got = Date.now();
  return 0;
}
async function fetchNow(names) {
  if (!GIVEN.live) { fill(); return; }
  if (asking) { again = names || again || true; return; }
  asking = true;
  try {
    const jobs = [], of = [];
    const add = (run, name) => { if (!names || names.includes(name)) { of.push(name); jobs.push(ask(run, name)); } };
    GIVEN.names.forEach((_, run) => { for (const name of EVERY) add(run, name); });
    for (const name of OF_ONE) add(state.run, name);
    const done = await Promise.allSettled(jobs), asked = done.filter(one => one.status === "rejected" || one.value === 0);
    for (const name of of) pending.delete(name);
    done.forEach((one, i) => { if (one.value > 0) pending.add(of[i]); });
    if (pending.size) { clearTimeout(later); later = setTimeout(() => fetchNow([...pending]), Math.max(1000, Math.min(REST, ...done.filter(one => one.value > 0).map(one => one.value)))); }
    lost(asked.length > 0 && asked.every(one => one.status === "rejected"));
    fill();
  } finally { asking = false; if (again) { const next = again; again = null; fetchNow(next === true ? undefined : next); } }
}
function lost(is) { if (is) for (const d of state.data) if (d.alive) { d.alive.says = [["bad", "This page has lost its server: what it shows is old."]]; d.alive.health = "bad"; } }
function zoom(from, to) { if (from !== null && to - from < 1) to = from + 1; state.from = from; state.to = to; showTip(null, null); fetchNow(["loss", "speed", "rank-heatmap", "memory", "experts"]); fill(); }
function choose(run) { if (run === state.run) return; state.run = run; panels.without.textContent = ""; fill(); fetchNow(); }

// ---- Orders, for who has the second token: it stands behind # in the address, which browsers send nowhere

const ACT = (location.hash.match(/act=([\w-]+)/) || [])[1];
function actions() {
  if (!GIVEN.acts || !ACT || !now().alive || now().alive.state !== "running") return null;
  const said = h("span", {class: "muted"}, state.said || ""), nodes = (now().incidents && now().incidents.placement || []).filter(n => n);
  const send = async (words, order) => {
    if (!confirm(words + "?")) return;
    const answer = await fetch("order", {method: "POST", headers: {"X-Megalith-Act": ACT}, body: JSON.stringify({run: state.run, ...order})});
    const found = await answer.json().catch(() => ({words: "refused (" + answer.status + ")"}));
    state.said = said.textContent = found.words;
  };
  const stop = f => e => { e.stopPropagation(); f(); };
  return h("div", {class: "top", style: {marginTop: "13px"}},
    h("button", {on: {click: stop(() => send("Save the state now (the ranks stop, save and start again)", {what: "save"}))}}, "Save now"),
    h("button", {on: {click: stop(() => send("Save and stop after this step", {what: "stop"}))}}, "Stop after this step"),
    nodes.length > 1 ? nodes.slice(0, 16).map(n => h("button", {on: {click: stop(() => send("Take node " + n + " out", {what: "quarantine", node: n}))}}, "Quarantine " + n)) : null, said);
}

build();
GIVEN.data.forEach((d, i) => { state.data[i] = d; });
fill();
if (GIVEN.live) {
  fetchNow();
  const news = new EventSource("news");
  let seen = null, last = 0, whole = 0, timer = null;
  news.onmessage = e => { if (e.data === seen) return; seen = e.data; clearTimeout(timer); const wait = Math.max(0, 1000 - (Date.now() - last)); timer = setTimeout(() => { last = Date.now(); if (last - whole < REST) { for (const name of OF_ONE) pending.add(name); fetchNow(QUICK); } else { whole = last; fetchNow(); } }, wait); };
  setInterval(() => { if (!document.hidden) fillRuns(); }, 1000);
  setInterval(() => { if (!document.hidden) fetchNow(["alive"]); }, 5000);
}
