"""`skyrl-trainer serve` and `train --serve`: OpenAI's completions and chat completions, out of our engines.

Every reply names the weights that it was sampled with: `system_fingerprint` "weights-12" is the newest of them, and
`weight_versions` says which tokens came from which, [{"version": 12, "start": 0, "end": 31}], a list per choice.
Errors are the dialect's JSON: 400 for a request that makes no sense, 404 for another model, 503 for a dead engine.
"""

import asyncio
import itertools
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from skyrl_trainer.agent import chat_api
from skyrl_trainer.agent.chat_api import CALL, Chat, Choice, Common, Completion, Refusal
from skyrl_trainer.agent.http_server import HTTPServer
from skyrl_trainer.agent.parsers import ParsingPrompt, choice_of, named, with_parsers
from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.agent.streaming import Json, settled
from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.engine.client import EngineClient
from skyrl_trainer.engine.stops import first_stop
from skyrl_trainer.errors import UserError
from skyrl_trainer.run.guardian import guarded
from skyrl_trainer.run.processes import Processes, check_engines
from skyrl_trainer.run.run import Run
from skyrl_trainer.settings import Config, GeneratorConfig
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions

WATCH_SECONDS = 2.0
ANSWER_SECONDS = 3600.0
"""Longest wait for a whole reply."""


class Policy:
    """A policy by its name, on several engines in turn. Used from one event loop."""

    def __init__(
        self, name: str, engines: list[Any], prompt: ChatPrompt, generator: GeneratorConfig, away: Collection[int] = ()
    ) -> None:
        """away: the engines that are not asked now (run/engine_watch.py)."""
        self.name, self.limits = name, {"max_model_len": generator.max_model_len}
        self._prompt, self._generator = prompt, generator
        self._engines = [(e, EngineClient(e, f"serve-{secrets.token_hex(4)}")) for e in engines]
        self._turn, self._away = itertools.count(), away

    async def complete(self, request: Completion) -> Json:
        given, size = request.prompt, len(self._prompt.tokenizer)
        ids = self._prompt.encode(given) if isinstance(given, str) else given
        if ids is given and (wrong := [each for each in ids if not 0 <= each < size]):  # one ends an engine
            raise Refusal(400, f"prompt: {wrong[0]} is no token here: give 0 to {size - 1}.")
        outputs, answer = await self._generate(request, ids)
        choices = []
        for index, output in enumerate(outputs):
            text, finish, _ = self._text(request, output)
            choices.append({"index": index, "text": text, "logprobs": None, "finish_reason": finish})
        return answer | {"object": "text_completion", "choices": choices}

    async def chat(self, request: Chat) -> Json:
        chat_api.check(request)
        try:
            ids = self._prompt.conversation([*map(chat_api.for_template, request.messages)], request.tools)
        except UserError as error:
            raise Refusal(400, str(error)) from error
        except Exception as error:  # templates are programs, and raise what they like
            raise Refusal(400, f"The chat template cannot render these messages: {error}") from error
        outputs, answer = await self._generate(request, ids)
        choices = list[Choice]()
        for index, output in enumerate(outputs):
            text, finish, stop = self._text(request, output)
            choice = choice_of(self._prompt, text, output, request.tools or [], request.logprobs, finish, stop)
            choices.append(choice | {"index": index})
        return named(answer, choices)

    def _text(self, request: Common, output: GenerationOutput) -> tuple[str, str, str | None]:
        text = self._prompt.decode(output.output_ids)
        at, stop = first_stop(text, request.stops) or (len(text), None)
        return text[:at], "stop" if stop else output.finish_reason, stop

    async def _generate(self, request: Common, ids: list[int]) -> tuple[list[GenerationOutput], Json]:
        if request.model != self.name:
            raise Refusal(404, f"The model {request.model!r} is not served here; {self.name!r} is.")
        room = self._generator.max_model_len - len(ids)
        if room <= 0:
            raise Refusal(400, chat_api.too_long(len(ids), self._generator.max_model_len))
        most = request.most or self._generator.max_completion_length
        temperature = self._generator.temperature if request.temperature is None else request.temperature
        ends = self._prompt.stop_token_ids
        options = SamplingOptions(min(most, room), temperature, request.top_p, ends, stops=tuple(request.stops))
        seed = secrets.randbits(48) if request.seed is None else request.seed
        name = f"cmpl-{secrets.token_hex(12)}"
        # Seeded always: engines on a CPU only keep seeded requests from pushing each other out of the cache.
        streams = bool(request.stream) and request.n == 1 and not isinstance(self._prompt, ParsingPrompt)
        seeds = [(seed + i) % 2**63 for i in range(request.n)]  # engines take 63 bits
        asked = [GenerationRequest(f"{name}-{i}", ids, options, each, streams=streams) for i, each in enumerate(seeds)]
        there = [each for index, each in enumerate(self._engines) if index not in self._away] or self._engines
        engine, client = there[next(self._turn) % len(there)]
        following = asyncio.create_task(self._follow(engine, asked[0], request)) if streams else None
        try:
            outputs = await asyncio.wait_for(client.generate_round(asked), ANSWER_SECONDS)
        except (UserError, TimeoutError) as error:
            raise Refusal(503, str(error) or f"No answer within {ANSWER_SECONDS:.0f} s.") from error
        finally:
            if following is not None:
                following.cancel()
        if failed := [each.error for each in outputs if each.error is not None]:
            raise Refusal(400, failed[0])
        spans = [versions_of(output) for output in outputs]
        newest = max((span["version"] for each in spans for span in each), default=0)
        usage = {"prompt_tokens": len(ids), "completion_tokens": sum(len(each.output_ids) for each in outputs)}
        told = {"system_fingerprint": f"weights-{newest}", "weight_versions": spans}
        return outputs, chat_api.answer_of(name, self.name, usage) | told

    async def _follow(self, engine: Any, asked: GenerationRequest, request: Common) -> None:
        ends = [*request.stops, *([CALL] if isinstance(request, Chat) else [])]
        ids: list[int] = []
        with suppress(Exception):  # an engine that cannot, or that dies: what is left comes in one piece
            while True:
                if more := await engine.written.remote(asked.request_id, len(ids)):
                    ids = more
                    request.tell(settled(self._prompt.decode(ids), ends))


def versions_of(output: GenerationOutput) -> list[dict[str, int]]:
    """Example: versions [3, 3, 4] are [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 3}]."""
    spans, start = [], 0
    for version, tokens in itertools.groupby(output.weight_versions):
        end = start + len(list(tokens))
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


class PolicyServer(HTTPServer):
    @contextmanager
    def beside(self, run: Run) -> Iterator[None]:
        """Serves the policy of a training that has given its engines their first weights."""
        config = run.config
        kwargs = config.generator.chat_template_kwargs
        prompt = with_parsers(ChatPrompt(run.learner.tokenizer, kwargs), config.generator.agent)
        engines, away = run.processes.engines, run.processes.watch.away
        policy = Policy(config.trainer.run_name, engines, prompt, config.generator, away)
        with self.running(chat_api.application(policy)):
            run.table.note(f"{config.trainer.run_name} is served at {self.url}")
            yield


def serve(config: Config, model_path: str, name: str, server: PolicyServer) -> None:
    """Serves a model on disk under `name` until Ctrl-C, on engines of its own; one that dies is started again."""
    check_engines(config, model_path, training=False)
    prompt = with_parsers(load_chat_prompt(model_path, config.generator.chat_template_kwargs), config.generator.agent)
    with guarded(), Processes(config, model_path, plays=False) as processes:
        processes.wait_for_engines()
        policy = Policy(name, processes.engines, prompt, config.generator, processes.watch.away)
        with server.running(chat_api.application(policy)):
            print(f"{name} is served at {server.url}", flush=True)
            print(f"Its context has {config.generator.max_model_len} tokens.", flush=True)
            while True:
                processes.watch.check(WATCH_SECONDS)
