"""The judge: a model behind an OpenAI-compatible endpoint that says whether an answer matches.

Replies that can be read are kept in a file, by the hash of everything that was sent, so that grading the same attempts
again asks nobody and gives the same verdicts. A reply that cannot be read is asked for again, three times in all; then
JudgeFailed is raised, and the verdict is "ungraded". A judge that fails eight times in a row is asked no more.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from skyrl_eval.benchmarks.common import final
from skyrl_eval.store import read_lines
from skyrl_trainer.errors import UserError

TRIES, RETRIES, SECONDS, MOST_FAILURES = 3, 4, 300.0, 8
"""At a readable reply; at any reply, by the client; for one; in a row."""
TOKENS = ("prompt_tokens", "completion_tokens")
T = TypeVar("T")


class JudgeFailed(Exception):
    """No readable judgement was to be had: says why, and what it cost (under a verdict's names)."""

    def __init__(self, reason: str, tokens: dict[str, int | None] | None = None) -> None:
        super().__init__(reason)
        self.tokens = tokens or {}


class Match(BaseModel):
    """HLE's structured reply. Example: {"extracted_final_answer": "B", "reasoning": "...", "correct": "yes",
    "confidence": 70, "strict": true}"""

    extracted_final_answer: str
    reasoning: str
    correct: Literal["yes", "no"]
    confidence: int
    strict: Literal[True] = True


def objects(text: str) -> Iterator[Any]:
    """The JSON objects in a text, whatever else is in it."""
    for brace in re.finditer(r"\{", text):
        with suppress(ValueError):
            yield json.JSONDecoder(strict=False).raw_decode(text, brace.start())[0]


def parse_match(reply: str) -> Match | None:
    """The judgement in a reply: its JSON, or else the last line that begins with "correct:" and goes on with yes or no.

    So "incorrect: yes" is no judgement, and "**Correct:** yes" is one. Values are read as judges write them ("Yes",
    true, 85.5, "85%"); without a confidence it is 100, as the prompt says.
    """
    text = final(reply)
    whole = [found for found in objects(text) if found.keys() >= Match.model_fields.keys() - {"strict"}]
    if whole:
        values = {name: " ".join(str(value).split()) for name, value in whole[-1].items()}
        text = "\n".join(f"{name}: {value}" for name, value in values.items())
    if not (verdicts := re.findall(r"(?im)^\W*correct\W*:\W*(yes|no|true|false)\b", text)):
        return None
    answers = re.findall(r"(?im)^\W*extracted_final_answer\W*:\s*(.*?)\s*$", text)
    confidences = re.findall(r"(?im)^\W*confidence\W*:\W*(\d+(?:\.\d+)?)", text)
    return Match(
        extracted_final_answer=answers[-1] if answers else "",
        reasoning="",
        correct="yes" if verdicts[-1].lower() in ("yes", "true") else "no",
        confidence=min(round(float(confidences[-1])), 100) if confidences else 100,
    )


class Judge:
    """Asks, remembers, and counts tokens. Threads may share one.

    Args:
        base_url: up to and with /v1; the key is taken from JUDGE_API_KEY, or else from OPENAI_API_KEY.
        cache: the file of replies, one line of JSON each, made when it is missing; None keeps none.
    """

    def __init__(self, base_url: str, model: str, cache: Path | None = None) -> None:
        self.base_url, self.model, self._cache = base_url, model, cache
        self._lock = threading.Lock()
        self.failures = 0  # in a row, since the last grading began
        try:
            self._replies = {reply["key"]: reply for reply in read_lines(cache, repair=True)} if cache else {}
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{cache} is no file of a judge's replies ({error!r}): move it away.") from error

    def ask(
        self, prompt: str, parse: Callable[[str], T | None], schema: type[BaseModel] | None = None
    ) -> tuple[T, dict[str, int | None]]:
        """What `parse` makes of the reply, and the tokens of all tries (also when remembered), as a verdict names them.

        Raises:
            JudgeFailed: the endpoint fails, or no reply could be read.
        """
        key = hashlib.sha256(json.dumps([self.model, prompt, schema and schema.__name__]).encode()).hexdigest()
        known = self._replies.get(key)
        if known and (result := parse(known["reply"])) is not None:
            return result, {f"judge_{name}": known[name] for name in TOKENS}
        spent: dict[str, int | None] = dict.fromkeys(TOKENS, 0)
        reason = f"has failed {MOST_FAILURES} times in a row and is asked no more"
        for _ in range(TRIES if self.failures < MOST_FAILURES else 0):
            try:
                reply, usage = self._request(prompt, schema)
            except JudgeFailed as error:
                reason = str(error)
                break
            for name in TOKENS:
                count, before = getattr(usage, name, None), spent[name]
                spent[name] = None if count is None or before is None else before + count
            if (result := parse(reply)) is not None:
                self._remember({"key": key, "reply": reply, **spent})
                return result, {f"judge_{name}": count for name, count in spent.items()}
            reason = f"says what cannot be read: {reply[:200]!r}"
        self.failures += 1
        tokens = {f"judge_{name}": count for name, count in spent.items()}
        raise JudgeFailed(f"The judge {self.model} at {self.base_url} {reason}.", tokens)

    @cached_property
    def _client(self) -> Any:
        import openai

        key = os.environ.get("JUDGE_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"
        return openai.OpenAI(base_url=self.base_url, api_key=key, max_retries=RETRIES, timeout=SECONDS)

    def _request(self, prompt: str, schema: type[BaseModel] | None) -> tuple[str, Any]:
        """The reply and its usage."""
        import openai

        create = self._client.chat.completions.create
        messages = [{"role": "user", "content": prompt}]
        request: dict[str, Any] = {"model": self.model, "messages": messages}
        wishes: dict[str, Any] = {"max_completion_tokens": 4096}
        if schema:
            strict = openai.pydantic_function_tool(schema)["function"]["parameters"]
            form = {"name": schema.__name__, "schema": strict, "strict": True}
            wishes["response_format"] = {"type": "json_schema", "json_schema": form}
        try:
            try:
                done = create(**request, **wishes)
            except (openai.BadRequestError, openai.UnprocessableEntityError):
                done = create(**request)  # without structured output, or with another limit
            return done.choices[0].message.content or "", done.usage
        except openai.OpenAIError as error:
            raise JudgeFailed(f"does not answer: {' '.join(str(error).split())[:300]}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise JudgeFailed(f"does not answer as OpenAI's API does: {error!r}") from error

    def _remember(self, reply: dict[str, Any]) -> None:
        with self._lock:
            self.failures = 0
            self._replies[reply["key"]] = reply
            if self._cache:
                with self._cache.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(reply) + "\n")
