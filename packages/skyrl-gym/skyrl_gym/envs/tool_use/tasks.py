"""A made-up world and the tasks about it, from the word lists and sentences in world.json.

Each fact of an entity is a number, another entity or a nickname. It is stated in the entity's article, and, where it
names another entity, in that one's article too. A chain asks for a fact by way of others: "the population of the city in
which the founder of X was born". The chains of a difficulty are cut into splits: no chain of one is in another.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain as joined
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

from skyrl_gym.envs.tool_use import programs
from skyrl_gym.tools.calculator import calculate
from skyrl_gym.tools.search import Corpus

LANGS = ("en", "zh")
Plan = list[list[list[Any]]]
"""The expert's rounds of calls [tool, args]; the calls of a round do not need each other's results."""
Draft = tuple[str, Plan, str]
"""A task's text, plan and answer."""

_GENERATED = {"train": range(80_000), "val": range(80_000, 90_000), "test": range(90_000, 100_000)}
_HOPS = {2: ((1, False),), 3: ((2, False), (1, True)), 4: ((1, False), (2, False)), 6: ((1, True), (2, True))}
"""By difficulty: how many facts a chain has, and whether it begins at a nickname."""
_STRIDE = 2_654_435_761
"""A prime, so that index * _STRIDE % size is a permutation of range(size) for the sizes here."""


@dataclass(slots=True, eq=False)
class Entity:
    """Example: the city with names ["Velmora", "维尔莫拉"] and facts {"population": 52_100, "river": <Entity>, ...}."""

    kind: str
    names: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    named_by: dict[tuple[str, str], list[Entity]] = field(default_factory=dict)
    """The entities that name this one, by kind and field."""

    def article(self, lang: int) -> tuple[str, str]:
        says = [
            rule["says"][lang].format(name=self.names[lang], value=_shown(self.facts[name], lang))
            for name, rule in _fields(self.kind).items()
        ]
        for (kind, name), others in self.named_by.items():
            listed = ("、" if lang else ", ").join(other.names[lang] for other in others)
            says.append(_fields(kind)[name]["back"][lang].format(value=listed))
        return self.names[lang], ("" if lang else " ").join(says)


@dataclass(frozen=True, slots=True)
class Chain:
    """The facts to follow one after the other, from an entity that is given by its name or by its nickname."""

    entity: Entity
    path: tuple[str, ...]
    by_nick: bool

    def walk(self, lang: int) -> tuple[str, Plan, Any]:
        """The phrase that asks for the last fact, the calls that find it, and the fact."""
        here: Any = self.entity
        phrase, plan = here.names[lang], []
        if self.by_nick:
            nick = here.facts["nick"][lang]
            phrase = _fields(here.kind)["nick"]["asks"][lang].format(nick)
            plan.append([["search", {"query": nick}]])
        for name in self.path:
            plan.append([["wiki", {"title": here.names[lang]}]])
            phrase = _fields(here.kind)[name]["asks"][lang].format(phrase)
            here = here.facts[name]
        return phrase, plan, here


@cache
def texts() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("world.json").read_text(encoding="utf-8")))


@cache
def world() -> list[Entity]:
    """Every entity; about 10 ms."""
    rng, kinds = random.Random("skyrl_gym tool_use 1"), texts()["kinds"]
    groups = {kind: [Entity(kind, names) for names in _names(rng, rule, rule["count"])] for kind, rule in kinds.items()}
    for kind, group in groups.items():
        for name, rule in _fields(kind).items():
            targets = rng.sample(groups[rule["to"]], len(groups[rule["to"]])) if "to" in rule else []
            nicknames = _names(rng, rule, len(group)) if "pools" in rule else []
            for number, entity in enumerate(group):
                if targets:
                    fitting = [to for to in targets if "where" not in rule or to.facts[rule["where"]] is entity]
                    entity.facts[name] = target = fitting[number % len(fitting)]
                    target.named_by.setdefault((kind, name), []).append(entity)
                elif nicknames:
                    entity.facts[name] = nicknames[number]
                else:
                    start = entity.facts[rule["after"]].facts["born"] if "after" in rule else 0
                    entity.facts[name] = start + rng.randint(*rule["range"])
    return list(joined.from_iterable(groups.values()))


@cache
def corpus(lang: str) -> Corpus:
    return Corpus([entity.article(LANGS.index(lang)) for entity in world()])


@cache
def chains(difficulty: int) -> dict[str, list[Chain]]:
    """By split; for sums, facts of a kind lie side by side. The answer of none is in its phrase."""
    found = []
    for (hops, by_nick), entity in product(_HOPS[difficulty], world()):
        for path in _paths(entity.kind, hops) if not by_nick or "nick" in entity.facts else ():
            chain = Chain(entity, path, by_nick)
            walks = [chain.walk(lang) for lang in range(len(LANGS))]
            fine = isinstance(walks[0][2], int) or difficulty in (2, 3)
            if fine and all(_shown(value, lang) not in phrase for lang, (phrase, _, value) in enumerate(walks)):
                found.append(chain)
    random.Random(f"chains {difficulty}").shuffle(found)
    tenth = len(found) // 10
    splits = {"val": found[:tenth], "test": found[tenth : 2 * tenth], "train": found[2 * tenth :]}
    return {name: sorted(part, key=lambda chain: chain.path[-1]) for name, part in splits.items()}


def count(difficulty: int, split: str) -> int:
    if difficulty not in _HOPS:
        return len(_GENERATED[split])
    return len(chains(difficulty)[split]) * {4: 5 * len(texts()["frames"]), 6: 2 + len(texts()["programs"])}.get(
        difficulty, 1
    )


def draft(difficulty: int, split: str, lang: int, index: int) -> Draft:
    """Task `index`: 1 calculator, 2 one article, 3 two hops, 4 facts and a sum, 5 python, 6 search, wiki and either."""
    if difficulty == 1:
        kind, a, b, c = _spread(_GENERATED[split][index], len(texts()["expressions"]), 9000, 89, 899)
        expression = texts()["expressions"][kind].format(a=1000 + a, b=11 + b, c=101 + c)
        plan: Plan = [[["calculator", {"expression": expression}]]]
        return texts()["texts"]["compute"][lang].format(expression), plan, calculate(expression)
    if difficulty == 5:
        kind, a, b = _spread(_GENERATED[split][index], len(texts()["programs"]), 899, 300)
        return _program(kind, (str(a + 101), a + 101), 401 + b, lang)
    options = chains(difficulty)[split]
    if difficulty == 4:
        index, kind = divmod(index, len(texts()["frames"]))
        index, shift = divmod(index, 5)
        (phrase, plan, a), (other, more, b) = (options[n % len(options)].walk(lang) for n in (index, index + 1 + shift))
        both = [one + two for one, two in zip_longest(plan, more, fillvalue=[])]
        text, sums, answer = _frame(kind, (phrase, a), (other, b), lang)
        return text, both + sums, answer
    if difficulty == 6:
        index, kind = divmod(index, 2 + len(texts()["programs"]))
        phrase, plan, a = options[index].walk(lang)
        b = 401 + index % 300
        last = _frame(kind, (phrase, a), (str(b), b), lang) if kind < 2 else _program(kind - 2, (phrase, a), b, lang)
        return last[0], plan + last[1], last[2]
    phrase, plan, value = options[index].walk(lang)
    return texts()["texts"]["find"][lang].format(phrase), plan, _shown(value, lang)


def _frame(kind: int, a: tuple[str, int], b: tuple[str, int], lang: int) -> Draft:
    """An expression over two values, each given as the question writes it and as it is."""
    frame = texts()["frames"][kind]
    expression = frame["expression"].format(a=a[1], b=b[1])
    plan = [[["calculator", {"expression": expression}]]]
    return frame["asks"][lang].format(a=a[0], b=b[0]), plan, calculate(expression)


def _program(kind: int, a: tuple[str, int], b: int, lang: int) -> Draft:
    name = list(texts()["programs"])[kind]
    code = f"import math\n\n\n{_source(name)}\n\nprint({name}({a[1]}, {b}))"
    answer = str(getattr(programs, name)(a[1], b))
    return texts()["programs"][name][lang].format(a=a[0], b=b), [[["python_exec", {"code": code}]]], answer


@cache
def _source(name: str) -> str:
    return inspect.getsource(getattr(programs, name))


def _spread(index: int, *sizes: int) -> list[int]:
    """A number below each size; different indices below the product of the sizes give different ones."""
    total = 1
    for size in sizes:
        total *= size
    rest, numbers = index * _STRIDE % total, []
    for size in sizes:
        rest, number = divmod(rest, size)
        numbers.append(number)
    return numbers


def _fields(kind: str) -> dict[str, Any]:
    return dict(texts()["kinds"][kind]["fields"])


def _paths(kind: str, hops: int) -> Iterator[tuple[str, ...]]:
    for name, rule in _fields(kind).items():
        if hops == 1 and "pools" not in rule:
            yield (name,)
        elif hops > 1 and "to" in rule:
            yield from ((name, *rest) for rest in _paths(rule["to"], hops - 1))


def _names(rng: random.Random, rule: dict[str, Any], number: int) -> list[list[str]]:
    """Distinct combinations of words, in each language."""
    pools = [[word.split("=") for word in texts()["pools"][pool].split()] for pool in rule["pools"]]
    combinations = rng.sample(list(product(*pools)), number)
    return [[rule["name"][n].format(*(word[n] for word in words)) for n in range(len(LANGS))] for words in combinations]


def _shown(value: Any, lang: int) -> str:
    if isinstance(value, int):
        return str(value)
    return str(value.names[lang] if isinstance(value, Entity) else value[lang])
