"""The loop, on one page: roll out, learn, publish the weights, now and then evaluate and save.

    1. the sampler draws as many tasks as there is room for    2. the agents try each of them num_generations times
    3. the tries are stored, judged by the reward functions, and taken or refused by the sampler, which draws others
    4. the algorithm turns the oldest of them, a batch, into an update of the policy, while younger ones go on
    5. the engines get the weights, and a canary proves it
    6. every eval_interval steps held-out tasks; every ckpt_interval steps a checkpoint

With trainer.max_staleness=0 there is room for one batch, and with trainer.deterministic as well a step is a function of
the checkpoint before it. Killed anywhere, a run goes on from its newest checkpoint and the tries stored after it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from skyrl_trainer.errors import LearnersWait, NothingLearned
from skyrl_trainer.report.history import Spans
from skyrl_trainer.rollout.flow import staleness
from skyrl_trainer.rollout.metrics import group_metrics, rollout_metrics
from skyrl_trainer.run.run import Run
from skyrl_trainer.run.signals import StopSignal
from skyrl_trainer.types import RewardBatch, StepMetrics

Beside = Callable[[Run], AbstractContextManager[object]]
"""What runs from the first evaluation to the end: the endpoint of `train --serve`."""


class Loop:
    """Owns the order of things and nothing else: `run` does the work."""

    def __init__(self, run: Run, stop: StopSignal, beside: Beside = nullcontext) -> None:
        self.run, self.stop, self.config = run, stop, run.config.trainer
        self.beside = beside
        # The newest step in the weights, and its metrics until they are written.
        self.step, self.unfinished = run.resume()
        self.seconds: StepMetrics = {}  # and when: of this step's phases
        self.spans: Spans = {}
        self.saved: object = None if self.unfinished is not None else (self.step, None)
        self.batch_at = time.perf_counter()  # when the newest was taken
        self.whole = True
        """False during an update: no checkpoint then."""

    def train(self) -> None:
        """Trains until `trainer.max_steps`. A signal raises Stopped once a checkpoint is saved."""
        try:
            self.finish_step()
            self.run.stack.enter_context(self.beside(self.run))
            while self.step < self.config.max_steps and not self.run.enough:
                rewards, metrics = self.next_batch()
                self.learn(rewards, metrics)
                self.finish_step()
        except LearnersWait:
            self.whole = False
            raise
        finally:  # also after Ctrl-C or an engine's death: the newest whole step is never lost
            if self.whole:
                self.save()

    def next_batch(self) -> tuple[RewardBatch, StepMetrics]:
        """Waits for a batch, the oldest tries; others go on playing, and new ones begin as there is room."""
        run, size = self.run, self.config.train_batch_size
        self.seconds = {}
        with self.phase("rollout"):
            self.stop.check()  # a signal may have come during the update
            run.tries.draw(self.step)
            while (taken := run.tries.take(self.step)) is None:
                run.tries.collect(self.stop.interruptible())
                run.tries.draw(self.step)
        rollouts, accepted = taken
        if accepted < size:
            bound = f"trainer.algorithm.options.max_draws={run.alone.options.max_draws}"
            run.table.note(f"step {rollouts.step}: only {accepted} of {size} groups accepted ({bound})")
        rewards = run.rewards.batch(rollouts, range(accepted))
        metrics = rollout_metrics(rollouts) | run.rewards.metrics(rollouts)
        return rewards, metrics | group_metrics(rewards, accepted, size)

    def learn(self, rewards: RewardBatch, metrics: StepMetrics) -> None:
        """One call of the algorithm. Once it returns the step counts, whatever happens after."""
        seconds = self.seconds["time/rollout"]
        if self.config.max_staleness:  # rollouts go on beside the learner: since the batch before
            before, self.batch_at = self.batch_at, time.perf_counter()
            seconds = self.batch_at - before
            metrics |= staleness(rewards.trajectories, self.step, self.config.max_staleness)
            metrics |= self.run.tries.flow.metrics()
        metrics["tokens/per_second"] = metrics["tokens"] / seconds
        with self.phase("train"):
            self.run.colocation.sleep()
            self.whole = False
            try:
                metrics |= self.run.algorithm.update(rewards)
            except NothingLearned:
                self.whole = True
                raise
        self.step, self.unfinished = rewards.rollouts.step, metrics | self.seconds
        self.run.tries.learned(rewards.rollouts)

    def finish_step(self) -> None:
        """Brings the engines to this step's weights; draws, evaluates, logs and saves where that is due."""
        with self.phase("sync"):
            self.whole = True
            synced = self.run.publish(self.step)
        if self.config.max_staleness and not self.config.deterministic:
            self.run.tries.draw(self.step)
        if self.unfinished is None:  # resumed from a checkpoint whose step was written already
            return
        metrics = self.unfinished | synced
        if self.evaluation_due():
            with self.phase("eval"), self.stop.interruptible():
                metrics |= self.run.evaluate(self.step)
        row = metrics | self.seconds  # of a step that was resumed before it was logged, the metrics have some
        total = sum(value for name, value in row.items() if name.startswith("time/"))
        self.run.log(self.step, row | {"time/step": total}, self.spans)
        self.unfinished, self.spans = None, {}
        if self.config.ckpt_interval and self.step and self.step % self.config.ckpt_interval == 0:
            self.save()

    def evaluation_due(self) -> bool:
        if self.step == 0:
            return self.config.eval_before_train
        last = self.step == self.config.max_steps
        return last or bool(self.config.eval_interval and self.step % self.config.eval_interval == 0)

    def save(self) -> None:
        if (self.step, self.unfinished) != self.saved:
            self.run.save(self.step, {"tries": self.run.tries.state_dict(), "unfinished": self.unfinished})
            self.saved = (self.step, self.unfinished)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows the phase, and counts its seconds as `time/<name>`."""
        self.run.table.phase(name)
        start, began = time.perf_counter(), time.time()
        yield
        self.seconds[f"time/{name}"] = time.perf_counter() - start
        self.spans[name] = [(began, time.time())]
