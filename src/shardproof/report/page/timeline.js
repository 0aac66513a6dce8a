// One step of each rank: what was computed, gathered and reduced, and where computation waited.

const LANE = 18, GAP = 5, LABEL = 92;
const WORDS = {
  forward: "forward", backward: "backward", recompute: "recomputed", inference: "without gradients", update: "optimizer",
  gather: "gather", reduce: "reduce",
};

// Overlapping intervals [from, to], merged.
function merged(intervals) {
  const found = [];
  for (const [from, to] of [...intervals].sort((a, b) => a[0] - b[0])) {
    const last = found.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to); else found.push([from, to]);
  }
  return found;
}
const covered = (intervals) => merged(intervals).reduce((total, [from, to]) => total + to - from, 0);

function summed(timeline) {
  const under = covered(timeline.moved.map((m) => [m[3], m[5]]));
  const waited = covered(timeline.moved.map((m) => [m[4], m[5]]));
  const idle = merged([...timeline.moved.map((m) => [m[4], m[5]]), ...timeline.met.map((m) => [m[1], m[2]])]);
  const both = covered(idle), kinds = {};
  for (const [kind, , from, to] of timeline.computed) {
    const lost = idle.reduce((total, [a, b]) => total + Math.max(0, Math.min(b, to) - Math.max(a, from)), 0);
    kinds[kind] = (kinds[kind] || 0) + (to - from) - lost;
  }
  const computing = Object.values(kinds).reduce((a, b) => a + b, 0);
  return { under, waited, met: both - waited, kinds, other: Math.max(0, timeline.seconds - computing - both), hidden: under > 0 ? Math.max(0, 1 - waited / under) : null };
}

function timelineCard(run, state) {
  const all = run.timelines;
  const node = el("section", { class: "card wide", "data-figure": "timeline" });
  const title = el("figcaption", {}, `Step ${whole(all[0].step)} of ${run.name}`, el("span", { class: "unit" }, "drag to zoom in, double-click to reset"));
  const own = all[0], sums = summed(own);
  const sentence = el("p", { class: "said", "data-hidden": sums.hidden === null ? "" : sums.hidden.toFixed(4) });
  if (sums.hidden === null) sentence.append(`Rank ${own.rank} took ${seconds(own.seconds)}; nothing had to be gathered or reduced.`);
  else sentence.append(
    `On rank ${own.rank} the step took ${seconds(own.seconds)}. Gathers and reductions were under way for ${seconds(sums.under)} of it, and it waited for them for ${seconds(sums.waited)}: `,
    el("b", {}, `${percent(100 * sums.hidden)} of that time was hidden`), ` behind other work. It waited ${seconds(sums.met)} for other ranks to reach the same point.`);
  const canvas = svg("svg", { class: "plot", role: "img", "aria-label": "timeline of one step" });
  const longest = Math.max(...all.map((t) => t.seconds));
  const shown = all.slice(0, state.everyRank ? all.length : 4);

  function draw() {
    const width = canvas.clientWidth || 900;
    const [first, last] = state.span || [0, longest];
    const x = (at) => LABEL + (at - first) / (last - first) * (width - LABEL - 8);
    const parts = [], height = shown.length * (3 * (LANE + GAP) + 14) + 22;
    canvas.setAttribute("height", height);
    const rects = svg("g", {});
    function bar(y, tall, shade, from, to, head, rows, opacity) {
      const a = Math.max(x(from), LABEL), b = Math.min(x(to), width - 8);
      if (b <= LABEL || a >= width - 8 || b - a < .15) return;
      const rect = svg("rect", { x: a.toFixed(2), y, width: Math.max(.6, b - a).toFixed(2), height: tall, rx: b - a > 5 ? 2 : 0, opacity });
      rect.style.fill = shade;
      rect.addEventListener("pointermove", (event) => showTip(event, head, rows));
      rect.addEventListener("pointerleave", hideTip);
      rects.append(rect);
    }
    shown.forEach((timeline, place) => {
      const top = place * (3 * (LANE + GAP) + 14) + 4;
      ["computing", "gathers", "reductions"].forEach((name, lane) => {
        const y = top + lane * (LANE + GAP);
        parts.push(svg("rect", { class: "lane", x: LABEL, y, width: width - LABEL - 8, height: LANE, rx: 3 }));
        parts.push(svg("text", { class: "laneName", x: LABEL - 8, y: y + 13, "text-anchor": "end" }, lane ? name : `rank ${timeline.rank}`));
      });
      for (const [kind, unit, from, to] of timeline.computed) {
        bar(top, LANE, `var(--${kind})`, from, to, WORDS[kind] || kind, [[null, unit || "all parameters", seconds(to - from)], [null, "from", seconds(from)]]);
      }
      const waits = [], level = { gather: LANE + GAP, reduce: 2 * (LANE + GAP) };
      for (const [kind, unit, size, wanted, begin, taken] of timeline.moved) {
        const rows = [[null, unit, bytes(size)], [null, "under way", seconds(taken - wanted)], [null, "of which waiting", seconds(taken - begin)]];
        bar(top + level[kind], LANE, `var(--${kind})`, wanted, taken, WORDS[kind], rows, .6);
        waits.push(() => {
          bar(top + level[kind], LANE, "var(--wait)", begin, taken, WORDS[kind], rows);
          bar(top + LANE - 5, 5, "var(--wait)", begin, taken, `waiting for a ${WORDS[kind]}`, rows);
        });
      }
      for (const draw of waits) draw(); // on top of all bars
      for (const [what, from, to] of timeline.met) bar(top + LANE - 5, 5, "var(--meet)", from, to, "waiting for other ranks", [[null, what, seconds(to - from)]]);
    });
    for (const at of ticks(first, last, Math.max(2, width / 110))) {
      parts.push(svg("line", { class: "axis", x1: x(at), x2: x(at), y1: 0, y2: height - 20 }));
      parts.push(svg("text", { x: x(at), y: height - 6, "text-anchor": "middle" }, seconds(at)));
    }
    const surface = svg("rect", { x: LABEL, y: 0, width: Math.max(1, width - LABEL - 8), height: height - 20, fill: "transparent" });
    const within = svg("g", {}, surface, rects);
    canvas.replaceChildren(...parts, within);
    brushed(within, 0, height - 20, (event) => event.clientX - canvas.getBoundingClientRect().left, (from, to) => {
      const at = (place) => first + (place - LABEL) / (width - LABEL - 8) * (last - first);
      state.span = from === null ? null : [Math.max(0, at(from)), Math.min(longest, at(to))];
      draw();
    });
  }
  const share = el("div", { class: "share" });
  const key = el("div", { class: "key" });
  const parts = [...Object.entries(sums.kinds).map(([kind, s]) => [WORDS[kind] || kind, `var(--${kind})`, s]),
    ["waiting for gathers and reductions", "var(--wait)", sums.waited], ["waiting for other ranks", "var(--meet)", sums.met], ["everything else", "var(--faint)", sums.other]];
  for (const [name, shade, took] of parts) {
    if (took <= 0) continue;
    share.append(el("div", { style: { width: `${100 * took / own.seconds}%`, background: shade }, onpointermove: (event) => showTip(event, name, [[shade, percent(100 * took / own.seconds), seconds(took)]]), onpointerleave: hideTip }));
    key.append(el("span", {}, el("i", { class: "box", style: { background: shade } }), `${name} ${percent(100 * took / own.seconds)}`));
  }
  key.append(el("span", {}, el("i", { class: "box", style: { background: "var(--gather)" } }), "gather under way"), el("span", {}, el("i", { class: "box", style: { background: "var(--reduce)" } }), "reduction under way"));
  node.append(el("figure", {}, title, sentence, canvas, share, key));
  if (own.cut) node.append(el("p", { class: "said" }, "Some events of this step were not kept."));
  charts.add({ draw, cross() {} });
  return node;
}
