// node viewer_dom.js PAGE CLICKS: runs a page's script and the clicks on a document of its own, as small as they need,
// for machines without a browser, and prints what clicks() says. No layout, no events that bubble.
const { readFileSync } = require("node:fs");

class Element extends EventTarget {
  constructor(tag) {
    super();
    Object.assign(this, { tagName: tag.toUpperCase(), attributes: new Map(), nodes: [], scrollTop: 0, clientHeight: 600, offsetWidth: 100, offsetHeight: 100 });
    const values = new Map();
    this.style = { setProperty: (name, value) => values.set(name, value), getPropertyValue: name => values.get(name) ?? "" };
    const names = () => (this.getAttribute("class") ?? "").split(/\s+/).filter(Boolean);
    this.classList = {
      contains: name => names().includes(name),
      toggle: (name, on) => this.setAttribute("class", [...names().filter(each => each !== name), ...(on ? [name] : [])].join(" ")),
    };
  }
  append(...nodes) { this.nodes.push(...nodes.map(node => node instanceof Element ? node : String(node))); }
  replaceChildren(...nodes) { this.nodes = []; this.append(...nodes); }
  setAttribute(name, value) { this.attributes.set(name, String(value)); }
  getAttribute(name) { return this.attributes.get(name) ?? null; }
  hasAttribute(name) { return this.attributes.has(name); }
  getBoundingClientRect() { return { left: 0, top: 0, bottom: 0 }; }
  scrollIntoView() {}
  focus() { document.activeElement = this; }
  get open() { return this.hasAttribute("open"); }
  set open(on) { on ? this.setAttribute("open", "") : this.attributes.delete("open"); }
  get children() { return this.nodes.filter(node => node instanceof Element); }
  get textContent() { return this.nodes.map(node => node instanceof Element ? node.textContent : node).join(""); }
  set textContent(text) { this.replaceChildren(text); }
  get value() { return this.chosen ?? (this.tagName === "SELECT" ? this.children[0]?.value : this.getAttribute("value")) ?? ""; }
  set value(value) { this.chosen = String(value); }
  matches(part) {
    const [, tag, id, name, attribute, value] = /^(\w+)?(?:#([\w-]+))?(?:\.([\w-]+))?(?:\[([\w-]+)="(.*)"\])?$/.exec(part);
    return (!tag || this.tagName === tag.toUpperCase()) && (!id || this.getAttribute("id") === id)
      && (!name || this.classList.contains(name)) && (!attribute || this.getAttribute(attribute) === value);
  }
  querySelectorAll(selector) {
    const [part, ...rest] = selector.split(" "), below = this.children.flatMap(node => [node, ...node.querySelectorAll("*")]);
    const found = part === "*" ? below : below.filter(node => node.matches(part));
    return rest.length ? found.flatMap(node => node.querySelectorAll(rest.join(" "))) : found;
  }
}

const html = readFileSync(process.argv[2], "utf8"), root = new Element("html"), view = new EventTarget();
const byId = new Map();
function place(tag, id, text) {
  const node = new Element(tag);
  if (id) node.setAttribute("id", id);
  if (text !== undefined) node.append(text);
  root.append(node);
  byId.set(id, node);
}
for (const [, id, text] of html.matchAll(/<script[^>]* id="([\w-]+)">([^<]*)<\/script>/g)) place("script", id, text);
globalThis.document = {
  title: /<title>(.*)<\/title>/.exec(html)[1], body: root, createElement: tag => new Element(tag), createElementNS: (space, tag) => new Element(tag),
  querySelectorAll: part => root.querySelectorAll(part),
  querySelector: part => root.querySelectorAll(part)[0] ?? null, getElementById: id => byId.get(id) ?? root.querySelectorAll(`#${id}`)[0] ?? null,
};
let hash = "";
globalThis.location = {
  get hash() { return hash; },
  set hash(value) { hash = value === "#" ? "" : value; setTimeout(() => view.dispatchEvent(new Event("hashchange"))); },
  replace(value) { this.hash = value; },
};
globalThis.KeyboardEvent = class extends Event { constructor(type, { key }) { super(type); this.key = key; } };
Object.assign(globalThis, { innerWidth: 1400, innerHeight: 900, addEventListener: view.addEventListener.bind(view), dispatchEvent: view.dispatchEvent.bind(view) });
const own = html.slice(html.lastIndexOf("<script>") + 8, html.lastIndexOf("</script>"));
new Function(`${own}\n${readFileSync(process.argv[3], "utf8")}\nreturn clicks();`)().then(seen => console.log(JSON.stringify(seen)));
