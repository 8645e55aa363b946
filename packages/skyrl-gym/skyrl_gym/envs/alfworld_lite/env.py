"""alfworld_lite (docs/environments/alfworld_lite.md): household tasks in a text room, by ALFWorld's rules."""

import random
from os import PathLike
from typing import Any

from skyrl_gym.core import Info, Options, Outcome, Task, TextEnv
from skyrl_gym.envs.alfworld_lite.expert import next_command, slip
from skyrl_gym.envs.alfworld_lite.given import given, world_of
from skyrl_gym.envs.alfworld_lite.tasks import COUNTS, TYPES, Data, make_data, reached
from skyrl_gym.envs.alfworld_lite.world import World, kind_of, load, why_not

_LONGEST = 300
SLIPS = 1 / 8
"""Of the commands on a search, how many may be given in vain."""


class AlfworldLiteEnv(TextEnv):
    """Option `task_type` asks for one of the six types; `feedback` is what an inadmissible command is answered by;
    `expert` says whether the expert knows where everything lies. tasks: a JSON file (given.py) in place of ours.
    """

    choices = TextEnv.choices | {
        "difficulty": tuple(load()["levels"]),
        "task_type": ("any", *TYPES),
        "feedback": ("alfworld", "explain"),
        "expert": ("knows", "searches"),
    }

    def __init__(self, *, tasks: str | PathLike[str] | None = None, **defaults: Any) -> None:
        super().__init__(**defaults)
        self._file = None if tasks is None else str(tasks)
        if self._file:
            given(self._file)

    def _given(self, options: Options) -> list[Data]:
        asked = options["task_type"]
        return [each for each in given(str(self._file))[options["split"]] if asked in ("any", each["type"])]

    def count_tasks(self, options: Options) -> int:
        if self._file:
            if not (found := len(self._given(options))):
                raise ValueError(f"{self._file} has no task of split {options['split']!r} and this task_type.")
            return found
        return COUNTS[options["split"]] // (1 if options["task_type"] == "any" else len(TYPES))

    def task_id(self, options: Options, index: int) -> str:
        """With a task type, the index counts the tasks of that type; the index of a task id counts all of them."""
        return self.make_task(options, index).task_id

    def make_task(self, options: Options, index: int) -> Task:
        split, difficulty, lang = (options[name] for name in self.id_options)
        if self._file:
            data = self._given(options)[index]
            index = given(self._file)[split].index(data)
        else:
            if options["task_type"] != "any":
                index = index * len(TYPES) + TYPES.index(options["task_type"])
            data = make_data(split, difficulty, index)
        places = {thing: place for place, things in data["contents"].items() for thing in things}
        wanted = {thing: place for thing, place in places.items() if kind_of(thing) == data["object"]}
        text = f"{world_of(data, lang).room_view()}\n{_goal(data, lang)}"
        task_id, instructions = super().task_id(options, index), load("text.yaml")[lang]["instructions"]
        return Task(task_id, text, wanted, instructions=instructions, data=data)

    def reset_info(self) -> Info:
        return {"task_type": self.task.data["type"]}

    def begin(self, task: Task) -> str:
        self._world = world_of(task.data, task.lang)
        return task.text

    def act(self, action: str) -> Outcome:
        world = self._world
        tail = action[-_LONGEST:].rstrip(" \t\r\n.。").lstrip()
        world.turn += 1
        words = tail.rpartition("\n")[2].lower().split()
        if words[:1] == ["put"] and words[3:4] in (["in/on"], ["in"], ["on"]):
            words[0], words[3] = "move", "to"
        command, whole = " ".join(words), len(action) <= _LONGEST or "\n" in tail
        valid = whole and command in world.actions
        if valid:
            observation = world.do(command)
        elif self.options["feedback"] == "explain":
            observation = why_not(world, command) if whole else world.texts["why"]["long"]
        else:
            observation = world.texts["nothing"]
        success = valid and reached(world, self.task.data)
        return Outcome(observation, {"success": float(success)}, valid, success, success, self.reset_info())

    def expert_action(self) -> str:
        """Of the expert that searches, now and then a slip. Task and turn decide where: to ask changes nothing."""
        searches = self.options["expert"] == "searches"
        draw = random.Random(f"{self.task.task_id} {self._world.turn}")
        slipped = slip(self._world, self.task.data) if searches and draw.random() < SLIPS else None
        return slipped or next_command(self._world, self.task.data, searches)

    def admissible_actions(self) -> list[str]:
        """Every command that is carried out, also those that only inform; `put` for `move` is not listed."""
        return list(self._world.actions if self.task else ())  # or ResetNeeded

    def get_env_state(self) -> dict[str, Any]:
        return {name: getattr(self._world, name) for name in World.STATE}

    def set_env_state(self, state: dict[str, Any]) -> None:
        self.begin(self.task)
        self._world.set_state(state)

    def _from_task_id(self, task_id: Any, options: Options) -> tuple[dict[str, Any], int]:
        resolved, index = super()._from_task_id(task_id, {**options, "task_type": "any"})
        asked, task_type = options.get("task_type", "any"), self.make_task(resolved, index).data["type"]
        if asked not in ("any", task_type):
            raise ValueError(f"task_id {task_id!r} is a {task_type!r}; option 'task_type' is {asked!r}.")
        return resolved, index


def _goal(data: Data, lang: str) -> str:
    texts, facts = load("text.yaml")[lang], load()
    entries = facts["objects"][data["object"]], (facts["receptacles"] | facts["lamps"])[data["target"]]
    glosses = [f"（{entry['zh']}）" if lang == "zh" else "" for entry in entries]
    names = {"object": data["object"] + glosses[0], "target": data["target"] + glosses[1]}
    prep = texts["prepositions"].get(entries[1].get("prep"))
    return texts["goal"].format(goal=texts["goals"][data["type"]][data["phrase"]].format(prep=prep, **names))
