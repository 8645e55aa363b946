"""The facts of the world, from world.yaml (receptacles, lamps, objects, layouts), and text.yaml; each is read once.

A thing's name is its kind and a number, "mug 1"; a kind is one lower-case word. Nothing here changes in an episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml


def kind_of(name: str) -> str:
    """Of "mug 1", "mug"."""
    return name.partition(" ")[0]


@cache
def load(name: str = "world.yaml") -> dict[str, Any]:
    """A data file of this environment."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(Path(__file__).with_name(name).read_text(encoding="utf-8"), loader)


def fits(thing: str, place: str) -> bool:
    """canContain, for names and for kinds."""
    return kind_of(place) in load()["objects"][kind_of(thing)]["in"]


def works(verb: str, thing: str) -> bool:
    """Whether one can "heat", "cool" or "clean" it, for a name or a kind."""
    return verb in load()["objects"][kind_of(thing)]["can"]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A room and its receptacles ("places")."""

    room: str
    places: tuple[str, ...]
    by_kind: dict[str, tuple[str, ...]]
    openable: frozenset[str]
    go: dict[str | None, tuple[str, ...]]
    """The sorted "go to ..." commands by where one stands (None: the middle of the room): every step lists them."""


@cache
def layout(room: str, group: str, number: int, most: int) -> Layout:
    """A layout of a room kind from the group "seen" or "unseen", with at most `most` receptacles of a kind."""
    counts = load()["rooms"][room][group][number]
    by_kind = {kind: tuple(f"{kind} {n}" for n in range(1, min(count, most) + 1)) for kind, count in counts.items()}
    places = tuple(place for names in by_kind.values() for place in names)
    openable = frozenset(place for place in places if load()["receptacles"][kind_of(place)]["opens"])
    commands = sorted(f"go to {place}" for place in places)
    go = {at: tuple(command for command in commands if command != f"go to {at}") for at in (None, *places)}
    return Layout(room, places, by_kind, openable, go)
