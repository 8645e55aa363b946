"""Policies that do not do what a task asks for. A benchmark is worth what the best of them earns.

A policy is a function from what has been seen so far, the observation and info of the reset and of every step, to an
action. One that must know what it did before decides once more for every step since the reset.

The line: a cheat may know the words of a family, but neither the ground truth nor the catalog. One of the shop reads no
page of a product, or matches its words with the instruction's. One of alfworld_lite has one recipe for every task: it
knows the words of the goal, the admissible commands and which of them it gave; it does not read what is seen, and opens
no door. One that also lights, heats, cools and cleans where it can does what the types of tasks ask for: it is no
cheat, but a player without doors. One of questions answers with a constant (the best one, found with hindsight; of
puzzles the best for each kind) or with what stands in the question; one that computes with its numbers, solves. Of
tool_use it may ask the search for the whole question, and copies from one place of the first article. Those that write
programs and queries are in cheat_programs.py.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import cycle, pairwise
from typing import Any, NamedTuple

from skyrl_gym.baseline import History
from skyrl_gym.bm25 import terms
from skyrl_gym.envs.webshop_lite.generate import words
from skyrl_gym.tools.search import LONGEST_QUERY

Policy = Callable[[History], str]


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


# The household.


def first_admissible(history: History) -> str:
    return str(history[-1][1]["admissible_actions"][0])


def goal_words(history: History) -> set[str]:
    return set(re.findall(r"[a-z]+", history[0][0].rpartition("\n")[2].lower()))


def most_words_of_the_goal(history: History) -> str:
    """Of the commands that it gave least often, the first that shares most words with the goal."""
    wanted, given, action = goal_words(history), Counter[str](), ""
    for _, info in history:
        action = min(info["admissible_actions"], key=lambda each: (given[each], -len(wanted & set(each.split()))))
        given[action] += 1
    return action


def walker(also: tuple[str, ...] = ()) -> Policy:
    """From place to place in their order; takes what the goal names, goes where the goal says and puts it down."""

    def policy(history: History) -> str:
        wanted, given, action = goal_words(history), set[str](), ""
        tour = cycle(each for each in history[0][1]["admissible_actions"] if each.startswith("go to "))
        for _, info in history:
            steps = towards(wanted, info["admissible_actions"], given, also)
            action = steps[0] if steps else next(tour)
            given = given | {action} if action.startswith("go ") else {action}
        return action

    return policy


def towards(wanted: set[str], actions: list[str], given: set[str], also: tuple[str, ...]) -> list[str]:
    """What a walker has to do here, most urgent first; nothing that it did since it last held or put down a thing."""
    fresh = [(action, *action.split()) for action in actions if action not in given]
    steps = [action for action, *words in fresh if also and action.startswith(also) and words[1] in wanted]
    steps += [a for a, *words in fresh if words[0] == "take" and words[1] in wanted and words[4] not in wanted]
    steps += [action for action, *words in fresh if words[0] == "move" and words[4] in wanted]
    holding = not any(action.startswith("take ") for action in actions)
    return steps + [action for action, *words in fresh if holding and words[0] == "go" and words[2] in wanted]


# Questions.


def answer(text: str) -> str:
    return f"\\boxed{{{text}}} <answer>{text}</answer>"


def copied_number(pick: Callable[[list[str]], str]) -> Policy:
    """A number of the question; of a puzzle, the people in the order of their names."""

    def policy(history: History) -> str:
        first = history[0][0]
        numbers = re.findall(r"\d+(?:\.\d+)?", first.split("\\boxed")[0])
        names = re.match(r"(?:Each of )?(.+?)(?: ran a | is either | are invited|参加|每人|受邀)", first)
        return answer(pick(numbers) if numbers else re.sub(" and |、|和", ", ", names[1] if names else "none"))

    return policy


def kind(question: str) -> str:
    return next((word for word in ("knave", "无赖", "race", "赛跑", "party", "聚会") if word in question), "other")


def best_constants(tasks: list[tuple[str, str]]) -> Policy:
    """Of questions and their answers: for each kind of question, the answer that is right most often."""
    truths: dict[str, Counter[str]] = {}
    for question, truth in tasks:
        truths.setdefault(kind(question), Counter())[truth] += 1
    return lambda history: answer(truths[kind(history[0][0])].most_common(1)[0][0])


def found(place: Callable[[str], int]) -> Policy:
    """The title of the first article that a search for the whole question finds (place 0), or a number in it."""

    def policy(history: History) -> str:
        if len(history) == 1:
            call = {"tool": "search", "args": {"query": history[0][0][:LONGEST_QUERY]}}
            return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"
        title, _, article = history[1][0].removeprefix("<tool_response>\n").partition("\n")[0].partition(": ")
        answers = [title, *re.findall(r"\d+", article)]
        return answer(dict(enumerate(answers)).get(place(history[0][0]), "none"))

    return policy


NUMBERS = "Find the (year|population|area|length|greatest depth|number) |(年份|人口|人数|页数|公里）|分米）)。"
"""How questions end or begin that ask for a number."""


def first_of_its_type(question: str) -> int:
    """The first number where a number is asked for, else the title."""
    return 1 if re.search(NUMBERS, question) else 0


QUESTIONS: dict[str, Policy] = {
    "first number of the question": copied_number(lambda numbers: numbers[0]),
    "last number of the question": copied_number(lambda numbers: numbers[-1]),
    "largest number of the question": copied_number(lambda numbers: max(numbers, key=float)),
}
CHEATS: dict[str, dict[str, Policy]] = {
    "alfworld_lite": {
        "first admissible command": first_admissible,
        "least given command, most words of the goal": most_words_of_the_goal,
        "walk, take what the goal names, put it where it says": walker(),
    },
    "arithmetic": QUESTIONS,
    "logic": QUESTIONS,
    "tool_use": {
        **QUESTIONS,
        "search for the question, title of the first article": found(lambda _: 0),
        "search for the question, first number of the first article": found(lambda _: 1),
        "search for the question, second number of the first article": found(lambda _: 2),
        "search for the question, third number of the first article": found(lambda _: 3),
        "search for the question, title or first number, as is asked": found(first_of_its_type),
    },
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
    "words": QUESTIONS,
}
"""Of each family, those of text_math one by one: what it is called in the table, and the cheat."""

PLAYERS: dict[str, dict[str, Policy]] = {
    "alfworld_lite": {
        "player without doors: also lights, heats, cools and cleans": walker(("use ", "heat ", "cool ", "clean "))
    }
}
"""Those beyond the line: in the table, outside the bars."""
