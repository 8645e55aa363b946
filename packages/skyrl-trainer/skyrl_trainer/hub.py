"""Hugging Face: data sets by files (`owner/name`, `owner/name@revision`, either after `hf:`), and models put there."""

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from skyrl_trainer.errors import UserError


def snapshot(name: str, patterns: list[str], asked_by: str) -> tuple[str, list[Path]]:
    """The data set's commit, and its files that fit the patterns, in the cache, in order. asked_by: for UserErrors."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, revision = name.removeprefix("hf:").partition("@")
    try:
        found = snapshot_download(repo, repo_type="dataset", revision=revision or None, allow_patterns=patterns)
    except GatedRepoError as error:
        token = "The token in HF_TOKEN may not" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set: you may not"
        raise UserError(
            f"{token} read the gated data set {repo}. Accept its terms at https://huggingface.co/datasets/{repo}, put "
            f"a token of that account in HF_TOKEN, or give {asked_by} the path of a local copy."
        ) from error
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{asked_by} {name.removeprefix('hf:')} is neither a file here nor a data set that Hugging Face gives out "
            f"({_first_line(error)}). Give the path of a local copy in the same schema."
        ) from error
    folder = Path(found)
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*"))  # earlier calls left more
    return folder.name, [folder / name for name in names if any(fnmatch(name, each) for each in patterns)]


def data_files(name: str, suffixes: Sequence[str], split: str = "train", **other: object) -> list[Path]:
    """A data set's files of a split."""
    if other:
        raise UserError(f"Data source {name!r} is a data set, whose only option is split; got {', '.join(other)}.")
    _, files = snapshot(name, [f"*{split}*{suffix}" for suffix in suffixes], "Data source")
    if not files:
        raise UserError(f"Data source {name!r} has no file *{split}*{f' or *{split}*'.join(suffixes)} on Hugging Face.")
    return files


def push(repo: str, folder: Path | None = None) -> str:
    """The address of the model repository `owner/name`: made, private, where there is none; a policy's files go there.
    UserError where it cannot be written to; without a folder, before there is anything to be lost.
    """
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(repo, private=True, exist_ok=True)
        if folder:
            HfApi().upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="From skyrl-trainer")
    except Exception as error:  # the hub's kinds, and those of its HTTP client
        raise UserError(
            f"--push {repo} failed ({_first_line(error)}): it needs owner/name, the network, and a token in HF_TOKEN "
            f"that may write there.{f' The policy stays in {folder}.' if folder else ''}"
        ) from error
    return str(address)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
