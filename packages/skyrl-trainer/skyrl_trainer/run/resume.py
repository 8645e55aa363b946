"""A checkpoint as a run of today takes it up: with the same settings, and its run folder wherever that lies by now."""

from typing import Any

from skyrl_trainer import __version__
from skyrl_trainer.config import flatten, saved_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.run.checkpoint import Loaded
from skyrl_trainer.settings import FREE, ROUNDING, Config, leaf_fields

OPEN_ENDED_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Their learning rate does not depend on `trainer.max_steps`, so a run may be made longer or shorter."""


def resumable(found: Loaded, config: Config) -> Loaded:
    """Its open tasks name the files of today. UserError when the run cannot go on with these settings."""
    then = check_resumable(found.extra["config"], config, found.version)
    exams = [[c.data.val_data, c.data.val_size, c.generator.eval_temperature] for c in (then, config)]
    if str(exams[0]).replace(f"{then.run_path}/", f"{config.run_path}/") != str(exams[1]):
        # The score on other tasks is no bar: the next evaluation makes model/best anew.
        found.extra["score"] = []
    for _, _, sample in found.extra["tries"]["open"]:
        sample["sample_id"] = moved(sample["sample_id"], then, config)
        sample["env_file"] = config.environment.env_file
    return found


def moved(value: Any, then: Config, now: Config) -> Any:
    """A setting, or another name of a file, that begins with the run folder of then, with the one of now instead."""
    if isinstance(value, list):
        return [moved(each, then, now) for each in value]
    old, new = (f"{each.run_path}/" for each in (then, now))
    return new + value[len(old) :] if isinstance(value, str) and value.startswith(old) else value


def check_resumable(saved: dict[str, Any], config: Config, version: str = __version__) -> Config:
    """The settings of then (`saved` is their model_dump, by `version`). UserError names those that forbid to go on."""
    try:
        then = saved_config(saved)
    except UserError as error:
        raise UserError(
            f"The checkpoint's configuration is not one of this version. {error} It was written by skyrl-trainer "
            f"{version}: resume with that, or start anew in another trainer.run_dir."
        ) from error
    marks = {FREE} if config.trainer.deterministic else {FREE, ROUNDING}
    free = {name for name, field in leaf_fields().items() if marks & set(field.metadata)}
    if config.trainer.lr_scheduler_type.partition("?")[0] in OPEN_ENDED_SCHEDULES:
        free.add("trainer.max_steps")
    now = flatten(config)
    before = {name: moved(value, then, config) for name, value in flatten(then).items()}
    changed = [name for name in now if name not in free and before[name] != now[name]]
    if changed:
        differences = "; ".join(f"{name} was {before[name]!r}, is {now[name]!r}" for name in changed)
        raise UserError(
            f"This run cannot go on with other settings ({differences}); restore them, or start anew in "
            "another trainer.run_dir."
        )
    return then
