"""Tasks from a file, a JSON list of

    {"split": "train", "type": "pick_and_place_simple", "object": "mug", "target": "shelf", "room": "kitchen",
     "places": {"cabinet": 2, "shelf": 1}, "contents": {"cabinet 2": ["mug 1", "fork 1"]}, "lamps": {}}

in the kinds of world.yaml. `places` says how many receptacles of each kind there are; `lamps` is by the place beside
which one stands. scripts/alfworld_data.py writes such a file from ALFWorld's games.
"""

from contextlib import suppress
from functools import lru_cache
from typing import Any

from skyrl_gym.core import SPLITS
from skyrl_gym.data import read_list, require
from skyrl_gym.envs.alfworld_lite.expert import next_command
from skyrl_gym.envs.alfworld_lite.tasks import TYPES, Data, reached
from skyrl_gym.envs.alfworld_lite.world import World, kind_of, layout, load

STEPS = 50


def world_of(data: Data, lang: str) -> World:
    """Where a task begins."""
    room, group, number, most = data["layout"]
    counts = tuple(map(tuple, number)) if group == "given" else number
    return World(layout(room, group, counts, most), data["lamps"], data["contents"], lang)


@lru_cache(maxsize=4)
def given(path: str) -> dict[str, list[Data]]:
    """A file's tasks by split. OSError, or ValueError with file, task (from 1) and what is wrong."""
    found: dict[str, list[Data]] = {split: [] for split in SPLITS}
    for number, row in enumerate(read_list(path, "tasks"), start=1):
        found[checked(row, f"{path} task {number}")["split"]].append(made(row))
    return found


def made(row: dict[str, Any]) -> Data:
    """A row as tasks.make_data makes it."""
    counts = [list(pair) for pair in row["places"].items()]
    most = max(row["places"].values(), default=0)
    kept = {name: row[name] for name in ("type", "object", "target", "contents", "lamps")}
    return {**kept, "layout": [row["room"], "given", counts, most], "phrase": 0}


def checked(row: Any, where: str) -> dict[str, Any]:
    """The row, if the expert can do it; else ValueError."""
    facts = load()
    valid = {"split": SPLITS, "type": TYPES, "object": facts["objects"], "room": facts["rooms"]}
    valid["target"] = facts["receptacles"] | facts["lamps"]
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {row!r:.60}.")
    for field, values in valid.items():
        value = row.get(field)
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"{where}: field {field!r} is {value!r:.60}; valid ones are {', '.join(values)}.")
    for field in ("places", "contents", "lamps"):
        require(isinstance(row.get(field), dict), where, field, "an object", row.get(field))
    counts = row["places"]
    for kind, count in counts.items():
        if kind not in facts["receptacles"] or type(count) is not int or not 0 < count < 100:
            raise ValueError(f"{where}: field 'places': {kind!r:.40} is no known kind with a count from 1 to 99.")
    places = {f"{kind} {n}" for kind, count in counts.items() for n in range(1, count + 1)}
    lists = {place: held if isinstance(held, list) else [None] for place, held in row["contents"].items()}
    things = [(place, thing) for place, held in lists.items() for thing in held]
    for place, thing in [*things, *row["lamps"].items()]:
        if place not in places or kind_of(str(thing)) not in facts["objects"] | facts["lamps"]:
            raise ValueError(f"{where}: {thing!r:.40} at {place!r:.40}: no known object at one of 'places'.")
    if len(things) > len({thing for _, thing in things}):
        raise ValueError(f"{where}: field 'contents' names an object twice.")
    if not _can_be_done(made(row)):
        raise ValueError(f"{where}: by the rules of alfworld_lite it is done already, or not in {STEPS} steps.")
    return row


def _can_be_done(data: Data) -> bool:
    world = world_of(data, "en")
    with suppress(KeyError, ValueError, IndexError):  # no place to put it, no lamp, no tool
        begun = not reached(world, data)
        for _ in range(STEPS):
            world.do(next_command(world, data))
            if reached(world, data):
                return begun
    return False
