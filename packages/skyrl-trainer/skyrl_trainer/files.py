"""Files and folders that are whole or not there: written aside, flushed to the disk, and renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError

from skyrl_trainer.errors import UserError


def local_folder(name: str) -> Path:
    """Of a folder's name; of an address, `s3://bucket/runs/a`, the folder on this machine that stands in for it."""
    kind, is_address, rest = name.partition("://")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "skyrl-trainer" / kind / rest.strip("/") if is_address else Path(name).expanduser()


@contextmanager
def writing(path: object, folder: Path | None = None) -> Iterator[None]:
    """Around what writes there: the disk's errors are UserErrors. folder: is made first."""
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be written: {getattr(error, 'strerror', None) or error}; free some space or name another "
            "folder (a run's is trainer.run_dir). What was saved before is intact."
        ) from error


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Gives an empty folder beside `target`; what is put there is flushed and becomes `target` in one rename.
    On an error the folder goes away and `target` stays as it was; one of the disk is a UserError. What a process
    that was killed here had left behind is removed, or put back, first.
    """
    aside, replaced = (target.parent / f".{kind}-{target.name}" for kind in ("tmp", "replaced"))
    with writing(target, target.parent), ExitStack() as stack:
        stack.callback(shutil.rmtree, aside, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        aside.mkdir()
        yield aside
        for path in (*aside.rglob("*"), aside):
            if path.is_file():  # as the umask says: safetensors lets nobody else read
                path.chmod(aside.stat().st_mode & 0o666)
            flush(path)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            stack.callback(lambda: target.exists() or replaced.rename(target))
            target.rename(replaced)
        aside.rename(target)
        flush(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def write_whole(path: Path, content: bytes, writer: object = "") -> None:
    """It has its old content, or the new one; a killed process leaves a hidden file beside it. writer: of several."""
    aside = path.with_name(f".{path.name}{writer}")
    try:
        aside.write_bytes(content)
        flush(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Puts a file, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
