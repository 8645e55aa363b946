"""Questions about made-up databases, from the domains and patterns in world.yaml: docs/environments/sql_lite.md."""

import hashlib
import random
import re
import sqlite3
from contextlib import closing
from functools import cache, lru_cache, partial
from itertools import permutations, product
from math import prod
from typing import Any, NamedTuple

from skyrl_gym.data import beside
from skyrl_gym.envs.sql_lite.queries import answer
from skyrl_gym.envs.sql_lite.results import MOST_ROWS, Result, same
from skyrl_gym.envs.text_math.words import shuffled

LANGS = ("en", "zh")
COUNTS = {"train": 9_985, "val": 995, "test": 995}
"""Tasks of each split, in each difficulty. A fifth is a prime, so that the candidates of a task are of all tables."""
LEAST, TRIES = 4, 12
"""A task has at least so many databases; so many are tried."""
world = partial(beside, __file__, "world.yaml")
_SLOT = re.compile(r"\{([\w.]+)\}")
_ABOVE = (("t", "p"), ("p", "g"), ("t", "o"))
"""Which role's table belongs to which other's."""
Planted = tuple[tuple[str, str, Any], ...]
"""Constants that the databases hold often, and their neighbours, with table and column."""


class Option(NamedTuple):
    """What a slot may be: its column, a constant, the SQL, and words in both languages."""

    column: str
    constant: Any
    texts: tuple[str, ...]


class Draft(NamedTuple):
    """A question: its gold query and its text in each language. `tables` are those that it is about."""

    sql: str
    texts: tuple[str, ...]
    ordered: bool
    domain: str
    planted: Planted
    tables: list[str]


@cache
def columns(domain: str, table: str) -> dict[str, tuple[str, str, str, list[Any]]]:
    """Of each its words in both languages, kind (m different names, n numbers, v also NULL, c words) and values."""
    found = {}
    values: list[Any]
    for name, (*words, spec) in world()["domains"][domain][table]["columns"].items():
        if spec[0] == "@":
            pools = [pool.split() for pool in world()["pools"][spec[1:]]]
            gap = "" if spec == "@place" else " "
            kind, values = "m", [gap.join(parts) for parts in product(*pools)]
        elif ".." in spec:
            kind, parts = "v" if "?" in spec else "n", re.split(r"\.\.|/", spec.strip("?"))
            low, high, step = (float(part) if "." in part else int(part) for part in parts)
            values = [low + number * step for number in range(int((high - low) / step) + 1)]
        else:
            kind, values = "c", spec.split()
        found[name] = (*words, kind, values)
    return found


@cache
def options(domain: str, table: str, letter: str) -> list[Option]:
    """What a slot of world.yaml's letters may be."""
    if letter == "f":
        return [Option("", None, (name, *words)) for name, words in world()["aggregates"].items()]
    if letter in "hk":
        return [Option("", None, (number,) * 3) for number in ("2", "3", "4")]
    found = []
    for name, (*words, kind, values) in columns(domain, table).items():
        if kind in ("mnc" if letter == "d" else letter):
            found.append(Option(name, None, (f"{table}.{name}", *words)))
        for sign, (kinds, *says) in world()["conditions"].items():
            if letter == "w" and kind in kinds:
                constants = [None] if sign == "IS NULL" else values if kind == "c" else values[2:-2]
                for place, constant in enumerate(constants):
                    sql = f"{table}.{name} {sign}" + ("" if constant is None else f" {constant!r}")
                    english, chinese = (way[place % 2].format(constant) for way in says)
                    found.append(Option(name, constant, (sql, f"{words[0]} {english}", f"{words[1]}{chinese}")))
    return found


@cache
def patterns(difficulty: int) -> list[tuple[dict[str, Any], list[str], list[tuple[str, dict[str, str]]]]]:
    """Of each pattern its slots that are to be chosen, and the domains with the tables of its roles."""
    found = []
    for pattern in world()["levels"][difficulty]:
        slots = sorted({slot for slot in _SLOT.findall(pattern["sql"]) if re.fullmatch(r"\w\.[mdncw]1?2?|[fhk]", slot)})
        roles = sorted({slot[0] for slot in slots} - set("fhk"))
        places = []
        for domain, tables in world()["domains"].items():
            for chosen in permutations(tables, len(roles)):
                of = dict(zip(roles, chosen, strict=True))
                pairs = [(of[below], of[above]) for below, above in _ABOVE if below in of and above in of]
                if all(above in tables[below].get("of", ()) for below, above in pairs):
                    places.append((domain, of))
        found.append((pattern, slots, places))
    return found


@lru_cache(maxsize=1 << 12)
def candidate(difficulty: int, number: int) -> Draft | None:
    """The question of a number; None where it repeats another, uses a column twice, or does not exist."""
    number, which = divmod(number, len(patterns(difficulty)))
    pattern, slots, places = patterns(difficulty)[which]
    number, place = divmod(number, len(places))
    domain, tables = places[place]
    choices = [options(domain, tables.get(slot[0], ""), slot.rpartition(".")[2][0]) for slot in slots]
    size = prod(map(len, choices))
    if number >= size:
        return None
    start = random.Random(f"{difficulty} {which} {place}").randrange(size)
    number = (shuffled(number, size) + start) % size
    picks = dict[str, int]()
    for slot, choice in zip(slots, choices, strict=True):
        number, picks[slot] = divmod(number, len(choice))
    picked = {slot: choice[picks[slot]] for slot, choice in zip(slots, choices, strict=True)}
    used = [(slot[0], option.column) for slot, option in picked.items() if slot[2:3] in {*"mdcw"}]
    turned = any(picks[slot[:-1] + "1"] > pick for slot, pick in picks.items() if slot[-1] == "2")
    return None if turned or len({*used}) < len(used) else _draft(pattern, domain, tables, picked)


def _draft(pattern: dict[str, Any], domain: str, tables: dict[str, str], picked: dict[str, Option]) -> Draft:
    known = {slot: option.texts for slot, option in picked.items()}
    for role, table in tables.items():
        one, many, chinese = world()["domains"][domain][table]["words"]
        known |= {role: (table,) * 3, f"{role}.id": (f"{table}.{table}_id",) * 3}
        known |= {f"{role}.one": ("", one, chinese), f"{role}.many": ("", many, chinese)}
        known |= {f"{role}.{above}": (f"{table}.{tables[above]}_id",) * 3 for above in tables}

    def filled(way: str, side: int) -> str:
        return _SLOT.sub(lambda slot: known[slot[1]][side], way)

    sql = filled(pattern["sql"], 0)
    if len(tables) == 1:
        sql = sql.replace(f"{tables['t']}.", "")
    way = _digest(sql)[1] % 2
    texts = tuple(filled(pattern[lang][way], side) for side, lang in enumerate(LANGS, 1))
    fixed = [(slot, option) for slot, option in picked.items() if option.constant is not None]
    planted = tuple((tables[slot[0]], option.column, option.constant) for slot, option in fixed)
    return Draft(sql, texts, "ordered" in pattern, domain, planted, list(tables.values()))


def _digest(sql: str) -> bytes:
    return hashlib.blake2b(f"sql_lite {sql}".encode(), digest_size=4).digest()


def split_of(sql: str) -> str:
    """The split that the questions of a query lie in."""
    return {0: "val", 1: "test"}.get(_digest(sql)[0] % 10, "train")


@lru_cache(maxsize=1 << 10)
def make(difficulty: int, split: str, index: int) -> tuple[Draft, list[int]]:
    """A task: its question, and the numbers of its databases, the one that is shown first."""
    # Of n tasks (a multiple of the number of patterns) task i tries candidates i, i + n and so on: all of one pattern.
    count = len(patterns(difficulty))
    step = -(-COUNTS[split] // count) * count
    for number in range(index, 10_000 * step, step):
        draft = candidate(difficulty, number)
        if draft and split_of(draft.sql) == split and (numbers := suite(draft)):
            return draft, numbers
    raise LookupError(f"sql_lite has no task {split}:{difficulty}:{index}.")


@lru_cache(maxsize=1 << 9)
def database(domain: str, planted: Planted, number: int) -> bytes:
    """A SQLite file, alike in every process."""
    rng = random.Random(f"{domain} {planted} {number}")
    sizes = dict[str, int]()
    depths = dict[str, int]()
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("PRAGMA page_size = 512")
        for table, spec in world()["domains"][domain].items():
            above = spec.get("of", ())
            depths[table] = 1 + max((depths[name] for name in above), default=-1)
            size = sizes[table] = rng.randint(7, 10) * (1, 2, 5)[depths[table]]
            lines, cells = [f"{table}_id INTEGER PRIMARY KEY"], [list[Any](range(1, size + 1))]
            for name, (*_, kind, values) in columns(domain, table).items():
                lines.append(f"{name} {({str: 'TEXT', int: 'INTEGER', float: 'REAL'})[type(values[0])]}")
                places = [values.index(x) for owner, column, x in planted if (owner, column) == (table, name)]
                often = [values[(place + step) % len(values)] for place in places for step in (0, 0, -1, 1)]
                drawn = [rng.choice(often if often and rng.random() < 0.5 else values) for _ in range(size)]
                nulls = [kind == "v" and rng.random() < 0.2 for _ in range(size)]
                drawn = rng.sample(values, size) if kind == "m" else drawn
                cells.append([None if null else value for null, value in zip(nulls, drawn, strict=True)])
            for name in above:  # of which one in five has none of these rows
                lines.append(f"{name}_id INTEGER REFERENCES {name}({name}_id)")
                ids = rng.sample(range(1, sizes[name] + 1), 4 * sizes[name] // 5)
                cells.append(rng.choices(ids, k=size))
            db.execute(f"CREATE TABLE {table} ({', '.join(lines)})")
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(cells))})", zip(*cells, strict=True))
        db.commit()
        return db.serialize()


def results(content: bytes, queries: list[str]) -> list[Result]:
    """Of queries of our own, in this process."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(content)
        return [answer(db, query, MOST_ROWS) for query in queries]


def near_misses(sql: str) -> list[str]:
    """The query with one thing changed: every place of world.yaml's changes."""
    places = [(place, change) for pattern, change in world()["changes"] for place in re.finditer(pattern, sql)]
    return [sql[: place.start()] + change + sql[place.end() :] for place, change in places]


def suite(draft: Draft) -> list[int]:
    """The numbers of databases that tell the query from all of its near misses; [] if too many have to be tried."""
    # On each its result is neither empty nor has a NULL, which a sum of nothing is; and it is not the same on all.
    alive, chosen, truths = near_misses(draft.sql), list[int](), list[list[Any]]()
    for number in range(TRIES):
        truth, *others = results(database(draft.domain, draft.planted, number), [draft.sql, *alive])
        if not truth["rows"] or any(value is None for row in truth["rows"] for value in row):
            continue
        left = [sql for sql, other in zip(alive, others, strict=True) if same([other], [truth], draft.ordered)]
        if len(left) < len(alive) or len(chosen) < LEAST:
            chosen.append(number)
            truths.append(truth["rows"])
        alive = left
        if not alive and len(chosen) >= LEAST and any(rows != truths[0] for rows in truths):
            return chosen
    return []
