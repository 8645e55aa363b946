"""Stand-ins for the slow or random parts: a tiny tokenizer, an engine without a model, envs without a process."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError

from skyrl_trainer.rollout.env_process import LONGEST_TEXT
from skyrl_trainer.rollout.env_worker import EnvReply
from skyrl_trainer.types import GenerationOutput, GenerationRequest

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer with ChatML's tokens, trained on a few words in a moment."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["user assistant system the answer is \\boxed{12}", "12 + 34 = ?"] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML,
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip


def tiny_policy(folder: Path) -> str:
    """A Qwen3 with random weights and the tiny tokenizer, for tests of the real engine."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def fake_tokens(request: GenerationRequest) -> GenerationOutput:
    """Random-looking tokens that depend on the prompt, the seed and the id only; sometimes cut, sometimes stopped."""
    options = request.options
    key = repr((request.prompt_ids, request.seed if request.seed is not None else request.request_id))
    rng = random.Random(hashlib.sha256(key.encode()).digest())
    length = max(options.min_tokens, rng.randint(1, options.max_tokens))
    ids = [rng.randint(3, 300) for _ in range(length)]
    stopped = bool(options.stop_token_ids) and rng.random() < 0.7 and length > options.min_tokens
    if stopped:
        ids[-1] = options.stop_token_ids[0]
    else:
        ids += [rng.randint(3, 300) for _ in range(options.max_tokens - length)]
    logprobs = [-rng.random() for _ in ids]
    return GenerationOutput(request.request_id, ids, logprobs, [0] * len(ids), "stop" if stopped else "length")


class FakeEngineClient:
    """What an EngineClient offers, with a delay of one's choice; remembers the requests in their order."""

    def __init__(self, delay: Callable[[GenerationRequest], float] = lambda request: 0.0) -> None:
        self.requests: list[GenerationRequest] = []
        self.rounds: list[list[str]] = []
        self.running = self.most_running = 0
        self._delay = delay

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(self._delay(request))
        finally:
            self.running -= 1
        return fake_tokens(request)

    async def generate_round(self, requests: list[GenerationRequest]) -> list[GenerationOutput]:
        self.rounds.append([request.request_id for request in requests])
        return list(await asyncio.gather(*map(self.generate, requests)))


class FakeEngine:
    """An engine actor without a model: `ray.remote(FakeEngine)`."""

    def __init__(self) -> None:
        self._done: dict[str, list[GenerationOutput]] = {}
        self._asked: list[str] = []

    async def asked(self) -> list[str]:
        return self._asked

    async def ready(self) -> dict[str, Any]:
        return {"pid": 0, "model": "fake", "max_model_len": 4096}

    async def submit(self, client: str, requests: list[GenerationRequest]) -> None:
        self._asked += [request.request_id for request in requests]
        self._done.setdefault(client, []).extend(map(fake_tokens, requests))

    async def collect(self, client: str, timeout: float) -> list[GenerationOutput]:
        end = asyncio.get_running_loop().time() + timeout
        while not self._done.get(client) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.002)
        return self._done.pop(client, [])


class FakeEnvWorker:
    """What a handle of an EnvWorker offers, in this process. The env answers what `Sample.options` say:

    {"turns": 3} ends after three steps with reward 1, {"says": [...]} are its texts, {"stop": [...]} ends an answer;
    {"raise_at": 1} and {"hang_at": 1} fail in step 1 (0: reset).
    `kill()` loses all envs, fails the calls under way and comes back after `restart` seconds.
    """

    def __init__(self, delay: Callable[[], float] = lambda: 0.0, restart: float = 0.01) -> None:
        self.envs: dict[str, tuple[dict[str, Any], list[str]]] = {}
        self.closed: list[str] = []
        self.pid = 1
        self._delay = delay
        self._restart = restart
        self._death: asyncio.Event = asyncio.Event()
        self._down_until = 0.0
        self.call_many = SimpleNamespace(remote=self._call_many)
        self.alone = SimpleNamespace(remote=self._alone)

    def kill(self) -> None:
        self.envs.clear()
        self._death.set()
        self._death = asyncio.Event()
        self.pid += 1
        self._down_until = asyncio.get_running_loop().time() + self._restart

    async def _call_many(self, calls: list[Any]) -> list[Any]:
        self._raise_if_down()
        methods = {"reset": self._reset, "step": self._step, "close": self._close}
        answers = (methods[what](item) for what, *item in calls)
        work = asyncio.ensure_future(asyncio.gather(*answers, return_exceptions=True))
        death = asyncio.ensure_future(self._death.wait())
        await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            work.cancel()
            work.add_done_callback(lambda cancelled: cancelled.cancelled() or cancelled.exception())
            raise ActorDiedError
        death.cancel()
        return list(await work)

    async def _alone(self, call: Any) -> EnvReply:
        (reply,) = await self._call_many([call])
        return reply

    def _raise_if_down(self) -> None:
        if asyncio.get_running_loop().time() < self._down_until:
            raise ActorDiedError

    async def _reset(self, item: list[Any]) -> EnvReply:
        (key, sample), pid = item, self.pid
        await asyncio.sleep(self._delay())
        if pid != self.pid:  # killed meanwhile
            raise ActorDiedError
        self.envs[key] = (sample.options, [])
        return self._answer(key)

    async def _step(self, item: list[Any]) -> EnvReply:
        key, action, *_ = item
        await asyncio.sleep(self._delay())
        if key not in self.envs:
            return EnvReply(error="no env", kind="lost")
        self.envs[key][1].append(action)
        return self._answer(key)

    async def _close(self, item: list[Any]) -> EnvReply:
        self.envs.pop(item[0], None)
        self.closed.append(item[0])
        return EnvReply()

    def _answer(self, key: str) -> EnvReply:
        options, actions = self.envs[key]
        if options.get("raise_at") == len(actions):
            del self.envs[key]
            return EnvReply(error="The env's step raised ValueError: no such move", kind="raised")
        over = bool(actions) and len(actions) >= options.get("turns", 1)
        if over:
            del self.envs[key]
        digest = hashlib.sha256("\0".join(actions).encode()).hexdigest()[:8]
        info: dict[str, Any] = {"reward_parts": {"correct": float(over)}}
        info |= {"stop": options["stop"]} if not actions and "stop" in options else {}
        text = [*options.get("says", []), *[f"turn {len(actions)} {digest}"] * (len(actions) + 1)][len(actions)]
        return EnvReply(text[:LONGEST_TEXT], float(over), over, info=info)
