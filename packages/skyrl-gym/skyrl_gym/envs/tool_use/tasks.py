"""Made-up worlds and the tasks about them, from the words and sentences in world.json.

A fact of an entity is a number, another entity, or a nickname. A chain asks for a fact by way of others: "the
population of the city in which the founder of X was born". Each split has a world and names of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product, zip_longest
from random import Random
from typing import Any

from skyrl_gym.data import beside
from skyrl_gym.tools.calculator import calculate
from skyrl_gym.tools.search import Corpus

data = partial(beside, __file__, "world.json")
LANGS = ("en", "zh")
Plan = list[list[list[Any]]]
"""The expert's rounds of calls [tool, args]; the calls of a round do not need each other's results."""
_NUMBERS = {"train": range(8000), "val": range(8000, 9000), "test": range(9000, 10_000)}


@dataclass(slots=True, eq=False)
class Entity:
    """Example: a city with names ["Velmora", "维尔莫拉"] and facts {"population": 52100, "river": Entity(...), ...}"""

    kind: str
    names: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    says: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    """The sentences of its article, in each language: its own, the first one first, then those that name it."""


Chain = tuple[Entity, tuple[str, ...], bool]
"""Where it starts, the facts to follow, and whether the start is given by its nickname."""


@cache
def world(split: str) -> list[Entity]:
    rng, kinds = Random(f"skyrl_gym tool_use 2 {split}"), data()["kinds"]
    groups = {kind: [Entity(kind, x) for x in _names(rule, rule["count"], split)] for kind, rule in kinds.items()}
    for kind, group in groups.items():
        for name, rule in kinds[kind]["fields"].items():
            targets = rng.sample(groups[rule["to"]], len(groups[rule["to"]])) if "to" in rule else []
            nicknames = _names(rule, kinds[kind]["count"], split) if "pools" in rule else []
            for number, entity in enumerate(group):
                place = rng.randint(min(1, len(entity.facts)), len(entity.facts))
                if targets:
                    fitting = [to for to in targets if "where" not in rule or to.facts[rule["where"]] is entity]
                    value: Any = fitting[number % len(fitting)]
                elif nicknames:
                    value = nicknames[number]
                else:
                    start = entity.facts[rule["after"]].facts["born"] if "after" in rule else 0
                    value = start + rng.randint(*rule["range"])
                for lang, says in enumerate(entity.says):
                    sentence = rule["says"][lang].format(name=entity.names[lang], value=_shown(value, lang))
                    says.insert(place, sentence)
                    if targets:
                        value.says[lang].append(rule["back"][lang].format(value=entity.names[lang]))
                entity.facts[name] = value
    return [entity for group in groups.values() for entity in group]


@cache
def corpus(language: str, split: str) -> Corpus:
    lang = LANGS.index(language)

    def articles() -> list[tuple[str, str]]:
        return [(entity.names[lang], ("" if lang else " ").join(entity.says[lang])) for entity in world(split)]

    return Corpus(articles, (corpus, (language, split)))


def walk(chain: Chain, lang: int) -> tuple[str, Plan, Any]:
    """The phrase that asks for the chain's last fact, the calls that find it, and the fact."""
    here, path, by_nick = chain
    phrase, plan = here.names[lang], []
    if by_nick:
        phrase = here.facts["nick"][lang]
        plan.append([["search", {"query": phrase}]])
        phrase = data()["kinds"][here.kind]["fields"]["nick"]["asks"][lang].format(phrase)
    for name in path:
        plan.append([["wiki", {"title": here.names[lang]}]])
        phrase = data()["kinds"][here.kind]["fields"][name]["asks"][lang].format(phrase)
        here = here.facts[name]
    return phrase, plan, here


@cache
def chains(difficulty: int, split: str) -> list[Chain]:
    """The answer of none is in its phrase. Facts of one name lie side by side."""
    level, found = data()["levels"][str(difficulty)], []
    for (hops, by_nick), entity in product(level["chains"], world(split) if level["chains"] else ()):
        for path in _paths(entity.kind, hops) if not by_nick or "nick" in entity.facts else ():
            walks = [walk((entity, path, by_nick), lang) for lang in range(len(LANGS))]
            fits = isinstance(walks[0][2], int) or not level["computations"]
            if fits and all(_shown(value, lang) not in phrase for lang, (phrase, _, value) in enumerate(walks)):
                found.append((entity, path, by_nick))
    Random(f"chains {difficulty}").shuffle(found)
    return sorted(found, key=lambda chain: chain[1][-1])


def _pair(number: int) -> tuple[int, int]:
    # The numbers of a computation without facts; the pairs differ, for 899 and 300 are coprime.
    return 101 + number % 899, 401 + number * 7 % 300


@cache
def _pairs(split: str) -> list[tuple[int, int]]:
    # Those of test that train has the other way round are left out: their products are the same.
    turned = {_pair(number)[::-1] for number in _NUMBERS["train"]} if split == "test" else set()
    return [pair for pair in map(_pair, _NUMBERS[split]) if pair not in turned]


def _computations(difficulty: int) -> list[tuple[str, Any]]:
    return [(group, rule) for group in data()["levels"][str(difficulty)]["computations"] for rule in data()[group]]


def count(difficulty: int, split: str) -> int:
    return len(chains(difficulty, split) or _pairs(split)) * max(len(_computations(difficulty)), 1)


def draft(difficulty: int, split: str, lang: int, index: int) -> tuple[str, Plan, str]:
    """The text, the plan and the answer of a task: the last fact of a chain, or a computation with two of them."""
    level, texts = data()["levels"][str(difficulty)], data()["texts"]
    options, computations = chains(difficulty, split), _computations(difficulty)
    if not computations:
        phrase, plan, value = walk(options[index], lang)
        return texts["find"][lang].format(phrase), plan, _shown(value, lang)
    index, kind = divmod(index, len(computations))
    group, rule = computations[kind]
    a, b = _pair(index) if options else _pairs(split)[index]
    phrase, plan, a = walk(options[index], lang) if options else (str(a), [], a)
    other, more, b = walk(options[(index + 1) % len(options)], lang) if "both" in level else (str(b), [], b)
    rounds = [(one or []) + (two or []) for one, two in zip_longest(plan, more)]
    text = texts["let"][lang].format(a=phrase, b=other) + rule["asks"][lang]
    code = rule["code"].format(a=a, b=b)
    if group == "sums":
        return text, [*rounds, [["calculator", {"expression": code}]]], calculate(code)
    answer = str(eval(code, {"math": math}))  # a line of world.json with two whole numbers put in
    return text, [*rounds, [["python_exec", {"code": f"import math\n\nprint({code})"}]]], answer


def _paths(kind: str, hops: int) -> Iterator[tuple[str, ...]]:
    for name, rule in data()["kinds"][kind]["fields"].items():
        if hops == 1 and "asks" in rule and "pools" not in rule:
            yield (name,)
        elif hops > 1 and "to" in rule:
            yield from ((name, *rest) for rest in _paths(rule["to"], hops - 1))


def _names(rule: dict[str, Any], count: int, split: str) -> list[list[str]]:
    pools = [[word.split("=") for word in data()["pools"][pool].split()] for pool in rule["pools"]]
    combinations = list(product(*pools))
    Random(f"names {rule['pools']}").shuffle(combinations)
    part = -(-count // 4)
    mine = {"train": slice(count), "val": slice(count, count + part), "test": slice(count + part, count + 2 * part)}
    chosen = combinations[mine[split]]
    return [[rule["name"][lang].format(*(word[lang] for word in words)) for lang in (0, 1)] for words in chosen]


def _shown(value: Any, lang: int) -> str:
    return str(value) if isinstance(value, int) else (value.names if isinstance(value, Entity) else value)[lang]
