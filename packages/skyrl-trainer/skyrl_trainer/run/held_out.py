"""What a policy is examined on: held-out tasks of envs, and benchmarks."""

from skyrl_trainer.algorithms.rewards import Rewards
from skyrl_trainer.data import EnvSamples, held_out, take_exams, tasks
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.flow import Group
from skyrl_trainer.rollout.manager import Rollouts, check_not_all_failed
from skyrl_trainer.rollout.metrics import rollout_metrics
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.settings import Config
from skyrl_trainer.types import PromptBatch, RolloutBatch, Sample, StepMetrics, Trajectory

TASKS_OF_ENVS = 500
"""How many an evaluation has, unless `data.val_size` says it."""
SHOWN = 8
"""Of its tries, that a tracker shows."""


class HeldOut:
    """`data.val_data`: tasks of envs and files, and benchmarks. `rewards` judges tries, `store` keeps them."""

    def __init__(self, config: Config, rewards: Rewards | None, store: JsonlTrajectoryStore | None = None) -> None:
        specs, self._exams = take_exams(config.data.val_data, config.run_path)
        self._rewards, self._store = rewards, store
        tries = [getattr(each, "tries", 1) for each in self._exams]
        for each in self._exams:
            each.store = store
        self._at_once = config.trainer.eval_batch_size
        self.tasks = list[Sample]()
        self.tried: list[Trajectory] = []
        if specs or not self._exams:
            source = tasks(config, specs)
            of_files = [len(part) for part in source.parts if not isinstance(part, EnvSamples)]
            default = sum(of_files) + TASKS_OF_ENVS * (len(of_files) < len(source.parts))
            tries += source.tries
            self.tasks = held_out(source, config.data.val_size or default)
        if max(tries) > 1 and not config.generator.eval_temperature:
            raise UserError("data.val_data: `tries` are all the same at generator.eval_temperature=0: raise it.")

    def metrics(self, rollouts: Rollouts, step: int) -> StepMetrics:
        """Of all tries. Without tasks of envs `eval/success` is the mean accuracy of the benchmarks."""
        found: StepMetrics = {}
        tries = RolloutBatch(step, [])
        for start in range(0, len(self.tasks), self._at_once):
            part = PromptBatch(step, self.tasks[start : start + self._at_once], num_generations=1, offset=start)
            tries.groups += rollouts.run(part, eval=True).groups
        tries.groups = by_task(tries.trajectories)
        if len(self.tasks) > 1:  # one alone may have had bad luck
            check_not_all_failed(tries, "evaluation at step")
        if self.tasks:
            self.tried = tries.trajectories[:SHOWN]
            if self._rewards:
                self._rewards.judge(tries.trajectories)
                found = self._rewards.metrics(tries)
            if self._store:
                self._store.write(tries)
            found = {f"eval/{name}": value for name, value in (rollout_metrics(tries) | found).items()}
        for exam in self._exams:
            found |= exam.run(rollouts, step)
        accuracies = [value for name, value in found.items() if name.endswith("/accuracy")]
        return found if self.tasks else found | {"eval/success": sum(accuracies) / len(accuracies)}


def by_task(tries: list[Trajectory]) -> list[Group]:
    """Tries of equal rows, or of one env's task, are a group: DAPO's AIME has each row 32 times."""
    groups: dict[tuple[str, str, int | None], Group] = {}
    for each in tries:
        task = each.sample
        seed = None if "task" in task.options else task.seed
        group = groups.setdefault((task.env_id, repr(task.options), seed), [])
        each.generation = len(group)
        group.append(each)
    return list(groups.values())
