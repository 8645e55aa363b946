"""What a script in TRL's shape brings, as files for EnvWorkers: rows, tools, environments, a model."""

import inspect
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from skyrl_gym.adapters.trl_env import columns
from skyrl_trainer.agent.tokenizer import load_tokenizer
from skyrl_trainer.errors import UserError
from skyrl_trainer.protocols import RewardFunction
from skyrl_trainer.registry import load

ENV_ID = "trl/environment-v0"
ENV_FILE = """import pickle
import sys
from pathlib import Path

import gymnasium

sys.path += [path for path in {paths!r} if path not in sys.path]
given = Path(__file__).with_name({given!r})  # wherever the run folder lies by now
pickle.loads(given.read_bytes())  # its imports may take longer than a reset has
gymnasium.registry.pop({env_id!r}, None)
gymnasium.register({env_id!r}, "skyrl_gym.adapters.trl_env:TRLEnv", kwargs={{"given": str(given)}})
"""
EMPTY = [{"role": "user", "content": ""}]
NOT_PASSED = {"environments", "log_extra", "log_metric"}


def write_rows(path: Path, name: str, given: Iterable[Mapping[str, Any]], most: int | None, speaks: bool) -> str:
    """A file of at most `most` rows. speaks: an environment does, and a row needs no prompt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside, run = path.with_suffix(".new"), path.parents[1]
    with aside.open("w", encoding="utf-8") as file:
        for number, row in enumerate(islice(given, most)):
            if not isinstance(row, Mapping):
                raise UserError(f"{name} data is a {type(given).__name__} of {type(row).__name__}; give one Dataset.")
            prompt = row.get("prompt", EMPTY if speaks else None)
            if prompt is None:
                raise UserError(f"Row {number} of {name} has no 'prompt'; it has {', '.join(row)}.")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            try:
                file.write(json.dumps({"prompt": messages, "columns": dict(row)}) + "\n")
            except TypeError as error:
                what = f"Row {number} of {name} holds what JSON cannot ({error})"
                raise UserError(f"{what}: leave that column out.") from None
    then, now = (file.read_bytes() if file.exists() else b"" for file in (path, aside))
    begun = name == "train" and (run / "checkpoints").exists()
    if begun and not (then.startswith(now) or now.startswith(then)):  # a longer run reads more
        aside.unlink()
        raise UserError(f"The run in {run} began with other rows: give another output_dir.")
    aside.replace(path)
    return str(path)


def write_environment(folder: Path, factory: Any, tools: Sequence[Any] | None, rewarded: bool) -> str:
    """The Python file that registers ENV_ID in every EnvWorker. rewarded: by functions."""
    kinds = [*factory.values()] if isinstance(factory, dict) else [factory]
    if not rewarded and all(isinstance(kind, type) and not hasattr(kind, "get_reward") for kind in kinds):
        raise UserError("Nothing gives a reward: give reward_funcs, or the environment a method get_reward.")
    folder.mkdir(parents=True, exist_ok=True)
    given = folder.resolve() / "environment.pkl"
    try:
        given.write_bytes(load("cloudpickle:dumps")((factory, list(tools or ()))))
    except Exception as error:
        raise UserError(f"environment_factory or tools cannot be sent to another process: {error}.") from error
    file = folder.resolve() / "environment.py"
    file.write_text(ENV_FILE.format(paths=sys.path, env_id=ENV_ID, given=given.name), encoding="utf-8")
    return str(file)


def write_model(folder: Path, model: Any, tokenizer: Any) -> str:
    """A folder of a model (an object, a folder or a name) with a tokenizer, the model's if None."""
    adapted = hasattr(model, "peft_type") or getattr(model, "_hf_peft_config_loaded", False)
    if not isinstance(model, str | Path) and (adapted or not hasattr(model, "save_pretrained")):
        wanted = "give a name, a folder, or a model of transformers without adapters"
        raise UserError(f"model is of type {type(model).__name__}; {wanted}.")
    model = str(model) if isinstance(model, Path) else model
    if isinstance(model, str) and (tokenizer is None or model == "tiny"):
        if tokenizer is not None:
            raise UserError("processing_class cannot be taken with model='tiny', which makes its own tokenizer.")
        return model
    if hasattr(tokenizer, "tokenizer") or not hasattr(tokenizer or model, "save_pretrained"):
        raise UserError(f"processing_class is a {type(tokenizer).__name__}; these trainers take a tokenizer, for text.")
    if tokenizer is None:
        if not model.name_or_path:
            raise UserError("model was not loaded from anywhere: give its tokenizer as processing_class.")
        tokenizer = load_tokenizer(model.name_or_path)
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    if isinstance(model, str):
        found = model if Path(model).is_dir() else load("huggingface_hub:snapshot_download")(model)
        for file in Path(found).resolve().iterdir():
            if not (folder / file.name).exists():
                (folder / file.name).symlink_to(file)
    else:
        model.save_pretrained(folder)
    return str(folder)


def with_columns(name: str, function: RewardFunction, state: Any) -> RewardFunction:
    """The function with what TRL passes: columns, texts where the prompts are texts, and `trainer_state`."""
    for asked in NOT_PASSED & inspect.signature(function).parameters.keys():
        instead = "give the environment a method get_reward" if asked == "environments" else "return it as a reward"
        raise UserError(f"The reward function {name!r} asks for {asked!r}, which is not passed: {instead}.")

    def call(*, prompts: Any, completions: Any, task: Any = (), **others: Any) -> Any:
        rows = [columns(row or {}) for row in task]
        if rows and all(isinstance(row.get("prompt"), str) for row in rows):
            prompts = [row["prompt"] for row in rows]
            completions = ["".join(said["content"] for said in talk) for talk in completions]
        own = {"task": [row.get("task", whole) for row, whole in zip(rows, task, strict=True)]} if rows else {}
        return function(prompts=prompts, completions=completions, **{**others, **own, "trainer_state": state})

    return call
