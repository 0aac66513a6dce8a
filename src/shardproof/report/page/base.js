"use strict";
// Elements, numbers, and what the figures share. Text is always inserted as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const tip = document.getElementById("tip");

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const dot = (color) => el("span", { class: "dot", style: { background: color } });
const color = (index) => `var(--c${index % 8})`;

// --- numbers as text ---

function plain(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(4)));
}
function scaled(value, base, names) {
  if (!Number.isFinite(value)) return "–";
  let at = 0;
  while (Math.abs(value) >= base && at < names.length - 1) { value /= base; at += 1; }
  return `${Number(value.toPrecision(3)).toLocaleString("en")} ${names[at]}`;
}
const bytes = (value) => scaled(value, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
const rate = (value) => scaled(value, 1000, ["", "k", "M", "G"]).trim();
const percent = (value) => `${plain(Number(value.toPrecision(3)))} %`;
function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  const minutes = Math.round(value / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
const whole = (value) => Math.round(value).toLocaleString("en");

// --- axes ---

function ticks(low, high, wanted, integer) {
  if (!(high > low)) return [low];
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  if (integer) step = Math.max(1, Math.round(step));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9 && found.length < 40; n += 1) found.push(n * step);
  return found.length < 2 && wanted < 16 ? ticks(low, high, 2 * wanted, integer) : found;
}
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
    for (const m of high - low > 3 ? [1] : [1, 2, 5]) {
      const at = Math.log10(m) + power;
      if (at >= low && at <= high) found.push(at);
    }
  }
  return found.length > 1 ? found : [low, high];
}
// The minimum and maximum of many numbers: Math.min does not take more than some 100,000 arguments.
const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
// The index of the nearest step.
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}
// An exponential moving average with bias correction.
function smoothed(values, weight) {
  let mean = 0, known = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    known = weight * known + (1 - weight);
    return mean / known;
  });
}

// --- the tooltip ---

function showTip(event, head, rows) {
  tip.replaceChildren(
    head ? el("div", { class: "head" }, head) : "",
    ...rows.map(([shade, name, value]) =>
      el("div", { class: "row" }, shade ? dot(shade) : "", el("span", {}, name), el("span", { class: "value" }, value))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 16;
  const top = Math.min(event.clientY + 14, innerHeight - box.height - 8);
  Object.assign(tip.style, { left: `${Math.max(4, left)}px`, top: `${Math.max(4, top)}px` });
}
function hideTip() { tip.hidden = true; }

// Dragging over `surface` calls chosen(from, to) with the positions that `place` returns; a double click calls chosen(null).
function brushed(surface, top, height, place, chosen) {
  let from = null, mark = null;
  surface.addEventListener("pointerdown", (event) => { if (event.button === 0) from = place(event); });
  surface.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = place(event);
    if (!mark) surface.parentNode.append(mark = svg("rect", { class: "brush", y: top, height, "pointer-events": "none" }));
    mark.setAttribute("x", Math.min(from, to));
    mark.setAttribute("width", Math.abs(to - from));
  });
  const end = (event) => {
    if (from === null) return;
    const to = place(event), began = from;
    from = null;
    if (mark) mark.remove();
    mark = null;
    if (Math.abs(to - began) > 6) chosen(Math.min(began, to), Math.max(began, to));
  };
  surface.addEventListener("pointerup", end);
  surface.addEventListener("pointerleave", end);
  surface.addEventListener("dblclick", () => chosen(null));
}
