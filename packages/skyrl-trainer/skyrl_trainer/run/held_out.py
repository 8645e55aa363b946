"""What a policy is examined on: held-out tasks of envs, and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_trainer.config import Config
from skyrl_trainer.data import SampleSource, held_out, load_samples, take_exams
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.rollout.metrics import rollout_metrics
from skyrl_trainer.types import PromptBatch, StepMetrics


def tasks(config: Config, specs: Sequence[str | dict[str, Any]]) -> SampleSource:
    environment = config.environment
    return load_samples(
        specs, environment.env_class, size=None, seed=config.trainer.seed, env_file=environment.env_file
    )


class HeldOut:
    """`data.val_data`: the first `trainer.eval_batch_size` distinct tasks of envs, and benchmarks."""

    def __init__(self, config: Config) -> None:
        specs, self._exams = take_exams(config.data.val_data, config.run_path)
        count = config.trainer.eval_batch_size
        self.tasks = held_out(tasks(config, specs), count) if specs or not self._exams else []

    def metrics(self, rollouts: Rollouts, step: int) -> StepMetrics:
        """Each tried once. Without tasks of envs `eval/success` is the mean accuracy of the benchmarks."""
        found: StepMetrics = {}
        if self.tasks:
            tries = rollouts.run(PromptBatch(step, self.tasks, num_generations=1), eval=True)
            found = {f"eval/{name}": value for name, value in rollout_metrics(tries).items()}
        for exam in self._exams:
            found |= exam.run(rollouts, step)
        accuracies = [value for name, value in found.items() if name.endswith("/accuracy")]
        return found if self.tasks else found | {"eval/success": sum(accuracies) / len(accuracies)}
