"""`skyrl-trainer sft` (docs/sft.md): fine-tunes on chats, by the settings of a run, into a run folder."""

import hashlib
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import ray
import torch

from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.chats import Chat, read_chats
from skyrl_trainer.data import FILE_SUFFIXES, Spec
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.group import LearnerGroup
from skyrl_trainer.learner.lora import checked
from skyrl_trainer.learner.model import Learner, make_learner
from skyrl_trainer.learner.sft import SFTTrainer, fit, make_rows
from skyrl_trainer.report.history import MetricsWriter
from skyrl_trainer.report.html import write_report
from skyrl_trainer.report.trackers import Tracker
from skyrl_trainer.run.checkpoint import Checkpoints
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.guardian import guarded
from skyrl_trainer.run.processes import start_ray
from skyrl_trainer.run.resume import check_resumable
from skyrl_trainer.run.signals import StopSignal
from skyrl_trainer.settings import Config
from skyrl_trainer.tiny.init_policy import init_policy
from skyrl_trainer.types import StepMetrics

LINE_EVERY = 10
"""Steps between two lines of output."""
SHOWN = ("loss", "eval/loss", "lr", "grad_norm", "epoch", "tokens/per_second")


def fine_tune(config: Config) -> str:
    """Returns a sentence about what was learned. UserError, before a model is loaded, for what is wrong."""
    _refuse(config)
    chats = _chats(config.data.train_data)
    held_out = _chats([each for each in config.data.val_data if any(map(str(each).count, FILE_SUFFIXES))])
    with StopSignal() as stop, RunFolder(config) as folder, ExitStack() as stack:
        run = FineTuning(config, folder.path, chats, held_out[: config.data.val_size])
        if run.done >= run.steps:
            return f"The run in {folder.path} is complete. For a new one give another trainer.run_dir."
        folder.write_config()
        run.start(stack)
        run.learn(stop)
    return f"Learned from {len(run.rows)} chats. Policy: {run.saved}   Curves: {folder.path / 'report.html'}"


class FineTuning:
    def __init__(self, config: Config, path: Path, chats: list[Chat], held_out: list[Chat]) -> None:
        self.config, self.path, self.saved = config, path, path / "model" / "last"
        self.model = config.trainer.policy.model.path
        self.checkpoints = Checkpoints(path, config.trainer.max_ckpts_to_keep)
        self.found = self.checkpoints.load_latest()
        self.done = self.found.step if self.found else 0
        if self.found:
            check_resumable(self.found.extra["config"], config, self.found.version)
        if self.model == "tiny":
            self.model = str(path / "init" / "random")
            if not self.found:  # else a refused start may have left it
                shutil.rmtree(self.model, ignore_errors=True)
                texts = (each.get("content", "") for chat in chats for each in chat.messages)
                init_policy(Path(self.model), texts, config.trainer.policy.model.tiny, config.trainer.seed)
        prompt = load_chat_prompt(self.model, config.generator.chat_template_kwargs)
        longest = config.generator.max_model_len
        self.rows, self.held_out = (
            [row for row in make_rows(prompt, part) if len(row.token_ids) <= longest] for part in (chats, held_out)
        )
        counts = f"{len(self.rows)} of {len(chats)} chats, {len(self.held_out)} of {len(held_out)} held-out ones"
        print(f"{counts} are no longer than generator.max_model_len={longest} tokens")
        if not self.rows:
            raise UserError(f"generator.max_model_len={longest} is less than any chat has: raise it.")
        passes, size = config.trainer.num_iterations, min(config.trainer.train_batch_size, len(self.rows))
        self.steps = min(config.trainer.max_steps, math.ceil(passes * len(self.rows) / size))
        learned = hashlib.sha256(b"".join(part.tobytes() for row in self.rows for part in (row.token_ids, row.mask)))
        self.extra = {"config": config.model_dump(mode="json"), "chats": learned.hexdigest()}
        if self.found and self.found.extra.get("chats") != self.extra["chats"]:
            raise UserError(f"{path} has learned from other chats: give another trainer.run_dir.")

    def start(self, stack: ExitStack) -> None:
        config = self.config.model_copy(deep=True)
        config.generator.temperature = 1.0  # nothing is sampled
        self.learner: Learner | LearnerGroup
        if config.num_learners == 1:
            self.learner = make_learner(config, self.model, self.steps)
            self.update: Callable[..., StepMetrics] = SFTTrainer(config).start(self.learner).update
        else:
            stack.enter_context(guarded())
            start_ray(config)
            stack.callback(ray.shutdown)
            self.learner = group = LearnerGroup(config, SFTTrainer(config), self.model, self.steps)
            self.update = lambda rows, learn=True: group.call("algorithm", "update", ray.put(rows), learn)
            stack.callback(group.close)
        if self.found:
            self.learner.load_state_dict(self.found.learner)
            self.found = None  # its tensors are in the learner now
            print(f"going on from the checkpoint of step {self.done}")
        self.tracker = Tracker(self.config, self.done)
        self.metrics = MetricsWriter(self.path, self.done or None)
        stack.callback(self.metrics.close)
        stack.callback(self.tracker.close)

    def learn(self, stop: StopSignal) -> None:
        trainer, stop.at_once = self.config.trainer, False
        self.checkpoints.folder.mkdir(exist_ok=True)  # what a first save leaves is this run's
        if self.held_out and trainer.eval_before_train and not self.done:
            self._log({"step": 0, **self._evaluate()})
        for metrics in fit(self.update, self.rows, trainer.train_batch_size, self.steps, trainer.seed, self.done):
            step, last = metrics["step"], metrics["step"] == self.steps
            if self.held_out and (last or (trainer.eval_interval and step % trainer.eval_interval == 0)):
                metrics |= self._evaluate()
            self._log(metrics)
            if last or stop.requested or (trainer.ckpt_interval and step % trainer.ckpt_interval == 0):
                self.learner.save_pretrained(self.saved, int(step))
                write_report([self.path], self.path / "report.html")
                self.checkpoints.save(int(step), self.learner.state_dict(), self.extra)
                stop.check()

    def _evaluate(self) -> StepMetrics:
        return {"eval/loss": self.update(self.held_out, learn=False)["loss"]}

    def _log(self, metrics: StepMetrics) -> None:
        self.metrics.write(metrics)
        self.tracker.log(metrics)
        step = int(metrics["step"])
        if step in (1, self.steps) or step % LINE_EVERY == 0 or "eval/loss" in metrics:
            shown = [f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics]
            print(f"step {step} of {self.steps}: {', '.join(shown)}", flush=True)


def _refuse(config: Config) -> None:
    path, gpus = config.run_path, config.trainer.placement.policy_num_gpus_per_node
    if "://" in config.run_address:
        raise UserError(f"sft writes to a disk only: give another trainer.run_dir than {config.run_address}.")
    if (path / "model").exists() and not (path / "checkpoints").exists():
        raise UserError(f"{path} has a policy, and no checkpoint to go on from: give another trainer.run_dir.")
    if not config.trainer.max_steps:
        raise UserError("trainer.max_steps is 0, which leaves nothing to learn: set it above.")
    if gpus > (found := torch.cuda.device_count()) and not config.ray.address:
        raise UserError(f"trainer.placement.policy_num_gpus_per_node is {gpus}; this machine has {found or 'no'} GPUs.")
    checked(config)


def _chats(sources: Sequence[Spec]) -> list[Chat]:
    for source in sources:
        if not str(source).endswith(FILE_SUFFIXES):
            raise UserError(
                f"sft learns from files of chats (.jsonl or .parquet), not from {source!r}; "
                "`python -m skyrl_gym demos ENV` writes what an env's expert does."
            )
    return [chat for source in sources for chat in read_chats(str(source))]
