"""The judge: a model behind an OpenAI-compatible endpoint that says whether an answer matches."""

import asyncio
import json
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from skyrl_eval.benchmarks.common import final, last
from skyrl_trainer.engine.endpoint import text_of, usage_of
from skyrl_trainer.engine.http import HTTPClient, Refused, Replies

TRIES, MOST_FAILURES = 3, 8
"""At a readable reply; in a row."""
FIRST, PATIENCE = (120.0, 5, 0.0), (300.0, 5, 1800.0)
"""Seconds for a reply, tries at any, seconds in which a rate limit costs no try: of the first question, of others."""
TOKENS = ("judge_prompt_tokens", "judge_completion_tokens")
T = TypeVar("T")


class JudgeFailed(Exception):
    """No readable judgement was to be had: says why, and what it cost."""

    def __init__(self, reason: str, **tokens: int | None) -> None:
        super().__init__(reason)
        self.tokens = tokens


class Match(BaseModel):  # HLE's structured reply
    model_config = ConfigDict(extra="forbid")  # as structured output has it: no other member, and none left out
    extracted_final_answer: str
    reasoning: str
    correct: Literal["yes", "no"]
    confidence: int
    strict: Literal[True]


def objects(text: str, member: str) -> Iterator[Any]:
    """The JSON objects with this member in a text, whatever else is in it; none that lies within another."""
    with suppress(RecursionError):  # what is nested so deeply is no judgement, and every brace in it would be tried
        text = re.sub(r",(\s*[\]}])", r"\1", text)  # DeepSearchQA's prompt has one
        # LaTeX, and "\$5", as judges quote them: JSON has no such escapes.
        text = re.sub(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\', lambda found: found[0] if found[1] else r"\\", text)
        end = 0
        for brace in re.finditer(r"\{", text):
            with suppress(ValueError):
                found, stop = json.JSONDecoder(strict=False).raw_decode(text, brace.start())
                if member in found and brace.start() >= end:
                    end = stop
                    yield found


def parse_match(reply: str) -> Match | None:
    """The judgement in a reply: its JSON, or else the last line that is "correct:" and yes or no. Values are read as
    judges write them ("Yes", true, 0.9, "85%"). Without one a confidence is 100, as in the prompt.
    """
    text = final(reply)
    if whole := [*objects(text, "correct")]:
        values = {name: " ".join(str(value).split()) for name, value in whole[-1].items()}
        text = "\n".join(f"{name}: {value}" for name, value in values.items())
    if not (verdicts := re.findall(r"(?im)^\W*correct\W*:\W*(yes|no|true|false)\b(?!/)", text)):
        return None
    said = last(r"(?im)^\W*confidence\W*:[^\d\n]*(\d+(?:\.\d+)?[ \t]*%?)", text).strip() or "100%"
    confidence = float(said.strip(" %")) * (100 if re.fullmatch(r"0\.\d+|1\.0+", said) else 1)
    return Match(
        extracted_final_answer=last(r"(?im)^\W*extracted_final_answer\W*:\s*(.*?)\s*$", text),
        reasoning="",
        strict=True,
        correct="yes" if verdicts[-1].lower() in ("yes", "true") else "no",
        confidence=round(min(confidence, 100)),
    )


class Judge:
    """Asks, remembers, and counts tokens. Threads may share one. The key is JUDGE_API_KEY, or else OPENAI_API_KEY."""

    def __init__(self, base_url: str, model: str, cache: str | Path = "") -> None:
        """base_url: up to and with /v1. cache: the folder of replies; "" keeps none."""
        self.base_url, self.model, self._replies = base_url, model, Replies(cache)
        self.failures = 0  # in a row, since the last grading began
        self.patience = PATIENCE
        self._locks = defaultdict[str, threading.Lock](threading.Lock)

    def ask(
        self, prompt: str, parse: Callable[[str], T | None], schema: type[BaseModel] | None = None
    ) -> tuple[T, dict[str, int | None]]:
        """What `parse` makes of the reply, and the tokens of all tries, also of remembered ones. Or JudgeFailed."""
        with self._locks[prompt]:  # tries with the same answer have one verdict
            asked = (self.model, prompt, schema and schema.__name__)
            known = self._replies.get(*asked)
            if known and (result := parse(known["reply"])) is not None:
                return result, {name: known[name] for name in TOKENS}
            spent: dict[str, int | None] = dict.fromkeys(TOKENS, 0)
            reason = f"has failed {MOST_FAILURES} times in a row and is asked no more"
            for _ in range(TRIES if self.failures < MOST_FAILURES else 0):
                try:
                    reply, usage = self._request(prompt, schema)
                except JudgeFailed as error:
                    reason = str(error)
                    break
                for name in TOKENS:
                    count, before = usage.get(name.removeprefix("judge_")), spent[name]
                    spent[name] = None if count is None or before is None else before + count
                if (result := parse(reply)) is not None:
                    self.failures = 0
                    self._replies.put({"reply": reply, **spent}, *asked)
                    return result, spent
                reason = f"says what cannot be read: {reply[:200]!r}"
            self.failures += 1
            raise JudgeFailed(f"The judge {self.model} at {self.base_url} {reason}.", **spent)

    def _request(self, prompt: str, schema: type[BaseModel] | None) -> tuple[str, dict[str, Any]]:
        request: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        wishes: dict[str, Any] = {}
        if schema:  # HLE's: other judges think longer
            form = {"name": schema.__name__, "schema": schema.model_json_schema(), "strict": True}
            wishes = {"max_completion_tokens": 4096, "response_format": {"type": "json_schema", "json_schema": form}}
        try:
            try:
                answer = asyncio.run(self._post(request | wishes))
            except Refused as error:
                if not wishes or error.status not in (400, 422):
                    raise
                answer = asyncio.run(self._post(request))  # without structured output, or with another limit
            return text_of(answer["choices"][0]["message"].get("content")), usage_of(answer, {})
        except Refused as error:
            raise JudgeFailed(f"does not answer: {error}") from error
        except (LookupError, TypeError, AttributeError) as error:
            said = "no JSON" if answer is None else f"{answer!r:.200}"
            raise JudgeFailed(f"does not answer as OpenAI's API does, but with {said}") from error

    async def _post(self, body: dict[str, Any]) -> Any:
        key = os.environ.get("JUDGE_API_KEY") or os.environ.get("OPENAI_API_KEY", "")
        async with HTTPClient(self.base_url, key) as http:
            return await http.ask("POST", "/chat/completions", body, *self.patience)
