"use strict";
// A range of the horizontal axis that people move: Ctrl+wheel, pinch, drag, double click, buttons and keys. Pictures draw what is in it.
class View {
  constructor(canvas, full, draw) {
    this.canvas = canvas;
    this.full = full; // the whole axis is [0, full]
    this.lo = 0;
    this.hi = full;
    this.draw = draw;
    this.left = 0; // pixels left of the axis
    this.pending = false;
    this.pointers = new Map();
    this.moved = 0;
    canvas.tabIndex = 0;
    canvas.style.touchAction = "pan-y";
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.onUp(event));
    canvas.addEventListener("dblclick", (event) => this.zoom(4, this.valueAt(event.offsetX)));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }
  width() { return Math.max(1, widthOf(this.canvas) - this.left); }
  scale() { return this.width() / (this.hi - this.lo); }
  x(value) { return this.left + (value - this.lo) * this.scale(); }
  valueAt(x) { return this.lo + (x - this.left) / this.scale(); }
  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }
  show(lo, hi) {
    const length = Math.min(this.full, Math.max(hi - lo, Math.min(this.full, 20)));
    this.lo = Math.min(Math.max(0, lo), this.full - length);
    this.hi = this.lo + length;
    this.redraw();
  }
  zoom(factor, at) {
    const middle = at === undefined ? (this.lo + this.hi) / 2 : at;
    this.show(middle - (middle - this.lo) / factor, middle + (this.hi - middle) / factor);
  }
  pan(share) { const by = share * (this.hi - this.lo); this.show(this.lo + by, this.hi + by); }
  reset() { this.show(0, this.full); }
  onWheel(event) {
    if (!event.ctrlKey && !event.metaKey) {
      if (Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return; // the page scrolls
      event.preventDefault();
      this.pan(event.deltaX / this.width());
      return;
    }
    event.preventDefault();
    this.zoom(Math.exp(-event.deltaY * 0.003), this.valueAt(event.offsetX));
  }
  onDown(event) {
    if (event.button !== 0) return;
    if (event.pointerType !== "touch") this.canvas.setPointerCapture(event.pointerId);
    if (this.pointers.size === 0) this.moved = 0;
    this.pointers.set(event.pointerId, event.offsetX);
  }
  onMove(event) {
    const before = this.pointers.get(event.pointerId);
    if (before === undefined) return;
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    this.pointers.set(event.pointerId, event.offsetX);
    this.moved += Math.abs(event.offsetX - before);
    if (others.length === 1) {
      const was = Math.max(1, Math.abs(before - others[0]));
      this.zoom(Math.max(1, Math.abs(event.offsetX - others[0])) / was, this.valueAt((event.offsetX + others[0]) / 2));
    } else if (others.length === 0) {
      const by = (before - event.offsetX) / this.scale();
      this.show(this.lo + by, this.hi + by);
    }
  }
  onUp(event) { this.pointers.delete(event.pointerId); }
  onKey(event) {
    const acts = {
      "+": () => this.zoom(2), "=": () => this.zoom(2), "-": () => this.zoom(0.5), "0": () => this.reset(),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
    };
    if (!(event.key in acts) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  }
}

const PRINTED = 720; // logical pixels of a picture on paper

function widthOf(canvas) { return document.documentElement.dataset.print ? PRINTED : canvas.clientWidth; }

// Returns the 2D context of a canvas as sharp as the screen (or the printer), cleared, in CSS pixels.
function context(canvas, height) {
  const density = Math.max(window.devicePixelRatio || 1, document.documentElement.dataset.print ? 3 : 1), width = widthOf(canvas);
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const c = canvas.getContext("2d");
  c.scale(density, density);
  c.font = "12px system-ui, sans-serif";
  return c;
}

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// Returns round values within [lo, hi], at most about `most` of them.
function ticksOf(lo, hi, most) {
  const rough = (hi - lo) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(lo / step); k * step <= hi; k++) found.push(k * step);
  return { at: found, step };
}

function digits(step) { return Math.max(0, -Math.floor(Math.log10(step) + 1e-9)); }

// As Python writes it: exact ties go to the even digit.
function fixed(value, places) {
  const halves = value * 2 ** (places + 1), down = Math.floor(value * 10 ** places);
  const tie = Number.isInteger(halves) && Math.abs(halves % 2) === 1;
  return (tie ? (down + (down % 2)) / 10 ** places : value).toFixed(places);
}

function showBytes(bytes) {
  for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]]) {
    if (bytes >= 1024 ** power) return `${fixed(bytes / 1024 ** power, 2)} ${unit}`;
  }
  return `${bytes} B`;
}

function showTicks(ticks, perUs) {
  const us = ticks / perUs;
  return us >= 1000 ? `${fixed(us / 1000, 3).replace(/\B(?=(\d{3})+\.)/g, ",")} ms` : `${fixed(us, 2)} µs`;
}

// Returns the index of the last entry of ascending `values` that is at most `value`; -1 for none.
function lastAtMost(values, value) {
  let lo = 0, hi = values.length;
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (values[mid] <= value) lo = mid + 1; else hi = mid;
  }
  return lo - 1;
}

function shortened(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  let n = Math.floor((text.length * width) / c.measureText(text).width);
  while (n > 2 && c.measureText(`${text.slice(0, n)}…`).width > width) n--;
  return n > 3 ? `${text.slice(0, n)}…` : "";
}

// Shows rows of text beside the pointer; text is never taken as markup.
class Tip {
  constructor() {
    this.box = document.createElement("div");
    this.box.id = "tip";
    this.box.setAttribute("role", "status");
    this.box.hidden = true;
    document.body.append(this.box);
  }
  show(title, rows, event) {
    const head = document.createElement("strong");
    head.textContent = title;
    const list = document.createElement("dl");
    for (const [label, value] of rows) {
      if (value === "" || value === undefined) continue;
      const term = document.createElement("dt"), said = document.createElement("dd");
      term.textContent = label;
      said.textContent = value;
      list.append(term, said);
    }
    this.box.replaceChildren(head, list);
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const x = event.clientX + 14 + width > innerWidth ? Math.max(4, event.clientX - width - 14) : event.clientX + 14;
    const y = event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 12) : event.clientY + 18;
    this.box.style.left = `${x}px`;
    this.box.style.top = `${y}px`;
  }
  hide() { this.box.hidden = true; }
}
