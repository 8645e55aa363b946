"""TextEnv: a Gymnasium environment whose observations and actions are strings.

The contract of every environment here:
- An episode is a function of seed, options and actions. Randomness comes from `self.np_random` only.
- The agent may see observations, `info["instructions"]` (the system message, "" for none) and, where there are such,
  `info["admissible_actions"]`. The rest of `info` is for training, metrics and people, without the ground truth.
- Every step's info has `reward_parts` (they sum to the reward), `valid_action` and `success`.
- A task's id, "<split>:<difficulty>:<lang>:<index>", names the same task in every process and run.

A subclass gives `choices`, `count_tasks`, `make_task`, `begin`, `act` and `expert_action`; docs/environments/README.md.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from os.path import getmtime, isfile
from pathlib import Path
from typing import Any, ClassVar

from gymnasium import Env, logger
from gymnasium.error import ResetNeeded

from skyrl_gym.data import load_rows
from skyrl_gym.spaces import UnicodeText

Choices = dict[str, tuple[Any, ...]]
Options = Mapping[str, Any]
"""Of a reset."""
Info = dict[str, Any]
"""Of a reset or a step."""
Row = Mapping[str, Any]
"""Of a dataset."""

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be done. Everything in it is plain data (JSON), so that a state can be saved. `reset` fills in
    difficulty, language and split, where these are options of the environment.
    Example: Task("val:1:en:7", "47 + 38 = ?", 85)
    """

    task_id: str
    text: str
    """What is asked, as the agent reads it."""
    ground_truth: Any = field(repr=False)
    """Never shown to the agent, nor put in `info`."""
    difficulty: int = 1
    lang: str = "en"
    split: str = "train"
    instructions: str = ""
    """The system message; "" for none."""
    data: dict[str, Any] = field(default_factory=dict, repr=False)
    """The environment's own description of the task, for its rules and its expert."""


@dataclass(slots=True)
class Outcome:
    """What an action led to."""

    observation: str
    reward_parts: dict[str, float]
    valid_action: bool
    success: bool = False
    terminated: bool = False
    info: Info = field(default_factory=dict)


class TextEnv(Env[str, str]):
    """Base class of all environments here. `defaults`: of reset options, as in `gymnasium.make(id, difficulty=2)`."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (Gymnasium's declaration)
    choices: ClassVar[Choices] = {"split": SPLITS, "difficulty": (1,), "lang": ("en", "zh")}
    """The reset options beside `task_id` and `task`, each with its valid values; the first is the default."""
    id_options: ClassVar[tuple[str, ...]] = ("split", "difficulty", "lang")
    """Those of `choices` that a task id spells before its index: all that decide which task an index is."""
    path_options: ClassVar[tuple[str, ...]] = ()
    """Further reset options, each a path."""
    kept: ClassVar[tuple[str, ...]] = ()
    """The attributes, of plain data, that `begin` and `act` keep between steps."""

    def __init__(self, *, render_mode: str | None = None, **defaults: Any) -> None:
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode is {render_mode!r}; valid ones are None and 'ansi'.")
        self.render_mode = render_mode
        self.observation_space = UnicodeText(1 << 16)
        self.action_space = UnicodeText(1 << 20)
        self.defaults = {name: values[0] for name, values in self.choices.items()} | self._checked(defaults)
        self.options = self.defaults
        """The options in force in this episode."""
        self._task: Task | None = None
        self._finished = False
        self._screen = ""
        self.recorded: list[Mapping[str, Any]] | None = None
        """What `feed_external` gave for the next step."""

    # What a subclass gives.

    @classmethod
    def preload(cls, options: Options) -> None:
        """Reads what all episodes with these `options` share: for the processes that are forked from this one."""

    def count_tasks(self, options: Options) -> int:
        """How many distinct tasks there are under these options (complete, checked)."""
        raise NotImplementedError

    def make_task(self, options: Options, index: int) -> Task:
        """Task `index` (0 <= index < count_tasks(options)); different indices are different tasks."""
        raise NotImplementedError

    def task_from_row(self, row: Row, options: Options) -> Task:
        """A task from a row in SkyRL's dataset format (skyrl_gym.data); raises ValueError with a sentence."""
        raise ValueError(f"{type(self).__name__} cannot be given a dataset row as options['task'].")

    def begin(self, task: Task) -> str:
        """Sets the state up for a new episode and returns the first observation, by default the task's text."""
        return task.text

    def act(self, action: str) -> Outcome:
        """Applies any string at all, however malformed; never raises."""
        raise NotImplementedError

    def expert_action(self) -> str:
        """An action of a policy that always succeeds, in the state at hand."""
        raise NotImplementedError(f"{type(self).__name__} has no expert.")

    def admissible_actions(self) -> list[str] | None:
        """All actions that do something in this state, or None where they cannot be listed."""
        return None

    def reset_info(self) -> Info:
        """Further entries for the `info` of `reset`."""
        return {}

    def get_env_state(self) -> dict[str, Any]:
        """What `begin` and `act` keep between steps, as plain data: by default the attributes of `kept`."""
        return {name: getattr(self, name) for name in self.kept}

    def set_env_state(self, state: dict[str, Any]) -> None:
        """The inverse of `get_env_state`; `self.task` is already set."""
        for name in self.kept:
            setattr(self, name, state[name])

    def task_id(self, options: Options, index: int) -> str:
        """The id of task `index`, for `make_task`."""
        return ":".join([*(str(options[name]) for name in self.id_options), str(index)])

    # What a user calls.

    @property
    def task(self) -> Task:
        """The task of this episode, ground truth included."""
        if self._task is None:
            raise ResetNeeded("There is no task before the first reset().")
        return self._task

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Starts an episode. ValueError for an unknown option, value or task id names the valid ones.
        seed: seeds `np_random`, which picks the task unless `options` names one. options: `task_id` (a task by its id),
        or `task` (a row in SkyRL's dataset format), or any of `choices`.
        """
        options = dict(options or {})
        row, task_id = options.pop("task", None), options.pop("task_id", None)
        if row is not None and task_id is not None:
            raise ValueError("Give options['task'] or options['task_id'], not both.")
        if task_id is not None:
            chosen, index = self._from_task_id(task_id, options)
        else:
            chosen, index = self.defaults | self._checked(options), -1
        given = None if row is None else self.task_from_row(row, chosen)
        drawn_from = self.count_tasks(chosen) if given is None and index < 0 else 0
        super().reset(seed=seed)  # not before: a refusal changes nothing
        task = given or self.make_task(chosen, index if index >= 0 else int(self.np_random.integers(drawn_from)))
        own = {name: chosen[name] for name in ("difficulty", "lang", "split") if name in chosen}
        self.options, self._task = chosen, (task := replace(task, **own))
        self._finished, self.recorded = True, None  # should it not begin
        self._screen = observation = self.begin(task)
        self._finished = False
        info = {"instructions": task.instructions, "task_id": task.task_id, **self.reset_info()}
        return observation, info | self._admissible()

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Applies an action. `truncated` is always False: step limits are Gymnasium's TimeLimit."""
        if self._task is None:
            raise ResetNeeded("step() was called before the first reset().")
        if not isinstance(action, str):
            raise TypeError(f"An action is a str, got {type(action).__name__}.")
        if self._finished:
            logger.warn("step() was called after the episode had ended; call reset() first. Nothing happens.")
            return "", 0.0, True, False, {"reward_parts": {}, "valid_action": False, "success": False}
        self._finished = True  # should it fail half-way
        outcome = self.act(action)
        self.recorded = None
        self._finished = outcome.terminated
        reward = float(sum(outcome.reward_parts.values()))
        info = outcome.info | {"reward_parts": outcome.reward_parts}
        info |= {"valid_action": outcome.valid_action, "success": outcome.success}
        if self.render_mode is not None:
            self._screen = f"> {action}\n{outcome.observation}\nreward {reward:g} {outcome.reward_parts}"
        return outcome.observation, reward, outcome.terminated, False, info | self._admissible()

    def feed_external(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Lets tools with effects outside answer the next step's calls by a record, that step's `info["tool_calls"]`:
        an env with such tools hands `self.recorded` to `tools.tool.run_call`; a call that it lacks gets an error."""
        self.recorded = list(calls)

    def render(self) -> str | None:  # type: ignore[override]
        """With render_mode "ansi": the first observation, or the last action and what it led to."""
        return self._screen if self.render_mode == "ansi" else None

    def num_tasks(self, options: Options | None = None) -> int:
        """How many distinct tasks there are under reset options such as {"split": "val", "difficulty": 2}."""
        return self.count_tasks(self.defaults | self._checked(options or {}))

    def get_state(self) -> dict[str, Any]:
        """The whole state of the episode as plain data, which `json` can carry; wrappers' state is not in it."""
        episode = {"task": asdict(self.task), "options": self.options, "env": self.get_env_state()}
        generator = {"np_random": self.np_random.bit_generator.state}
        return copy.deepcopy(episode | generator | {"finished": self._finished, "screen": self._screen})

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues exactly where `get_state` was called, in this or another instance or process."""
        state = copy.deepcopy(state)
        self._task = Task(**state["task"])
        self.options = state["options"]
        self.np_random.bit_generator.state = state["np_random"]
        self._finished = state["finished"]
        self._screen = state["screen"]
        self.set_env_state(state["env"])

    def _checked(self, options: Options) -> dict[str, Any]:
        checked = {}
        for name, value in options.items():
            if name in self.path_options:
                checked[name] = str(value)
                continue
            values = self.choices.get(name)
            if values is None:
                valid = ", ".join(("task_id", "task", *self.choices))
                raise ValueError(f"{type(self).__name__} has no option {name!r}; valid ones are {valid}.")
            if isinstance(value, bool) or value not in values:
                valid = ", ".join(map(repr, values))
                raise ValueError(f"{type(self).__name__}: option {name!r} is {value!r}; valid values are {valid}.")
            checked[name] = values[values.index(value)]  # a numpy integer becomes the int that it equals
        return checked

    def _from_task_id(self, task_id: Any, options: Options) -> tuple[dict[str, Any], int]:
        *values, index = task_id.split(":") if isinstance(task_id, str) else [""]
        if len(values) != len(self.id_options) or not (index.isascii() and index.isdigit() and len(index) < 10):
            form = ":".join(f"<{name}>" for name in (*self.id_options, "index"))
            example = TextEnv.task_id(self, self.defaults, 17)
            raise ValueError(f"task_id {task_id!r} is not {form!r}, for example {example!r}.")
        spelled = zip(self.id_options, values, strict=True)
        named = {name: {str(valid): valid for valid in self.choices[name]}.get(text, text) for name, text in spelled}
        given = self._checked(options)
        for name, value in self._checked(named).items():
            if given.get(name, value) != value:
                raise ValueError(f"task_id {task_id!r} contradicts option {name!r}, which is {given[name]!r}.")
        resolved = self.defaults | given | named
        count = self.count_tasks(resolved)
        if int(index) >= count:
            raise ValueError(f"There is no task {task_id!r}: its index must be below {count}.")
        return resolved, int(index)

    def _admissible(self) -> Info:
        actions = self.admissible_actions()
        return {} if actions is None else {"admissible_actions": actions}


class RowsOnly(TextEnv):
    """Has no tasks of its own: an episode plays options["task"], or one of the argument `rows`, a list or a file of
    skyrl_gym.data.load_rows. Where environments are reset without options, as in vectors of them, `rows` is needed."""

    path_options = ("rows",)  # another file, of one episode

    def __init__(self, *, rows: Any = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._rows = load_rows(rows) if isinstance(rows, str | Path) else list(rows or ())

    def _rows_of(self, options: Options) -> list[Any]:
        return _rows(path, isfile(path) and getmtime(path)) if (path := options.get("rows")) else self._rows

    def count_tasks(self, options: Options) -> int:
        if not (rows := self._rows_of(options)):
            raise ValueError(
                "This environment plays rows of a dataset: gymnasium.make(id, rows='train.jsonl'), --option rows=..., "
                "or env.reset(options={'task': row}) with a row of skyrl_gym.data.load_rows('train.jsonl')."
            )
        return len(rows)

    def make_task(self, options: Options, index: int) -> Task:
        return self.task_from_row(self._rows_of(options)[index], options)


@lru_cache(maxsize=1)
def _rows(path: str, changed: float) -> list[Any]:
    return load_rows(path)
