"""The policy that a run starts from: a model on disk or on the hub, or the tiny one that is made here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_trainer.data import conversation_texts, spec_label
from skyrl_trainer.errors import UserError
from skyrl_trainer.settings import Config
from skyrl_trainer.tiny.init_policy import DEFAULT_VOCAB_SIZE, init_policy
from skyrl_trainer.types import Sample

WARMSTART_SECONDS = 3600.0
"""Limit of cloning the expert."""
NUM_TEXTS = 2000
"""Episodes of the training data whose texts the tiny policy's tokens are made from."""


class StartPolicy:
    """`architecture` is a model that an engine can load at once; `weights()` waits for the one to start from.

    Both are folders in `<run>/init` for the tiny policy, and the same model otherwise. The expert is cloned in a
    process of its own: trl's trainer keeps its threads and its memory to itself, and the engines start meanwhile.
    """

    def __init__(self, config: Config, run_path: Path, train_tasks: Sequence[Sample]) -> None:
        model = config.trainer.policy.model
        self._process: subprocess.Popen[bytes] | None = None
        self.architecture = self._weights = model.path
        if model.path != "tiny":
            return
        self._folder = run_path / "init"
        random, cloned = self._folder / "random", self._folder / "cloned"
        options = model.warmstart
        if not random.exists():
            experts = options.num_demonstrations > 0
            texts = conversation_texts(train_tasks, NUM_TEXTS, config.trainer.seed, experts)
            settings = {**model.tiny.config_kwargs, "induction": model.tiny.induction}
            tokens = (settings.pop("vocab_size", DEFAULT_VOCAB_SIZE), model.tiny.spaces)
            init_policy(random, texts, settings, config.trainer.seed, *tokens)
        self.architecture = str(random)
        self._weights = str(cloned) if options.num_demonstrations else str(random)
        if options.num_demonstrations and not cloned.exists():
            self._log = open(self._folder / "warmstart.log", "wb")  # noqa: SIM115 - closed in __exit__
            command = [sys.executable, "-m", "skyrl_trainer.tiny.clone", "--policy", str(random), "--out", str(cloned)]
            for spec in config.data.train_data:
                command += ["--data", spec_label(spec)]
            command += ["--env-class", config.environment.env_class, "--seed", str(config.trainer.seed)]
            for name, value in options:
                command += [f"--{name.replace('_', '-')}", str(value)]
            if config.environment.env_file:
                command += ["--env-file", config.environment.env_file]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    def weights(self) -> str:
        """The folder or name of the policy; raises UserError with the end of the log when cloning failed."""
        if self._process is not None:
            try:
                code = self._process.wait(WARMSTART_SECONDS)
            except subprocess.TimeoutExpired:
                code = -1
            if code != 0:
                log = self._folder / "warmstart.log"
                last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
                raise UserError(f"Cloning the expert failed ({last}); {log} has the rest.")
        return self._weights

    def __enter__(self) -> StartPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._log.close()
