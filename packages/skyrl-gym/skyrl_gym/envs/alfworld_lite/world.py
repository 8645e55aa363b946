"""The world's facts, from world.yaml (receptacles, lamps, objects, commands, layouts) and text.yaml, and its rules.

A thing's name is its kind and a number, "mug 1". What a command needs is said once, in `World._list_actions`. There is
one hand. Heating and cooling undo each other; cleaning is never undone.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from skyrl_gym.data import beside


def kind_of(name: str) -> str:
    """Of "mug 1", "mug"."""
    return name.partition(" ")[0]


@cache
def load(name: str = "world.yaml") -> dict[str, Any]:
    """A data file of this environment."""
    return beside(__file__, name)


TOOLS, JOINTS = load()["tools"], load()["joints"]


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
    key: tuple[Any, ...]
    """The arguments of `layout`, which a pickle holds in place of the rest."""

    def __reduce__(self) -> Any:
        return layout, self.key


@cache
def layout(room: str, group: str, number: Any, most: int) -> Layout:
    """From the group "seen" or "unseen"; in "given", `number` is pairs of kind and count. At most `most` of a kind."""
    counts = dict(number) if group == "given" else load()["rooms"][room][group][number]
    by_kind = {kind: tuple(f"{kind} {n}" for n in range(1, min(count, most) + 1)) for kind, count in counts.items()}
    places = tuple(place for names in by_kind.values() for place in names)
    openable = frozenset(place for place in places if load()["receptacles"][kind_of(place)]["opens"])
    commands = sorted(f"go to {place}" for place in places)
    go = {at: tuple(command for command in commands if command != f"go to {at}") for at in (None, *places)}
    return Layout(room, places, by_kind, openable, go, (room, group, number, most))


class World:
    """A room in some state. `lamps` (the lamp beside a place) and `contents` (the objects in it) are by place."""

    STATE = ("at", "held", "contents", "open", "lit", "marks", "walking", "turn")
    """The attributes that change in an episode; all of them plain data."""

    def __init__(self, layout: Layout, lamps: dict[str, str], contents: dict[str, list[str]], lang: str) -> None:
        self.layout, self.lamps, self.texts = layout, lamps, load("text.yaml")[lang]
        self.at: str | None = None
        self.held: str | None = None
        self.contents = {place: sorted(contents.get(place, ())) for place in layout.places}
        self.open: list[str] = []
        self.lit: list[str] = []
        self.marks: dict[str, list[str]] = {}
        self.walking = False  # whether, since a thing was changed, one has only gone and opened
        self.turn = 0  # how many actions there were, admissible or not
        self.actions = self._list_actions()

    def set_state(self, state: dict[str, Any]) -> None:
        for name in self.STATE:
            setattr(self, name, state[name])
        self.actions = self._list_actions()

    def reachable(self, place: str) -> bool:
        """Whether one who stands there can see and use its inside."""
        return place not in self.layout.openable or place in self.open

    def _list_actions(self) -> list[str]:
        here, held = self.at, self.held
        actions = ["help", "inventory", "look", *self.layout.go[here]]
        if held is not None:
            actions.append(f"examine {held}")
        if here is None:
            return sorted(actions)
        actions.append(f"examine {here}")
        if here in self.layout.openable:
            actions.append(f"close {here}" if here in self.open else f"open {here}")
        if here in self.lamps:
            actions += [f"examine {self.lamps[here]}", f"use {self.lamps[here]}"]
        things = self.contents[here] if self.reachable(here) else []
        actions += [f"examine {thing}" for thing in things]
        if held is None:
            return sorted(actions + [f"take {thing} from {here}" for thing in things])
        if self.reachable(here) and fits(held, here):
            actions.append(f"move {held} to {here}")
        uses = [verb for verb, (tool, _) in TOOLS.items() if tool == kind_of(here) and works(verb, held)]
        return sorted(actions + [f"{verb} {held} with {here}" for verb in uses])

    def do(self, command: str) -> str:
        """Carries out one of `actions` and returns what is seen."""
        verb, _, rest = command.partition(" ")
        if verb in ("help", "inventory", "look", "examine"):
            return self._inform(verb, rest)
        thing, _, place = rest.partition(JOINTS[verb]) if verb in JOINTS else (rest, "", rest)
        if verb == "go":
            self.at = place
        elif verb in ("open", "close"):
            (self.open.append if verb == "open" else self.open.remove)(place)
        elif verb == "use":
            (self.lit.remove if thing in self.lit else self.lit.append)(thing)
            verb = "use_on" if thing in self.lit else "use_off"
        elif verb == "take":
            self.contents[place].remove(thing)
            self.held = thing
        elif verb == "move":
            self.contents[place] = sorted([*self.contents[place], thing])
            self.held = None
        else:
            mark = TOOLS[verb][1]
            gone = (mark,) if mark == "clean" else ("hot", "cool")
            self.marks[thing] = [*(old for old in self.marks.get(thing, ()) if old not in gone), mark]
        self.walking = verb in ("go", "open", "close")
        self.actions = self._list_actions()
        view = self._view(place) if verb in ("go", "open") else ""
        return self._say(verb, thing=thing, place=place, view=view)

    def _inform(self, verb: str, rest: str) -> str:
        """The commands that change nothing."""
        if verb == "help":
            return "\n".join(self.texts["forms"].values())
        if verb == "inventory":
            return self._say("carrying" if self.held else "empty_hand", thing=self.held)
        if verb == "look":
            return self.room_view()
        if rest == self.at:
            return self._view(rest)
        if rest in self.lamps.values():
            return self._say("examine_on" if rest in self.lit else "examine_off", thing=rest)
        marks = self.texts["separator"].join(self.texts["marks"][mark] for mark in self.marks.get(rest, ()))
        return self._say("examine_marked" if marks else "examine_plain", thing=rest, marks=marks)

    def room_view(self) -> str:
        """Where one stands, and which receptacles there are elsewhere."""
        places = self.texts["separator"].join(place for place in self.layout.places if place != self.at)
        room = self.texts["rooms"][self.layout.room]
        return self._say("elsewhere" if self.at else "room", room=room, place=self.at, places=places)

    def _view(self, place: str) -> str:
        things, key = self.contents[place], f"view_{load()['receptacles'][kind_of(place)]['prep']}"
        key = (key if things else f"{key}_empty") if self.reachable(place) else "view_closed"
        view, lamp = self._say(key, things=self.texts["separator"].join(things)), self.lamps.get(place)
        return self._say("beside_on" if lamp in self.lit else "beside_off", view=view, thing=lamp) if lamp else view

    def _say(self, key: str, **values: str | None) -> str:
        return self.texts[key].format(**values)


def why_not(world: World, command: str) -> str:
    """What stands in the way of a command that is not admissible: the first thing that an agent should mend."""
    verb, _, rest = command.partition(" ")
    verb = "move" if verb == "put" else verb
    thing, joint, place = rest.partition(JOINTS[verb]) if verb in JOINTS else ("", "", rest)
    form, tool = world.texts["forms"].get(verb), TOOLS.get(verb, ("", ""))[0]
    checks = [(form is None, "command"), (verb in JOINTS and (not joint or bool(thing) == (verb == "go")), "form")]
    if verb in ("use", "examine", "inventory", "look", "help"):
        checks.append((True, {"use": "lamp", "examine": "nothing_here"}.get(verb, "form")))
    checks += [(place not in world.contents, "place"), (verb == "go", "already"), (place != world.at, "away")]
    if verb in ("open", "close"):
        checks += [(place not in world.layout.openable, "no_door"), (True, "is_open" if verb == "open" else "is_shut")]
    checks += [(world.held is not None, "full_hand") if verb == "take" else (thing != world.held, "empty")]
    if verb in TOOLS:
        checks += [(kind_of(place) != tool, "tool"), (True, "unable")]
    checks += [(not world.reachable(place), "is_closed"), (verb == "take", "unseen"), (True, "unfit")]
    reason = next(key for failed, key in checks if failed)
    return world.texts["why"][reason].format(form=form, place=place, thing=world.held, tool=tool)
