"""Where tasks come from: env specs and dataset files, as one list of samples.

    text_math?split=train&difficulty=2       an env (gymnasium id, or short name for skyrl/<name>-v0) and its options
    {"env": "text_math", "split": "train"}   the same as a mapping
    openenv:ws://127.0.0.1:8900?split=train  an env behind an OpenEnv server
    skyrl_eval:gsm8k?data=gsm8k.jsonl&n=50   held-out data only: a benchmark, by the `exam` of the package named
    data/train.jsonl  data/train.parquet     rows in SkyRL's format; a row's env_class, else the default one
    owner/name?split=train  hf:a/b@revision  such files of a data set on Hugging Face, whose names hold the split's

Four options are not the env's: `size` (how many samples the spec stands for), `seed` (which ones), `weight` (its share
of what is drawn, 1 where another has one; without any, shares are as the sizes), and `tries`, of held-out data.
"""

import json
import math
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any
from urllib.parse import parse_qsl

from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.settings import Config
from skyrl_trainer.types import Sample
from skyrl_trainer.user_file import cause, load_user_file

Spec = str | dict[str, Any]
DEFAULT_ENV_SIZE = 10_000
CHECK_SECONDS, FIRST_SECONDS = 5.0, 300.0
"""Limits of trying a file's rows at the start, and of an env's first reset there."""
FILE_SUFFIXES = (".jsonl", ".parquet")


# Made when they are asked for: `_at(index)`, 0 <= index < len.
class _Samples(Sequence[Sample]):
    def __getitem__(self, index: int | slice) -> Any:
        places = range(len(self))[index]
        return self._at(places) if isinstance(places, int) else [self._at(place) for place in places]

    def _at(self, index: int) -> Sample:
        raise NotImplementedError


@dataclass(frozen=True)
class EnvSamples(_Samples):
    """`size` episodes of one env, by seed."""

    spec: str
    env_id: str
    options: dict[str, Any]
    size: int
    seed: int
    env_file: str | None

    def __len__(self) -> int:
        return self.size

    def _at(self, index: int) -> Sample:
        # Seeds of different `seed`s do not meet, and every one of them fits a float64, so that JSON keeps it.
        env_seed = (self.seed % 2**20) * 2**32 + index
        return Sample(f"{self.spec}#{index}", self.env_id, env_seed, dict(self.options), env_file=self.env_file)


class SampleSource(_Samples):
    """Several sources, one after the other. `weights` are theirs, or none where no spec has a weight."""

    def __init__(
        self, parts: Sequence[Sequence[Sample]], weights: Sequence[float] = (), tries: Sequence[int] = ()
    ) -> None:
        self.parts, self.weights, self.tries = parts, weights, tries or [1] * len(parts)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def _at(self, index: int) -> Sample:
        number = 0
        while index >= len(self.parts[number]):
            index -= len(self.parts[number])
            number += 1
        return self.parts[number][index]


def load_samples(
    specs: Sequence[Spec], default_env_class: str = "text_math", seed: int = 0, env_file: str | None = None
) -> SampleSource:
    """The samples of all specs, in order. UserError names the spec, what is wrong with it and what is right.
    default_env_class: of rows that name none. seed: of specs that have none. env_file: registers environments.
    """
    if not specs:
        raise UserError("data.train_data or data.val_data is empty: give it 'text_math?split=train', say, or a file.")
    if env_file:
        load_user_file("environment.env_file", env_file, "registers environments")
    parts: dict[str, Sequence[Sample]] = {}
    weights, tries = list[float | None](), list[int]()
    for spec in specs:
        name, options = _parse(spec)
        weights.append(weight := options.pop("weight", None))
        if weight is not None and not (type(weight) in (int, float) and 0 < weight < math.inf):
            raise UserError(f"Data source {spec!r}: weight is {weight!r}, and must be a number above 0.")
        tries.append(options.pop("tries", 1))
        if type(tries[-1]) is not int or tries[-1] < 1:
            raise UserError(f"Data source {spec!r}: tries is {tries[-1]!r}, and must be a whole number above 0.")
        label = name + "?" * bool(options) + "&".join(f"{key}={options[key]}" for key in sorted(options))
        if label in parts:
            raise UserError(f"Data source {label!r} is listed twice; set the share of an env by its `weight` option.")
        if name.endswith(FILE_SUFFIXES) or Path(name).expanduser().is_file():
            if options:
                raise UserError(f"Data source {name!r} is a file, which takes no options; got {', '.join(options)}.")
            parts[label] = _row_samples(name, [Path(name).expanduser()], default_env_class, env_file)
        # An env's id of this form ends in a version, as in a/b-v0.
        elif name.startswith("hf:") or re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(?<!-v\d)(?<!-v\d\d)", name):
            files = load("skyrl_trainer.hub:data_files")(name, FILE_SUFFIXES, **options)
            parts[label] = _row_samples(label.replace("?split=", ":"), files, default_env_class, env_file)
        else:
            parts[label] = _env_samples(label, name, options, seed, env_file)
    return SampleSource([*parts.values()], [weight or 1.0 for weight in weights] if any(weights) else (), tries)


def tasks(config: Config, specs: Sequence[Spec]) -> SampleSource:
    environment = config.environment
    return load_samples(specs, environment.env_class, seed=config.trainer.seed, env_file=environment.env_file)


def held_out(source: SampleSource, count: int) -> list[Sample]:
    """The first `count` rows, and tasks of envs whose messages differ, each `tries` times; the sources take turns."""
    found: dict[tuple[str, ...], list[Sample]] = {}
    given, longest = [*zip(source.parts, source.tries, strict=True)], max(map(len, source.parts))
    with first_envs() as envs:
        for sample, times in ((part[i], n) for i in range(longest) for part, n in given if i < len(part)):
            if len(found) == count:
                break
            observation, info = first_texts(sample, envs)
            row = sample.sample_id if "task" in sample.options else ""  # as often as it stands there
            found.setdefault((info.get("instructions", ""), observation, row), [sample] * times)
    return [sample for same in found.values() for sample in same]


def _late(*of: object) -> None:
    raise TimeoutError(f"it took longer than {FIRST_SECONDS:g} seconds")


@contextmanager
def _limited() -> Iterator[None]:
    if current_thread() is not main_thread():  # it hears no alarm
        yield
        return
    before = signal.signal(signal.SIGALRM, _late)
    alarm = signal.setitimer(signal.ITIMER_REAL, FIRST_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *alarm)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def first_envs() -> Iterator[dict[str, Any]]:
    """Envs by their ids, for `first_texts` to make; closed at the end."""
    envs: dict[str, Any] = {}
    try:
        yield envs
    finally:
        for env in envs.values():
            with suppress(Exception, SystemExit), _limited():
                env.close()


def first_texts(sample: Sample, envs: dict[str, Any], label: str = "") -> tuple[str, dict[str, Any]]:
    """An env's first observation and info; envs: of `first_envs`. UserError (label or sample's id first)."""
    try:
        with _limited():
            if sample.env_id not in envs:
                envs[sample.env_id] = load("gymnasium:make")(sample.env_id, disable_env_checker=True)
            env = envs[sample.env_id]
            observation, info = env.reset(seed=sample.seed, options=dict(sample.options))
        if not (isinstance(observation, str) and isinstance(info, dict)):
            raise TypeError(f"reset gave {(observation, info)!r:.80}, and should give a text and a dict")
    except (Exception, SystemExit) as error:
        where = f"Data source {(label or sample.sample_id)!r}"
        reason = error if type(error) in (ValueError, ImportError) else cause(error)  # our envs' are sentences
        raise UserError(f"{where}: {sample.env_id} cannot begin an episode: {reason}") from error
    return observation, info


def _parse(spec: Spec) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, dict):
        if not isinstance(spec.get("env"), str):
            raise UserError(f"Data source {spec!r} names no env; write {{env: text_math, split: train}}.")
        return spec["env"], {key: value for key, value in spec.items() if key != "env"}
    if not isinstance(spec, str) or not spec.strip():
        raise UserError(f"Data source {spec!r} is neither an env spec such as 'text_math?split=train' nor a file.")
    name, _, query = spec.strip().partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise UserError(f"Data source {spec!r}: after '?' come options as in 'split=train&difficulty=2'.") from error
    options: dict[str, Any] = {}
    for key, text in pairs:
        if key in options:
            raise UserError(f"Data source {spec!r} gives the option {key!r} twice; list two sources instead.")
        options[key] = typed(text)
    return name, options


def typed(text: str) -> Any:
    """2 of "2", True of "true", and text of everything else."""
    with suppress(ValueError, RecursionError):
        return value if isinstance(value := json.loads(text), (int, float)) else text
    return text


def take_exams(specs: Sequence[Spec], folder: Path) -> tuple[list[Spec], list[Any]]:
    """Held-out data apart: what `load_samples` takes, and the package's `exam(name, options, folder)` for every
    benchmark, whose `run(rollouts, step)` gives figures to log. folder: of the run."""
    rest, exams, named = [], [], set[str]()
    for spec in specs:
        name, options = _parse(spec)
        package, _, bench = name.partition(":")
        is_env = not bench or "/" in bench or re.search(r"-v\d+$", bench)
        make = None
        if not is_env and all(part.isidentifier() for part in package.split(".")):
            with suppress(ModuleNotFoundError):
                make = getattr(import_module(package), "exam", None)
        if make is None:  # an env, or a file
            rest.append(spec)
        elif name in named:
            raise UserError(f"Data source {name!r} is listed twice, and a benchmark has one curve: leave one out.")
        else:
            named.add(name)
            exams.append(make(bench, options, folder))
    return rest, exams


def _env_samples(label: str, name: str, options: dict[str, Any], seed: int, env_file: str | None) -> EnvSamples:
    size = options.pop("size", DEFAULT_ENV_SIZE)
    seed = options.pop("seed", seed)
    for key, value, least in (("size", size, 1), ("seed", seed, 0)):
        if type(value) is not int or not least <= value < 2**63:
            raise UserError(f"Data source {label!r}: {key} is {value!r}, not a whole number from {least} to 2**63.")
    try:
        env_id, own = load("skyrl_gym.registry:portable_env")(name)
    except ValueError as error:
        hint = " A data file ends in .jsonl or .parquet." if "." in name or "/" in name else ""
        raise UserError(f"Data source {label!r}: {error}{hint}") from error
    samples = EnvSamples(label, env_id, options | own, size, seed, env_file)
    with first_envs() as envs:
        first_texts(samples[0], envs, label)  # an unknown option is told at the start
    return samples


def _row_samples(path: str, files: Sequence[Path], default_env_class: str, env_file: str | None) -> list[Sample]:
    try:
        rows = [row for file in files for row in load("skyrl_gym.data:load_rows")(file)]
    except (OSError, ValueError, ImportError) as error:
        raise UserError(str(error)) from error
    samples = []
    env_ids, deadline = dict[str, str](), time.monotonic() + CHECK_SECONDS
    with first_envs() as envs:
        for number, row in enumerate(rows):
            env_class = row.get("env_class") or default_env_class
            if first_of_class := env_class not in env_ids:
                try:
                    env_ids[env_class] = load("skyrl_gym:resolve_env_id")(env_class)
                except ValueError as error:
                    raise UserError(f"{path} row {number + 1}, field 'env_class': {error}") from error
            truth = row["reward_spec"].get("ground_truth")
            sample = Sample(f"{path}#{number}", env_ids[env_class], number, {"task": row}, truth, env_file)
            if first_of_class or time.monotonic() < deadline:
                first_texts(sample, envs, f"{path} row {number + 1}")
            samples.append(sample)
    return samples
