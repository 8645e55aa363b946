"""vLLM's OpenAI-compatible server as a process of ours, with a guard that ends it when we are gone.

It listens on a Unix socket in a folder that only we can open: its control endpoints obey anybody who asks.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import Any

from skyrl_gym.openenv import result_of
from skyrl_trainer.engine.http import HTTPClient, Refused
from skyrl_trainer.engine.vllm_args import engine_env
from skyrl_trainer.errors import UserError

SERVER_ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""For the endpoints of the weight transfer, and for those that load an adapter."""
URLS = "generator.engine_kwargs.urls"
IDLE_ENV = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "86400"}  # else one closes in use
GUARD = """
import os, shutil, sys
if os.fork():
    # An orphan is no child of the actor, whose children Ray kills without a word
    os._exit(0)
sys.stdin.read()
shutil.rmtree(sys.argv[1], True)
os.killpg(0, 9)
"""
"""Keeps the server's process group, and ends it when the other end of its standard input closes."""


class ServerProcess:
    """Started by the constructor; answers at `socket` when it has loaded the model."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="skyrl-engine-"))
        self.socket = str(self._folder / "socket")
        guard = [sys.executable, "-S", "-c", GUARD, str(self._folder)]
        self._guard = Popen(guard, stdin=PIPE, process_group=0)
        self._guard.wait()
        flags = [f"--uds={self.socket}", "--enable-scale-out", "--max-logprobs=32", "--disable-uvicorn-access-log"]
        flags += [as_flag(name, value) for name, value in engine_args.items()]
        with (self._folder / "log").open("wb") as log:
            self.process = Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags],
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                env=os.environ | engine_env() | SERVER_ENV | IDLE_ENV,
                process_group=self._guard.pid,
            )

    def last_words(self) -> str:
        """The last line of its log that names an error."""
        lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "it said nothing")

    def end(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()


def as_flag(name: str, value: Any) -> str:
    """One of vLLM's engine arguments as an option of its server. Example: as_flag("seed", 1) is "--seed=1"."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"


def check_servers(urls: Any, num_engines: int, model: str, training: bool) -> None:
    """UserError unless each URL is a server that has the model and our endpoints, and takes weights."""
    if not isinstance(urls, list) or len(urls) != num_engines:
        raise UserError(f"{URLS} is {urls!r}, but should be a list of generator.num_inference_engines={num_engines}.")
    for url in urls:
        result_of(_check_server(str(url), model, training))


async def _check_server(url: str, model: str, training: bool) -> None:
    async def ask(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        try:
            return 200, await server.ask(method, path, body)
        except Refused as error:
            if not error.status:
                raise UserError(f"{URLS}: {url} does not answer: {error}.") from None
            return error.status, error.reason

    async with HTTPClient(url) as server:
        status, found = await ask("GET", "/v1/models")
        try:
            cards = found["data"]
            names = [str(card["id"]) for card in cards]
            known = {*names, *(card.get("root") for card in cards)}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{URLS}: {url} is no OpenAI server: /v1/models gave {status} {found!r}.") from None
        if model not in known:
            raise UserError(f"{URLS}: {url} does not serve trainer.policy.model.path={model}, but {', '.join(names)}.")
        if (await ask("POST", "/inference/v1/generate", {}))[0] == 404:
            raise UserError(f"{URLS}: {url} has no /inference/v1/generate: start vLLM with --enable-scale-out.")
        if training and (await ask("POST", "/collective_rpc", {"method": "loaded_checksum"}))[0] != 200:
            raise UserError(
                f"{URLS}: {url} takes no weights from us, so nobody can train with it: start it on this machine with "
                "VLLM_SERVER_DEV_MODE=1, --logprobs-mode=processed_logprobs, "
                "--worker-extension-cls=skyrl_trainer.weight_sync.vllm_backend.WorkerExtension and "
                '--weight-transfer-config=\'{"backend": "skyrl_shared_memory"}\', or leave urls out.'
            )
