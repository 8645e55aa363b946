"""What a run has, made in an order that lets what is slow (engines, clone, learner) start together."""

import gc
from contextlib import ExitStack, closing
from copy import copy
from typing import TYPE_CHECKING, Any, Self

from skyrl_trainer.algorithms.options import algorithm_name
from skyrl_trainer.algorithms.rewards import Rewards
from skyrl_trainer.algorithms.samplers import sampler_class
from skyrl_trainer.errors import EngineDied, EngineLost
from skyrl_trainer.learner.compose import algorithm_class
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.learner.model import Learner, make_learner
from skyrl_trainer.process_memory import INTERVAL, pss_gib, return_free_memory
from skyrl_trainer.registry import load
from skyrl_trainer.report.history import MetricsWriter, Spans, write_spans
from skyrl_trainer.report.table import COLUMNS, OVERLAPPED, LiveTable
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.run.checkpoint import Checkpoints
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.held_out import HeldOut, tasks
from skyrl_trainer.run.processes import Processes, check_engines
from skyrl_trainer.run.tries import Tries
from skyrl_trainer.settings import Config
from skyrl_trainer.types import StepMetrics
from skyrl_trainer.weight_sync.canary import TOLERANCE, Canary
from skyrl_trainer.weight_sync.colocation import Colocation, shares_gpus, sync_backend
from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync

if TYPE_CHECKING:  # options, which are imported where they are chosen
    from skyrl_trainer.learner.group import LearnerGroup
    from skyrl_trainer.weight_sync.nccl import NCCLSync

CANARY_TEXT = "The canary sings 17 + 25 = 42 and the quick brown fox listens. "
CANARY_TOKENS = 96
LOST_SECONDS = 10.0
"""How long to look for an engine that died in a call, before it is asked again."""


class Run:
    """The constructor finds whatever is wrong with files and settings; `with run:` starts everything, and stops it."""

    learner: "Learner | LearnerGroup"
    enough = False  # ends it after a step

    def __init__(self, config: Config, folder: RunFolder, algorithm: GRPO | None = None) -> None:
        self.config, self.folder = config, folder
        trainer, path = config.trainer, folder.path
        check_engines(config, trainer.policy.model.path, training=True)  # loads the plug-in
        if trainer.policy.model.lora.quantization != "none":
            load("skyrl_trainer.learner.lora:checked")(config)
        sync_backend(config)
        self.alone = algorithm or algorithm_class(algorithm_name(config))(config)
        """Of this process; with several learners `algorithm` is all of theirs."""
        self.algorithm: GRPO | LearnerGroup = self.alone
        self.rewards = Rewards(config, self.alone.options.overlong_filter)
        self.checkpoints = Checkpoints(path, trainer.max_ckpts_to_keep)
        self.checkpoint = self.checkpoints.load_latest()
        if self.checkpoint:
            self.checkpoint = load("skyrl_trainer.run.resume:resumable")(self.checkpoint, config)
        self.first_step = self.checkpoint.step if self.checkpoint else 0
        self.replayed = load("skyrl_trainer.rollout.stored:stored_rollouts")(config, lambda: self.alone)
        self.train_tasks = self.replayed.samples if self.replayed else tasks(config, config.data.train_data)
        self.tried = JsonlTrajectoryStore(path / "held_out")
        self.held_out = HeldOut(config, self.rewards, self.tried)
        sampler = sampler_class(self.alone.options.sampler)(self.train_tasks, trainer.seed)
        store = JsonlTrajectoryStore(path / "trajectories")
        self.tries = Tries(config, self.alone.options.max_draws, sampler, self.rewards, store, folder.check)

    @property
    def complete(self) -> bool:
        found = self.checkpoint
        return bool(found and found.step >= self.config.trainer.max_steps and found.extra["unfinished"] is None)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.stack = stack
            trainer = self.config.trainer
            columns = OVERLAPPED if trainer.max_staleness else COLUMNS
            if trainer.algorithm.reward_funcs and self.held_out.tasks:  # success may earn nothing
                columns = columns | {"held-out": ("eval/reward/total", 8, "{:.3f}")}
            self.table = stack.enter_context(LiveTable(trainer.max_steps, self.first_step, columns))
            distinct = {each.sample_id for each in self.held_out.tasks}
            if len(distinct) < (self.config.data.val_size or 0):
                self.table.note(f"data.val_data has {len(distinct)} distinct tasks: all are used")
            self.folder.write_config()
            self._start_processes()
            stack.callback(gc.set_threshold, *gc.get_threshold())
            gc.set_threshold(50_000, 20, 50)  # fewer passes over all tokens in memory
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def _start_processes(self) -> None:
        config, trainer = self.config, self.config.trainer
        self.table.phase("making the policy")
        start = load("skyrl_trainer.tiny.start:StartPolicy")
        policy = self.stack.enter_context(start(config, self.folder.path, self.train_tasks, self.table.phase))
        self.table.phase("starting Ray and the engines")
        self.processes = self.stack.enter_context(Processes(config, policy.architecture, learns=True))
        self.table.phase("waiting for the policy")
        weights = policy.weights()
        level = 1 if sync_backend(config) == "adapter" else 2  # 2 drops the weights: an adapter brings none
        engines, hold = self.processes.engines, self.processes.rollouts.hold
        self.colocation = Colocation(engines, level, shares_gpus(config), lambda: self.learner.release_memory(), hold)
        if self.colocation.shared:  # neither could measure its memory beside the other
            self.processes.wait_for_engines()
            self.colocation.sleep()
        self.table.phase("loading the policy")
        self._start_learner(weights, trainer.max_steps * trainer.num_iterations * trainer.num_mini_batches)
        if self.replayed:
            self.replayed.check(self.learner.tokenizer)
        self.table.phase("waiting for the engines")
        self.processes.wait_for_engines()
        self.sync = self._weight_sync()
        self.stack.callback(self.sync.close)
        length = min(CANARY_TOKENS, config.generator.max_model_len - 1)
        ids = self.learner.tokenizer.encode(CANARY_TEXT * (length // 8 + 1), add_special_tokens=False)
        self.canary = Canary(engines, list(ids[:length]), TOLERANCE[trainer.policy.model.dtype])
        self.sync.away = self.canary.away = self.processes.watch.away
        self.processes.watch.restore = self._restore
        self.tries.rollouts = self.replayed or self.processes.rollouts

    def _start_learner(self, weights: str, updates: int) -> None:
        if self.config.num_learners > 1:
            sent = copy(self.alone)
            vars(sent).update(callbacks=None, functions=None)  # of a script, to which they are of use
            group = load("skyrl_trainer.learner.group:LearnerGroup")(self.config, sent, weights, updates)
            self.learner = self.algorithm = group
            self.stack.callback(group.close)
        else:
            self.learner = learner = make_learner(self.config, weights, updates)
            self.alone.start(learner, learner.reference() if self.alone.beta > 0 else None)

    def _weight_sync(self) -> "SharedMemorySync | NCCLSync":
        engines, backend = self.processes.engines, sync_backend(self.config)
        own: Any = self.learner
        if backend == "nccl":
            tensor_parallel = self.config.generator.inference_engine_tensor_parallel_size
            return load("skyrl_trainer.weight_sync.nccl:NCCLSync")(engines, own.transfer, tensor_parallel)
        if backend == "adapter":  # of one learner alone
            return load("skyrl_trainer.weight_sync.lora:AdapterSync")(engines, own.base_tensors, own.adapter_tensors)
        buffer = own.share_weights()
        if backend == "cuda_ipc":
            buffer = load("skyrl_trainer.weight_sync.cuda_ipc:GPUBuffer").create(own.named_tensors())
        return SharedMemorySync(engines, own.named_tensors, buffer)

    def resume(self) -> tuple[int, StepMetrics | None]:
        """The newest step in the weights, and its metrics if they were not written; 0 and {} in a new run."""
        found, self.best = self.checkpoint, list[float]()
        if found is None:
            step, unfinished = 0, {}
            self.tries.forget()
        else:
            step, unfinished, self.best = found.step, found.extra["unfinished"], found.extra.get("score", self.best)
            self.algorithm.load_state_dict(found.learner)
            self.tries.load_state_dict(found.extra["tries"], step)
            self.checkpoint = None  # its tensors are in the learner now
            self.table.note(f"going on from the checkpoint of step {step}")
        written = step if unfinished is None else step - 1
        self.tried.forget(written if found else -1)
        self.metrics = MetricsWriter(self.folder.path, last_step=written if found else None)
        self.stack.callback(self.metrics.close)
        tracker = load("skyrl_trainer.report.trackers:Tracker")
        self.tracker = self.stack.enter_context(closing(tracker(self.config, last_step=written)))
        return step, unfinished

    def publish(self, step: int) -> StepMetrics:
        """The learner's weights into every engine, proved by the canary. SyncError."""
        with self.colocation.publishing():
            loaded = self.sync.sync(version=step).engine_checksums
        lost = bool({index for index, each in enumerate(loaded) if each is None} - self.sync.away)
        while True:  # as often as an engine may die
            self.processes.watch.check(LOST_SECONDS if lost else 0.0)
            try:
                return self.canary.check(step, self.learner.token_logprobs, self.sync.report)
            except EngineLost:
                lost = True

    def _restore(self, index: int) -> None:
        if self.colocation.shared:
            raise EngineDied(f"Engine {index} died; beside the learner on its GPU it cannot load: start the run again.")
        report = self.sync.restore(index)
        if self.sync.version is not None:
            self.canary.check(self.sync.version, self.learner.token_logprobs, report, only=index)

    def evaluate(self, step: int) -> StepMetrics:
        """Keeps the best policy: by success, then reward, and the other way round where rewards are chosen."""
        metrics = self.held_out.metrics(self.processes.rollouts, step)
        score = [metrics["eval/success"], metrics.get("eval/reward/total", 0.0)]
        score = score[::-1] if self.config.trainer.algorithm.reward_funcs else score
        if score > self.best:
            self.learner.save_pretrained(self.folder.path / "model" / "best", step)
            self.best = score
        return metrics

    def log(self, step: int, metrics: StepMetrics, spans: Spans) -> None:
        self.folder.check()
        worked = self.processes.worked()
        busy = [end - start for own in worked.values() for start, end in own]
        idle = {"idle/engines": max(0.0, 1.0 - sum(busy) / (len(worked) * metrics["time/step"]))} if worked else {}
        idle |= {"idle/learner": metrics["time/rollout"] / metrics["time/step"]} if step else {}
        row = {"step": float(step), **metrics, **idle, "engine_restarts": float(self.processes.watch.new_step())}
        if step % INTERVAL == 0:
            return_free_memory()
            row["memory/pss_gib"] = pss_gib()
        self.metrics.write(row)  # first: it names a full disk
        write_spans(self.folder.path, step, spans | worked)
        self.tracker.log(row, worked, self.held_out.tried)
        self.table.step(row)

    def save(self, step: int, loop_state: dict[str, Any]) -> None:
        self.folder.check()
        extra = {**loop_state, "score": self.best, "config": self.config.model_dump(mode="json")}
        policy, ends = self.folder.path / "model" / "last", step == self.config.trainer.max_steps
        if ends:  # by its checkpoint
            self.learner.save_pretrained(policy, step)
        self.checkpoints.save(step, self.algorithm.state_dict(), extra)
        if not ends:
            self.learner.save_pretrained(policy, step)
        load("skyrl_trainer.report.html:write_report")([self.folder.path], self.folder.path / "report.html")
