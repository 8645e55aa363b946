"""The contexts of a user's agent, which writes its own histories, or of the roles of self-play: as token ids, in which
what the policy sampled stays.

Each request is messages. Where one of them is an answer of the policy in this episode, its ids are taken from the
record; all else is the chat template's. A request whose ids begin with an earlier context and its answer continues that
segment; any other (a rewritten history, a second conversation, a retry) begins a new one, whose prompt is all of it.
"""

import json
from hashlib import blake2b
from itertools import accumulate

from skyrl_trainer.agent.chat_api import Json, for_template, too_long
from skyrl_trainer.agent.parsers import choice_of
from skyrl_trainer.agent.prompt import MARKER, ChatPrompt
from skyrl_trainer.engine.stops import cut_at_stop
from skyrl_trainer.types import Turn

MOST_REFUSED = 8
"""Requests one after the other that do not fit."""


class Conversation:
    """One episode's; what Memory (agent/memory.py) is to our own agent.
    Example: the agent asks [user A], is told B, and asks [user A, assistant B, user C]: one segment, of two turns. It
    then asks [user "In short: A B C"]: a second segment.
    """

    def __init__(self, prompt: ChatPrompt, request: Json, limit: int) -> None:
        """request: {"messages", "tools", "max_tokens", "logprobs", "stop"}, or {"messages", "role"}. limit: tokens."""
        self._prompt, self._limit = prompt, limit
        self._answers: dict[str, list[int]] = {}
        """Ids of what the policy has answered: by the answer alone, and by the history that ends with it."""
        self._segments: list[int] = []
        """Which segment each turn belongs to."""
        self._ends: dict[int, tuple[list[int], str, int]] = {}
        """Of each segment up to its last answer: all ids, the history, and the number of messages."""
        self._history = ""
        """That of the request."""
        self._segment = 0
        self._begin(request)

    def _begin(self, request: Json) -> None:
        self._request, self._read = request, request["messages"]
        self.most: int | None = request.get("max_tokens")
        """Tokens that the answer may have."""
        self.stops = tuple(request.get("stop") or ())
        self.context = self._ids()
        """What the next output follows."""

    def said(self, turn: Turn) -> str:
        """The turn's answer as the agent gets it, in JSON: the message, why it ended, and how many tokens it took.
        One that asks for a `role` gets the plain text."""
        stop, tools = cut_at_stop(self._prompt.decode, turn, self.stops), self._request.get("tools") or None
        self.at_stop = stop is not None or turn.output_ids[-1] in self._prompt.stop_token_ids
        logprobs, finish = self._request.get("logprobs"), "stop" if self.at_stop else "length"
        choice = choice_of(self._prompt, turn.action, turn, tools, logprobs, finish, stop)
        self.marks = {"skyrl/call": len(self._segments), "skyrl/read": self._read}
        """For the info of the turn: its number, and the messages that are new in its segment."""
        self._history = _history(self._history, choice["message"])
        self._answers |= dict.fromkeys((_key(choice["message"]), self._history), turn.output_ids)
        end = self.context + turn.output_ids
        self._ends[self._segment] = end, self._history, len(self._request["messages"]) + 1
        self._segments.append(self._segment)
        self._refused = list[str]()
        usage = {"prompt_tokens": len(self.context), "completion_tokens": len(turn.output_ids)}
        return turn.action if "role" in self._request else json.dumps({"choice": choice, "usage": usage})

    def refusal(self, info: Json) -> str | None:
        """Takes the next request from a reply's info. Where it does not fit: what the agent is told, for its env."""
        if (request := info.pop("request", None)) is None:
            return None
        self._begin(request)
        if len(self.context) < self._limit or "role" in request or len(self._refused) == MOST_REFUSED:
            return None
        self._refused.append(too_long(len(self.context), self._limit))
        return json.dumps({"refused": self._refused})

    def advance(self, turns: list[Turn]) -> tuple[list[int], bool]:
        """Before the request that was read last, after the last of `turns`: its `prompt_ids` and `new_segment`."""
        # The turns of the segment that goes on are moved to the end, so that each segment's stand together.
        fitting = [(len(ids), n, told) for n, (ids, _, told) in self._ends.items() if self.context[: len(ids)] == ids]
        if not fitting:
            self._segment = len(self._ends)
            return list(self.context), True
        size, self._segment, told = max(fitting)
        turns[self._segments.index(self._segment)].new_segment = len(self._ends) > 1
        order = sorted(range(len(turns)), key=lambda place: self._segments[place] == self._segment)
        turns[:] = [turns[place] for place in order]
        self._segments = [self._segments[place] for place in order]
        self._read = self._request["messages"][told:]
        return self.context[size:], False

    def _ids(self) -> list[int]:
        messages, tools = self._request["messages"], self._request.get("tools")
        histories = [*accumulate(messages, _history, initial=json.dumps(tools))][1:]
        self._history = histories[-1]
        told = [*map(for_template, messages)]
        said = [n for n, each in enumerate(told) if each["role"] == "assistant"]
        last = max(said, default=0)
        news = told[last + 1 :]
        at_front = any(each["role"] == "system" for each in news)  # where some templates put it
        ends = {history: ids for ids, history, _ in self._ends.values()}
        if (end := ends.get(histories[last])) and not at_front:  # others change what is before an earlier answer
            return end + self._prompt.replies(news, end)
        answers = self._answers
        sampled = {n: out for n in said if (out := answers.get(histories[n]) or answers.get(_key(messages[n])))}
        marks = {n: f"{MARKER}{n}{MARKER}" for n in sampled}
        for number, mark in marks.items():
            told[number] = {"role": "assistant", "content": mark}
        rest = self._prompt.text(told, tools)
        if rest.count(MARKER) > 2 * len(marks):
            raise ValueError("a message holds the mark that stands for the assistant's words")
        ids = list[int]()
        for number, mark in marks.items():
            before, there, rest = rest.partition(mark)
            if not there:
                raise ValueError("the chat template leaves out an answer of the policy")
            ids = self._joined(ids, before) + sampled[number]
        return self._joined(ids, rest)

    def _joined(self, ids: list[int], text: str) -> list[int]:
        after = self._prompt.encode(text)
        return ids + (after[1:] if ids and after[:1] == ids[-1:] == [self._prompt.end_of_turn_id] else after)


def _history(before: str, message: Json) -> str:
    return blake2b((before + _key(message)).encode(errors="replace"), digest_size=16).hexdigest()


# A message by what it says: agents leave out empty members, and white space around an answer.
def _key(message: Json) -> str:
    told = for_template(message)
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in told.get("tool_calls") or ()]
    content = told["content"].strip() if told["role"] == "assistant" else told["content"]
    return json.dumps([told["role"], content, calls], sort_keys=True)
