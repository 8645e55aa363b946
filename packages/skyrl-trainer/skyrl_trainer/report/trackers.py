"""`trainer.logger`: accelerate's trackers and Prometheus; nothing is sent to anybody unless the setting asks for it."""

import math
from typing import TYPE_CHECKING, Any

from skyrl_trainer.config import Config, flatten
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.timeline import Spans
from skyrl_trainer.types import StepMetrics

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


class Tracker:
    """Made after the learner: accelerate's state is its to make. last_step: of a resumed run's checkpoint; TensorBoard
    hides what it had drawn after it."""

    def __init__(self, config: Config, last_step: int = 0) -> None:
        self._tracker: GeneralTracker | Any = None
        trainer = config.trainer
        self._prometheus = trainer.logger == "prometheus"
        if trainer.logger == "none":
            return
        from accelerate.tracking import MLflowTracker, SwanLabTracker, TensorBoardTracker, TrackioTracker, WandBTracker

        project, name, values = trainer.project_name, trainer.run_name, flatten(config)
        if trainer.logger == "tensorboard":
            path = str(config.run_path)
            self._tracker = TensorBoardTracker("tensorboard", logging_dir=path, purge_step=last_step + 1)
        elif trainer.logger == "mlflow":
            self._tracker = MLflowTracker(project, run_name=name)
        elif trainer.logger == "swanlab":
            self._tracker = SwanLabTracker(project, experiment_name=name, config=values)
        elif self._prometheus:
            from skyrl_trainer.report.prometheus import PrometheusTracker

            self._tracker = PrometheusTracker(config)
        else:
            kind = WandBTracker if trainer.logger == "wandb" else TrackioTracker
            self._tracker = kind(project, name=name, config=values)
        try:
            self._tracker.start()
            if isinstance(self._tracker, MLflowTracker):
                self._tracker.store_init_configuration(values)
        except Exception as error:  # each tracker has its own kinds; one that is not installed raises ImportError
            raise UserError(
                f"trainer.logger={trainer.logger} cannot start: {error}; use trainer.logger=tensorboard or none."
            ) from error

    def log(self, metrics: StepMetrics, worked: Spans | None = None) -> None:
        """worked: when each engine computed in the step; Prometheus gets its seconds as `busy/engine <number>`."""
        if self._tracker:
            values = {key: float(value) for key, value in metrics.items() if key != "step" and math.isfinite(value)}
            if worked and self._prometheus:
                values |= {f"busy/{who}": sum(end - start for start, end in own) for who, own in worked.items()}
            self._tracker.log(values, step=int(metrics["step"]))

    def close(self) -> None:
        if self._tracker:
            self._tracker.finish()
