"use strict";
// Colours of Okabe and Ito; a pattern beside the colour, so that no kind is told by colour alone.
const KINDS = {
  "compute": { color: "#56B4E9", ink: "#000" },
  "moved compute": { color: "#332288", ink: "#fff" },
  "copy": { color: "#F0E442", ink: "#000", pattern: "dots" },
  "launch": { color: "#777777", ink: "#fff" },
  "exposed": { color: "none", ink: "#D55E00", pattern: "hatch" },
  "all_gather": { color: "#E69F00", ink: "#000" },
  "reduce_scatter": { color: "#009E73", ink: "#fff", pattern: "stripes" },
  "all_reduce": { color: "#CC79A7", ink: "#000", pattern: "grid" },
  "all_to_all": { color: "#0072B2", ink: "#fff", pattern: "dots" },
  "broadcast": { color: "#999999", ink: "#000", pattern: "stripes" },
};
const ROW = 26, GAP = 6, BAND = 18, AXIS = 24;

function patternOf(c, kind) {
  const { pattern, ink } = KINDS[kind];
  if (!pattern) return null;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const t = tile.getContext("2d");
  t.strokeStyle = t.fillStyle = ink;
  t.globalAlpha = kind === "exposed" ? 0.9 : 0.35;
  t.beginPath();
  if (pattern === "dots") { t.arc(4, 4, 1.4, 0, 7); t.fill(); }
  if (pattern === "hatch") { t.moveTo(-2, 10); t.lineTo(10, -2); t.moveTo(-2, 2); t.lineTo(2, -2); t.moveTo(6, 10); t.lineTo(10, 6); }
  if (pattern === "stripes") { t.moveTo(2, 0); t.lineTo(2, 8); }
  if (pattern === "grid") { t.moveTo(0, 4); t.lineTo(8, 4); t.moveTo(4, 0); t.lineTo(4, 8); }
  t.stroke();
  return c.createPattern(tile, "repeat");
}

function fillBar(c, kind, patterns, x, y, width, height) {
  const { color } = KINDS[kind];
  if (color !== "none") { c.fillStyle = color; c.fillRect(x, y, width, height); }
  const pattern = patterns[kind];
  if (color === "none" && width < 3) { c.fillStyle = KINDS[kind].ink; c.fillRect(x, y, width, height); }
  else if (pattern && width >= 3) { c.fillStyle = pattern; c.fillRect(x, y, width, height); }
}

// All bars of one order, by row (the compute stream, then each group), each row in order of time.
function rowsOf(order, graph, text) {
  const rows = [[], ...graph.streams.map(() => [])];
  const why = new Map(order.steps.why);
  let now = 0;
  order.steps.length.forEach((length, k) => {
    if (length > 0) {
      rows[0].push({ begin: now, length, kind: text(order.steps.kind[k]), name: text(order.steps.name[k]),
                     module: text(order.steps.module[k]), why: text(why.get(k) || 0), step: k });
    }
    now += length;
  });
  if (order.step_time > now) {
    rows[0].push({ begin: now, length: order.step_time - now, kind: "exposed", name: "end of the step", module: "", why: text(order.tail_why) });
  }
  const t = order.transfers;
  t.name.forEach((name, i) => rows[1 + t.stream[i]].push({
    begin: t.begin[i], length: t.length[i], kind: text(t.kind[i]), name: text(name), module: text(t.module[i]), bytes: t.bytes[i],
    form: text(t.form[i]), launched: t.launched[i], waited: t.waited[i],
  }));
  return rows.map((bars) => ({ bars, begins: bars.map((bar) => bar.begin) }));
}

class Timeline {
  constructor(figure, graph, data, tip) {
    const text = (k) => data.strings[k];
    this.perUs = data.ticks_per_us;
    this.tip = tip;
    this.canvas = figure.querySelector("canvas");
    this.lanes = [];
    let y = 0;
    for (const order of graph.orders) {
      this.lanes.push({ head: `${order.label}: ${showTicks(order.step_time, this.perUs)}`, y });
      y += BAND;
      rowsOf(order, graph, text).forEach((row, r) => {
        this.lanes.push({ ...row, y, label: r === 0 ? "compute" : graph.streams[r - 1], order: order.label });
        y += ROW;
      });
      y += GAP;
    }
    this.height = y + AXIS;
    this.ends = graph.orders.map((order) => order.step_time);
    this.view = new View(this.canvas, Math.max(1, ...this.ends), () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tip.hide());
    this.kinds = Object.keys(KINDS).filter((kind) => this.lanes.some((lane) => lane.bars?.some((bar) => bar.kind === kind)));
    this.legend(figure);
  }
  legend(figure) {
    for (const kind of this.kinds) {
      const entry = document.createElement("span"), sample = document.createElement("canvas");
      sample.width = 28; sample.height = 14; sample.ariaHidden = "true";
      const c = sample.getContext("2d");
      fillBar(c, kind, { [kind]: patternOf(c, kind) }, 0, 0, 28, 14);
      entry.append(sample, kind === "exposed" ? "exposed (compute waits)" : kind.replaceAll("_", "-"));
      figure.querySelector(".legend").append(entry);
    }
  }
  draw() {
    const c = context(this.canvas, this.height), view = this.view;
    const patterns = Object.fromEntries(this.kinds.map((kind) => [kind, patternOf(c, kind)]));
    view.left = Math.min(150, Math.max(60, ...this.lanes.filter((lane) => lane.bars).map((lane) => c.measureText(lane.label).width + 12)));
    const right = widthOf(this.canvas);
    this.axis(c);
    c.textBaseline = "middle";
    for (const lane of this.lanes) {
      c.fillStyle = css("--text");
      if (lane.head) { c.font = "600 12px system-ui, sans-serif"; c.fillText(lane.head, 0, lane.y + BAND / 2); continue; }
      c.font = "12px system-ui, sans-serif";
      c.fillText(shortened(c, lane.label, view.left - 8), 0, lane.y + ROW / 2);
      c.save();
      c.beginPath(); c.rect(view.left, lane.y, right - view.left, ROW); c.clip();
      c.font = "11px system-ui, sans-serif";
      for (let i = Math.max(0, lastAtMost(lane.begins, view.lo)); i < lane.bars.length && lane.bars[i].begin < view.hi; i++) {
        this.bar(c, lane.bars[i], lane.y + 2, patterns, right);
      }
      c.restore();
    }
  }
  bar(c, bar, y, patterns, right) {
    const from = this.view.x(bar.begin), width = bar.length * this.view.scale();
    const x = Math.max(from, this.view.left - 4), shown = Math.min(from + width, right + 4) - x;
    if (shown <= 0) return;
    fillBar(c, bar.kind, patterns, x, y, shown - (width > 4 ? 0.7 : 0), ROW - 4);
    if (shown < 34) return;
    const label = shortened(c, bar.kind === "exposed" ? "waits" : bar.name, shown - 8);
    if (!label) return;
    const { color, ink } = KINDS[bar.kind];
    if (patterns[bar.kind]) { // a plain ground under letters on a pattern
      c.fillStyle = color === "none" ? css("--page") : color;
      c.fillRect(x + 2, y + 4, c.measureText(label).width + 6, ROW - 12);
    }
    c.fillStyle = color === "none" ? css("--text") : ink;
    c.fillText(label, x + 4, y + (ROW - 4) / 2 + 0.5);
  }
  axis(c) {
    const view = this.view, ms = view.hi - view.lo >= 2000 * this.perUs, unit = (ms ? 1000 : 1) * this.perUs;
    const y = this.height - AXIS, { at, step } = ticksOf(view.lo / unit, view.hi / unit, view.width() / 90);
    c.strokeStyle = css("--grid"); c.fillStyle = css("--soft"); c.textBaseline = "top"; c.textAlign = "center";
    for (const value of at) {
      const x = view.x(value * unit);
      c.beginPath(); c.moveTo(x, BAND); c.lineTo(x, y); c.stroke();
      if (x < view.left + 14 || x > widthOf(this.canvas) - 40) continue;
      c.fillText(value.toLocaleString("en", { minimumFractionDigits: digits(step), maximumFractionDigits: digits(step) }), x, y + 5);
    }
    c.textAlign = "right";
    c.fillText(ms ? "ms" : "µs", widthOf(this.canvas) - 2, y + 5);
    c.textAlign = "left";
  }
  // The bar at a place of the canvas; a few pixels beside a bar that is too narrow to hit count as on it.
  barAt(x, y) {
    const lane = this.lanes.find((one) => one.bars && y >= one.y && y < one.y + ROW);
    if (!lane || x < this.view.left) return null;
    const value = this.view.valueAt(x), near = 3 / this.view.scale(), k = lastAtMost(lane.begins, value);
    const close = [k, k + 1].map((i) => lane.bars[i]).filter(Boolean).find((b) => value >= b.begin - near && value < b.begin + b.length + near);
    const exact = lane.bars[k] && value < lane.bars[k].begin + lane.bars[k].length ? lane.bars[k] : null;
    return exact || close ? { lane, bar: exact || close } : null;
  }
  hover(event) {
    const found = this.view.pointers.size ? null : this.barAt(event.offsetX, event.offsetY);
    if (!found) { this.tip.hide(); return; }
    const { bar, lane } = found, time = (ticks) => showTicks(ticks, this.perUs);
    this.tip.show(bar.kind === "exposed" ? `stalls at ${bar.name}` : bar.name, [
      ["", `${lane.order}, ${lane.label}, ${bar.kind}`],
      ["module", bar.module],
      ["bytes", bar.bytes === undefined ? "" : `${showBytes(bar.bytes)} (${bar.form})`],
      ["from", `${time(bar.begin)} to ${time(bar.begin + bar.length)}`],
      ["takes", time(bar.length)],
      ["launched", bar.launched === undefined ? "" : time(bar.launched) + (bar.begin > bar.launched ? `, queued for ${time(bar.begin - bar.launched)}` : "")],
      ["waited for", bar.waited === undefined ? "" : time(bar.waited)],
      ["why", bar.why],
    ], event);
  }
}
