"use strict";
const find = id => document.getElementById(id);
const page = JSON.parse(find("index").textContent);
const rows = page.rows.map((row, number) => Object.fromEntries([["number", number], ...page.fields.map((name, k) => [name, row[k]])]));
const byId = new Map(rows.map(row => [row.id, row]));
const ROW = 30, UNLIKELY = 5;  // pixels a line of the list; nats of a token in full colour
const state = { filters: {}, sort: null, shown: rows, open: [], turn: -1, shade: page.scale ? "advantage" : "logprob" };

// Every text goes in as a text node or an attribute: nothing that a model or an env wrote is ever parsed as HTML.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== false) node.setAttribute(name, value);
  node.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return node;
}
function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(3));
}
const words = text => text.replaceAll("_", " ");
const pairs = object => Object.entries(object || {}).map(([name, value]) => `${words(name)} ${show(value)}`).join(", ");
const linkTo = (...open) => "#" + open.map(row => encodeURIComponent(row.id).replaceAll("%2F", "/")).join(",");
function decode(part) { try { return decodeURIComponent(part); } catch { return part; } }
const attempts = row => rows.filter(other => other.task === row.task && other !== row);

/* ---- Blocks ---- */
async function load(row) {
  const bytes = Uint8Array.from(atob(find(`block-${row.number}`).textContent), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

/* ---- The list ---- */
const COLUMNS = [["outcome", ""], ["id", "id"], ["task", "task"], ["difficulty", "diff"], ["reward", "reward"], ["turns", "turns"], ["tokens", "tokens"], ["stop", "stop"]];
const MARKS = { success: "✓", "no success": "·", failed: "✗" };
const mark = outcome => outcome.split(" ")[0];
function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}
function refresh() {
  const { search = "", low = "", high = "", ...same } = state.filters, text = search.toLowerCase();
  state.shown = rows.filter(row => Object.entries(same).every(([name, value]) => value === "" || String(row[name]) === value)
    && (low === "" || row.reward !== null && row.reward >= +low) && (high === "" || row.reward !== null && row.reward <= +high)
    && (text === "" || `${row.task} ${row.id}`.toLowerCase().includes(text)));
  if (state.sort) state.shown.sort((a, b) => state.sort.sign * compare(a[state.sort.name], b[state.sort.name]) || a.number - b.number);
  find("count").textContent = `${show(state.shown.length)} of ${show(rows.length)}`;
  find("heads").replaceChildren(...COLUMNS.map(([name, title]) => {
    const sorted = state.sort && state.sort.name === name;
    const head = el("button", { title: `sort by ${name}`, "aria-sort": sorted && (state.sort.sign > 0 ? "ascending" : "descending") },
      (title || "✓") + (sorted ? (state.sort.sign > 0 ? " ↑" : " ↓") : ""));
    head.addEventListener("click", () => {
      state.sort = sorted && state.sort.sign > 0 ? { name, sign: -1 } : sorted ? null : { name, sign: 1 };
      refresh();
    });
    return head;
  }));
  find("list").scrollTop = 0;
  paint();
}
function paint() {  // only the lines in view are in the document
  const list = find("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 8);
  const seen = state.shown.slice(first, first + Math.ceil((list.clientHeight || 900) / ROW) + 16);
  list.replaceChildren(el("div", { style: `height:${state.shown.length * ROW}px` }), ...seen.map((row, k) =>
    el("a", { class: `line${row === state.open[0] ? " chosen" : ""}`, href: linkTo(row), style: `top:${(first + k) * ROW}px`, role: "option",
      "aria-selected": String(row === state.open[0]), title: `${row.id}: ${row.task}, ${row.env}, ${row.outcome}` },
      COLUMNS.map(([name]) => name === "outcome" ? el("span", { class: mark(row.outcome) }, MARKS[row.outcome])
        : name === "task" ? el("span", { class: "task" }, el("span", {}, row.task.slice(0, -6)), row.task.slice(-6))
        : el("span", {}, name === "stop" ? words(row.stop) : show(row[name]))))));
}
function filters() {
  const box = el("div", { class: "filters" });
  const add = (name, input, event) => {
    input.addEventListener(event, () => { state.filters[name] = input.value.trim(); refresh(); });
    box.append(name === "search" ? input : el("label", {}, `${{ low: "reward from", high: "to" }[name] || name} `, input));
  };
  add("search", el("input", { type: "search", id: "search", placeholder: "search task or id", "aria-label": "search" }), "input");
  for (const name of ["env", "difficulty", "outcome", "stop", "step"]) {
    const values = [...new Set(rows.map(row => row[name]))].filter(value => value !== null).sort(compare);
    if (values.length) add(name, el("select", { id: name }, el("option", { value: "" }, "all"), values.map(value => el("option", { value }, words(String(value))))), "change");
  }
  for (const name of ["low", "high"]) add(name, el("input", { type: "number", id: name, step: "any" }), "input");
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
const mean = (list, start, end) => list.length ? list.slice(start, end).reduce((sum, x) => sum + x, 0) / (end - start) : 0;
function shading(turn, { start, end }) {
  if (state.shade === "logprob") return ["unlikely", Math.min(1, -mean(turn.logprobs, start, end) / UNLIKELY)];
  const advantage = mean(turn.advantages, start, end);
  return [advantage < 0 ? "minus" : "plus", page.scale ? Math.min(1, Math.abs(advantage) / page.scale) : 0];
}
function tokens(turn, differs) {
  if (!turn.texts.length) return turn.action;
  return spans(turn).map(span => {
    const [kind, strength] = shading(turn, span), hit = differs !== null && differs >= span.start && differs < span.end;
    const node = el("span", { class: `t ${strength ? kind : ""}${span.text.startsWith("\n") ? " break" : ""}${hit ? " differs" : ""}` }, span.text);
    node.style.setProperty("--a", (strength * .75).toFixed(3));
    const tip = () => tipOver(node, turn, span);
    node.addEventListener("pointerenter", tip);
    node.addEventListener("click", tip);
    node.addEventListener("pointerleave", () => { find("tip").style.display = "none"; });
    return node;
  });
}
function tipOver(node, turn, { start, end, text }) {
  const lines = turn.output_ids.slice(start, end).map((id, k) => [["token", `${start + k + 1} of ${turn.output_ids.length}`], ["id", String(id)],
    ["logprob", show(turn.logprobs[start + k])], ["advantage", show(turn.advantages[start + k])], ["weights", `version ${show(turn.weight_versions[start + k])}`]]);
  const tip = find("tip"), box = node.getBoundingClientRect();
  tip.replaceChildren(el("code", {}, JSON.stringify(text)), el("table", {}, lines.flat().map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, value)))));
  tip.style.display = "block";
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.bottom + tip.offsetHeight + 8 > innerHeight ? Math.max(4, box.top - tip.offsetHeight - 6) : box.bottom + 6}px`;
}

/* ---- One trajectory ---- */
function said(label, text, open = true, kind = "") {
  return el("details", { open: open && "" }, el("summary", { class: "label" }, label), el("pre", { class: kind }, text));
}
function promptView(data) {
  return el("section", { class: "turn prompt" }, data.prompt.length ? data.prompt.map(message => said(message.role, message.content, message.role !== "system"))
    : el("div", { class: "label" }, "no prompt is stored"));
}
function turnView(turn, number, total, difference = null) {
  const { reward_parts, valid_action, success, ...more } = turn.info, info = Object.keys(more).length > 0 && JSON.stringify(more, null, 1);
  const versions = [...new Set(turn.weight_versions)], here = difference && difference.turn === number;
  const about = [`reward ${show(turn.reward)}${Object.keys(turn.reward_parts).length ? ` (${pairs(turn.reward_parts)})` : ""}`,
    `${show(turn.output_ids.length)} tokens after ${show(turn.prompt_ids)} read`,
    versions.length ? `weights ${versions.length > 1 ? `${Math.min(...versions)} to ${Math.max(...versions)}` : versions[0]}` : null,
    Object.keys(turn.seconds).length ? `${pairs(turn.seconds)} s` : null];
  return el("section", { class: `turn${here ? " first-difference" : ""}`, "data-turn": number },
    el("div", { class: "about" }, el("b", {}, `turn ${number + 1} of ${total}`), about.map(text => text && el("span", {}, text)),
      valid_action === false && el("span", { class: "bad" }, "invalid action"), turn.new_segment && number > 0 && el("span", { class: "bad" }, "history rewritten"),
      here && el("span", { class: "bad" }, `first difference: ${difference.what}`)),
    turn.context && said(`the whole context of this turn, ${show(turn.prompt_ids)} tokens`, turn.context, false),
    el("div", { class: "label" }, "policy"), el("pre", { class: "policy" }, tokens(turn, here ? difference.token : null)),
    turn.tool_calls.map(call => el("div", { class: `call${"error" in call ? " failed" : ""}` },
      el("code", {}, `${call.tool ?? "(no call that could be read)"} ${call.args ? JSON.stringify(call.args) : ""}`),
      el("pre", { class: "error" in call ? "error" : "" }, "error" in call ? `error: ${call.error}` : `→ ${call.result}`))),
    turn.observation && said("environment", turn.observation), info && said("more that the environment reported", info, false));
}
function head(row, data) {
  const seconds = data.metrics.seconds;
  return el("div", {}, el("div", { class: "bar" }, el("h2", {}, row.id), el("span", { class: `chip ${mark(row.outcome)}` }, row.outcome),
    el("span", {}, `reward ${show(row.reward)}`), el("span", {}, `stopped: ${words(row.stop)}`), el("span", {}, row.env),
    row.difficulty !== null && el("span", {}, `difficulty ${row.difficulty}`), el("span", {}, `${show(row.tokens)} tokens`), seconds !== undefined && el("span", {}, `${show(seconds)} s`)),
    el("div", { class: "bar" }, el("span", {}, row.task), data.truth !== null && el("span", {}, `right answer: ${typeof data.truth === "string" ? data.truth : JSON.stringify(data.truth)}`),
      Object.keys(data.scores).length > 0 && el("span", {}, pairs(data.scores))), data.error && el("pre", { class: "error" }, data.error));
}
function tools(row, learned) {
  const shade = el("select", { id: "shade", "aria-label": "shade tokens by" }, ["advantage", "logprob"].map(name => el("option", { value: name }, name)));
  shade.value = state.shade;
  shade.addEventListener("change", () => { state.shade = shade.value; draw(); });
  const others = attempts(row), select = el("select", { id: "other" }, el("option", { value: "" }, others.length ? "nothing" : "no other attempt"),
    others.map(other => el("option", { value: other.number }, `${other.id} (${other.outcome}, ${show(other.reward)})`)));
  select.value = state.open[1] ? state.open[1].number : "";
  select.addEventListener("change", () => { location.hash = select.value === "" ? linkTo(row) : linkTo(row, rows[select.value]); });
  const back = el("button", { class: "back" }, state.open[1] ? "✕ comparison" : "‹ list");
  back.addEventListener("click", () => { location.hash = state.open[1] ? linkTo(row) : "#"; });
  const scale = state.shade === "logprob" ? [`−${UNLIKELY} nats`, "0"] : [`−${show(page.scale)}`, `+${show(page.scale)}`];
  return el("div", { class: "bar" }, back, el("label", {}, "shade by ", shade), state.shade === "advantage" && !learned ? el("span", { class: "legend" }, "it has no advantages: nothing was learned from it")
    : el("span", { class: "legend" }, scale[0], el("i", { class: state.shade }), scale[1]),
    el("label", {}, "compare with ", select), el("span", { class: "keys" }, "↑ ↓ trajectory, ← → turn"));
}

/* ---- Two attempts at one task ---- */
const first = (a, b) => { let k = 0; while (k < a.length && k < b.length && a[k] === b[k]) k++; return k < a.length || k < b.length ? k : -1; };
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
  const cell = (data, row, turn) => turn < data.turns.length ? turnView(data.turns[turn], turn, data.turns.length, difference)
    : el("section", { class: "turn" }, el("div", { class: "about" }, `over after ${data.turns.length} turns: ${words(row.stop)}`));
  const total = Math.max(a.turns.length, b.turns.length), same = JSON.stringify(a.prompt) === JSON.stringify(b.prompt);
  return [both(head(left, a), head(right, b)),
    el("div", { class: "bar", id: "difference" }, difference ? `first difference: turn ${difference.turn + 1}, ${difference.what}` : "no difference"),
    same ? promptView(a) : both(promptView(a), promptView(b)),
    Array.from({ length: total }, (_, turn) => both(cell(a, left, turn), cell(b, right, turn)))];
}

/* ---- What the address names ---- */
let loaded = [], serial = 0;
function draw() {
  const detail = find("detail"), [row] = state.open, top = detail.scrollTop, [data] = loaded;
  const learned = loaded.some(each => each.turns.some(turn => turn.advantages.some(Boolean)));
  detail.replaceChildren(...[tools(row, learned), state.open[1] ? pairView(state.open, loaded)
    : [head(row, data), promptView(data), data.turns.map((turn, number) => turnView(turn, number, data.turns.length))]].flat(Infinity));
  detail.scrollTop = top;
  point();
}
function point() {
  document.querySelectorAll(".turn").forEach(node => node.classList.toggle("here", +node.getAttribute("data-turn") === state.turn && node.hasAttribute("data-turn")));
}
async function route() {
  const names = location.hash.slice(1).split(",").filter(Boolean).map(decode), open = names.map(name => byId.get(name)), mine = ++serial;
  const missing = names.filter((_, k) => !open[k]);
  const all = missing.length ? [] : await Promise.all(open.map(load));
  if (mine !== serial) return;  // another one was asked for meanwhile
  [state.open, state.turn, loaded] = [missing.length ? [] : open.slice(0, 2), -1, all];
  document.body.classList.toggle("comparing", state.open.length === 2);
  document.body.classList.toggle("reading", names.length > 0);
  find("tip").style.display = "none";
  find("detail").scrollTop = 0;
  const place = state.shown.indexOf(state.open[0]) * ROW, list = find("list");
  if (place >= 0 && (place < list.scrollTop || place + ROW > list.scrollTop + list.clientHeight)) list.scrollTop = place - list.clientHeight / 2;
  paint();
  if (state.open.length) return draw();
  find("detail").replaceChildren(el("div", { class: "empty" }, missing.length ? `There is no ${missing.join(", ")} on this page.`
    : "Choose a trajectory: click a line, or press ↓. Its tokens are shaded by the advantage that the policy learned from, or by their logprob."));
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

document.querySelector("header").replaceChildren(el("h1", {}, page.run), el("span", { class: "note" }, [page.what, ...page.notes].join("; ") + "."), filters());
find("list").addEventListener("scroll", paint);
addEventListener("resize", paint);
addEventListener("hashchange", route);
addEventListener("keydown", key);
addEventListener("unhandledrejection", event => find("detail").replaceChildren(
  el("pre", { class: "error" }, `This cannot be shown (${event.reason}): it takes a browser of 2023 or later.`)));
refresh();
route();
