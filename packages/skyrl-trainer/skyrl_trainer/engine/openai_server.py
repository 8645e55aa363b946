"""An engine that is an OpenAI-compatible vLLM server in a process of its own, started and watched by its actor.

One that dies takes its actor along, so that Ray's restart of the actor is the one way back. `engine_kwargs.url` names
a server that runs already instead. Token ids go in and come out of `/inference/v1/generate`, with the weight version of
every token; unlike the in-process engine the server decides what is computed together.
"""

import asyncio
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from skyrl_trainer.engine.actor import CALL_SECONDS, LOAD_SECONDS, EngineActor, refusal
from skyrl_trainer.engine.http import PROBE_SECONDS, HTTPClient, Refused
from skyrl_trainer.engine.server_process import ServerProcess
from skyrl_trainer.engine.vllm_actor import STALE_CACHE, blocks_of, joint_checksum, sampling_params
from skyrl_trainer.engine.vllm_args import has_gpu, kv_token_bytes, vllm_kwargs
from skyrl_trainer.errors import EngineDied, SyncError
from skyrl_trainer.types import GenerationOutput, GenerationRequest

GENERATE_SECONDS = 3600.0
"""Longest wait for one generation; an episode has a shorter limit of its own."""
IDLE_SECONDS = 2.0  # others' servers close idle connections after 5
ADAPTER = "policy"
"""The name under which the server knows the adapter that we train."""


class OpenAIServerEngine(EngineActor):
    """See protocols.InferenceEngine. `engine_kwargs` are vLLM's, or a `url`."""

    def __init__(self, *settings: Any, **named_settings: Any) -> None:
        super().__init__(*settings, **named_settings)
        self._url = self.engine_kwargs.get("url")
        self._running: dict[asyncio.Task[None], int] = {}  # and the KV cache blocks that each may need
        self._began = 0.0  # when it last had nothing to do, was resumed, or ended a request
        self._started: asyncio.Task[None] | None = None
        self._serving = False
        self._model: str | None = None  # the adapter's name, once there is one
        self._block_size, self._free_blocks = 1, 0  # none: no admission by room in the cache

    async def ready(self) -> dict[str, Any]:
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        await asyncio.shield(self._started)
        return {"pid": os.getpid()} | ({} if self._url else {"server_pid": self._server.process.pid})

    async def submit(self, client: str, requests: list[GenerationRequest]) -> None:
        self._check_alive()
        self._enqueue(client, requests)
        self._admit()

    async def pause(self) -> None:
        self._paused = True
        if self._running:
            self._note_work(self._began)
        await self._post("/pause?mode=keep&clear_cache=false")

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        await self._post("/init_weight_transfer_engine", {"init_info": init_info})
        self._model = None

    async def start_weight_update(self) -> None:
        await self._post("/start_weight_update")

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        folder = update_info.get("adapter")
        if folder is None:
            await self._post("/update_weights", {"update_info": update_info})
            return
        if self._model is None:
            await self._post("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": folder})
            self._model = ADAPTER
        else:  # by the server's own endpoint every later request would load it once more
            await self._post("/collective_rpc", {"method": "load_adapter", "args": [folder]})
        await self._post("/collective_rpc", {"method": "adapter_loaded"})

    async def finish_weight_update(self, version: int) -> str:
        if self._model is None:
            await self._post("/finish_weight_update", {"weight_version": str(version)})
        else:
            await self._post("/update_weight_version", {"new_version": str(version)})
        if not (await self._post("/reset_prefix_cache?reset_running_requests=true"))["success"]:
            raise SyncError(STALE_CACHE)
        return joint_checksum((await self._post("/collective_rpc", {"method": "loaded_checksum"}))["results"])

    async def resume(self) -> None:
        if not self._asleep:  # the server resumes by itself when it is awake
            await self._post("/resume")
        self._paused, self._began = False, time.time()
        self._admit()

    async def sleep(self, level: int) -> None:
        self._asleep = True
        await self._post(f"/sleep?level={level}&mode=keep")

    async def wake_up(self, tags: list[str]) -> None:
        await self._post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))
        self._asleep = self._asleep and "kv_cache" not in tags
        self._admit()

    async def _start(self) -> None:
        socket = "" if self._url else self._launch()
        self._http = HTTPClient(self._url or "http://engine", socket=socket, keep_alive=IDLE_SECONDS)
        deadline = time.monotonic() + LOAD_SECONDS
        while not await self._healthy():
            if not self._url and self._server.process.poll() is not None:
                raise EngineDied(f"The server of {self.model_path} did not start: {self._server.last_words()}")
            if self._url or time.monotonic() > deadline:
                limit = "" if self._url else f" within {LOAD_SECONDS:.0f} s"
                raise EngineDied(f"The server {self._url or 'of ' + self.model_path} did not answer{limit}.")
            await asyncio.sleep(0.1)
        self._serving = True
        if not self._url:
            await self._post("/update_weight_version", {"new_version": "0"})
            threading.Thread(target=self._follow_into_death, daemon=True).start()
        self._admit()

    def _launch(self) -> str:
        kwargs = vllm_kwargs(*self.settings)
        if kwargs.get("kv_cache_memory_bytes") and not has_gpu():
            self._block_size = kwargs["block_size"]
            block_bytes = self._block_size * kv_token_bytes(self.model_path, kwargs["dtype"])
            self._free_blocks = kwargs["kv_cache_memory_bytes"] // block_bytes - 1  # vLLM keeps a null block
        self._server = ServerProcess(kwargs)
        return self._server.socket

    async def _healthy(self) -> bool:
        with suppress(Refused):
            await self._http.ask("GET", "/health")
            return True
        return False

    def _follow_into_death(self) -> None:
        self._server.process.wait()
        print(f"The server of {self.model_path} died: {self._server.last_words()}", file=sys.stderr, flush=True)
        self._server.end()
        os._exit(1)

    # The answer's JSON or None. ValueError where the server refuses it; EngineDied where it fails or is gone.
    async def _post(self, path: str, body: dict[str, Any] | None = None, limit: float = CALL_SECONDS) -> Any:
        self._check_alive()
        try:
            return await self._http.ask("POST", path, body, limit)
        except Refused as error:
            if error.status == 400:
                raise ValueError(error.reason) from None
            problem = str(error)
        if not self._url:
            await asyncio.sleep(PROBE_SECONDS)
        raise EngineDied(f"The server {self._url or 'of ' + self.model_path} did not do {path}: {problem}")

    def _admit(self) -> None:
        stopped = not self._serving or self._paused or self._asleep
        while not stopped and self._seat(len(self._running)):
            client, request = self._queue[0]
            blocks = blocks_of(request, self._block_size, self.max_model_len)
            guarded = self._running and self._free_blocks and request.seed is not None  # see vllm_actor
            if guarded and request.options.max_tokens > 1 and sum(self._running.values()) + blocks > self._free_blocks:
                break
            self._queue.popleft()
            if not self._running:
                self._began = time.time()
            task = asyncio.create_task(self._answer(client, request))
            self._running[task] = blocks
            task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._note_work(self._began)
        self._began = time.time()
        self._admit()

    async def _answer(self, client: str, request: GenerationRequest) -> None:
        try:
            output = await self._generate(request)
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # or its answer has another form
            output = refusal(request, error)
        except EngineDied as error:
            return self._fail(str(error))
        self._deliver([(client, output)])

    async def _generate(self, request: GenerationRequest) -> GenerationOutput:
        options, sampling = request.options, sampling_params(request, self._room(request))
        sampling["logprobs"] = options.top_logprobs and options.top_logprobs + 1  # the server counts the sampled one
        rank = 0 if self._url else -request.first  # others' servers may know none
        body = {"token_ids": request.prompt_ids, "sampling_params": sampling, "model": self._model, "priority": rank}
        choice = (await self._post("/inference/v1/generate", body, GENERATE_SECONDS))["choices"][0]
        content = choice["logprobs"]["content"]
        top = None
        if options.top_logprobs:
            top = [{entry["token_id"]: entry["logprob"] for entry in token["top_logprobs"]} for token in content]
        finish, spans = choice["finish_reason"], choice["weight_versions"]
        # A server that never got weights has a version without a number.
        numbers = [int(span["version"]) if span["version"].isdigit() else 0 for span in spans]
        return GenerationOutput(
            request.request_id,
            choice["token_ids"],
            [token["logprob"] for token in content],
            [n for n, span in zip(numbers, spans, strict=True) for _ in range(span["start"], span["end"])],
            finish if finish in ("stop", "length") else "error",
            None if finish in ("stop", "length") else f"The server ended the request: {finish}.",
            top,
        )
