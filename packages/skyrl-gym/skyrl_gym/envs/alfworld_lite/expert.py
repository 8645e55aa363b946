"""An expert that knows the whole world: from any state, the next command of a short plan that succeeds.

One that `searches` uses only what it has read, and says what it is after now, as ReAct does (Yao et al. 2022).
"""

from skyrl_gym.envs.alfworld_lite.tasks import LOOK, VERBS, Data, placed, ready
from skyrl_gym.envs.alfworld_lite.world import TOOLS, World, fits, kind_of


def next_command(world: World, data: Data, searches: bool = False) -> str:
    """One of `world.actions`, "look" once the task is done; one that searches may write a line of thought before it."""
    command = _plan(world, data, searches)
    return f"{_thought(world, data)}\n{command}" if searches and not world.walking else command


def slip(world: World, data: Data) -> str | None:
    """A command in vain: to take, on the way, what is not to be seen; None where that cannot happen."""
    command = f"take {data['object']} 1 from {world.at}"
    return command if world.walking and world.held is None and command not in world.actions else None


def _thought(world: World, data: Data) -> str:
    thing, target, verb = data["object"], data["target"], VERBS.get(data["type"])
    if world.held is None or kind_of(world.held) != thing:
        return f"find one {thing}"
    if data["type"] == LOOK:
        return f"find {target}"
    return f"put {thing} at {target}" if verb is None or ready(world, data, world.held) else f"{verb} {thing}"


def _plan(world: World, data: Data, searches: bool) -> str:
    held, verb = world.held, VERBS.get(data["type"])
    if held is None:
        command = _fetch(world, data)
        return _search(world) if searches and command.startswith(("go to", "open")) else command
    if kind_of(held) != data["object"]:
        # It is in the way: leave it here if it may lie here, else on something open rather than in something closed.
        places = [place for place in world.layout.places if fits(held, place)]
        place = min(places, key=lambda place: (place != world.at, not world.reachable(place)))
        return _at(world, place, f"move {held} to {place}", inside=True)
    if data["type"] == LOOK:
        ((place, lamp),) = world.lamps.items()
        if searches and world.at != place:
            return _search(world)
        return _at(world, place, "look" if lamp in world.lit else f"use {lamp}")
    if verb is not None and not ready(world, data, held):
        tool = world.layout.by_kind[TOOLS[verb][0]][0]
        return _at(world, tool, f"{verb} {held} with {tool}")
    target = _target(world, data)
    return _at(world, target, f"move {held} to {target}", inside=True)


def _fetch(world: World, data: Data) -> str:
    done = placed(world, data, _target(world, data)) if data["target"] in world.layout.by_kind else []
    things = [(place, name) for place, names in world.contents.items() for name in names if name not in done]
    wanted = [(place, name) for place, name in things if kind_of(name) == data["object"]]
    if not wanted:
        return "look"
    place, name = min(wanted, key=lambda spot: spot[0] != world.at)
    return _at(world, place, f"take {name} from {place}", inside=True)


def _search(world: World) -> str:
    if world.at is not None and not world.reachable(world.at):
        return f"open {world.at}"
    walk = sorted(world.layout.places, key=lambda place: place in world.layout.openable)
    return f"go to {walk[(walk.index(world.at) + 1) % len(walk) if world.at is not None else 0]}"


def _target(world: World, data: Data) -> str:
    return max(world.layout.by_kind[data["target"]], key=lambda place: len(placed(world, data, place)))


def _at(world: World, place: str, command: str, inside: bool = False) -> str:
    if world.at != place:
        return f"go to {place}"
    return f"open {place}" if inside and not world.reachable(place) else command
