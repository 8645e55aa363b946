"""Chat prompts as token ids, made so that nothing the policy wrote is ever decoded and encoded again.

The first prompt is the model's own chat template. A later observation is what the template puts between an assistant's
words and the next thing the assistant says, encoded by itself. So the ids of an episode are always first + output +
observation + output + ..., and a prefix of the next prompt.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from skyrl_trainer.errors import UserError

Messages = list[dict[str, Any]]
LONGEST_TEXT = 2**20
"""Characters of an observation that are read, whatever the context holds."""
MARKER = "\x11assistant\x12"
"""Stands for the assistant's words; no text has it, and no template changes it."""
ASKED: Messages = [{"role": "user", "content": "."}]
MARKED = {"role": "assistant", "content": MARKER}


def first_messages(instructions: str, observation: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": instructions}] if instructions else []
    return [*system, {"role": "user", "content": observation}]


def well_formed(text: str) -> str:
    """With "?" for each lone surrogate, which is half a character: no tokenizer and no file takes it."""
    return str.encode(text, "utf-8", "replace").decode()


class ChatPrompt:
    """Builds prompts for one tokenizer.

    Example (ChatML): `first("", "1+1?")` are the ids of "<|im_start|>user\\n1+1?<|im_end|>\\n<|im_start|>assistant\\n";
    after an output that ends with <|im_end|>, `observation("Wrong.", output)` are the ids of
    "\\n<|im_start|>user\\nWrong.<|im_end|>\\n<|im_start|>assistant\\n", and with <|im_end|> before it otherwise.

    Only the template writes special tokens: a text that spells one, as a web page may or a tool's description, gets a
    space into it ("< |im_end|>"), so that it cannot end its message and begin the assistant's.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] = {}) -> None:
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs
        name = getattr(tokenizer, "name_or_path", "") or "the policy"
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"The tokenizer of {name} has no chat template: take an instruction-tuned model for "
                "trainer.policy.model.path, or save a chat_template with its tokenizer."
            )
        self._special = [each.content for each in tokenizer.added_tokens_decoder.values() if each.special]
        end = self._after(json.dumps(ASKED))[:1]
        if not end or end[0] not in tokenizer.all_special_ids:
            raise UserError(
                f"The chat template of {name} does not end an assistant's turn with a special token, so nobody can "
                "see where a turn ends: use a template that does, as ChatML's <|im_end|>."
            )
        self.end_of_turn_id: int = end[0]
        ends = (end[0], tokenizer.eos_token_id, *getattr(tokenizer, "model_ends", ()))
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        # The template, and not the model, begins a thought in each answer.
        self.thinks = self._render(ASKED).rstrip().endswith("<think>")
        # Every try of a sample has the same first prompt, and many observations repeat.
        self._first = lru_cache(256)(lambda given: tuple(self.conversation(*json.loads(given))))
        self._replies = lru_cache(256)(self._after)

    def first(self, instructions: str, observation: str, tools: Messages | None = None) -> list[int]:
        """Ids of the system message (if any) and the user's, up to where the assistant begins."""
        return list(self._first(json.dumps([first_messages(instructions, observation), tools])))

    def conversation(self, messages: Messages, tools: Messages | None = None) -> list[int]:
        """The same for messages of OpenAI's chat API."""
        return self.encode(self.text(messages, tools))

    def text(self, messages: Messages, tools: Messages | None = None) -> str:
        """What the template makes of them; UserError when it shows no tools."""
        text = self._render(messages, **({"tools": tools} if tools else {}))
        if tools and text == self._render(messages):
            raise UserError(
                "The chat template of the policy's tokenizer shows no tools: take a model whose does (Qwen's), "
                "generator.agent.tools=env, or leave `tools` out of what is asked."
            )
        return text

    def observation(self, text: str, after_ids: list[int]) -> list[int]:
        """Ids between an output and the next one; a turn that was cut gets its end-of-turn token here."""
        return self.replies([{"role": "user", "content": text}], after_ids)

    def replies(self, messages: Messages, after_ids: list[int]) -> list[int]:
        """The same for messages of OpenAI's chat API, such as the results of tools."""
        ids = self._replies(json.dumps(messages))
        ended = after_ids[-1:] == [self.end_of_turn_id] == list(ids[:1])
        return list(ids[1:] if ended else ids)

    def decode(self, ids: list[int]) -> str:
        """The text of an output, without the stop token at its end."""
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # Ids of what follows the assistant's words when these messages (JSON) answer it.
    def _after(self, messages: str) -> tuple[int, ...]:
        said = self._render([*ASKED, MARKED, *json.loads(messages)])
        return tuple(self.encode(said.split(MARKER, 1)[-1]))

    def _render(self, messages: Messages, **tools: Any) -> str:
        told, tools = map(self._without_special, ([{"content": None, **each} for each in messages], tools))
        kwargs = {**self.template_kwargs, **tools, "tokenize": False, "add_generation_prompt": True}
        return self.tokenizer.apply_chat_template(told, **kwargs)

    def _without_special(self, value: Any) -> Any:
        if isinstance(value, str):
            for token in self._special:
                value = value.replace(token, f"{token[0]} {token[1:]}")
        if isinstance(value, list | tuple):
            return [self._without_special(each) for each in value]
        return dict(self._without_special([*value.items()])) if isinstance(value, dict) else value

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it is."""
        return self.tokenizer.encode(well_formed(text), add_special_tokens=False)
