import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy that half knows two-digit sums, made by the two commands that users have for it."""
    # Of several pytest processes one makes it, in the folder above their own.
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / "policy"
    with FileLock(shared / "policy.lock", timeout=600):
        if not (folder / "clone").exists():
            data = "data.train_data=text_math?split=train&difficulty=1"
            commands = [
                ["init-policy", str(folder / "random"), data],
                ["warmstart", str(folder / "clone"), data, f"trainer.policy.model.path={folder / 'random'}"],
            ]
            for command in commands:
                done = subprocess.run([sys.executable, "-m", "skyrl_trainer", *command], capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
    return folder / "clone"
