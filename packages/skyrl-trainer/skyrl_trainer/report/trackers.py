"""`trainer.logger`: accelerate's trackers; nothing is sent to anybody unless the setting asks for it."""

import math
from typing import TYPE_CHECKING

from skyrl_trainer.config import Config, flatten
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import StepMetrics

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


class Tracker:
    """Made after the learner: accelerate's state is its to make. last_step: of a resumed run's checkpoint; TensorBoard
    hides what it had drawn after it."""

    def __init__(self, config: Config, last_step: int = 0) -> None:
        self._tracker: GeneralTracker | None = None
        trainer = config.trainer
        if trainer.logger == "none":
            return
        from accelerate.tracking import TensorBoardTracker, TrackioTracker, WandBTracker

        if trainer.logger == "tensorboard":
            path = str(config.run_path)
            self._tracker = TensorBoardTracker("tensorboard", logging_dir=path, purge_step=last_step + 1)
        else:
            kind = WandBTracker if trainer.logger == "wandb" else TrackioTracker
            self._tracker = kind(trainer.project_name, name=trainer.run_name, config=flatten(config))
        try:
            self._tracker.start()
        except Exception as error:  # each tracker has its own kinds; one that is not installed raises ImportError
            raise UserError(
                f"trainer.logger={trainer.logger} cannot start: {error}; use trainer.logger=tensorboard or none."
            ) from error

    def log(self, metrics: StepMetrics) -> None:
        if self._tracker:
            values = {key: float(value) for key, value in metrics.items() if key != "step" and math.isfinite(value)}
            self._tracker.log(values, step=int(metrics["step"]))

    def close(self) -> None:
        if self._tracker:
            self._tracker.finish()
