"""An answer's thoughts, words and calls of tools, read by vLLM's parsers for families of models.

vLLM's import takes 10 s and 600 MB of a process, which are paid for where a parser is named.
Without one, calls are in our own grammar (chat_api.message_of).
"""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any
from zlib import crc32

from skyrl_trainer.agent.chat_api import Choice, message_of, tokens_of
from skyrl_trainer.agent.prompt import ChatPrompt, well_formed
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.settings import AgentConfig
from skyrl_trainer.types import GenerationOutput, Turn

Message = dict[str, Any]
Tools = list[Message] | None
FOLDERS = ("tool_parsers", "reasoning")
"""Of vLLM's, whose first file has a table of the parsers by name."""
HARMONY = {"openai", "openai_gptoss"}
"""gpt-oss's, the one form that vLLM reads from token ids."""


def parser_names(agent: AgentConfig) -> tuple[str, str]:
    """Of calls and of thoughts; "" for our own grammar, and for none."""
    tool, _, reasoning = ("" if agent.tools in ("env", "template") else agent.tools).partition("+")
    return tool, reasoning


def check_names(agent: AgentConfig) -> None:
    """UserError where vLLM has no such parser; without its import."""
    for name, folder in zip(parser_names(agent), FOLDERS, strict=True):
        if name and name not in (known := _registered(folder)):
            those = ", ".join(sorted(known)) or "missing: install skyrl-trainer[cpu]"
            what = "it is neither env nor template, and no parser of vLLM's"
            raise UserError(f"generator.agent.tools={agent.tools}: {what} (its {folder} are {those}).")


def _registered(folder: str) -> set[str]:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return set()
    file = Path(vllm.origin).parent / folder / "__init__.py"
    body = ast.parse(file.read_text()).body
    tables = [node.value for node in body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
    return {name for table in tables for name in ast.literal_eval(table)}


class ParsingPrompt(ChatPrompt):
    """A ChatPrompt that also reads answers, as vLLM's server would."""

    def __init__(self, prompt: ChatPrompt, agent: AgentConfig) -> None:
        """UserError where the tokenizer or the machine's files do not suit."""
        super().__init__(prompt.tokenizer, prompt.template_kwargs)
        check_names(agent)
        manager = load("vllm.parser.parser_manager:ParserManager")
        tool, reasoning = (name or None for name in parser_names(agent))
        self._cached = load("vllm.tokenizers.hf:get_cached_tokenizer")(self.tokenizer)
        self._finds_calls = tool is not None
        try:
            is_harmony = bool(HARMONY & {tool, reasoning})
            self._parser: Any = manager.get_parser(tool, reasoning, True, is_harmony=is_harmony)
            self.read("", [], [])
        except Exception as error:
            told = f"generator.agent.tools={agent.tools}"
            raise UserError(f"{told} does not suit this model or lacks its files: {error}") from error

    def read(self, text: str, ids: list[int], tools: Tools) -> Message:
        """As `parsed`; raises what the parser raises."""
        kind = load("vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest")
        request = kind(messages=[], tools=tools or None)
        parser = self._parser(self._cached, request.tools)
        thought, said, calls = parser.parse(text, request, tools is not None, ids)
        message: Message = {"role": "assistant", "content": said or ""}
        if tools is not None and not self._finds_calls:
            message = message_of(said or "")
        elif calls:
            message |= {"content": said or None, "tool_calls": [_call(call, text) for call in calls]}
        if thought and thought.strip():
            message["reasoning_content"] = thought
        return message


# With the id that the model wrote, if any: vLLM's are random.
def _call(call: Any, text: str) -> Message:
    if not isinstance(json.loads(call.arguments), dict):
        raise ValueError("the arguments of a call are a JSON object")
    own = call.id if call.id and call.id in text else ""
    function = {"name": well_formed(call.name), "arguments": call.arguments}
    return {"id": own, "type": "function", "function": function}


def with_parsers(prompt: ChatPrompt, agent: AgentConfig) -> ChatPrompt:
    """The same prompts; with the parsers that the settings name, if any."""
    return ParsingPrompt(prompt, agent) if any(parser_names(agent)) else prompt


def parsed(prompt: ChatPrompt, text: str, ids: list[int], tools: Tools) -> Message:
    """The message in OpenAI's form. tools: those to call; None: calls stay in its text."""
    plain = {"role": "assistant", "content": text}
    if not isinstance(prompt, ParsingPrompt):
        return plain if tools is None else message_of(text)
    try:
        return prompt.read(text, ids, tools)
    except Exception:  # parsers are programs, and a policy may write what it likes
        return plain


def choice_of(
    prompt: ChatPrompt, text: str, output: GenerationOutput | Turn, tools: Tools, logprobs: Any, finish: str, stop: Any
) -> Choice:
    """text: of the output, up to the string `stop` if it ended at one. logprobs: whether they are asked."""
    message, ids = parsed(prompt, text, output.output_ids, tools), output.output_ids
    tokens = tokens_of(prompt.decode, text, ids, output.logprobs) if logprobs else None
    why = {"finish_reason": "tool_calls" if "tool_calls" in message else finish, "stop_reason": stop}
    return {"index": 0, "message": message, "logprobs": tokens, **why}


def named(answer: Message, choices: list[Choice]) -> Message:
    """Calls without an id get one that no other answer has, of nine characters as Mistral's have."""
    calls = [call for each in choices for call in each["message"].get("tool_calls", ())]
    for place, call in enumerate(calls):
        call["id"] = call["id"] or f"c{crc32((answer['id'] + str(place)).encode()):08x}"
    return answer | {"object": "chat.completion", "choices": choices}
