// One figure with lines over the steps. All figures share the crosshair and the range of steps.

const charts = new Set();
const HEIGHT = 190, MARGIN = { left: 56, right: 10, top: 10, bottom: 22 };

// figure: {title, unit, show(value), lost: steps, smooth: bool, zero: bool, lines: [{name, key, shade, x, y, dash, dots, faint}]}
// A line's name is shown in the tooltip, its key, which lines may share, below the figure.
function chart(figure, view) {
  const node = el("figure", { "data-figure": figure.title });
  const state = { log: false };
  const positive = figure.lines.every((line) => line.y.every((value) => value > 0));
  const toggle = el("button", { "aria-pressed": "false", title: "logarithmic scale", onclick: () => {
    state.log = !state.log;
    toggle.setAttribute("aria-pressed", String(state.log));
    draw();
  } }, "log");
  node.append(
    el("figcaption", {}, figure.title, el("span", { class: "unit" }, figure.unit || ""), el("span", { class: "grow" }), positive ? toggle : ""));
  const canvas = svg("svg", { class: "plot", height: HEIGHT, role: "img", "aria-label": `${figure.title} over the steps` });
  node.append(canvas);
  const keys = new Map(figure.lines.filter((line) => line.key).map((line) => [line.key, line.shade]));
  if (keys.size > (figure.ranks ? 0 : 1)) {
    node.append(el("div", { class: "key" }, [...keys].map(([name, shade]) => el("span", {}, el("i", { style: { background: shade } }), name))));
  }
  let scale = null, cross = null;

  function draw() {
    const width = canvas.clientWidth || 430;
    const right = width - MARGIN.right, bottom = HEIGHT - MARGIN.bottom;
    const [first, last] = view.range || view.all;
    const shown = figure.lines.map((line) => prepared(line));
    const inside = shown.flatMap((line) => line.y.filter((_, i) => line.x[i] >= first && line.x[i] <= last).concat(line.raw ? line.raw.filter((_, i) => line.x[i] >= first && line.x[i] <= last) : []));
    const put = state.log ? Math.log10 : (value) => value;
    let [low, high] = inside.length ? extent(inside.map(put)) : [0, 1];
    if (figure.zero && !state.log) low = Math.min(0, low);
    const flat = high - low <= 1e-9 * Math.abs(high); // smoothing leaves rounding errors
    const room = flat ? Math.abs(high) * .05 || 1 : (high - low) * .06;
    if (!(figure.zero && low === 0 && !state.log)) low -= room;
    high += room;
    const x = (step) => MARGIN.left + (last > first ? (step - first) / (last - first) : .5) * (right - MARGIN.left);
    const y = (value) => bottom - (put(value) - low) / (high - low) * (bottom - MARGIN.top);
    scale = { x, y, first, last, right, bottom, shown };
    const parts = [];
    for (const at of state.log ? logTicks(low, high) : ticks(low, high, 4)) {
      const value = state.log ? 10 ** at : at, place = y(value);
      if (place < MARGIN.top - 1 || place > bottom + 1) continue;
      parts.push(svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: place, y2: place }));
      parts.push(svg("text", { x: MARGIN.left - 7, y: place + 4, "text-anchor": "end" }, (figure.show || plain)(value)));
    }
    for (const step of ticks(first, last, Math.max(2, width / 90), true)) {
      parts.push(svg("text", { x: x(step), y: HEIGHT - 6, "text-anchor": "middle" }, whole(step)));
    }
    parts.push(svg("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }));
    const clip = `clip${Math.random().toString(36).slice(2)}`;
    parts.push(svg("clipPath", { id: clip }, svg("rect", { x: MARGIN.left - 4, y: 0, width: right - MARGIN.left + 8, height: HEIGHT })));
    const lines = svg("g", { "clip-path": `url(#${clip})` });
    for (const line of shown) {
      if (line.raw) lines.append(svg("path", { d: path(line.x, line.raw), fill: "none", stroke: line.shade, "stroke-width": 1, opacity: .22 }));
      lines.append(svg("path", {
        d: path(line.x, line.y), fill: "none", stroke: line.shade, "stroke-width": line.faint ? 1.1 : 1.8, opacity: line.faint ? .55 : 1,
        "stroke-linejoin": "round", "stroke-dasharray": line.dash ? "5 4" : null,
        "data-of": figure.title, "data-line": line.name, "data-points": line.x.length,
        "data-last": line.raw ? line.raw.at(-1) : line.y.at(-1),
      }));
      if (line.dots || line.x.length < 3) line.x.forEach((step, i) => lines.append(svg("circle", { cx: x(step), cy: y(line.y[i]), r: 2.7, fill: line.shade })));
    }
    for (const step of figure.lost || []) lines.append(svg("line", { class: "lost", x1: x(step), x2: x(step), y1: bottom - 12, y2: bottom, "data-lost": step }));
    cross = svg("line", { class: "cross", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
    const surface = svg("rect", { x: MARGIN.left, y: MARGIN.top, width: Math.max(1, right - MARGIN.left), height: bottom - MARGIN.top, fill: "transparent" });
    surface.addEventListener("pointermove", point);
    surface.addEventListener("pointerleave", () => { hideTip(); for (const each of charts) each.cross(null); });
    canvas.replaceChildren(...parts, lines, cross, surface);
    brushed(surface, MARGIN.top, bottom - MARGIN.top, (event) => event.clientX - canvas.getBoundingClientRect().left, (from, to) => {
      view.range = from === null ? null : [Math.max(first, stepAt(from)), Math.min(last, stepAt(to))];
      for (const each of charts) each.draw();
    });
  }
  function prepared(line) {
    if (!figure.smooth || !view.smooth || line.dots || line.x.length < 8) return line;
    return { ...line, raw: line.y, y: smoothed(line.y, view.smooth ** Math.min(1, 300 / line.y.length)) };
  }
  function path(steps, values) {
    let text = "";
    for (let i = 0; i < steps.length; i += 1) text += `${i ? "L" : "M"}${scale.x(steps[i]).toFixed(1)},${scale.y(values[i]).toFixed(1)}`;
    return text;
  }
  const stepAt = (place) => Math.round(scale.first + (place - MARGIN.left) / (scale.right - MARGIN.left) * (scale.last - scale.first));
  function point(event) {
    const step = stepAt(event.clientX - canvas.getBoundingClientRect().left);
    const rows = [];
    let at = null;
    for (const line of scale.shown) {
      if (!line.x.length || step < line.x[0] - 1) continue;
      const i = nearest(line.x, step);
      if (at === null || Math.abs(line.x[i] - step) < Math.abs(at - step)) at = line.x[i];
      rows.push([line.shade, line.name || figure.title, (figure.tip || figure.show || plain)((line.raw || line.y)[i])]);
    }
    for (const each of charts) each.cross(at);
    if (rows.length) showTip(event, `step ${whole(at)}`, rows.slice(0, 18)); else hideTip();
  }
  const handle = {
    draw,
    cross(step) {
      if (!cross) return;
      cross.setAttribute("visibility", step === null || step < scale.first || step > scale.last ? "hidden" : "visible");
      if (step !== null) for (const end of ["x1", "x2"]) cross.setAttribute(end, scale.x(step));
    },
  };
  charts.add(handle);
  return node;
}
