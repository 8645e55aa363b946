const { results, spread, comparison, trajectories, facts: { notes = [], ...known } } = page;
const per = results.means || {}, totals = results.totals || {};
function dollars(value) {
  if (none(value)) return "unknown";
  return value && value < .01 ? `$${value.toPrecision(2)}` : `$${value.toFixed(2)}`;
}
function plain(value) {
  if (Array.isArray(value)) return value.map(plain).join(", ") || "none";
  if (none(value) || value === "") return "none";
  if (typeof value !== "object") return String(value);
  return Object.entries(value).map(([name, part]) => `${name} ${plain(part)}`).join(", ") || "none";
}
const facts = object =>
  table([], Object.entries(object).map(([name, value]) => row([words(name), plain(value)])), "facts");

/* ---- What it came to ---- */
const tries = results.samples === 1 ? "one try each" : `${results.samples} tries each`;
const about = [results.model, results.judge && `judged by ${results.judge}`, `${show(results.items)} items, ${tries}`];
const error = none(results.standard_error) ? "–" : `± ${(100 * results.standard_error).toFixed(1)}`;
main.append(el("h1", {}, results.title || results.bench), note(about.filter(Boolean).join(" · ")),
  card("headline",
    el("div", {}, el("b", {}, percent(results.accuracy)),
      note(`${percent(results.low)} to ${percent(results.high)} (95 %, Wilson), over all selected items`),
      results.caveat && note(results.caveat)),
    interval(results.low, results.high, results.accuracy || 0, `accuracy ${percent(results.accuracy)}`)),
  tiles([
    [percent(results.accuracy_graded), "accuracy where graded"], [error, "standard error, clustered (points)"],
    [show(per.steps), "steps, mean"], [show(per.completion_tokens), "sampled tokens, mean"],
    [dollars(results.cost), "cost of the model"],
    results.judge ? [dollars(results.judge_cost), "cost of the judge, apart"] : ["–", "no judge"],
  ]));

const STATUSES = [  // name, colour, meaning
  ["correct", "var(--c2)"], ["wrong", "var(--faint)"], ["unparsed", "var(--c1)", "no answer was found"],
  ["truncated", "var(--c4)", "cut off, and not correct"],
  ["ungraded", "var(--c3)", "the attempt, the judge or the sandbox failed"],
  ["missing", "var(--line)", "not attempted, or not graded yet"],
];
const stops = Object.entries(results.stops || {}).map(([name, count]) => `${words(name)} ${show(count)}`).join(", ");
const meanings = STATUSES.filter(status => status[2]).map(([name, , meaning]) => `${name}: ${meaning}`).join("; ");
section("Outcomes", card("",
  parts(STATUSES.map(([name, color, meaning]) => [name, results.counts[name], color, meaning])),
  note(`How attempts ended: ${stops || "none were made"}. Statuses: ${meanings}. ` +
    "What is ungraded or missing is counted as not correct above, and left out where graded.")));
if (trajectories) section("Attempts", card("",
  el("a", { href: trajectories.page }, trajectories.page), ` (${trajectories.about}). This page holds none.`));

const ORDER = ["steps", "tool_calls", "tool_errors", "prompt_tokens", "cached_tokens", "completion_tokens", "seconds"];
const figures = name => [per[name], ...(spread[name] || [null, null, null]), totals[name]];
section("Figures per attempt",
  table(["", "mean", "median", "95th percentile", "most", "all together"],
    ORDER.map(name => row([words(name), ...figures(name).map(value => show(value))]))),
  note("Prompt tokens are summed over requests, as a bill has them." + (!results.judge ? "" :
    ` The judge read ${show(results.judge_tokens[0])} and wrote ${show(results.judge_tokens[1])} tokens.`)));
if (results.samples > 1) section("Several tries", table(["", ...Object.keys(results.pass_at).map(k => `k = ${k}`)], [
  row(["pass@k: one of k is correct", ...Object.values(results.pass_at).map(value => percent(value))]),
  row(["pass^k: all k are correct", ...Object.values(results.pass_all).map(value => percent(value))]),
]));

/* ---- The benchmark's own ---- */
const { calibration, ...own } = results.own || {}, categories = Object.entries(results.by_category || {}), boxes = [];
if (calibration && calibration.judged) {
  const whole = value => percent(value, 0), most = Math.max(...calibration.curve.map(point => point[2]));
  const shares = calibration.curve.map(([confidence, share, count]) => [
    confidence, share, 3 + 6 * Math.sqrt(count / most),
    `${whole(confidence)} stated, ${whole(share)} correct, ${count} answers`]);
  const lines = [{ color: "var(--faint)", dash: 1, points: [[0, 0, 0], [1, 1, 0]] },
    { label: "correct", color: "var(--c0)", points: shares }];
  const official = none(calibration.official) ? "given from 200 judged answers up" : percent(calibration.official);
  boxes.push([
    chart({ title: "Calibration", about: "share correct by stated confidence", unit: true, xs: [0, 1],
      x: whole, y: whole, lines }),
    note(`Root mean square calibration error, all bins: ${percent(calibration.all_bins)}, over ` +
      `${show(calibration.judged)} judged answers. Official figure, which leaves the last bin out: ${official}.`)]);
}
if (categories.length > 1) boxes.push(table(["part", "items", "accuracy"],
  categories.map(([name, part]) => row([name, show(part.items), percent(part.accuracy)]))));
const short = Object.entries(own).map(([name, value]) => [name, typeof value === "number" ? show(value) : value]);
if (short.length) boxes.push(facts(Object.fromEntries(short)));
if (boxes.length)
  section("The benchmark's own figures", el("div", { class: "charts" }, boxes.map(box => el("div", {}, box))));

if (comparison) {
  const { a, b, changed, caveats, items, difference, interval: ends, better, worse, p } = comparison;
  const signed = value => `${value >= 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(1)} points`;
  const same = Object.keys(changed).length === 0;
  section(`Against ${last(a.split("/"))}`,
    card("", el("b", {}, signed(difference)), ends && ` (95 %: ${signed(ends[0])} to ${signed(ends[1])})`,
      ` on the ${show(items)} items that both have: better on ${show(better)}, worse on ${show(worse)}`,
      none(p) ? "." : `; McNemar's exact p = ${show(p)}.`,
      caveats.map(note),
      note(`${a} is compared with ${b}. ${same ? "Their configurations are the same." : "They differ in:"}`)),
    !same && table(["", "that run", "this run"],
      Object.entries(changed).map(([name, both]) => row([words(name), ...both.map(plain)])), "facts"));
}
const deviations = [...new Set([...notes, ...(results.notes || [])])];
section("Deviations from the official protocol", card("", el("ul", {}, deviations.map(each => el("li", {}, each)))));
section("What was run", facts({ ...page.config, ...known, grader: results.grader, versions: page.versions }));
