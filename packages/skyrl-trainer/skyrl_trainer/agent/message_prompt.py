"""Prompts for a model that takes chat messages: every message is one "token" to the agent loop."""

from typing import Any

from skyrl_trainer.agent.prompt import first_messages


class MessagePrompt:
    """ChatPrompt's methods as the loop uses them, for one episode: the id of a message is its number, 0 ends a turn.

    Example: first("", "1+1?") == [1], and after the reply [2, 0] observation("Wrong.", [2, 0]) == [3].
    """

    stop_token_ids = (0,)

    def __init__(self, image: str = "") -> None:
        """image: a data URI that the first message shows."""
        self._messages: list[dict[str, Any]] = [{}]
        self._image = image

    def first(self, instructions: str, observation: str, tools: Any = None) -> list[int]:
        *system, _ = first_messages(instructions, observation)
        image = {"type": "image_url", "image_url": {"url": self._image}}
        content = [{"type": "text", "text": observation}, image] if self._image else observation
        return [self.add(message["role"], message["content"]) for message in system] + [self.add("user", content)]

    def observation(self, text: str, after_ids: list[int]) -> list[int]:
        return [self.add("user", text)]

    def decode(self, ids: list[int]) -> str:
        return str(self._messages[ids[0]]["content"])

    def add(self, role: str, content: Any) -> int:
        self._messages.append({"role": role, "content": content})
        return len(self._messages) - 1

    def messages(self, ids: list[int]) -> list[dict[str, Any]]:
        return [self._messages[number] for number in ids if number]
