const { runs } = page, several = runs.length > 1;
const points = (run, key) => run.metrics[key] || [];
const known = (run, key) => points(run, key).filter(point => point[1] !== null);
const values = (run, key) => known(run, key).map(point => point[1]);
function seconds(total) {
  const whole = Math.round(total), minutes = Math.floor(whole / 60);
  if (minutes >= 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${show(total)} s`;
}

/* ---- Curves ---- */
const allKeys = [...new Set(runs.flatMap(run => Object.keys(run.metrics)))].sort();
const after = key => key.slice(key.indexOf("/") + 1);
const group = (prefix, except = "") => allKeys.filter(key => key.startsWith(prefix) && key !== except);
const beyond = (limit, ...keys) => keys.filter(key => runs.some(run => values(run, key).some(value => value > limit)));
const heldOut = key => key.startsWith("eval/") ? "held-out" : "training";
const tool = key => key.split("/")[1];
// Of agents: turns and tools only where a run has some, and one card per env with a line for each difficulty.
const agents = beyond(1, "turns/mean", "eval/turns/mean").length > 0;
const both = key => [`eval/${key}`, key], ofAgents = key => agents ? both(key) : [];
const tools = figure => beyond(0, ...allKeys.filter(key => /^tools\/.+\/.+$/.test(key) && key.endsWith(figure)));
const kinds = allKeys.map(key => /^(eval\/|)agency\/([^/]+)(\/.+|)\/success$/.exec(key)).filter(Boolean);
const envs = [...new Set(kinds.map(found => found[2]))].map(env => {
  const own = kinds.filter(found => found[2] === env), held = own.filter(found => found[1]);
  const about = held.length ? "held-out" : "training", keys = (held.length ? held : own).map(found => found[0]);
  const short = key => `${/([^/]*)\/success$/.exec(key)[1]}, ${about}`;
  return { title: `Success, ${env}`, unit: true, about, keys, short };
});
const size = key => Number(key.split("/").pop()), byK = prefix => group(prefix).sort((a, b) => size(a) - size(b));
const held = byK("eval/pass_at/"), passes = held.length ? held : byK("pass_at/");
const exams = allKeys.filter(key => /^eval\/(?!reward\/).+\/accuracy$/.test(key)), bench = key => key.slice(5, -9);
const CHARTS = [
  { title: "Success", keys: both("success"), short: heldOut, marks: "eval/success", unit: true, always: true,
    about: allKeys.includes("eval/success") ? "held-out" : "training" },
  { title: "Solved by one of k tries", keys: passes, short: key => `k = ${size(key)}`, unit: true,
    about: passes === held ? "held-out" : "training" },
  { title: exams.length === 1 ? `Accuracy, ${bench(exams[0])}` : "Accuracy by benchmark", keys: exams, short: bench,
    unit: true },
  { title: "Reward", keys: ["reward/mean", ...group("reward/", "reward/mean")], always: true, compare: 1,
    about: "mean" },
  { title: "Length of answers", keys: ["length/mean", "length/max"], zero: true, always: true, about: "tokens" },
  ...envs,
  { title: "Turns per episode", keys: ofAgents("turns/mean"), short: heldOut, zero: true, about: "training" },
  { title: "Tool calls per episode", keys: tools("/calls"), short: tool, zero: true, about: "training" },
  { title: "Tool calls that failed", keys: tools("/errors"), short: tool, unit: true, about: "fraction" },
  { title: "Invalid actions", keys: ofAgents("invalid_actions"), short: heldOut, unit: true, about: "fraction" },
  { title: "Tokens per success", keys: ofAgents("tokens/per_success"), short: heldOut, zero: true },
  { title: "Entropy", keys: ["entropy"], always: true, about: "nats per token" },
  { title: "Age of what is learned from", keys: ["staleness/mean", "staleness/max"], zero: true, about: "updates" },
  { title: "Share of the time spent waiting", keys: ["idle/learner", "idle/engines"], unit: true },
  { title: "KL between engine and learner", keys: ["kl/engine_learner"], always: true },
  { title: "Largest logprob difference after a sync", keys: ["sync/max_logprob_diff"], zero: true },
  { title: "Time per phase", keys: ["time/rollout", "time/train", "time/sync", "time/eval"], zero: true, always: true,
    about: "seconds" },
  { title: "Tokens per second", keys: ["tokens/per_second"], zero: true },
  { title: "Gradient norm before clipping", keys: ["grad_norm"], zero: true },
  { title: "Clipped tokens", keys: ["clip_fraction"], zero: true, about: "fraction" },
  { title: "Why episodes ended", keys: beyond(0, ...group("stop/")), zero: true },
  { title: "Memory of all processes", keys: ["memory/pss_gib"], zero: true, about: "GiB" },
];
function curve({ keys, short = after, marks, compare, ...options }) {
  const wanted = several && compare ? keys.slice(0, compare) : keys;
  const there = wanted.filter(key => runs.some(run => points(run, key).length)), single = there.length === 1;
  // Two runs and many metrics: metrics have a colour each, and runs a line style. Else it is the other way round.
  const byRun = single || several && (there.length === 2 || runs.length > 2);
  const lines = there.flatMap((key, k) => runs.map((run, r) => ({
    label: single && several ? run.name : several ? `${short(key)}, ${run.name}` : short(key), mark: key === marks,
    color: `var(--c${(byRun ? r : k) % 6})`, dash: byRun ? k + Math.floor(r / 6) : r, points: points(run, key),
  }))).filter(line => line.points.length);
  return chart({ ...options, lines });
}
function anyMetric() {
  const place = el("div"), draw = key => place.replaceChildren(curve({ title: key, keys: [key] }));
  const keys = [...group("loss"), ...allKeys.filter(key => !key.startsWith("loss"))];
  return el("div", {}, choice("any metric", keys.map(key => [key, key]), draw), place);
}

/* ---- Figures ---- */
function figures(run) {
  const list = [], add = (value, label) => list.push([value, label]), evals = known(run, "eval/success");
  const start = evals.find(([step]) => step === 0), end = last(evals.filter(([step]) => step > 0));
  if (start) add(start[1].toFixed(3), "held-out success at the start");
  if (end) add(end[1].toFixed(3), `held-out success at step ${end[0]}`);
  const gain = start && end && end[1] - start[1];
  if (start && end) add(`${gain < 0 ? "−" : "+"}${Math.abs(gain).toFixed(3)}`, "gained by learning");
  const reward = known(run, "reward/mean"), speed = values(run, "tokens/per_second").sort((a, b) => a - b);
  if (reward.length) add(show(last(reward)[1]), `mean reward at step ${last(reward)[0]}`);
  const middle = [speed.length, speed.length - 1].map(ends => speed[ends >> 1] / 2);
  if (speed.length) add(show(middle[0] + middle[1]), "tokens per second (median)");
  const time = values(run, "time/step").reduce((a, b) => a + b, 0), memory = values(run, "memory/pss_gib");
  if (time) add(seconds(time), "all steps together");
  if (memory.length) add(`${show(Math.max(...memory))} GiB`, "peak memory");
  return list;
}
runs.forEach((run, r) => {
  const steps = Object.values(run.metrics).map(data => last(data)[0]);
  main.append(el("h1", { style: several && `color:var(--c${r % 6});margin-top:${r ? 18 : 0}px` }, run.name),
    el("div", { class: "note" }, `${run.path} · ${steps.length ? `${Math.max(...steps)} steps` : "no steps yet"}`,
      run.trajectories && [" · ", el("a", { href: run.trajectories }, "its trajectories, turn by turn")]),
    tiles(figures(run)), ...(run.notes.length ? [note(`${run.notes.join("; ")}.`)] : []));
});
const there = CHARTS.filter(each => each.always || each.keys.some(key => runs.some(run => values(run, key).length)));
section("Curves", el("div", { class: "charts" }, there.map(curve), allKeys.length > 0 && anyMetric()));

/* ---- Time line ---- */
const DOES = [["train", "learning", "var(--c0)"], ["rollout", "waiting for episodes", "var(--line)"],
  ["sync", "weights into the engines", "var(--c1)"], ["eval", "evaluating", "var(--c3)"]];
function timeline(run) {
  const gap = 60, all = step => Object.values(step).flat().filter(Array.isArray);
  const start = step => Math.min(...all(step).map(span => span[0]));
  const end = step => Math.max(...all(step).map(span => span[1]));
  let steps = run.timeline.filter(step => all(step).length);
  const stopped = steps.findLastIndex((step, k) => k && start(step) - end(steps[k - 1]) > gap);
  steps = steps.slice(Math.max(0, stopped));
  if (!steps.length) return null;
  const names = [...new Set(steps.flatMap(Object.keys))].filter(name => name.startsWith("engine ")).sort();
  const from = start(steps[0]), until = Math.max(...steps.map(end)), wide = 2 * WIDTH, left = 70, high = 22;
  const x = at => left + (at - from) / (until - from || 1) * (wide - left - RIGHT), y = k => TOP + k * (high + 6);
  const bar = (span, k, color, says) => svg("rect", { x: x(span[0]), width: Math.max(.5, x(span[1]) - x(span[0])),
    y: y(k), height: high, fill: color }, svg("title", {}, `${says}, ${show(span[1] - span[0])} s`));
  const bottom = y(names.length + 1), label = (text, k) => svg("text", { x: 0, y: y(k) + 15 }, text);
  const box = card("chart", el("h3", {}, `${whose(run)}Who worked when, steps ${steps[0].step} to ${last(steps).step}`),
    el("div", { class: "legend" }, [...DOES, ["", "an engine generating", "var(--c2)"]].map(([, says, color]) =>
      el("span", {}, el("i", { class: "box", style: `background:${color}` }), says))),
    svg("svg", { viewBox: `0 0 ${wide} ${bottom + 24}`, role: "img", "aria-label": "time line" },
      label("learner", 0), names.map((name, k) => label(name, k + 1)),
      steps.map(step => [DOES.map(([name, says, color]) => (step[name] || []).map(span =>
        bar(span, 0, color, `step ${step.step}, ${says}`))),
      names.map((name, k) => (step[name] || []).map(span => bar(span, k + 1, "var(--c2)", name)))]),
      steps.map(step => svg("line", { x1: x(end(step)), x2: x(end(step)), y1: TOP - 4, y2: bottom,
        stroke: "var(--faint)", "stroke-dasharray": "2 3" })),
      ticks(0, until - from, 8).map(tick => svg("text", { x: x(from + tick), y: bottom + 16, "text-anchor": "middle" },
        `${tick} s`))));
  return box;
}
const whose = run => several ? `${run.name}: ` : "";
section("Time", ...runs.map(run => timeline(run) || note(`${whose(run)}No time line is stored.`)));

/* ---- Settings ---- */
const maps = runs.map(run => new Map(run.settings.map(([name, value, isDefault]) => [name, [value, isDefault]])));
const names = [...new Set(maps.flatMap(map => [...map.keys()]))], place = el("div");
const KINDS = [["diff", "what differs"], ["own", "what is not the default"], ["all", "all"]];
const settings = choice("show", KINDS.slice(several ? 0 : 1), kind => {
  const rows = names.flatMap(name => {
    const cells = maps.map(map => map.get(name) || ["(not set)", true]);
    const differs = cells.some(cell => cell[0] !== cells[0][0]), own = cells.some(cell => !cell[1]);
    if (!differs && (kind === "diff" || kind === "own" && !own)) return [];
    const values = cells.map(([value, isDefault]) => el("code", { class: isDefault && "default" }, value));
    return [row([name, ...values], differs && "diff")];
  });
  const heads = ["setting", ...(several ? runs.map(run => run.name) : ["value"])];
  place.replaceChildren(table(heads, rows.length ? rows : [row(["none"])], "facts"));
});
section("Settings", names.length ? [el("div", { class: "bar" }, settings), place] : note("No settings are stored."));
