// What a person does with the page of test_viewer.py, in any engine that has a document; says what was then to be seen.
const all = selector => [...document.querySelectorAll(selector)];
const text = selector => all(selector).map(node => node.textContent);
async function until(what, condition) {
  for (let k = 0; k < 1000; k++) {
    if (condition()) return;
    await new Promise(done => setTimeout(done, 10));
  }
  throw new Error(`waited ten seconds for ${what}`);
}
function choose(id, value, event = "change") {
  const input = document.getElementById(id);
  input.value = value;
  input.dispatchEvent(new Event(event));
}
const press = key => dispatchEvent(new KeyboardEvent("keydown", { key }));
const count = () => text("#count")[0];
const ids = () => all("#list a").map(line => line.children[1].textContent);
const open = async id => {
  location.hash = `#${id}`;
  await until(id, () => text("h2").join() === id && all(".t").length > 0);
};
function filtered(id, value, event) {
  choose(id, value, event);
  const found = ids();
  choose(id, "", event);
  return found;
}
const shades = () => all(".t").map(node => [node.textContent, node.getAttribute("class").trim(), node.style.getPropertyValue("--a")]);
function hover(number) {
  all(".t")[number].dispatchEvent(new Event("pointerenter"));
  const rows = all("#tip td").map(node => node.textContent);
  return [text("#tip code")[0], ...rows];
}

async function clicks() {
  const seen = { start: [count(), ids()] };
  seen.filters = {
    env: filtered("env", "webshop_lite-v0"), difficulty: filtered("difficulty", "2"), outcome: filtered("outcome", "failed"),
    stop: filtered("stop", "env_error"), step: filtered("step", "1"), low: filtered("low", "0.5", "input"),
    high: filtered("high", "-0.5", "input"), search: filtered("search", "SHOP#9", "input"),
  };
  const head = name => all("#heads button").find(node => node.getAttribute("title") === `sort by ${name}`).dispatchEvent(new Event("click"));
  head("reward");
  const up = ids();
  head("reward");
  seen.sorted = [up, ids(), document.activeElement.textContent];
  head("reward");

  press("ArrowDown");
  await until("the first trajectory", () => text("h2").length === 1);
  const first = text("h2")[0];
  press("ArrowDown");
  await until("the second trajectory", () => text("h2")[0] !== first);
  seen.down = [first, text("h2")[0], location.hash];

  await open("2/0/0");
  seen.tokens = shades();
  seen.tip = hover(2);
  seen.focus = [document.activeElement.getAttribute("id")];
  for (const fold of all("#detail details")) fold.open = !fold.open;
  seen.folds = all("#detail details").map(fold => fold.open);
  choose("shade", "logprob");
  seen.folds = [seen.folds, all("#detail details").map(fold => fold.open)];
  seen.focus.push(document.activeElement.getAttribute("id"));
  seen.logprob = shades();
  choose("shade", "advantage");
  seen.texts = text("#detail pre");
  seen.about = text(".about");
  press("ArrowRight");
  press("ArrowRight");
  seen.turn = all(".here").map(node => node.getAttribute("data-turn"));
  press("ArrowLeft");
  seen.turn.push(...all(".here").map(node => node.getAttribute("data-turn")));

  seen.others = [...document.getElementById("other").children].map(node => node.textContent);
  choose("other", document.getElementById("other").children[1].value);
  await until("the comparison", () => all("#difference").length === 1);
  seen.compared = [text("h2"), text("#difference")[0], text(".differs"), all(".first-difference").length, location.hash];
  press("Escape");
  await until("the end of the comparison", () => text("h2").length === 1 && all("#difference").length === 0);
  seen.back = location.hash;

  location.hash = "#2/1/0";
  await until("the failed episode", () => text("h2")[0] === "2/1/0");
  seen.failed = [text("pre.error"), text(".chip")];
  location.hash = "#9/9/9";
  await until("the sentence", () => all(".empty").length === 1);
  seen.unknown = [text(".empty")[0], all(".empty .back").map(back => back.getAttribute("href"))];
  seen.title = document.title;
  seen.pwned = typeof globalThis.pwned;
  return seen;
}
