"""Prompts for a model that takes chat messages: every message is one "token" to the agent loop."""

from typing import Any

from skyrl_gym.parsing import said
from skyrl_trainer.agent.prompt import first_messages


class MessagePrompt:
    """ChatPrompt's methods, for one episode: the id of a message is its number, 0 ends a turn.
    Example: first("", "1+1?") == [1], and after the reply [2, 0] observation("Wrong.", [2, 0]) == [3].
    """

    stop_token_ids, thinks = (0,), False

    def __init__(self, image: str = "") -> None:
        """image: a data URI that the first message shows."""
        self._messages: list[dict[str, Any]] = [{}]
        self._image = image
        self.tools: list[dict[str, Any]] = []
        """Schemas of the tools that go with every request, in OpenAI's form."""

    def first(self, instructions: str, observation: str, tools: Any = None) -> list[int]:
        self.tools = tools or []
        *system, _ = first_messages(instructions, observation)
        image = {"type": "image_url", "image_url": {"url": self._image}}
        content = [{"type": "text", "text": observation}, image] if self._image else observation
        return [self.add(each["role"], each["content"]) for each in system] + [self.add("user", content)]

    def observation(self, text: str, after_ids: list[int]) -> list[int]:
        """The user's message; after tool calls of the endpoint's own form, a tool's message for each of them."""
        if not (calls := self._messages[after_ids[0]].get("tool_calls")):
            return [self.add("user", text)]
        inner = text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
        results = inner.split("\n</tool_response>\n<tool_response>\n")
        for escaped in ("&lt;tool_response>", "&lt;/tool_response>"):  # a message of its own needs no escape
            results = [each.replace(escaped, escaped.replace("&lt;", "<")) for each in results]
        if len(results) != len(calls):  # not one by one: the first message has all of it
            results = [text] + [""] * (len(calls) - 1)
        return [
            self.add("tool", one, tool_call_id=call.get("id", "")) for one, call in zip(results, calls, strict=True)
        ]

    def decode(self, ids: list[int]) -> str:
        return said(self._messages[ids[0]])

    def add(self, role: str, content: Any, **more: Any) -> int:
        self._messages.append({"role": role, "content": content, **more})
        return len(self._messages) - 1

    def messages(self, ids: list[int]) -> list[dict[str, Any]]:
        return [self._messages[number] for number in ids if number]
