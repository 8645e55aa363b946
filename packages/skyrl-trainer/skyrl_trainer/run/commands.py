"""What the command line and the Python API call."""

from contextlib import nullcontext
from pathlib import Path

from skyrl_trainer.algorithms.rewards import Rewards
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.guardian import guarded
from skyrl_trainer.run.held_out import HeldOut
from skyrl_trainer.run.loop import Beside, Loop
from skyrl_trainer.run.processes import Processes, check_engines
from skyrl_trainer.run.remote import mirrored
from skyrl_trainer.run.run import Run
from skyrl_trainer.run.signals import StopSignal
from skyrl_trainer.settings import Config
from skyrl_trainer.types import StepMetrics


def train(config: Config, algorithm: GRPO | None = None, beside: Beside = nullcontext, kind: type[Run] = Run) -> int:
    """Runs or resumes what `config` asks for; returns the exit code. UserError with a sentence.
    algorithm: instead of a new one of the class that `trainer.algorithm.name` is registered for. beside: entered once
    the engines have their first weights, left before they are stopped. kind: of the run, which may do more.
    """
    with guarded(), StopSignal() as stop, RunFolder(config) as folder, mirrored(config, kind) as kind:
        known = any((folder.path / name).exists() for name in ("trajectories", "checkpoints"))
        if (folder.path / "model" / "last").exists() and not known:
            raise UserError(f"{folder.path} has a policy, model/last, of no run: give another trainer.run_dir.")
        run = kind(config, folder, algorithm)
        if run.complete:
            print(f"The run in {folder.path} is complete. For a new one give another trainer.run_dir.")
        else:
            with run:
                stop.at_once = False
                Loop(run, stop, beside).train()
        print(f"Curves and transcripts: {folder.path / 'report.html'}   Policy: {folder.path / 'model'}")
    return 0


def evaluate(config: Config, model_path: str, out: Path | None = None) -> StepMetrics:
    """Held-out success of a model on disk, as `eval/<name>`; no learner. out: for the tries."""
    check_engines(config, model_path, training=False)  # loads the plug-in
    rewards = None
    try:
        rewards = Rewards(config, overlong_filter=False)
    except UserError as error:  # a script's, that is not here
        print(f"Rewards are the env's: {error}")
    held_out = HeldOut(config, rewards, JsonlTrajectoryStore(out) if out else None)
    with guarded(), Processes(config, model_path) as processes:
        processes.wait_for_engines()
        return held_out.metrics(processes.rollouts, step=0)
