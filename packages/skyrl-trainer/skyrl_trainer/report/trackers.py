"""`trainer.logger`: accelerate's trackers and Prometheus."""

import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import indent
from typing import Any

from skyrl_trainer.algorithms.rewards import completion
from skyrl_trainer.config import Config, flatten
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.report.history import Spans
from skyrl_trainer.types import StepMetrics, Trajectory

log = logging.getLogger(__name__)
LONGEST = 10_000
"""Characters of a try that is shown."""


class Tracker:
    """Made after the learner, which makes accelerate's state. TensorBoard hides what it drew after last_step."""

    def __init__(self, config: Config, last_step: int = 0) -> None:
        self._tracker: Any = None
        trainer = config.trainer
        self._logger = trainer.logger
        if trainer.logger == "none":
            return
        project = trainer.project_name if trainer.logger != "tensorboard" else "tensorboard"  # there, a folder
        name, values = trainer.run_name, flatten(config)
        kinds: dict[str, Any] = {
            "tensorboard": {"logging_dir": str(config.run_path), "purge_step": last_step + 1},
            "mlflow": {"run_name": name},
            "swanlab": {"experiment_name": name, "config": values},
        }
        given = kinds.get(trainer.logger, {"name": name, "config": values})
        if trainer.logger == "prometheus":
            self._tracker = load("skyrl_trainer.report.prometheus:PrometheusTracker")(config)
        else:
            self._tracker = load("accelerate.tracking:LOGGER_TYPE_TO_CLASS")[trainer.logger](project, **given)
        try:
            self._tracker.start()
            if trainer.logger == "mlflow":
                self._tracker.store_init_configuration(values)
        except Exception as error:  # of a kind of its own; ImportError: not installed
            reason = str(error).rstrip(".")
            raise UserError(
                f"trainer.logger={trainer.logger} cannot start: {reason}; use trainer.logger=tensorboard or none."
            ) from error

    def log(self, metrics: StepMetrics, worked: Spans | None = None, tried: Sequence[Trajectory] = ()) -> None:
        """worked: when each engine computed, for Prometheus's `busy/engine <number>`. tried: held-out tries to show."""
        if not self._tracker:
            return
        with self._asked():
            values = {key: float(value) for key, value in metrics.items() if key != "step" and math.isfinite(value)}
            if self._logger == "mlflow":  # which may keep a file each, of a name without other signs
                values = {re.sub(r"[^\w. -]", ".", key): value for key, value in values.items()}
            if worked and self._logger == "prometheus":
                values |= {f"busy/{who}": sum(end - start for start, end in own) for who, own in worked.items()}
            if "eval/success" in metrics:
                self._show(tried, int(metrics["step"]))
            self._tracker.log(values, step=int(metrics["step"]))

    def _show(self, tried: Sequence[Trajectory], step: int) -> None:
        rows = list[tuple[str, float, str]]()
        for each in tried:
            said = [f"[{message['role']}]\n{message['content']}" for message in (*each.prompt, *completion(each))]
            rows.append((each.sample.sample_id, each.env_reward, "\n\n".join(said)[:LONGEST]))
        if self._logger == "tensorboard":
            for number, (task, reward, text) in enumerate(rows):
                shown = f"{task}, reward {reward:g}\n\n{indent(text, '    ')}"  # Markdown's plain text
                self._tracker.writer.add_text(f"held_out/{number}", shown, step)
        elif self._logger == "wandb" and rows:
            self._tracker.log_table("held_out", ["task", "reward", "episode"], [*map(list, rows)], step=step)

    def close(self) -> None:
        if self._tracker:
            with self._asked():
                self._tracker.finish()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # its server may be gone, which ends no run
            log.warning("trainer.logger=%s is given up (%s); metrics.jsonl has all.", self._logger, error)
            self._tracker = None
