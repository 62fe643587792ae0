"use strict";
// Curves over steps or tokens: a drag zooms in, a double click shows everything, and each curve is drawn as wide as its place. Without
// this script the page shows the same curves as they were written.
const view = {from: null, to: null, log: false};
const short = v => v === 0 ? "0" : Math.abs(v) >= 100 ? v.toFixed(0) : Math.abs(v) >= 1e-3 ? String(+v.toPrecision(3)) : v.toExponential(1);
function number(v) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(v) >= size * 0.99995) return short(v / size) + letter;
  return short(v);
}
const label = (v, unit) => unit === " %" ? short(v * 100) + unit : unit === "2^" ? unit + short(v) : number(v) + unit;
function ticks(low, high, most) {
  const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw)), found = [];
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(m => m >= raw * 0.999);
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 40; i++) found.push(i * step);
  return found;
}
function logTicks(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) for (const m of [1, 2, 5]) { const v = m * 10 ** p; if (v >= low && v <= high) found.push(v); }
  return found.length > 2 ? found : ticks(low, high, 4).filter(v => v > 0);
}
function put(parent, tag, attributes, words) {
  const made = parent.appendChild(document.createElementNS(parent.namespaceURI, tag));
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (words !== undefined) made.textContent = words;
  return made;
}

class Chart {
  constructor(svg) {
    const [left, top, right, bottom, x0, x1, y0, y1] = svg.dataset.frame.split(" ").map(Number);
    const step = x => x0 + (x - left) / (right - left) * (x1 - x0), value = y => y0 + (bottom - y) / (bottom - top) * (y1 - y0);
    this.svg = svg; this.unit = svg.dataset.unit; this.zero = "zero" in svg.dataset; this.logs = "log" in svg.dataset;
    this.tall = svg.viewBox.baseVal.height; this.drag = null;
    this.axes = svg.querySelector(".axes"); this.names = [...svg.querySelectorAll(".legend > text")].map(words => [words.previousElementSibling, words]);
    this.curves = [...svg.querySelectorAll(".curve")].map(line => {
      const points = line.getAttribute("points").trim().split(/\s+/).map(p => p.split(",").map(Number));
      const dots = line.nextElementSibling && line.nextElementSibling.matches(".dots") ? [...line.nextElementSibling.children] : [];
      return {line, dots, points: points.map(([x, y]) => [step(x), value(y)])};
    });
    this.strips = [...svg.querySelectorAll(".strip")].map(rect => ({rect, from: step(+rect.getAttribute("x")), to: step(+rect.getAttribute("x") + +rect.getAttribute("width"))}));
    this.all = [x0, x1];
    this.shade = put(svg, "rect", {class: "drag", y: top, width: 0, height: 0});
    const place = e => Math.min(this.right, Math.max(this.left, e.clientX - svg.getBoundingClientRect().left));
    svg.addEventListener("pointerdown", e => { if (e.pointerType === "mouse" && e.button === 0) { this.drag = place(e); e.preventDefault(); } });
    svg.addEventListener("pointermove", e => { if (this.drag !== null) this.select(this.drag, place(e)); });
    svg.addEventListener("pointerleave", () => { this.drag = null; this.select(0, 0); });
    svg.addEventListener("pointerup", e => {
      const from = this.drag, to = place(e);
      this.drag = null; this.select(0, 0);
      if (from !== null && Math.abs(to - from) > 6) zoom(this.at(Math.min(from, to)), this.at(Math.max(from, to)));
    });
    svg.addEventListener("dblclick", () => zoom(null, null));
  }
  at(x) { return this.x0 + (x - this.left) / (this.right - this.left) * (this.x1 - this.x0); }
  select(a, b) {
    for (const [name, value] of Object.entries({x: Math.min(a, b), y: this.top, width: Math.abs(b - a), height: this.bottom - this.top})) this.shade.setAttribute(name, value);
  }
  legend(wide) { // its height
    let x = 8, y = 14;
    for (const [box, words] of this.names) {
      const long = words.getComputedTextLength() + 34;
      if (x + long > wide && x > 8) { x = 8; y += 17; }
      box.setAttribute("x", x); box.setAttribute("y", y - 8); words.setAttribute("x", x + 16); words.setAttribute("y", y + 2);
      x += long;
    }
    return this.names.length ? y + 18 : 10;
  }
  draw() {
    const wide = Math.round(this.svg.getBoundingClientRect().width);
    if (wide < 120) return;
    const log = view.log && this.logs, y = v => log ? Math.log10(v) : v;
    this.top = this.legend(wide); this.right = wide - 14; this.bottom = this.tall - 36;
    [this.x0, this.x1] = view.from === null ? this.all : [view.from, view.to];
    const shown = x => x >= this.x0 && x <= this.x1;
    const seen = this.curves.flatMap(c => c.points.filter(([x, v]) => shown(x) && (!log || v > 0)).map(([, v]) => y(v)));
    let low = seen.reduce((a, b) => Math.min(a, b), Infinity), high = seen.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!seen.length) [low, high] = [0, 1];
    if (this.zero && !log) low = Math.min(0, low);
    if (low === high) { low -= Math.abs(low) * 0.05 || 0.5; high += Math.abs(high) * 0.05 || 0.5; }
    const room = (high - low) * 0.06; high += room; if (!(this.zero && !log && low === 0)) low -= room;
    const marks = log ? logTicks(10 ** low, 10 ** high) : ticks(low, high, 4), words = marks.map(v => label(v, this.unit));
    this.left = 16 + Math.max(0, ...words.map(w => w.length * 6.4));
    const px = x => this.left + (x - this.x0) / (this.x1 - this.x0) * (this.right - this.left), py = v => this.bottom - (y(v) - low) / (high - low) * (this.bottom - this.top);
    this.svg.setAttribute("viewBox", `0 0 ${wide} ${this.tall}`);
    const name = this.axes.lastElementChild.textContent;
    this.axes.replaceChildren();
    marks.forEach((v, i) => {
      put(this.axes, "line", {class: "grid", x1: this.left, x2: this.right, y1: py(v), y2: py(v)});
      put(this.axes, "text", {x: this.left - 8, y: py(v) + 4, "text-anchor": "end"}, words[i]);
    });
    put(this.axes, "line", {class: "axis", x1: this.left, x2: this.right, y1: this.bottom, y2: this.bottom});
    for (const x of ticks(this.x0, this.x1, Math.max(2, wide / 90))) put(this.axes, "text", {x: px(x), y: this.bottom + 16, "text-anchor": "middle"}, number(x));
    put(this.axes, "text", {x: (this.left + this.right) / 2, y: this.bottom + 32, "text-anchor": "middle"}, name);
    for (const {line, dots, points} of this.curves) {
      line.setAttribute("points", points.filter(([x, v]) => shown(x) && (!log || v > 0)).map(([x, v]) => px(x).toFixed(2) + "," + py(v).toFixed(2)).join(" "));
      dots.forEach((dot, i) => {
        const [x, v] = points[i], there = shown(x) && (!log || v > 0);
        dot.setAttribute("visibility", there ? "visible" : "hidden");
        if (there) { dot.setAttribute("cx", px(x)); dot.setAttribute("cy", py(v)); }
      });
    }
    for (const {rect, from, to} of this.strips) {
      const a = Math.max(this.left, px(from)), b = Math.min(this.right, px(to));
      for (const [name, value] of Object.entries({x: a, y: this.top, width: Math.max(0, b - a), height: this.bottom - this.top})) rect.setAttribute(name, value);
    }
  }
}

const charts = [...document.querySelectorAll("svg[data-frame]")].map(svg => new Chart(svg));
const buttons = charts.filter(chart => chart.logs).map(chart => {
  const made = document.createElement("button");
  made.type = "button"; made.textContent = "log";
  made.addEventListener("click", () => { view.log = !view.log; draw(); });
  chart.svg.parentElement.querySelector("figcaption").append(made);
  return made;
});
function draw() { for (const one of buttons) one.setAttribute("aria-pressed", view.log); for (const chart of charts) chart.draw(); }
function zoom(from, to) { view.from = from; view.to = to; draw(); }
document.addEventListener("keydown", e => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key === "r") zoom(null, null);
  else if (e.key === "l") { view.log = !view.log; draw(); }
});
for (const hint of document.querySelectorAll(".hint")) hint.hidden = false;
addEventListener("resize", () => requestAnimationFrame(draw));
draw();
