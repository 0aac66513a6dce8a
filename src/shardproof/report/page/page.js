// The page: runs, figures, timelines, samples, configuration.

const data = { ...JSON.parse(document.getElementById("data").textContent) };
const view = { range: null, all: [0, 1], smooth: 0.6, hidden: new Set(), open: new Map(), spans: new Map(), search: "", samples: 12, onlyDiffering: true };

// --- the lines of a figure ---

const FIGURES = [
  { title: "loss", keys: ["loss", "eval_loss"], smooth: true },
  { title: "reward", keys: ["reward", "eval_reward"], smooth: true },
  { title: "learning rate", keys: ["lr"] },
  { title: "gradient norm", keys: ["grad_norm"], smooth: true, unit: "before clipping" },
  { title: "throughput", ranks: "tokens_per_second", unit: "tokens/s per rank", show: rate, smooth: true, zero: true },
  { title: "time of a step", keys: ["step_seconds"], show: seconds, smooth: true, zero: true },
  { title: "memory", ranks: "held", unit: "per rank, after a step", show: bytes },
  { title: "gathered", ranks: "gathered", unit: "bytes per rank in a step", show: bytes, zero: true },
  { title: "reduced", ranks: "reduced", unit: "bytes per rank in a step", show: bytes, zero: true },
  { title: "to other machines", ranks: "away", unit: "bytes per rank in a step", show: bytes, zero: true },
  { title: "sent in attention", ranks: "attention", unit: "bytes per rank in a step, to ranks that share its rows", show: bytes, zero: true },
  { title: "waiting", ranks: "waiting", unit: "% of the time, for data and for other ranks", show: (v) => percent(v), smooth: true, zero: true },
];
const DRAWN = new Set([...FIGURES.flatMap((f) => f.keys || []), "tokens_per_second"]);
const shownRuns = () => data.runs.map((run, index) => ({ run, index })).filter(({ run }) => !view.hidden.has(run.name));

function linesOf(figure) {
  const lines = [], several = data.runs.length > 1;
  for (const { run, index } of shownRuns()) {
    for (const key of figure.keys || []) {
      const line = run.lines[key];
      if (!line) continue;
      const second = key.startsWith("eval_") && figure.keys.length > 1;
      const name = several ? run.name + (second ? ", evaluation" : "") : second ? "evaluation" : figure.keys.length > 1 ? "training" : "";
      lines.push({ name, key: several ? run.name : name, shade: several ? color(index) : second ? "var(--c1)" : color(0), x: line[0], y: line[1], dash: second, dots: second });
    }
    const ranks = run.rank_lines[figure.ranks] || [];
    const alike = ranks.length > 1 && ranks.every((line) => String(line[1]) === String(ranks[0][1]));
    (alike ? ranks.slice(0, 1) : ranks).forEach((line, rank) => {
      const who = alike ? "every rank" : run.rank_names[rank];
      lines.push({ name: several ? `${run.name}, ${who}` : who, key: several ? run.name : who, shade: color(several ? index : rank), x: line[0], y: line[1], faint: several && rank > 0 });
    });
  }
  if (lines.length === 1 && !several && !figure.ranks) lines[0].name = lines[0].key = "";
  return lines;
}

function figureOf(figure) {
  const lines = linesOf(figure);
  const lost = shownRuns().flatMap(({ run }) => (figure.keys || []).flatMap((key) => run.unfinite[key] || []));
  if (!lines.length && !lost.length) return null;
  const unit = [figure.unit, lost.length ? `not finite at ${lost.length > 1 ? `${lost.length} steps, the first ` : "step "}${whole(Math.min(...lost))}` : ""];
  return el("div", { class: "card" }, chart({ ...figure, lines, lost, unit: unit.filter(Boolean).join("; ") }, view));
}

// --- the parts of the page ---

function section(title, note, open, ...content) {
  const node = el("details", { open: view.open.has(title) ? view.open.get(title) : open }, el("summary", {}, title, note ? el("small", {}, note) : ""), ...content);
  node.addEventListener("toggle", () => { view.open.set(title, node.open); if (node.open) for (const each of charts) each.draw(); });
  return node;
}

const NUMBERS = [
  ["loss", "last loss", plain], ["eval_loss", "best evaluation loss", plain], ["reward", "last reward", plain],
  ["tokens_per_second", "tokens/s", (v) => whole(v), "median of all steps"], ["tokens", "tokens", rate], ["memory", "peak memory", bytes, "of a rank"], ["seconds", "duration", seconds],
];

const MOVED = [["gathered", "gathered"], ["reduced", "reduced"], ["away", "to other machines"], ["attention", "sent in attention"]];

function moved(run, what) {
  const ends = (run.rank_lines[what] || []).filter((line) => line[1].length).map((line) => line[1].at(-1));
  return ends.length && Math.max(...ends) > 0 ? bytes(Math.max(...ends)) : null;
}

function stepsOf(run) { return run.steps ? `${whole(run.last)} of ${whole(run.steps)}` : whole(run.last); }

function numbers() {
  if (data.runs.length === 1) {
    const run = data.runs[0], tile = (name, value, more) => el("div", { class: "tile", "data-number": name }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), more ? el("div", { class: "more" }, more) : "");
    return el("div", { class: "tiles" }, tile("step", whole(run.last), run.steps ? `of ${whole(run.steps)}` : ""),
      NUMBERS.filter(([key]) => run.summary[key] !== undefined && !(key === "tokens" && !run.summary[key])).map(([key, name, show, more]) => tile(name, show(run.summary[key]), more)),
      MOVED.map(([what, name]) => moved(run, what) ? tile(name, moved(run, what), "by a rank in a step") : ""));
  }
  const sent = MOVED.filter(([what]) => ["gathered", "reduced"].includes(what) || data.runs.some((run) => moved(run, what)));
  const kept = NUMBERS.filter(([key]) => data.runs.some((run) => run.summary[key]));
  return el("div", { class: "card scroll", style: { marginTop: "16px" } }, el("table", { class: "runs" },
    el("thead", {}, el("tr", {}, el("th", {}, "run"), el("th", {}, ""), el("th", { class: "number" }, "step"), kept.map(([, name]) => el("th", { class: "number" }, name)), sent.map(([, name]) => el("th", { class: "number" }, name)))),
    el("tbody", {}, data.runs.map((run, index) => el("tr", {}, el("td", {}, dot(color(index)), ` ${run.name}`), el("td", {}, el("span", { class: `state ${run.state}`, title: run.told }, run.state)),
      el("td", { class: "number" }, stepsOf(run)), kept.map(([key, , show]) => el("td", { class: "number" }, run.summary[key] === undefined ? "–" : show(run.summary[key]))), sent.map(([what]) => el("td", { class: "number" }, moved(run, what) || "–")))))));
}

function header() {
  const one = data.runs.length === 1 ? data.runs[0] : null;
  const settings = one ? ["model", "stage", "nproc", "tuner"].filter((key) => one.config[key] !== undefined).map((key) => `${key} ${String(one.config[key]).split("/").pop()}`).join(" · ") : "";
  const dark = document.documentElement.dataset.theme === "dark";
  return [
    el("div", { class: "bar", style: { margin: "0" } }, el("h1", {}, one ? one.name : `${data.runs.length} runs`), one ? el("span", { class: `state ${one.state}` }, one.state) : "", el("span", { class: "grow" }),
      data.live ? el("span", { class: "chip", id: "live" }, dot("var(--good)"), "live") : "",
      el("button", { id: "theme", onclick: () => { document.documentElement.dataset.theme = dark ? "light" : "dark"; show(); } }, dark ? "light" : "dark")),
    el("p", { class: "lead" }, one ? [settings, settings ? " · " : "", one.told] : data.runs.map((run) => run.name).join(" · ")),
    one && one.steps && one.last < one.steps ? el("div", { class: "progress" }, el("div", { style: { width: `${100 * one.last / one.steps}%` } })) : "",
  ];
}

function controls() {
  const range = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smooth, "aria-label": "smoothing" });
  range.addEventListener("input", () => { view.smooth = Number(range.value); for (const each of charts) each.draw(); });
  const chips = data.runs.length > 1 ? data.runs.map((run, index) => el("button", { class: "chip", "aria-pressed": String(!view.hidden.has(run.name)), onclick: () => {
    if (view.hidden.has(run.name)) view.hidden.delete(run.name); else view.hidden.add(run.name);
    show();
  } }, dot(color(index)), run.name)) : [];
  return el("div", { class: "bar" }, chips, el("span", { class: "grow" }), el("label", { class: "slider" }, "smooth", range));
}

function samples() {
  const all = shownRuns().flatMap(({ run, index }) => run.samples.map((sample) => ({ ...sample, run, index }))).sort((a, b) => b.step - a.step);
  if (!all.length) return null;
  const most = (name) => Math.max(...all.map((sample) => sample.rewards[name] ?? 0), 1e-9);  // some range up to 1, some up to 100
  const cards = all.slice(0, view.samples).map((sample) => el("div", { class: "card sample" },
    el("div", { class: "head" }, data.runs.length > 1 ? [dot(color(sample.index)), el("span", {}, sample.run.name)] : "", el("span", {}, `step ${whole(sample.step)}`), el("span", { class: "grow" }),
      Object.entries(sample.rewards).map(([name, value]) => {
        const share = Math.max(0, Math.min(1, value / most(name)));
        return el("span", { class: "reward", style: { background: `color-mix(in srgb, var(--good) ${Math.round(share * 40)}%, var(--grid))` } }, `${name} ${plain(value)}`);
      })),
    el("pre", { class: "asked" }, sample.prompt), el("pre", {}, sample.completion),
    sample.right == null ? "" : el("pre", { class: "asked" }, `right: ${sample.right}`)));
  const more = all.length > view.samples ? el("div", { class: "bar" }, el("button", { onclick: () => { view.samples += 24; show(); } }, `show more of ${all.length}`)) : "";
  return section("Answers", "from steps across the run, latest first", true, el("div", { class: "samples" }, cards), more);
}

function configuration() {
  const runs = data.runs, several = runs.length > 1;
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  if (!keys.length) return null;
  const word = (value) => value === undefined ? "–" : value === null ? "none" : value === true ? "yes" : value === false ? "no" : String(value);
  const differs = (key) => new Set(runs.map((run) => word(run.config[key]))).size > 1;
  const body = el("tbody", {});
  const list = () => body.replaceChildren(...keys.filter((key) => (!several || !view.onlyDiffering || differs(key)) && (key.includes(view.search) || runs.some((run) => word(run.config[key]).includes(view.search))))
    .map((key) => el("tr", { class: several && differs(key) ? "differs" : null, "data-option": key }, el("td", {}, key), runs.map((run) => el("td", {}, word(run.config[key]))))));
  const search = el("input", { type: "search", placeholder: "find an option", value: view.search, "aria-label": "find an option" });
  search.addEventListener("input", () => { view.search = search.value; list(); });
  const only = el("button", { "aria-pressed": String(view.onlyDiffering), class: "chip", onclick: () => { view.onlyDiffering = !view.onlyDiffering; only.setAttribute("aria-pressed", String(view.onlyDiffering)); list(); } }, "only differences");
  list();
  const count = keys.filter(differs).length;
  const table = el("div", { class: "card scroll" }, el("table", {}, several ? el("thead", {}, el("tr", {}, el("th", {}, ""), runs.map((run, index) => el("th", {}, dot(color(index)), ` ${run.name}`)))) : "", body));
  return section(several ? "Differences" : "Configuration", several ? `${count} of ${keys.length} options differ` : `${keys.length} options`, several, el("div", { class: "bar", style: { margin: "0 0 10px" } }, search, several ? only : ""), table);
}

function notes() {
  return data.runs.flatMap((run) => [
    ...(run.state === "failed" ? [el("div", { class: "note bad" }, `${run.name}: ${run.told}`)] : []),
    ...run.notes.map((note) => el("div", { class: "note" }, `${run.name}: ${note}`)),
  ]);
}

function show() {
  charts.clear();
  hideTip();
  const steps = shownRuns().flatMap(({ run }) => [...Object.values(run.lines), ...Object.values(run.rank_lines).flat()].flatMap((line) => line[0].length ? [line[0][0], line[0].at(-1)] : []));
  view.all = steps.length ? extent(steps) : [0, 1];
  const main = FIGURES.map(figureOf).filter(Boolean);
  const others = [...new Set(shownRuns().flatMap(({ run }) => [...Object.keys(run.lines), ...Object.keys(run.unfinite)]))].filter((key) => !DRAWN.has(key)).sort();
  const timelines = shownRuns().filter(({ run }) => run.timelines.length).map(({ run }) => {
    if (!view.spans.has(run.name)) view.spans.set(run.name, {});
    return timelineCard(run, view.spans.get(run.name));
  });
  document.getElementById("top").replaceChildren(...header().flat().filter(Boolean));
  document.getElementById("page").replaceChildren(...[
    numbers(), ...notes(), controls(),
    main.length ? el("div", { class: "cards" }, main) : el("p", { class: "lead" }, "No values have been recorded."),
    timelines.length ? section("One step", "what was computed, gathered and reduced, and when", true, el("div", { class: "cards" }, timelines)) : null,
    others.length ? section("More numbers", `${others.length} recorded by the trainer`, others.length <= 6, el("div", { class: "cards" }, others.map((key) => figureOf({ title: key, keys: [key], smooth: true })))) : null,
    samples(), configuration(),
    el("footer", {}, `shardproof · ${data.made} · ${data.runs.map((run) => run.path).join(" · ")}`),
  ].filter(Boolean));
  for (const each of charts) each.draw();
}

// --- live ---

async function follow() {
  let pause = 2000;
  try {
    const began = performance.now();
    const answer = await fetch(`data.json?version=${encodeURIComponent(data.version)}`, { cache: "no-store" });
    const told = answer.status === 200 ? await answer.json() : null;
    pause = Math.max(2000, 10 * (performance.now() - began)); // long runs take time to read
    if (told) { Object.assign(data, told); show(); }
    lively(true);
  } catch { lively(false); }
  setTimeout(follow, pause);
}
function lively(there) {
  const chip = document.getElementById("live");
  if (chip) chip.replaceChildren(dot(there ? "var(--good)" : "var(--bad)"), there ? "live" : "the server has stopped");
}

const asked = new URLSearchParams(location.search).get("theme");
document.documentElement.dataset.theme = asked === "dark" || (asked !== "light" && matchMedia("(prefers-color-scheme: dark)").matches) ? "dark" : "light";
show();
let sized = 0;
addEventListener("resize", () => { cancelAnimationFrame(sized); sized = requestAnimationFrame(() => { for (const each of charts) each.draw(); }); });
if (data.live) setTimeout(follow, 2000);
