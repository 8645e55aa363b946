"""The run folder: one writer, who notices when the folder is taken away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from skyrl_trainer.errors import UserError
from skyrl_trainer.run.folder import RunFolder
from tests.trainer.learner.tiny_models import make_config


def test_a_folder_that_was_deleted_or_replaced_is_noticed(tmp_path: Path) -> None:
    config = make_config(trainer={"run_dir": str(tmp_path / "run")})
    with RunFolder(config) as folder:
        folder.check()
        with pytest.raises(UserError, match="in use by process"):
            RunFolder(config).__enter__()
        shutil.rmtree(folder.path)
        with pytest.raises(UserError, match=r"run was deleted or replaced during the run"):
            folder.check()
        with RunFolder(config) as other:
            other.check()
            with pytest.raises(UserError, match=r"run was deleted or replaced during the run"):
                folder.check()
