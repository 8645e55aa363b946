// What the reports draw: lines, an interval, parts of a whole, tiles and tables.
const WIDTH = 560, HEIGHT = 216, LEFT = 52, RIGHT = 14, TOP = 22, BOTTOM = 24;
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/* ---- Tiles and tables ---- */
const main = el("main");
document.body.append(main);
const card = (kind, ...body) => el("div", { class: `card ${kind}` }, body);
const note = text => el("p", { class: "note" }, text);
const section = (title, ...body) => fill(main, {}, [el("h2", {}, title), body]);
const tiles = list => el("div", { class: "tiles" }, list.map(([value, label]) =>
  card("", el("b", {}, value), el("span", {}, label))));
const row = (cells, kind) => el("tr", { class: kind }, cells.map(cell => el("td", {}, cell)));
const REGION = { class: "card scroll", tabindex: 0, role: "region", "aria-label": "table" };  // for keys that scroll
const table = (heads, rows, kind = "") => el("div", REGION, el("table", { class: kind },
  heads.length > 0 && el("tr", {}, heads.map(head => el("th", {}, head))), rows));
function choice(label, options, changed) {
  const select = el("select", {}, options.map(([value, text]) => el("option", { value }, text)));
  select.addEventListener("change", () => changed(select.value));
  changed(select.value);
  return el("label", {}, `${label} `, select);
}

/* ---- Lines: { title, lines, about, zero, unit, xs, x, y, marks } ---- */
// A line: { label, color, dash, points, mark }, dash: 0 is none; a point: [x, y, radius, what it says], y null in gaps.
// unit: from 0 to 1 at least; zero: from 0 on; xs: the ends of the x axis; x, y: the words for a value.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough)), list = [];
  const step = [1, 2, 2.5, 5, 10].map(factor => factor * power).find(size => size >= rough * .999);
  const end = high / step + 1e-9;
  for (let k = Math.ceil(low / step - 1e-9); k <= end; k++) list.push(+(k * step).toPrecision(12));
  return list;
}
// Of a list of any length: as arguments, Math.min and Math.max take some hundred thousand.
const lowest = list => list.reduce((a, b) => Math.min(a, b)), highest = list => list.reduce((a, b) => Math.max(a, b));
function range(values, { unit, zero }) {
  let low = lowest([...values, ...(unit || zero ? [0] : [])]), high = highest([...values, ...(unit ? [1] : [])]);
  const pad = Math.abs(high) * .1 || 1;
  if (low === high) [low, high] = [low && low - pad, high + pad];
  return [low, unit ? high : high + (high - low) * .06];
}
function chart(options) {
  const { title, about, lines } = options, all = lines.flatMap(line => line.points);
  const box = card("chart", el("h3", {}, title)), known = all.filter(point => point[1] !== null);
  if (!known.length) return fill(box, {}, [note("No values yet.")]);
  const names = lines.filter(line => line.label);
  box.append(el("div", { class: "legend" }, names.length < 2 ? about : names.map(line => el("span", {},
    el("i", { style: `border-color:${line.color}`, class: line.dash > 0 && "dash" }), line.label))));
  const [low, high] = range(known.map(point => point[1]), options), steps = all.map(point => point[0]);
  let [first, end] = options.xs || [lowest(steps), highest(steps)];
  if (first === end) [first, end] = [first - .5, end + .5];
  const x = value => LEFT + (value - first) / (end - first) * (WIDTH - LEFT - RIGHT);
  const y = value => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title },
    ticks(low, high, 4).map(tick => [
      svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick), stroke: "var(--line)" }),
      svg("text", { x: LEFT - 7, y: y(tick) + 4, "text-anchor": "end" }, options.y ? options.y(tick) : show(tick, 6))]),
    ticks(first, end, 6).filter(tick => options.x || Number.isInteger(tick)).map(tick =>
      svg("text", { x: x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, (options.x || String)(tick))),
    lines.map(line => drawn(line, x, y)), lines.filter(line => line.mark).map((line, k) => ends(line, x, y, k)));
  box.append(picture);
  hover(box, picture, x, options);
  return box;
}
function drawn({ points, color, dash }, x, y) {
  let path = "", open = false;
  for (const [at, value] of points) {
    // With h0 a point that stands alone is a dot.
    if (value !== null) path += `${open ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}${open ? "" : "h0"}`;
    open = value !== null;
  }
  const dots = points.length > 30 ? [] : points.filter(point => point[1] !== null);
  const stroke = { stroke: color, "stroke-width": 1.9, "stroke-linejoin": "round", "stroke-linecap": "round",
    "stroke-dasharray": dash > 0 && ["1 5", "5 5", "2 5", "9 5 2 5"][dash % 4] };
  return [svg("path", { d: path, fill: "none", ...stroke }), dots.map(([at, value, r = 2.6, says]) =>
    svg("circle", { cx: x(at), cy: y(value), r, fill: color }, says && svg("title", {}, says)))];
}
function ends({ points, color }, x, y, index) {
  const known = points.filter(point => point[1] !== null), list = [];
  if (!known.length) return list;
  if (known[0][0] === 0) list.push([known[0], "start", index ? -9 : 19]);
  if (last(known)[0] !== 0) list.push([last(known), "end", -9]);
  return list.map(([[at, value], anchor, below]) => [
    svg("circle", { cx: x(at), cy: y(value), r: 4.2, fill: "var(--card)", stroke: color, "stroke-width": 2.4 }),
    svg("text", { class: "mark", x: x(at) + (anchor === "start" ? 9 : -9), y: y(value) + below, "text-anchor": anchor,
      style: `fill:${color}` }, `${anchor === "start" ? "warm start" : "final"} ${value.toFixed(3)}`)]);
}
function hover(box, picture, x, options) {
  const lines = options.lines.filter(line => line.label), tip = el("div", { class: "tip" });
  const ruler = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--faint)", "stroke-dasharray": "3 3",
    visibility: "hidden" });
  const places = [...new Set(lines.flatMap(line => line.points.map(point => point[0])))];
  picture.append(ruler);
  box.append(tip);
  picture.addEventListener("pointermove", event => {
    const frame = picture.getBoundingClientRect(), at = (event.clientX - frame.left) / frame.width * WIDTH;
    const place = places.reduce((best, each) => Math.abs(x(each) - at) < Math.abs(x(best) - at) ? each : best);
    fill(ruler, { x1: x(place), x2: x(place), visibility: "visible" }, []);
    const values = lines.map(({ label, color, points }) => {
      const point = points.find(each => each[0] === place);
      return point && row([el("span", { style: `color:${color}` }, label), (options.y || show)(point[1])]);
    });
    tip.replaceChildren(el("b", {}, options.x ? options.x(place) : `step ${place}`), el("table", {}, values));
    tip.style.display = "block";
    const left = x(place) / WIDTH * frame.width + 24;
    tip.style.left = `${Math.max(4, left + tip.offsetWidth > frame.width ? left - tip.offsetWidth - 24 : left)}px`;
    tip.style.top = `${frame.top - box.getBoundingClientRect().top + 10}px`;
  });
  picture.addEventListener("pointerleave", () => {
    tip.style.display = "none";
    ruler.setAttribute("visibility", "hidden");
  });
}

/* ---- Shares ---- */
const percent = (value, digits = 1) => none(value) ? "–" : `${(100 * value).toFixed(digits)} %`;
function interval(low, high, mark, label) {  // on a line from 0 to 1, with a point on it
  const x = value => 10 + 580 * value;
  return svg("svg", { viewBox: "0 0 600 64", role: "img", "aria-label": label },
    svg("line", { x1: x(0), x2: x(1), y1: 24, y2: 24, stroke: "var(--line)", "stroke-width": 2 }),
    svg("line", { x1: x(low), x2: x(high), y1: 24, y2: 24, stroke: "var(--c0)", "stroke-width": 8, opacity: .35 }),
    svg("circle", { cx: x(mark), cy: 24, r: 7, fill: "var(--c0)" }),
    [0, .25, .5, .75, 1].map(tick => svg("text", { x: x(tick), y: 52,
      "text-anchor": tick === 0 ? "start" : tick === 1 ? "end" : "middle" }, percent(tick, 0))));
}
const parts = list => [  // of [name, count, color, what it means]
  el("div", { class: "parts" }, list.map(([name, count, color]) =>
    count > 0 && el("i", { style: `flex:${count};background:${color}`, title: `${name}: ${count}` }))),
  el("div", { class: "legend" }, list.map(([name, count, color, meaning]) => el("span", { title: meaning },
    el("i", { class: "box", style: `background:${color}` }), `${name} `, el("b", {}, show(count)))))];
