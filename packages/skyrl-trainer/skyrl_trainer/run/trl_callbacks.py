"""transformers.TrainerCallback beside a run: it is told what happens, with a TrainerState, and may stop the run."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from skyrl_trainer.errors import UserError
from skyrl_trainer.report.history import Spans, read_metrics
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.run import Run
from skyrl_trainer.settings import Config
from skyrl_trainer.types import StepMetrics
from skyrl_trainer.user_file import cause

TOLD = ("on_init_end", "on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")


class Callbacks:
    """What callbacks are told; UserError for all else."""

    def __init__(self, callbacks: Sequence[Any] | None, args: Any) -> None:
        self.callbacks = [each() if isinstance(each, type) else each for each in callbacks or ()]
        self.args, self.state, self.control = args, TrainerState(), TrainerControl()
        events = {name for name in dir(TrainerCallback) if name.startswith("on_")}
        for kind, event in product(map(type, self.callbacks), sorted(events - set(TOLD))):
            if getattr(kind, event, None) is not getattr(TrainerCallback, event):
                raise UserError(f"{kind.__name__}.{event} is never called; there are {', '.join(TOLD)}.")
        self.tell("on_init_end")

    def tell(self, event: str, **more: Any) -> None:
        for each in self.callbacks:
            name = type(each).__name__
            try:
                getattr(each, event)(self.args, self.state, self.control, **more)
            except Exception as error:
                raise UserError(f"{name}.{event} failed: {cause(error)}.") from error
            for flag in {flag for flag, on in vars(self.control).items() if on} - {"should_training_stop"}:
                raise UserError(f"{name} sets {flag}; only should_training_stop has an effect here.")


class ToldRun(Run):
    def __init__(self, config: Config, folder: RunFolder, algorithm: Any) -> None:
        super().__init__(config, folder, algorithm)
        self.callbacks: Callbacks = algorithm.callbacks
        self.updates = config.trainer.num_iterations * config.trainer.num_mini_batches
        self._at(self.first_step)
        self.callbacks.control.should_training_stop = False  # which ended the run before
        written = self.first_step + (self.checkpoint is not None and self.checkpoint.extra["unfinished"] is None)
        rows = [row for row in read_metrics(folder.path) if self.checkpoint and row["step"] < written]
        self.callbacks.state.log_history = [{**row, "step": int(row["step"]) * self.updates} for row in rows]

    def resume(self) -> tuple[int, StepMetrics | None]:
        step, unfinished = super().resume()
        self.callbacks.state.max_steps = self.config.trainer.max_steps * self.updates
        self._tell("on_train_begin")
        return step, unfinished

    def evaluate(self, step: int) -> StepMetrics:
        self._at(step)
        return super().evaluate(step)

    def log(self, step: int, metrics: StepMetrics, spans: Spans) -> None:
        super().log(step, metrics, spans)
        self._at(step)
        state = self.callbacks.state
        state.log_history.append({**metrics, "step": state.global_step})
        if step:
            self._tell("on_step_end")
        self._tell("on_log", logs=metrics)
        if "eval/success" in metrics:
            self._tell("on_evaluate", metrics={name: metrics[name] for name in metrics if name.startswith("eval/")})
        self.enough = self.callbacks.control.should_training_stop

    def save(self, step: int, loop_state: dict[str, Any]) -> None:
        super().save(step, loop_state)
        self._at(step)
        self._tell("on_save")

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self._tell("on_train_end")
        finally:
            super().__exit__(*error)

    def _at(self, step: int) -> None:
        state, size = self.callbacks.state, self.config.trainer.train_batch_size
        state.global_step = step * self.updates
        state.epoch = step * size / len(self.train_tasks)

    def _tell(self, event: str, **more: Any) -> None:
        model, tokenizer = getattr(self.learner, "model", None), self.learner.tokenizer
        self.callbacks.tell(event, model=model, processing_class=tokenizer, **more)
