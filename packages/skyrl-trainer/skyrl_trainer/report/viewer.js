const find = id => document.getElementById(id);
const list = el("div", { id: "list", role: "listbox", "aria-label": "trajectories" });
const side = el("div", { id: "side" }, el("div", { id: "heads", class: "line" }), list);
const detail = el("main", { id: "detail", tabindex: -1 }), bubble = el("div", { id: "tip", class: "tip" });
const rows = page.rows.map((row, number) =>
  Object.fromEntries([["number", number], ...page.fields.map((name, k) => [name, row[k]])]));
const byId = new Map(rows.map(row => [row.id, row]));
const MEASURE = rows.some(row => row.step !== null) ? "reward" : "score";  // of a run's steps, or of an evaluation
const ROW = 30, UNLIKELY = 5;  // pixels per line of the list; nats of a token in full colour
const state = { filters: {}, sort: null, shown: rows, open: [], turn: -1, shade: page.scale ? "advantage" : "logprob" };
const linkTo = (...open) => "#" + open.map(row => encodeURIComponent(row.id).replaceAll("%2F", "/")).join(",");
function decode(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

/* ---- Blocks ---- */
// What a turn of another agent than ours may lack.
const TURN = { output_ids: [], texts: [], advantages: [], logprobs: [], weight_versions: [], tool_calls: [],
  reward_parts: {}, seconds: {}, info: {} };
async function load(row) {
  const bytes = Uint8Array.from(atob(find(`block-${row.number}`).textContent), c => c.charCodeAt(0));
  const data = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  return { ...data, turns: data.turns.map(turn => ({ ...TURN, ...turn })) };
}

/* ---- The list ---- */
const COLUMNS = [  // name, title, width, width on a phone
  ["outcome", "✓", "16px", "14px"], ["id", "id", "minmax(62px, .4fr)", "minmax(54px, .4fr)"],
  ["task", "task", "minmax(80px, 1fr)", "minmax(50px, 1fr)"], ["difficulty", "diff", "37px", "28px"],
  ["reward", MEASURE, "62px", "50px"], ["turns", "turns", "50px", "40px"], ["tokens", "tokens", "60px", "60px"],
  ["stop", "stop", "76px", "0"],
].filter(([name]) => rows.some(row => row[name] !== null));
const GOOD = ["✓", "good"], BAD = ["✗", "bad"];
const MARKS = { success: GOOD, correct: GOOD, failed: BAD, ungraded: BAD, missing: BAD };
const mark = outcome => MARKS[outcome] || ["·", "no"];
const kind = name => ["difficulty", "reward", "turns", "tokens"].includes(name) ? "number" : name;
side.style.setProperty("--columns", COLUMNS.map(column => column[2]).join(" "));
side.style.setProperty("--narrow", COLUMNS.map(column => column[3]).join(" "));
function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
function wanted(row) {
  const { search = "", low = "", high = "", ...same } = state.filters;
  if (low !== "" && !(row.reward !== null && row.reward >= +low)) return false;
  if (high !== "" && !(row.reward !== null && row.reward <= +high)) return false;
  if (Object.entries(same).some(([name, value]) => value !== "" && String(row[name]) !== value)) return false;
  return search === "" || `${row.task} ${row.id}`.toLowerCase().includes(search.toLowerCase());
}
function refresh() {
  const { sort } = state;
  state.shown = rows.filter(wanted);
  if (sort) state.shown.sort((a, b) => sort.sign * compare(a[sort.name], b[sort.name]) || a.number - b.number);
  find("count").textContent = `${show(state.shown.length)} of ${show(rows.length)}`;
  find("heads").replaceChildren(...COLUMNS.map(([name, title], k) => {
    const sign = sort && sort.name === name ? sort.sign : 0, order = sign > 0 ? "ascending" : "descending";
    const head = el("button", { class: kind(name), title: `sort by ${name}`, "aria-sort": sign !== 0 && order },
      ["", "↑ ", "↓ "].at(sign) + title);
    head.addEventListener("click", () => {
      state.sort = sign < 0 ? null : { name, sign: sign ? -1 : 1 };
      refresh();
      find("heads").children[k].focus();
    });
    return head;
  }));
  list.scrollTop = 0;
  paint();
}
function cell(row, name) {
  if (name === "outcome") return el("span", { class: mark(row.outcome)[1] }, mark(row.outcome)[0]);
  if (name === "task") {
    const end = [...row.task].slice(-6).join(""), start = row.task.slice(0, row.task.length - end.length);
    return el("span", { class: "task" }, el("span", {}, start), end);
  }
  return el("span", { class: kind(name) }, name === "stop" ? words(row.stop) : show(row[name]));
}
function paint() {  // only the lines in view are in the document
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 8);
  const seen = state.shown.slice(first, first + Math.ceil((list.clientHeight || 900) / ROW) + 16);
  list.replaceChildren(el("div", { style: `height:${state.shown.length * ROW}px` }), ...seen.map((row, k) => el("a", {
    class: `line${row === state.open[0] ? " chosen" : ""}`, style: `top:${(first + k) * ROW}px`, href: linkTo(row),
    role: "option", "aria-selected": String(row === state.open[0]), tabindex: -1,
    title: `${row.id}: ${row.task}, ${row.env}, ${row.outcome}`,
  }, COLUMNS.map(([name]) => cell(row, name)))));
}
const select = (attributes, options) =>
  el("select", attributes, options.map(([value, text]) => el("option", { value }, text)));
function filters() {
  const box = el("div", { class: "filters" });
  const add = (name, input, event, label = name) => {
    input.addEventListener(event, () => { state.filters[name] = input.value.trim(); refresh(); });
    box.append(name === "search" ? input : el("label", {}, `${label} `, input));
  };
  const search = { type: "search", id: "search", placeholder: "search task or id", "aria-label": "search" };
  add("search", el("input", search), "input");
  for (const name of ["env", "difficulty", "outcome", "stop", "step"]) {
    const values = [...new Set(rows.map(row => row[name]))].filter(value => value !== null).sort(compare);
    const options = [["", "all"], ...values.map(value => [value, words(String(value))])];
    if (values.length > 1) add(name, select({ id: name }, options), "change");
  }
  add("low", el("input", { type: "number", id: "low", step: "any" }), "input", `${MEASURE} from`);
  add("high", el("input", { type: "number", id: "high", step: "any" }), "input", "to");
  box.append(el("b", { id: "count" }));
  return box;
}

/* ---- Tokens ---- */
// A character's tokens are one span: they have "" but for the last.
function spans(turn) {
  const list = [];
  for (let start = 0, end; start < turn.texts.length; start = end) {
    end = start + 1;
    while (end < turn.texts.length && turn.texts[end - 1] === "") end++;
    list.push({ start, end, text: turn.texts.slice(start, end).join("") });
  }
  return list;
}
const mean = (values, start, end) =>
  values.length ? values.slice(start, end).reduce((sum, x) => sum + x, 0) / (end - start) : 0;
function shading(turn, { start, end }) {
  if (state.shade === "logprob") return ["unlikely", Math.min(1, -mean(turn.logprobs, start, end) / UNLIKELY)];
  const advantage = mean(turn.advantages, start, end);
  return [advantage < 0 ? "minus" : "plus", page.scale ? Math.min(1, Math.abs(advantage) / page.scale) : 0];
}
function tokens(turn, differs) {
  if (!turn.texts.length) return turn.action;
  return spans(turn).map(span => {
    const hit = differs !== null && differs >= span.start && differs < span.end, [kind, strength] = shading(turn, span);
    const kinds = ["t", strength && kind, span.text.startsWith("\n") && "break", hit && "differs"];
    const node = el("span", { class: kinds.filter(Boolean).join(" ") }, span.text);
    const tip = () => tipOver(node, turn, span);
    node.style.setProperty("--a", (strength * .75).toFixed(3));
    node.addEventListener("pointerenter", tip);
    node.addEventListener("click", tip);
    node.addEventListener("pointerleave", () => { bubble.style.display = "none"; });
    return node;
  });
}
function tipOver(node, turn, { start, end, text }) {
  const lines = turn.output_ids.slice(start, end).flatMap((id, k) => [
    ["token", `${start + k + 1} of ${turn.output_ids.length}`], ["id", String(id)],
    ["logprob", show(turn.logprobs[start + k])], ["advantage", show(turn.advantages[start + k])],
    ["weights", `version ${show(turn.weight_versions[start + k])}`]]);
  const rows = lines.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, value)));
  bubble.replaceChildren(el("code", {}, JSON.stringify(text)), el("table", {}, rows));
  bubble.style.display = "block";
  const box = node.getBoundingClientRect(), below = box.bottom + bubble.offsetHeight + 8 <= innerHeight;
  bubble.style.left = `${Math.max(4, Math.min(box.left, innerWidth - bubble.offsetWidth - 8))}px`;
  bubble.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - bubble.offsetHeight - 6)}px`;
}

/* ---- One trajectory ---- */
function said(label, text, open = true) {
  return el("details", { open: open && "" }, el("summary", { class: "label" }, label),
    el("pre", {}, typeof text === "string" ? text : JSON.stringify(text, null, 1)));
}
function promptView({ prompt }) {
  const messages = prompt.map(({ role, content }) => said(role, content, role !== "system"));
  return el("section", { class: "turn prompt" },
    messages.length ? messages : el("div", { class: "label" }, "no prompt is stored"));
}
function callView(call) {
  if (call === null || typeof call !== "object") return el("div", { class: "call" }, el("code", {}, JSON.stringify(call)));
  const failed = "error" in call, args = call.args ? JSON.stringify(call.args) : "";
  const result = typeof call.result === "string" ? call.result : JSON.stringify(call.result ?? null);
  return el("div", { class: `call${failed ? " failed" : ""}` },
    el("code", {}, `${call.tool ?? "(no call that could be read)"} ${args}`),
    el("pre", { class: failed && "error" }, failed ? `error: ${call.error}` : `→ ${result}`));
}
function turnView(turn, number, total, difference = null) {
  const { reward_parts, valid_action, success, ...info } = turn.info, parts = pairs(turn.reward_parts);
  const versions = [...new Set(turn.weight_versions)], here = difference && difference.turn === number;
  const weights = versions.length > 1 ? `${Math.min(...versions)} to ${Math.max(...versions)}` : versions[0];
  const about = [turn.reward !== undefined && `reward ${show(turn.reward)}${parts && ` (${parts})`}`,
    turn.output_ids.length > 0 && `${show(turn.output_ids.length)} tokens after ${show(turn.prompt_ids)} read`,
    versions.length > 0 && `weights ${weights}`, Object.keys(turn.seconds).length > 0 && `${pairs(turn.seconds)} s`];
  const odd = [valid_action === false && "invalid action", turn.new_segment && number > 0 && "history rewritten",
    here && `first difference: ${difference.what}`];
  return el("section", { class: `turn${here ? " first-difference" : ""}`, "data-turn": number },
    el("div", { class: "about" }, el("b", {}, `turn ${number + 1} of ${total}`),
      about.map(text => text && el("span", {}, text)), odd.map(text => text && el("span", { class: "bad" }, text))),
    turn.context && said(`the whole context of this turn, ${show(turn.prompt_ids)} tokens`, turn.context, false),
    el("div", { class: "label" }, "policy"),
    el("pre", { class: "policy" }, tokens(turn, here ? difference.token : null)),
    turn.tool_calls.map(callView), turn.observation && said("environment", turn.observation),
    Object.keys(info).length > 0 && said("more that the environment reported", info, false));
}
function head(row, data) {
  const facts = Object.entries(data.facts).filter(([, value]) => value !== null && value !== "");
  const figures = [`${MEASURE} ${show(row.reward)}`, `stopped: ${words(row.stop)}`, row.env,
    row.difficulty !== null && `difficulty ${show(row.difficulty)}`, `${show(row.tokens)} tokens`];
  const spans = texts => texts.map(text => text && el("span", {}, text));
  const outcome = el("span", { class: `chip ${mark(row.outcome)[1]}` }, row.outcome);
  return el("div", {},
    el("div", { class: "bar" }, el("h2", {}, row.id), outcome, spans(figures)),
    el("div", { class: "bar" }, spans([row.task, ...facts.map(([name, value]) => `${words(name)} ${show(value)}`)])),
    data.error && el("pre", { class: "error" }, data.error));
}
function rest(data) {
  const texts = Object.entries(data.texts).map(([label, text]) => said(label, text));
  return texts.length > 0 && el("section", { class: "turn" }, texts);
}
function tools(row, learned) {
  const shade = select({ id: "shade" }, [["advantage", "advantage"], ["logprob", "logprob"]]);
  shade.value = state.shade;
  shade.addEventListener("change", () => {
    const folds = () => [...detail.querySelectorAll("details")], open = folds().map(fold => fold.open);
    state.shade = shade.value;
    draw();
    folds().forEach((fold, k) => { fold.open = open[k]; });
    find("shade").focus();
  });
  const others = rows.filter(other => other.task === row.task && other !== row);
  const other = select({ id: "other" }, [["", "nothing"],
    ...others.map(each => [each.number, `${each.id} (${each.outcome}, ${show(each.reward)})`])]);
  other.value = state.open[1] ? state.open[1].number : "";
  other.addEventListener("change", () => { location.hash = linkTo(row, ...other.value ? [rows[other.value]] : []); });
  const back = el("button", { class: "back" }, state.open[1] ? "✕ comparison" : "‹ list");
  back.addEventListener("click", () => { location.hash = state.open[1] ? linkTo(row) : "#"; });
  const legend = state.shade === "logprob" ? [`−${UNLIKELY} nats`, el("i", { class: "logprob" }), "0"]
    : learned ? [`−${show(page.scale)}`, el("i", { class: "advantage" }), `+${show(page.scale)}`]
    : "it has no advantages: nothing was learned from it";
  const shaded = loaded.some(data => data.turns.some(turn => turn.texts.length));
  return el("div", { class: "bar" }, back,
    shaded && [el("label", {}, "shade by ", shade), el("span", { class: "legend" }, legend)],
    others.length > 0 && el("label", {}, "compare with ", other),
    el("span", { class: "keys" }, "↑ ↓ trajectory, ← → turn"));
}

/* ---- Two attempts at one task ---- */
function first(a, b) {  // the first place where two lists differ, or -1
  let k = 0;
  while (k < a.length && k < b.length && a[k] === b[k]) k++;
  return k < a.length || k < b.length ? k : -1;
}
function divergence(a, b) {
  for (let turn = 0; turn < Math.max(a.turns.length, b.turns.length); turn++) {
    const [x, y] = [a.turns[turn], b.turns[turn]];
    if (!x || !y) return { turn, token: null, what: "one attempt was over" };
    const token = first(x.output_ids, y.output_ids);
    if (token >= 0) return { turn, token, what: `token ${token + 1}` };
    if (x.action !== y.action) return { turn, token: null, what: "the action" };
    if (x.observation !== y.observation) return { turn, token: null, what: "what the environment said" };
  }
  return null;
}
function pairView([left, right], [a, b]) {
  const difference = divergence(a, b), both = (x, y) => el("div", { class: "pair" }, x, y);
  const turnOf = ({ turns }, row, k) => k < turns.length ? turnView(turns[k], k, turns.length, difference)
    : el("section", { class: "turn" },
      el("div", { class: "about" }, `over after ${turns.length} turns: ${words(row.stop)}`));
  const total = Math.max(a.turns.length, b.turns.length), same = JSON.stringify(a.prompt) === JSON.stringify(b.prompt);
  const where = difference ? `first difference: turn ${difference.turn + 1}, ${difference.what}` : "no difference";
  return [both(head(left, a), head(right, b)), el("div", { class: "bar", id: "difference" }, where),
    same ? promptView(a) : both(promptView(a), promptView(b)),
    Array.from({ length: total }, (_, k) => both(turnOf(a, left, k), turnOf(b, right, k))), both(rest(a), rest(b))];
}

/* ---- What the address names ---- */
let loaded = [], serial = 0;
function view(row, data) {
  return [head(row, data), promptView(data),
    data.turns.map((turn, number) => turnView(turn, number, data.turns.length)), rest(data)];
}
function draw() {
  const top = detail.scrollTop, learned = loaded.some(data => data.turns.some(turn => turn.advantages.some(Boolean)));
  detail.replaceChildren();
  fill(detail, {}, [tools(state.open[0], learned),
    state.open[1] ? pairView(state.open, loaded) : view(state.open[0], loaded[0])]);
  detail.scrollTop = top;
  point();
}
function point() {
  for (const node of document.querySelectorAll(".turn"))
    node.classList.toggle("here", node.getAttribute("data-turn") === String(state.turn));
}
async function route() {
  const names = location.hash.slice(1).split(",").filter(Boolean).map(decode), mine = ++serial;
  const open = names.map(name => byId.get(name)), missing = names.filter((_, k) => !open[k]);
  const all = missing.length ? [] : await Promise.all(open.map(load));
  if (mine !== serial) return;  // another one was asked for meanwhile
  [state.open, state.turn, loaded] = [missing.length ? [] : open.slice(0, 2), -1, all];
  document.body.classList.toggle("comparing", state.open.length === 2);
  document.body.classList.toggle("reading", names.length > 0);
  bubble.style.display = "none";
  detail.scrollTop = 0;
  const place = state.shown.indexOf(state.open[0]) * ROW, below = place - list.scrollTop;
  if (place >= 0 && (below < 0 || below + ROW > list.clientHeight)) list.scrollTop = place - list.clientHeight / 2;
  paint();
  if (state.open.length) {
    draw();
    if (document.activeElement?.tagName !== "INPUT") detail.focus({ preventScroll: true });  // for keys that scroll
    return;
  }
  detail.replaceChildren(el("div", { class: "empty" }, el("a", { class: "back", href: "#" }, "‹ list"), missing.length
    ? `There is no ${missing.join(", ")} on this page.` : "Choose a trajectory: click a line, or press ↓."));
}
function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
  const down = { ArrowDown: 1, ArrowUp: -1 }[event.key], right = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (down) {
    const row = state.shown[Math.max(0, Math.min(state.shown.length - 1, state.shown.indexOf(state.open[0]) + down))];
    if (row) location.replace(linkTo(row));
  } else if (right && state.open.length) {
    const total = Math.max(...loaded.map(data => data.turns.length));
    state.turn = Math.max(0, Math.min(total - 1, state.turn + right));
    point();
    document.querySelector(`[data-turn="${state.turn}"]`)?.scrollIntoView({ block: "start" });
  } else if (event.key === "Escape" && state.open.length) location.hash = state.open[1] ? linkTo(state.open[0]) : "#";
  else return;
  event.preventDefault();
}

const about = el("span", { class: "note" }, `${[page.what, ...page.notes].join("; ")}.`);
document.body.append(el("header", {}, el("h1", {}, page.name), about, filters()), side, detail, bubble);
list.addEventListener("scroll", paint);
addEventListener("resize", paint);
addEventListener("hashchange", route);
addEventListener("keydown", key);
addEventListener("unhandledrejection", event => detail.replaceChildren(
  el("pre", { class: "error" }, `This cannot be shown (${event.reason}): it takes a browser of 2023 or later.`)));
refresh();
route();
