"""The six task types, how a task is drawn, and when it is done.

Task `index` has type index % 6, and is drawn until a hash of its goal, layout and kinds of places names its split.
"""

import hashlib
from functools import cache
from random import Random
from typing import Any

from skyrl_gym.envs.alfworld_lite.world import TOOLS, Layout, World, fits, kind_of, layout, load, works

TYPES = tuple(load()["task_types"])
_, LOOK, *_, TWO = TYPES
VERBS = {name: rule["verb"] for name, rule in load()["task_types"].items() if "verb" in rule}
COUNTS = {"train": 60_000, "val": 6_000, "test": 6_000}
"""Tasks of each split, in each difficulty."""
Data = dict[str, Any]
"""What `make_data` makes, plain data."""


def make_data(split: str, difficulty: int, index: int) -> Data:
    """A task as plain data: where it plays, its goal, and where everything lies."""
    level, task_type = load()["levels"][difficulty], TYPES[index % len(TYPES)]
    rng = Random(f"alfworld_lite:{split}:{difficulty}:{index}")
    while True:
        room, thing, target, found, lamp = _draw(rng, split, task_type, level)
        relevant = [*sorted(map(kind_of, found)), *(kind_of(place) for place, _ in lamp if task_type == LOOK)]
        form = " ".join(map(str, (task_type, thing, target, *room.key[:3], *relevant)))
        held_out = hashlib.blake2b(form.encode(), digest_size=4).digest()[0] % 10 == 0
        if split == "test" or held_out == (split == "val"):
            break
    contents: dict[str, list[str]] = {}
    for number, place in enumerate(found, start=1):
        contents.setdefault(place, []).append(f"{thing} {number}")
    numbers: dict[str, int] = {}
    spots = [spot for spot in _spots(room) if spot[0] != thing]
    for _ in range(level["others"]):
        kind, places = rng.choice(spots)
        numbers[kind] = numbers.get(kind, 0) + 1
        contents.setdefault(rng.choice(places), []).append(f"{kind} {numbers[kind]}")
    return {
        "type": task_type,
        "object": thing,
        "target": target,
        "layout": list(room.key),
        "lamps": dict(lamp),
        "contents": contents,
        "phrase": rng.randrange(2),
    }


def _draw(rng: Random, split: str, task_type: str, level: dict[str, Any]) -> tuple[Any, ...]:
    group = "unseen" if split == "test" else "seen"
    kind = rng.choice(load()["task_types"][task_type].get("rooms", tuple(load()["rooms"])))
    room = layout(kind, group, rng.randrange(len(load()["rooms"][kind][group])), level["most"])
    thing, target, sources = rng.choice(_goals(room, task_type, level["closed"]))
    lamps = _lamps(room, target)
    found = [rng.choice(sources) for _ in range(2 if task_type == TWO else 1)]
    return room, thing, target, found, [rng.choice(lamps)] if lamps else []


def reached(world: World, data: Data) -> bool:
    """Whether the world is as the task wants it."""
    if data["type"] == LOOK:
        return world.lamps.get(world.at or "") in world.lit and kind_of(world.held or "") == data["object"]
    needed = 2 if data["type"] == TWO else 1
    return any(len(placed(world, data, place)) >= needed for place in world.layout.by_kind[data["target"]])


def placed(world: World, data: Data, place: str) -> list[str]:
    """The task's objects in a receptacle, as far as they are ready."""
    return [name for name in world.contents[place] if kind_of(name) == data["object"] and ready(world, data, name)]


def ready(world: World, data: Data, name: str) -> bool:
    """Whether an object is clean, hot or cool, if it has to be."""
    verb = VERBS.get(data["type"])
    return verb is None or TOOLS[verb][1] in world.marks.get(name, ())


@cache
def _spots(room: Layout) -> list[tuple[str, list[str]]]:
    kinds = load()["rooms"][room.room]["objects"]
    spots = [(kind, [place for place in room.places if fits(kind, place)]) for kind in kinds]
    return [(kind, places) for kind, places in spots if places]


@cache
def _lamps(room: Layout, target: str) -> list[tuple[str, str]]:
    lamps = load()["lamps"]
    kinds = [target] if target in lamps else lamps if room.room in load()["task_types"][LOOK]["rooms"] else []
    return [(place, f"{kind} 1") for kind in kinds for place in room.places if kind_of(place) in lamps[kind]["beside"]]


@cache
def _goals(room: Layout, task_type: str, closed: bool | None) -> list[tuple[str, str, list[str]]]:
    verb, goals = VERBS.get(task_type), []
    for thing, places in _spots(room):
        targets = list(load()["lamps"]) if task_type == LOOK else list(dict.fromkeys(map(kind_of, places)))
        if verb is not None:
            targets = [kind for kind in targets if kind != TOOLS[verb][0] and works(verb, thing)]
        for target in targets:
            elsewhere = [place for place in places if kind_of(place) != target]
            liked = [place for place in elsewhere if closed is None or (place in room.openable) == closed]
            if elsewhere:
                goals.append((thing, target, liked or elsewhere))
    return goals
