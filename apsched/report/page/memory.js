"use strict";
// Bytes alive along the order, one panel for each order, with the cap; a click (or Enter) lists what is alive at that step.
const PANEL = 150, TITLE = 18, FOOT = 20, TOP_TENSORS = 12, KEPT_ACROSS = "#882255";

class Memory {
  constructor(figure, graph, order, data, tip) {
    this.text = (k) => data.strings[k];
    this.figure = figure;
    this.graph = graph;
    this.order = order;
    this.tip = tip;
    this.canvas = figure.querySelector("canvas");
    let sum = 0;
    this.live = order.steps.live.map((by) => (sum += by));
    this.keptAcross = this.aliveOf(graph.kept_across);
    this.peak = this.live.reduce((best, bytes, k) => (bytes > this.live[best] ? k : best), 0);
    this.picked = -1;
    this.view = new View(this.canvas, Math.max(1, this.live.length), () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tip.hide());
    this.canvas.addEventListener("click", (event) => { if (this.view.moved < 5) this.pick(this.stepAt(event.offsetX)); });
    this.canvas.addEventListener("keydown", (event) => { if (event.key === "Enter") this.pick(this.stepAt(this.view.left + this.view.width() / 2)); });
    figure.querySelector("[data-act=peak]").addEventListener("click", () => this.pick(this.peak));
  }
  // Bytes alive at each step of the tensors with the label numbered `label`.
  aliveOf(label) {
    const { label: labels, first, last, bytes } = this.order.lives, change = new Array(this.live.length + 1).fill(0);
    for (let i = 0; i < labels.length; i++) {
      if (labels[i] !== label) continue;
      change[first[i]] += bytes[i]; change[last[i] + 1] -= bytes[i];
    }
    let sum = 0;
    return change.slice(0, -1).map((by) => (sum += by));
  }
  stepAt(x) { return Math.min(this.live.length - 1, Math.max(0, Math.floor(this.view.valueAt(x)))); }
  scaleTop() {
    const all = this.graph.orders.map((order) => { let sum = 0, top = 0; for (const by of order.steps.live) { sum += by; top = Math.max(top, sum); } return top; });
    const most = Math.max(1, ...all);
    const cap = this.graph.cap;
    return 1.08 * (cap !== null && cap < 4 * most ? Math.max(cap, most) : most); // a cap far above is said, not drawn
  }
  draw() {
    const height = TITLE + PANEL + FOOT, c = context(this.canvas, height), view = this.view;
    this.top ??= this.scaleTop();
    const power = this.top >= 1024 ** 3 ? 3 : this.top >= 1024 ** 2 ? 2 : 1, unit = 1024 ** power;
    const y = (bytes) => TITLE + PANEL * (1 - bytes / this.top);
    view.left = 64;
    const right = widthOf(this.canvas);
    c.textBaseline = "middle"; c.textAlign = "right";
    const marks = ticksOf(0, this.top / unit, 6);
    for (const value of marks.at) {
      c.strokeStyle = css("--grid"); c.fillStyle = css("--soft");
      c.beginPath(); c.moveTo(view.left, y(value * unit)); c.lineTo(right, y(value * unit)); c.stroke();
      c.fillText(`${value.toFixed(digits(marks.step))} ${["", "KiB", "MiB", "GiB"][power]}`, view.left - 6, y(value * unit));
    }
    this.area(c, y, right, this.live, "#56B4E9", 0.45);
    if (this.graph.kept_across) this.area(c, y, right, this.keptAcross, KEPT_ACROSS, 0.75);
    c.textBaseline = "top"; c.textAlign = "center";
    c.fillStyle = css("--soft");
    for (const value of ticksOf(view.lo, view.hi, view.width() / 90).at.filter(Number.isInteger)) {
      const x = view.x(value);
      if (x > view.left + 14 && x < right - 60) c.fillText(value.toLocaleString("en"), x, TITLE + PANEL + 5);
    }
    c.textAlign = "right"; c.fillText("step", right - 2, TITLE + PANEL + 5);
    this.lines(c, y, right);
  }
  // The most and the least bytes in each pixel: nothing is lost where many steps share one.
  area(c, y, right, live, color, alpha) {
    const view = this.view, first = Math.floor(view.lo), last = Math.min(live.length, Math.ceil(view.hi)), base = TITLE + PANEL;
    c.save(); c.beginPath(); c.rect(view.left, TITLE, right - view.left, PANEL); c.clip();
    c.beginPath(); c.moveTo(view.x(first), base);
    let column = -1, most = 0, least = 0, seen = 0;
    const flush = () => { if (column >= 0) { c.lineTo(column, y(most)); if (least !== most) { c.lineTo(column, y(least)); } c.lineTo(column, y(seen)); } };
    for (let k = first; k < last; k++) {
      const x = view.x(k), wide = view.scale() >= 1;
      if (wide) { c.lineTo(x, y(live[k])); c.lineTo(view.x(k + 1), y(live[k])); continue; }
      if (Math.floor(x) !== column) { flush(); column = Math.floor(x); most = least = live[k]; }
      most = Math.max(most, live[k]); least = Math.min(least, live[k]); seen = live[k];
    }
    if (view.scale() < 1) flush();
    c.lineTo(view.x(last), base); c.closePath();
    c.fillStyle = color; c.globalAlpha = alpha; c.fill(); c.globalAlpha = 1;
    c.strokeStyle = color === KEPT_ACROSS ? color : css("--line"); c.lineWidth = 1.3; c.stroke();
    c.restore();
  }
  lines(c, y, right) {
    const view = this.view, { cap, kept } = this.graph;
    c.textAlign = "left"; c.textBaseline = "middle"; c.lineWidth = 1.5;
    const line = (bytes, color, dash) => {
      c.strokeStyle = color; c.setLineDash(dash);
      c.beginPath(); c.moveTo(view.left, y(bytes)); c.lineTo(right, y(bytes)); c.stroke(); c.setLineDash([]);
    };
    if (cap !== null && cap <= this.top) line(cap, "#D55E00", [7, 4]);
    if (kept > 0) line(kept, css("--soft"), [2, 3]);
    const peak = this.live[this.peak];
    c.fillStyle = css("--text");
    const capText = cap === null ? "no cap" : `cap ${showBytes(cap)}${cap <= this.top ? " (dashed)" : ", above this picture"}`;
    const keptText = kept > 0 ? ` · the caller keeps ${showBytes(kept)} (dotted)` : "";
    const acrossText = this.graph.kept_across ? ` · kept gathered up to ${showBytes(this.keptAcross.reduce((a, b) => Math.max(a, b), 0))} (purple)` : "";
    c.fillText(shortened(c, `peak ${showBytes(peak)} at step ${this.peak} ▼ · ${capText}${keptText}${acrossText}`, right - view.left - 4), view.left, TITLE / 2);
    c.textAlign = "center";
    const x = view.x(this.peak + 0.5);
    if (x >= view.left && x <= right) { c.textBaseline = "bottom"; c.fillText("▼", x, y(peak) + 1); }
    if (this.picked >= 0) {
      const at = view.x(this.picked + 0.5);
      c.strokeStyle = css("--text"); c.lineWidth = 1.2;
      if (at >= view.left) { c.beginPath(); c.moveTo(at, TITLE); c.lineTo(at, TITLE + PANEL); c.stroke(); }
    }
  }
  hover(event) {
    if (this.view.pointers.size || event.offsetX < this.view.left) { this.tip.hide(); return; }
    const k = this.stepAt(event.offsetX);
    this.tip.show(this.text(this.order.steps.name[k]), [
      ["", `${this.order.label}, step ${k}`],
      ["module", this.text(this.order.steps.module[k])],
      ["alive", showBytes(this.live[k])],
      ["of it kept gathered", this.graph.kept_across ? showBytes(this.keptAcross[k]) : ""],
      ["", "click: details"],
    ], event);
  }
  // What is alive at step k: label -> number and bytes, the most bytes first.
  aliveAt(k) {
    const { label, first, last, bytes } = this.order.lives, total = new Map();
    for (let i = 0; i < label.length; i++) {
      if (first[i] > k || last[i] < k) continue;
      const was = total.get(label[i]) || [0, 0];
      total.set(label[i], [was[0] + 1, was[1] + bytes[i]]);
    }
    const rows = [...total].map(([name, [count, size]]) => [this.text(name), count, size]);
    if (this.graph.kept > 0) rows.push([this.graph.kept_label, this.graph.kept_count, this.graph.kept]);
    return rows.filter((row) => row[2] > 0).sort((a, b) => b[2] - a[2] || (a[0] < b[0] ? -1 : 1));
  }
  pick(k) {
    this.picked = k;
    this.redrawTable(k, this.aliveAt(k));
    this.view.redraw();
  }
  redrawTable(k, rows) {
    const shown = rows.slice(0, TOP_TENSORS), rest = rows.slice(TOP_TENSORS);
    if (rest.length) shown.push([`the rest (${rest.length} more)`, rest.reduce((n, row) => n + row[1], 0), rest.reduce((n, row) => n + row[2], 0)]);
    const table = document.createElement("table"), caption = table.createCaption();
    caption.textContent = `Alive at step ${k}, ${this.text(this.order.steps.name[k])}: ${showBytes(this.live[k])}`;
    const head = table.createTHead().insertRow();
    for (const name of ["what", "tensors", "bytes", "share"]) { const th = document.createElement("th"); th.scope = "col"; th.textContent = name; head.append(th); }
    const body = table.createTBody();
    for (const [what, count, size] of shown) {
      const row = body.insertRow();
      for (const cell of [what, count.toLocaleString("en"), showBytes(size), `${((100 * size) / Math.max(1, this.live[k])).toFixed(1)} %`]) row.insertCell().textContent = cell;
    }
    this.figure.querySelector(".alive").replaceChildren(table);
  }
}
