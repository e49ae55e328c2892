"use strict";
// Memory against step time: what was found (a stair: a schedule fits every looser cap), what is proven, baselines, and this run.
const LINES = [
  { color: "#0072B2", dark: "#56B4E9", mark: "circle" }, { color: "#B45F06", dark: "#E69F00", mark: "square" },
  { color: "#00755A", dark: "#3CCBA0", mark: "triangle" }, { color: "#A8437F", dark: "#E59AC6", mark: "diamond" },
];
const CHART = 300, HEAD = 20, BOTTOM = 40, NEAR = 24;
const RANGES = [["bound", "with the bound"], ["steps", "step times only"], ["all", "with all baselines"]];

class Frontier {
  constructor(figure, frontier, data, tip) {
    Object.assign(this, { figure, tip, perUs: data.ticks_per_us, frontier, range: 0, picked: null });
    this.canvas = figure.querySelector("canvas");
    this.dots = [];
    frontier.lines.forEach((line, l) => line.points.forEach((point) => this.dots.push({ line: l, title: line.title, point, at: point.cap ?? point.peak })));
    for (const point of frontier.here) this.dots.push({ line: -1, title: "this run", point, at: point.peak });
    this.baselines = this.allBaselines();
    const bytes = [...this.dots.map((dot) => dot.at), ...this.baselines.map((b) => b.at)];
    const span = Math.max(1024, Math.max(...bytes) - Math.min(...bytes));
    this.base = Math.max(0, Math.min(...bytes) - 0.05 * span); // bytes where the axis begins
    this.view = new View(this.canvas, Math.max(...bytes) + 0.06 * span - this.base, () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tip.hide());
    this.canvas.addEventListener("click", (event) => { if (this.view.moved < 5) this.pick(this.nearest(event.offsetX, event.offsetY)); });
    this.button = figure.querySelector("[data-act=range]");
    this.button.addEventListener("click", () => { this.range = (this.range + 1) % RANGES.length; this.view.redraw(); });
  }
  // Each baseline once, where it fits: a name with one peak and one step time.
  allBaselines() {
    const found = new Map();
    for (const { point } of this.dots) {
      for (const [name, step, peak] of point.baselines) found.set(`${name} ${step} ${peak}`, { name, step, at: peak });
    }
    return [...found.values()];
  }
  x(bytes) { return this.view.x(bytes - this.base); }
  seen() { return this.dots.filter((dot) => dot.at - this.base >= this.view.lo && dot.at - this.base <= this.view.hi); }
  // The range of step times that fits what is in view.
  limits() {
    const seen = this.seen().length ? this.seen() : this.dots, kind = RANGES[this.range][0];
    const values = seen.map((dot) => dot.point.step);
    if (kind !== "steps") values.push(...seen.map((dot) => dot.point.bound));
    if (kind === "all") values.push(...this.baselines.map((b) => b.step));
    const low = Math.min(...values), high = Math.max(...values), pad = 0.08 * Math.max(high - low, high * 1e-4, 1);
    return [Math.max(0, low - pad), high + pad];
  }
  draw() {
    const c = context(this.canvas, HEAD + CHART + BOTTOM), view = this.view, right = widthOf(this.canvas), foot = HEAD + CHART;
    view.left = 84;
    [this.low, this.high] = this.limits();
    this.y = (ticks) => HEAD + CHART * (1 - (ticks - this.low) / (this.high - this.low));
    this.button.textContent = RANGES[this.range][1];
    this.axes(c, right, foot);
    c.save(); c.beginPath(); c.rect(view.left, HEAD - 8, right - view.left, CHART + 8); c.clip();
    this.frontier.lines.forEach((line, l) => { if (line.points.length > 1) this.line(c, line, l, right, foot); });
    this.crosses(c);
    for (const dot of this.dots) this.mark(c, dot);
    c.restore();
    this.head(c, right);
  }
  axes(c, right, foot) {
    const view = this.view, ms = 1000 * this.perUs, down = ticksOf(this.low / ms, this.high / ms, 7), unit = 1024 ** (view.full > 2 * 1024 ** 3 ? 3 : 2);
    c.strokeStyle = css("--grid"); c.fillStyle = css("--soft"); c.lineWidth = 1;
    c.textBaseline = "middle"; c.textAlign = "right";
    for (const value of down.at) {
      const y = this.y(value * ms);
      c.beginPath(); c.moveTo(view.left, y); c.lineTo(right, y); c.stroke();
      c.fillText(`${value.toFixed(digits(down.step))} ms`, view.left - 6, y);
    }
    const across = ticksOf((this.base + view.lo) / unit, (this.base + view.hi) / unit, view.width() / 110);
    c.textBaseline = "top"; c.textAlign = "center";
    for (const value of across.at) {
      const x = this.x(value * unit);
      c.beginPath(); c.moveTo(x, HEAD); c.lineTo(x, foot); c.stroke();
      if (x > view.left + 8 && x < right - 20) c.fillText(value.toFixed(digits(across.step)), x, foot + 5);
    }
    c.fillText(`memory cap, ${unit === 1024 ** 3 ? "GiB" : "MiB"}`, (view.left + right) / 2, foot + 22);
  }
  tone(l) { const style = LINES[l % LINES.length]; return getComputedStyle(document.documentElement).colorScheme === "dark" ? style.dark : style.color; }
  // Found: from a point's peak on its schedule fits. Proven: a bound holds under every tighter cap. Between both lies what is unknown.
  line(c, line, l, right, foot) {
    const points = [...line.points], end = Math.max(right, this.x(points[points.length - 1].peak) + 30);
    const stair = points.map((p) => [Math.min(this.x(p.cap ?? p.peak), this.x(p.peak)), this.y(p.step)]);
    const floor = points.map((p) => [this.x(p.cap ?? p.peak), this.y(p.bound)]);
    c.strokeStyle = c.fillStyle = this.tone(l);
    const upper = () => { stair.forEach(([x, y], k) => { if (k) c.lineTo(x, stair[k - 1][1]); k ? c.lineTo(x, y) : c.moveTo(x, y); }); c.lineTo(end, stair[stair.length - 1][1]); };
    c.beginPath(); upper();
    c.lineTo(end, floor[floor.length - 1][1]);
    for (let k = floor.length - 1; k >= 0; k--) { c.lineTo(floor[k][0], floor[k][1]); if (k) c.lineTo(floor[k - 1][0], floor[k][1]); }
    c.closePath(); c.globalAlpha = 0.1; c.fill(); c.globalAlpha = 1;
    c.beginPath(); upper(); c.lineWidth = 2; c.stroke();
    c.setLineDash([6, 4]); c.lineWidth = 1.5; c.beginPath();
    floor.forEach(([x, y], k) => { if (k) c.lineTo(floor[k - 1][0], y); k ? c.lineTo(x, y) : c.moveTo(x, y); });
    c.lineTo(end, floor[floor.length - 1][1]); c.stroke(); c.setLineDash([]);
  }
  crosses(c) {
    c.strokeStyle = c.fillStyle = css("--soft"); c.lineWidth = 1.5; c.textAlign = "left"; c.textBaseline = "middle";
    for (const b of this.baselines) {
      const x = this.x(b.at), y = this.y(b.step);
      c.beginPath(); c.moveTo(x - 4, y - 4); c.lineTo(x + 4, y + 4); c.moveTo(x - 4, y + 4); c.lineTo(x + 4, y - 4); c.stroke();
    }
  }
  mark(c, { line, point, at }) {
    const x = this.x(at), y = this.y(point.step), r = line < 0 ? 9 : 5;
    c.fillStyle = line < 0 ? "#D55E00" : this.tone(line); c.strokeStyle = css("--page"); c.lineWidth = 1.5;
    c.beginPath();
    const shape = line < 0 ? "star" : LINES[line % LINES.length].mark;
    if (shape === "circle") c.arc(x, y, r, 0, 7);
    else {
      const corners = { square: 4, diamond: 4, triangle: 3, star: 10 }[shape], turn = shape === "square" ? Math.PI / 4 : 0;
      for (let k = 0; k < corners; k++) {
        const angle = turn - Math.PI / 2 + (2 * Math.PI * k) / corners, size = shape === "star" && k % 2 ? r * 0.45 : r * (shape === "star" ? 1 : 1.2);
        c.lineTo(x + size * Math.cos(angle), y + size * Math.sin(angle));
      }
      c.closePath();
    }
    c.fill(); c.stroke();
    if (this.picked && this.picked.point === point) { c.strokeStyle = css("--text"); c.beginPath(); c.arc(x, y, r + 4, 0, 7); c.stroke(); }
  }
  head(c, right) {
    const above = this.baselines.filter((b) => b.step > this.high), seen = [...new Set(above.map((b) => b.name))];
    const fastest = Math.min(...above.map((b) => b.step));
    const text = above.length ? `above this picture: baselines from ${showTicks(fastest, this.perUs)} (${seen.slice(0, 3).join(", ")}${seen.length > 3 ? " …" : ""})` : "";
    c.fillStyle = css("--text"); c.textAlign = "left"; c.textBaseline = "middle";
    c.fillText(shortened(c, text, right - this.view.left), this.view.left, 7);
    this.legend();
  }
  legend() {
    const box = this.figure.querySelector(".legend");
    const many = this.frontier.lines.filter((line) => line.points.length > 1);
    const signs = { circle: "●", square: "■", triangle: "▲", diamond: "◆" };
    const rows = many.map((line) => [signs[LINES[this.frontier.lines.indexOf(line) % LINES.length].mark], this.tone(this.frontier.lines.indexOf(line)), line.title]);
    if (this.frontier.here.length) rows.push(["★", "#D55E00", "this run"]);
    if (this.baselines.length) rows.push(["×", css("--soft"), "baselines"]);
    if (many.length) rows.push(["┅", css("--text"), "proven bound: nothing is below"]);
    box.replaceChildren(...rows.map(([sign, color, title]) => {
      const entry = document.createElement("span"), mark = document.createElement("b");
      mark.textContent = `${sign} `; mark.style.color = color;
      entry.append(mark, title);
      return entry;
    }));
  }
  // The point or baseline under the pointer; null where none is near.
  nearest(x, y) {
    const away = (at, step) => Math.hypot(this.x(at) - x, this.y(step) - y);
    const all = [...this.dots.map((dot) => ({ ...dot, away: away(dot.at, dot.point.step) })),
                 ...this.baselines.map((b) => ({ baseline: b, away: away(b.at, b.step) + 6 }))];
    const best = all.reduce((one, other) => (other.away < one.away ? other : one));
    return best.away <= NEAR ? best : null;
  }
  hover(event) {
    const near = this.view.pointers.size ? null : this.nearest(event.offsetX, event.offsetY);
    if (!near) { this.tip.hide(); return; }
    if (near.baseline) {
      this.tip.show(near.baseline.name, [["baseline", ""], ["step time", showTicks(near.baseline.step, this.perUs)], ["peak", showBytes(near.baseline.at)]], event);
      return;
    }
    this.tip.show(near.title, this.rows(near.point), event);
  }
  rows(p) {
    return [
      ["memory cap", p.cap === null ? "none" : showBytes(p.cap)], ["peak", showBytes(p.peak)], ["step time", `${showTicks(p.step, this.perUs)} ${p.mark}`.trim()],
      ["bound", `${showTicks(p.bound, this.perUs)}, gap ${((100 * (p.step - p.bound)) / Math.max(1, p.step)).toFixed(2)} %`],
      ["price", p.price === null ? "" : `${p.price.toFixed(3)} ms per GiB more than the cap before`],
      ["launches", `${p.launches}, the largest bucket ${showBytes(p.bucket)}`], ["binds", p.binds],
    ];
  }
  pick(near) {
    if (!near || near.baseline) return;
    this.picked = near;
    const table = document.createElement("table"), p = near.point;
    table.createCaption().textContent = `${near.title}, memory cap ${p.cap === null ? "none" : showBytes(p.cap)}: ${showTicks(p.step, this.perUs)} beside the baselines`;
    const head = table.createTHead().insertRow();
    for (const name of ["schedule", "step time", "above this point", "peak", "fits"]) { const th = document.createElement("th"); th.scope = "col"; th.textContent = name; head.append(th); }
    const body = table.createTBody(), sorted = [...p.baselines].sort((a, b) => a[1] - b[1]);
    for (const [name, step, peak, fits] of sorted) {
      const row = body.insertRow();
      for (const cell of [name, showTicks(step, this.perUs), `${(100 * (step / p.step - 1)).toFixed(2)} %`, showBytes(peak), fits ? "yes" : "no"]) row.insertCell().textContent = cell;
    }
    this.figure.querySelector(".alive").replaceChildren(table);
    this.view.redraw();
  }
}
