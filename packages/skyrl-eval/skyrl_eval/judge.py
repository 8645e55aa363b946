"""The judge: a model behind an OpenAI-compatible endpoint that says whether an answer matches.

Replies that can be read are kept in a file, by the hash of everything that was sent, so that grading the same attempts
again asks nobody and gives the same verdicts. A reply that cannot be read is asked for again, three times in all; then
JudgeFailed is raised, and the verdict is "ungraded".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from skyrl_eval.store import read_lines

TRIES, SECONDS = 3, 300.0
T = TypeVar("T")


class JudgeFailed(Exception):
    """No readable judgement was to be had: says why."""


class Match(BaseModel):
    """HLE's structured reply. Example: {"extracted_final_answer": "B", "reasoning": "...", "correct": "yes",
    "confidence": 70, "strict": true}"""

    model_config = ConfigDict(extra="forbid")

    extracted_final_answer: str
    reasoning: str
    correct: Literal["yes", "no"]
    confidence: int
    strict: Literal[True] = True


def parse_match(reply: str) -> Match | None:
    """The judgement in a reply: its JSON, or else the last line that begins with "correct:" and goes on with yes or no.

    So "incorrect: yes" is no judgement, and "**Correct:** yes" is one.
    """
    try:
        return Match.model_validate_json(reply[reply.find("{") : reply.rfind("}") + 1])
    except ValidationError:
        pass
    if not (verdicts := re.findall(r"(?im)^\W*correct\W*:\W*(yes|no)\b", reply)):
        return None
    answers = re.findall(r"(?im)^\W*extracted_final_answer\W*:\s*(.*?)\s*$", reply)
    confidences = re.findall(r"(?im)^\W*confidence\W*:\W*(\d+)", reply)
    return Match(
        extracted_final_answer=answers[-1] if answers else "",
        reasoning="",
        correct=verdicts[-1].lower(),
        confidence=int(confidences[-1]) if confidences else 100,
    )


class Judge:
    """Asks, remembers, and counts tokens. Threads may share one.

    Args:
        base_url: up to and with /v1; the key is taken from JUDGE_API_KEY, or else from OPENAI_API_KEY.
        cache: the file of replies, one line of JSON each; made when it is missing.
    """

    def __init__(self, base_url: str, model: str, cache: Path) -> None:
        self.base_url, self.model, self._cache = base_url, model, cache
        self._lock = threading.Lock()
        self._replies = {reply["key"]: reply for reply in read_lines(cache, repair=True)}

    def ask(
        self, prompt: str, parse: Callable[[str], T | None], schema: type[BaseModel] | None = None
    ) -> tuple[T, dict[str, int]]:
        """What `parse` makes of the reply, and its tokens under a verdict's names for them (also when remembered).

        Raises:
            JudgeFailed: the endpoint fails, or no reply could be read.
        """
        key = hashlib.sha256(json.dumps([self.model, prompt, schema and schema.__name__]).encode()).hexdigest()
        reason = ""
        for _ in range(TRIES):
            with self._lock:
                reply = self._replies.get(key)
            if reply is None:
                reply = {"key": key, **self._request(prompt, schema)}
            if (result := parse(reply["reply"])) is not None:
                self._remember(reply)
                return result, {f"judge_{name}": reply[name] for name in ("prompt_tokens", "completion_tokens")}
            reason = f"cannot be read: {reply['reply'][:200]!r}"
        raise JudgeFailed(f"The reply of the judge {self.model} {reason}.")

    @cached_property
    def _client(self) -> Any:
        import openai

        key = os.environ.get("JUDGE_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"
        return openai.OpenAI(base_url=self.base_url, api_key=key, max_retries=3, timeout=SECONDS)

    def _request(self, prompt: str, schema: type[BaseModel] | None) -> dict[str, Any]:
        import openai

        chat = self._client.chat.completions
        request: Any = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        request["max_completion_tokens"] = 4096
        try:
            try:
                done = chat.parse(**request, response_format=schema) if schema else chat.create(**request)
            except (openai.BadRequestError, openai.LengthFinishReasonError, ValidationError):
                done = chat.create(**request)  # a server without structured output, or one that does not keep to it
        except openai.OpenAIError as error:
            raise JudgeFailed(f"The judge {self.model} at {self.base_url} does not answer: {error}") from error
        usage = done.usage
        return {
            "reply": done.choices[0].message.content or "",
            "prompt_tokens": usage.prompt_tokens if usage else 0,
            "completion_tokens": usage.completion_tokens if usage else 0,
        }

    def _remember(self, reply: dict[str, Any]) -> None:
        with self._lock:
            if reply["key"] not in self._replies:
                self._replies[reply["key"]] = reply
                with self._cache.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(reply) + "\n")
