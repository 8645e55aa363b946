"""Benchmarks while a policy trains: `skyrl_eval:gsm8k?n=50&data=...&judge_url=...` in `data.val_data`."""

from pathlib import Path
from typing import Any

from skyrl_eval import benchmarks, data, grade, metrics
from skyrl_eval.benchmarks.common import Context
from skyrl_eval.judge import Judge
from skyrl_eval.solve import attempt_of
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.manager import check_not_all_failed
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.types import PromptBatch, StepMetrics


class Exam:
    """A subset of a benchmark. Example: Exam("gsm8k", {"data": "gsm8k.jsonl", "n": 50}, Path("runs/run"))"""

    def __init__(self, name: str, options: dict[str, Any], folder: Path) -> None:
        """folder: where the judge's replies are kept. UserError where something is missing."""
        if unknown := sorted(options.keys() - {"data", "n", "tries", "judge_url", "judge_model"}):
            raise UserError(f"skyrl_eval:{name} takes data, n, tries, judge_url and judge_model, not {unknown[0]}.")
        n, self.tries = options.get("n", 50), options.get("tries", 1)
        if not all(type(count) is int and count > 0 for count in (n, self.tries)):
            raise UserError(f"skyrl_eval:{name}: n={n}, tries={self.tries}: each must be above 0.")
        self._bench = benchmarks.find(name)
        self.store: JsonlTrajectoryStore | None = None  # which keeps tries
        self._items = data.subset(data.load(self._bench, options.get("data")).items, n)
        asks = options.get("judge_url") and options.get("judge_model")
        judge = Judge(options["judge_url"], options["judge_model"], folder / "judge") if asks else None
        self._context = Context(judge)
        self._bench.check(self._context)
        grade.check_judge(self._bench, self._items[0], self._context)

    def run(self, rollouts: Any, step: int) -> StepMetrics:
        """Example: {"eval/gsm8k/accuracy": 0.4, "eval/gsm8k/ungraded": 0.0, ...}"""
        samples = [self._bench.env(item) for item in self._items]
        tries = rollouts.run(PromptBatch(step, samples, self.tries), eval=True)
        check_not_all_failed(tries, "evaluation at step")
        items = [item for item in self._items for _ in range(self.tries)]
        attempts = [attempt_of(t, item, t.generation) for t, item in zip(tries.trajectories, items, strict=True)]
        verdicts = list(grade.grade_all(self._bench, items, attempts, self._context))
        scores = {each.key: each.score for each in verdicts}
        for played, attempt in zip(tries.trajectories, attempts, strict=True):
            played.scores[self._bench.name] = scores[attempt.key]
        if self.store:
            self.store.inside(self._bench.name).write(tries)
        found = metrics.summarise(self._items, self.tries, attempts, verdicts)
        shown = {"accuracy": found["accuracy"]} | {f: found["counts"][f] for f in ("ungraded", "unparsed", "truncated")}
        shown |= {f"pass_at/{k}": value for k, value in found["pass_at"].items() if k != "1"}
        return {f"eval/{self._bench.name}/{figure}": float(value) for figure, value in shown.items()}
