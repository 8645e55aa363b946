"""What the cheapest policies score: a panel of cheats per family, beside random and the expert.

    python benchmarks/cheats.py [--family webshop_lite ...] [--episodes 1000] [--write]

Every cheat plays the same episodes (seeds from 0, val split) at every difficulty in both languages, through gym.make
with its default wrappers. A cheat is a function from what has been seen so far, the observation and info of the reset
and of every step, to an action; it may know the words of a family, but neither the ground truth nor the catalog.
`--write` puts the table into docs/environments/cheats.md. The last line is one JSON object:
{family: {policy: {"<lang>:<difficulty>": success}}}.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym

import skyrl_gym  # noqa: F401  # registers the environments
from skyrl_gym.bm25 import terms
from skyrl_gym.envs.webshop_lite.generate import words

History = list[tuple[str, dict[str, Any]]]
Policy = Callable[[History], str]
PAGE = Path(__file__).parents[1] / "docs/environments/cheats.md"
LANGS = ("en", "zh")


def at_random(history: History) -> str:
    """Any of the admissible actions, drawn from the task and the number of the step."""
    return random.Random(f"{history[0][0]} {len(history)}").choice(history[-1][1]["admissible_actions"])


# The shop: what its pages show.


class Wish(NamedTuple):
    """The instruction, its parts between commas, and the price limit."""

    text: str
    parts: list[str]
    limit: float


class Result(NamedTuple):
    code: str
    title: str
    price: float


def shown(observation: str) -> list[str]:
    return observation.split(" [SEP] ")


def wish(history: History) -> Wish:
    text = shown(history[0][0])[1]
    return Wish(text, re.split(r"[,，] ?", text)[:-1], float(re.findall(r"\d+\.\d\d", text)[-1]))


def results(observation: str) -> list[Result]:
    found = shown(observation)
    places = [place for place, text in enumerate(found) if re.fullmatch(r"B\d{9}", text)]
    return [Result(found[n], found[n + 1], float(found[n + 2].strip("$"))) for n in places]


def groups(observation: str, info: dict[str, Any]) -> list[tuple[list[str], bool]]:
    """The values of each option of an item page, and whether one of them is chosen."""
    found: list[tuple[list[str], bool]] = []
    for text in shown(observation)[2:]:
        value = re.sub(r" \(chosen\)$|（已选）$", "", text)
        if value.lower() not in info["clickables"][2:-4]:
            found.append(([], False))
        else:
            found[-1] = ([*found[-1][0], value], found[-1][1] or value != text)
    return [each for each in found if each[0]]


def tried(history: History) -> int:
    """How many products were opened before."""
    pages = [info["page"] for _, info in history]
    return sum(pair == ("results", "item") for pair in pairwise(pages))


# The shop: what a cheat does with them.

GIVE_UP = "this product is not it"


def shopper(
    query: Callable[[Wish], str],
    ranked: Callable[[Wish, list[Result]], list[Result]],
    choose: Callable[[Wish, list[str]], str | None],
) -> Policy:
    """Searches once, opens the results in its own order, chooses options, buys; reads no page of a product.

    `choose` gives one of an option's values, None to leave it alone, or GIVE_UP to go on to the next result.
    """

    def policy(history: History) -> str:
        (observation, info), asked = history[-1], wish(history)
        if info["page"] == "search":
            return f"search[{query(asked)}]"
        if info["page"] == "results":
            order = ranked(asked, results(observation))
            return f"click[{order[min(tried(history), len(order) - 1)].code if order else info['clickables'][0]}]"
        wanted = [choose(asked, values) for values, chosen in groups(observation, info) if not chosen]
        if GIVE_UP in wanted:
            return f"click[{info['clickables'][1]}]"
        return f"click[{next(filter(None, wanted), info['clickables'][-1])}]"

    return policy


def instruction(asked: Wish) -> str:
    return asked.text


def first_part(asked: Wish) -> str:
    """What kind of product, in the instruction's words."""
    return asked.parts[0]


def as_listed(asked: Wish, found: list[Result]) -> list[Result]:
    return found


def in_price(asked: Wish, found: list[Result]) -> list[Result]:
    return [each for each in found if each.price <= asked.limit] or found


def by_title(asked: Wish, found: list[Result]) -> list[Result]:
    """Those within the limit, most words shared with the instruction first."""
    return sorted(in_price(asked, found), key=lambda each: -len({*terms(each.title)} & {*terms(asked.text)}))


def cheapest(asked: Wish, found: list[Result]) -> list[Result]:
    return sorted(found, key=lambda each: each.price)


def dearest(asked: Wish, found: list[Result]) -> list[Result]:
    return sorted(in_price(asked, found), key=lambda each: -each.price)


def majority(asked: Wish, found: list[Result]) -> list[Result]:
    """Those within the limit that have the title which most of the results have; any of them, drawn from the task."""
    title = Counter(each.title for each in found).most_common(1)[0][0] if found else ""
    same = [each for each in in_price(asked, found) if each.title == title] or found
    return random.Random(asked.text).sample(same, len(same))


def copied(asked: Wish, values: list[str]) -> str | None:
    """The value that the instruction names."""
    return next((value for value in values if value.lower() in asked.text.lower()), None)


def copied_or_first(asked: Wish, values: list[str]) -> str | None:
    return copied(asked, values) or values[0]


def copied_or_any(asked: Wish, values: list[str]) -> str | None:
    return copied(asked, values) or random.Random(asked.text).choice(values)


# The shop: cheats that have learned all of its words, of titles, options and pages, but read no page of a product.


@cache
def meanings(what: str) -> dict[str, str]:
    """Of goals' phrases in both languages: the tag's, kind's or option value's name, or what pages say."""
    kinds = [kind for line in words()["lines"] for kind in line["kinds"]]
    facets = [value for facet in words()["facets"].values() for value in facet["values"]]
    values = [value for _, group in words()["options"].values() for value in group]
    named = {
        "tag": [(tag[0], tag[2]) for tag in words()["tags"]],
        "kind": [((kind[0][0], kind[0][1].replace(" ", "")), kind[3]) for kind in kinds],
        "option": values,
        "page": [(["|".join(say) for say in zip(*value[1], strict=True)], value[2]) for value in facets],
        "pack": [((str(number), str(number)), phrases) for number, phrases in words()["pack"]["values"]],
    }[what]
    return {phrase[side]: name[side] for name, phrases in named for phrase in phrases for side in (0, 1)}


def understood(asked: Wish, what: str) -> list[str]:
    return [name for phrase, name in meanings(what).items() if phrase in asked.text]


def title(asked: Wish) -> str:
    parts = [understood(asked, what)[0] for what in ("tag", "kind")]
    return ("" if "，" in asked.text else " ").join(parts)


def title_and_page(asked: Wish) -> str:
    return " ".join([title(asked), *understood(asked, "page")])  # which are parted by "|"


def titled(asked: Wish, found: list[Result]) -> list[Result]:
    return [each for each in in_price(asked, found) if each.title.lower() == title(asked)]


def meant(asked: Wish, values: list[str]) -> str | None:
    """The value that is meant; of packs, whose meaning only a page tells, the first."""
    known = {*meanings("option").values()}
    if values[0].lower() not in known:
        return values[0]
    return next((value for value in values if value in understood(asked, "option")), GIVE_UP)


def shared_words(asked: Wish, pages: list[str]) -> int:
    """How many words of the instruction a product's pages have."""
    return len({*terms(" ".join(pages))} & {*terms(" ".join(asked.parts))} - {*words()["stop_words"]})


def all_pages(
    score: Callable[[Wish, list[str]], int], choose: Callable[[Wish, list[str], list[str]], str | None]
) -> Policy:
    """Opens every page of the four products of the right title, and buys the one whose pages score most."""

    def policy(history: History) -> str:
        (observation, info), asked = history[-1], wish(history)
        if info["page"] == "search":
            return f"search[{title(asked)}]"
        order, buttons = titled(asked, results(history[1][0]))[:4], info["clickables"]
        number, place = divmod(len(history) - 2, 8)
        if number < len(order):  # opens it, reads a page and goes back, three times, and goes back to the results
            page = buttons[1] if place in (2, 4, 6, 7) else buttons[place // 2 - 4]
            return f"click[{page if place else order[number].code}]"
        read = [history[8 * n + 2 : 8 * n + 10] for n in range(len(order))]
        pages = [[" ".join(shown(text)[2:]) for text, info in each if info["page"] != "item"][:3] for each in read]
        scores = [
            (GIVE_UP not in [meant(asked, values) for values, _ in groups(*each[0])], score(asked, texts))
            for each, texts in zip(read, pages, strict=True)
        ]
        best = scores.index(max(scores))
        if info["page"] == "results":
            return f"click[{order[best].code}]"
        wanted = [choose(asked, values, pages[best]) for values, chosen in groups(observation, info) if not chosen]
        return f"click[{[*wanted, buttons[-1]][0]}]"

    return policy


CHEATS: dict[str, dict[str, Policy]] = {
    "webshop_lite": {
        "whole instruction, first result, options it names": shopper(instruction, as_listed, copied),
        "whole instruction, first result, first options": shopper(instruction, as_listed, copied_or_first),
        "best title within the price, options it names": shopper(instruction, by_title, copied),
        "best title within the price, any options": shopper(instruction, by_title, copied_or_any),
        "kind of product, cheapest, first options": shopper(first_part, cheapest, copied_or_first),
        "kind of product, dearest within the price, first options": shopper(first_part, dearest, copied_or_first),
        "kind of product, most frequent title, any options": shopper(first_part, majority, copied_or_any),
        "knows all words, first of the right title": shopper(title, titled, meant),
        "knows all words, cheapest of the right title": shopper(title, lambda *x: cheapest(x[0], titled(*x)), meant),
        "knows all words, searches for the pages' own": shopper(title_and_page, titled, meant),
        "knows titles and options, matches pages by words": all_pages(shared_words, lambda *x: meant(*x[:2])),
    },
}
"""Of each family: what it is called in the table, and the cheat."""


# The table.


def success(family: str, difficulty: int, lang: str, policy: Policy | None, episodes: int) -> float:
    """The share of episodes that a policy solves; None is the expert."""
    env: Any = gym.make(f"skyrl/{family}-v0", split="val", difficulty=difficulty, lang=lang)
    solved = 0
    for seed in range(episodes):
        history, over = [env.reset(seed=seed)], False
        while not over:
            action = policy(history) if policy else env.unwrapped.expert_action()
            observation, _, terminated, truncated, info = env.step(action)
            history.append((observation, info))
            over = terminated or truncated
        solved += info["success"]
    return solved / episodes


def measured(family: str, episodes: int) -> dict[str, dict[str, float]]:
    """{policy: {"<lang>:<difficulty>": success}}, of random, the cheats and the expert."""
    levels = gym.make(f"skyrl/{family}-v0").unwrapped.choices["difficulty"]
    found: dict[str, dict[str, float]] = {}
    for name, policy in {"random": at_random, **CHEATS[family], "expert": None}.items():
        cells = {
            f"{lang}:{level}": success(family, level, lang, policy, episodes) for lang in LANGS for level in levels
        }
        found[name] = cells
        print(f"{family:<16}{name:<60}" + "".join(f"{cell:>8.3f}" for cell in cells.values()), flush=True)
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    cells = list(next(iter(found.values())))
    lines = [["policy", *(cell.replace(":", ", ") for cell in cells)], ["---", *("---:" for _ in cells)]]
    lines += [[name, *(f"{scores[cell]:.3f}" for cell in cells)] for name, scores in found.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(family: str, found: dict[str, dict[str, float]], episodes: int) -> None:
    """Puts the family's section into the page, in place of the one there."""
    head, *sections = re.split(r"(?m)^(?=## )", PAGE.read_text(encoding="utf-8"))
    kept = [each for each in sections if not each.startswith(f"## {family}\n")]
    said = f"Success in {episodes:,} episodes of the val split, by language and difficulty."
    new = f"## {family}\n\n{said}\n\n{table(found)}\n\n"
    PAGE.write_text(f"{head.rstrip()}\n\n{''.join(sorted([*kept, new])).rstrip()}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="What cheats, random and the expert score.")
    parser.add_argument("--family", nargs="+", choices=CHEATS, default=list(CHEATS))
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--write", action="store_true", help="put the table into docs/environments/cheats.md")
    args = parser.parse_args()
    result = {}
    for family in args.family:
        result[family] = measured(family, args.episodes)
        if args.write:
            write(family, result[family], args.episodes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
