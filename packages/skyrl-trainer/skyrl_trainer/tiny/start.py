"""The policy that a run starts from: a model on disk or on the hub, or the tiny one that is made here."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from skyrl_trainer.errors import UserError
from skyrl_trainer.settings import Config
from skyrl_trainer.tiny.demonstrations import conversation_texts
from skyrl_trainer.tiny.init_policy import init_policy
from skyrl_trainer.types import Sample

WARMSTART_SECONDS = 7200.0
"""Limit of cloning the expert."""
NUM_TEXTS = 2000
"""Episodes of the training data whose texts the tiny policy's tokens are made from."""


def make_tiny(config: Config, out: Path, source: Sequence[Sample]) -> None:
    """A tiny policy with random weights, and tokens made from the source's texts, in a new folder."""
    model, seed = config.trainer.policy.model, config.trainer.seed
    texts = [*conversation_texts(source, NUM_TEXTS, seed, experts=model.warmstart.num_demonstrations > 0)]
    init_policy(out, texts, model.tiny, seed)


class StartPolicy(AbstractContextManager["StartPolicy"]):
    """An engine can load `architecture` at once, while a process clones a tiny policy's expert for `weights()`."""

    def __init__(self, config: Config, run_path: Path, train_tasks: Sequence[Sample], tell: Any = str) -> None:
        self._tell, model = tell, config.trainer.policy.model
        self._process: subprocess.Popen[bytes] | None = None
        self.architecture = self._weights = model.path
        if model.path != "tiny":
            return
        folder = run_path / "init"
        random, cloned = folder / "random", folder / "cloned"
        if not any(run_path.glob("checkpoints/step_*[0-9]")):  # of other settings, perhaps
            for left in (random, cloned):
                shutil.rmtree(left, ignore_errors=True)
        if not random.exists():
            make_tiny(config, random, train_tasks)
        self.architecture = self._weights = str(random)
        if not model.warmstart.num_demonstrations:
            return
        self._weights = str(cloned)
        if not cloned.exists():
            self._log = open(folder / "warmstart.log", "wb")  # noqa: SIM115 - closed in __exit__
            command = [sys.executable, "-m", "skyrl_trainer", "warmstart", str(cloned), str(run_path / "config.yaml")]
            command.append(f"trainer.policy.model.path={json.dumps(str(random), ensure_ascii=False)}")
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
            if torch.cuda.is_available():  # whose memory an engine measures
                self.weights()

    def weights(self) -> str:
        """The policy's folder or name; `tell` hears how far its clone is. UserError with the end of the log."""
        if self._process is not None:
            said, until = "", time.monotonic() + WARMSTART_SECONDS
            while (code := self._process.poll()) is None and time.monotonic() < until:
                if said != (said := self._said()):
                    self._tell(said.rstrip("."))
                time.sleep(0.1)
            if code != 0:
                said = self._said() or "no output"
                raise UserError(f"Cloning the expert failed ({said}); {self._log.name} has the rest.")
        return self._weights

    def _said(self) -> str:
        return (Path(self._log.name).read_text(errors="replace").strip().splitlines() or [""])[-1]

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._log.close()
