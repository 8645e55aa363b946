"""Supervised fine-tuning: the same Learner, taught by what an expert said instead of by rewards.

A chat becomes token ids exactly as a rollout makes them. The loss is the mean of -log p over a batch's learned tokens.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from os.path import commonprefix
from typing import Any, ClassVar, Self

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TextColumn

from skyrl_trainer.agent.prompt import ASKED, MARKED, MARKER, ChatPrompt
from skyrl_trainer.chats import Chat
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.batch import Row, collate
from skyrl_trainer.learner.checks import shown
from skyrl_trainer.learner.model import Learner, Scorer
from skyrl_trainer.process_memory import INTERVAL, return_free_memory
from skyrl_trainer.settings import Config
from skyrl_trainer.types import StepMetrics

LIKELY = math.log(0.5)
"""A token more likely than all others together is the one that greedy decoding takes."""


def encode_chat(prompt: ChatPrompt, chat: Chat) -> tuple[list[int], list[bool]]:
    """The ids of a chat as a rollout would have them, and whether each is learned.
    Example: user "1+1?", assistant "2" gives the ids of "<|im_start|>user\\n1+1?<|im_end|>\\n<|im_start|>assistant\\n",
    all False, then those of "2<|im_end|>", all True.
    """
    ids, taught, said = list[int](), list[bool](), list[dict[str, object]]()
    for message in chat.messages:
        said.append(message)
        if message["role"] == "assistant":
            before = prompt.replies(said[:-1], ids) if ids else prompt.conversation(said[:-1], chat.tools)
            output = answer_ids(prompt, message)
            ids += before + output
            taught += [False] * len(before) + [message.get("weight") != 0] * len(output)
            said = []
    return ids, taught


def answer_ids(prompt: ChatPrompt, message: dict[str, Any]) -> list[int]:
    """Ids of an assistant's message, as if sampled; UserError when the template writes no tool calls."""
    text = message.get("content") or ""
    if message.get("tool_calls"):
        rest = text.rpartition("</think>")[2].lstrip()  # templates drop thoughts
        before, _, after = prompt.text([*ASKED, MARKED, *ASKED]).partition(MARKER)
        whole = prompt.text([*ASKED, message | {"content": rest}, *ASKED])
        written = whole.removeprefix(before).removesuffix(after)
        if f"{before}{written}{after}" != whole or written == rest:
            raise UserError("The chat template of the policy's tokenizer does not write an assistant's tool_calls.")
        text = text.removesuffix(rest) + written
    return [*prompt.encode(text), prompt.end_of_turn_id]


def make_rows(prompt: ChatPrompt, chats: Sequence[Chat]) -> list[Row]:
    """A row per chat, in order. UserError for a chat that the template does not take."""
    rows, families = list[Row](), dict[str, list[Row]]()
    for chat in chats:
        try:
            ids, taught = encode_chat(prompt, chat)
        except Exception as error:  # a template raises what it likes
            raise UserError(f"{chat.where}: the policy's chat template does not take it: {error}") from error
        zeros = np.zeros(len(ids))
        rows.append(Row(chat.where, np.array(ids), np.array(taught), zeros, zeros))
        system = chat.messages[0]["content"] if chat.messages[0]["role"] == "system" else ""
        if system or chat.tools:
            families.setdefault(json.dumps([system, chat.tools]), []).append(rows[-1])
    for family in families.values():
        share_beginning(family)
    return rows


def share_beginning(rows: Sequence[Row]) -> None:
    """Lets a micro-batch compute once what all prompts of these rows begin with: most of an agent's is its system
    message. Example: prompts [1, 2, 3] and [1, 2, 4] share [1, 2]."""
    shared = commonprefix([row.prompt.tolist() for row in rows])  # noqa: RUF071
    for row in rows:
        row.shared = len(shared) or None


class SFTTrainer:
    """Learns from rows, as the algorithms do from rollouts."""

    beta: ClassVar[float] = 0.0
    """It has no reference policy."""

    def __init__(self, config: Config) -> None:
        self.micro_batch_tokens = config.trainer.micro_batch_tokens

    def start(self, learner: Learner, reference: Scorer | None = None) -> Self:
        self.learner = learner
        self.state_dict = learner.state_dict
        self.load_state_dict = learner.load_state_dict
        return self

    def update(self, rows: Sequence[Row], learn: bool = True) -> StepMetrics:
        """One optimizer step, unless the loss or the gradient is not finite (UserError); without `learn` metrics."""
        # `exact_match` is the share of rows that greedy decoding would surely repeat token for token.
        learner, tokens = self.learner, sum(row.num_sampled for row in rows)
        sums = torch.zeros(2, dtype=torch.float64, device=learner.device)  # loss, unlikely rows
        with torch.set_grad_enabled(learn):
            for indices, counts in learner.ranks.passes(rows, range(len(rows)), self.micro_batch_tokens):
                batch = collate(rows, indices, learner.device, learner.dtype)
                logprobs_N, _ = learner.logprobs(batch)
                loss = (-1.0 if counts else 0.0) / tokens * logprobs_N.sum()
                if learn:
                    loss.backward()
                sums[0] += loss.detach()
                sums[1] += len(batch.trajectory_N[logprobs_N <= LIKELY].unique()) if counts else 0
        loss, other = learner.ranks.sum(sums)
        metrics = {"loss": loss.item(), "exact_match": 1.0 - other.item() / len(rows)}
        if not learn:
            return metrics
        grad_norm = learner.clip_gradients()
        if not (loss.isfinite() and grad_norm.isfinite()):
            learner.clear_gradients()
            raise UserError(
                f"The loss or the gradient of the chats {shown([row.trajectory_id for row in rows])} is not finite; "
                "lower trainer.learning_rate or trainer.max_grad_norm."
            )
        metrics |= {"lr": learner.step(), "grad_norm": grad_norm.item()}
        if learner.optimizer_steps % INTERVAL == 0:
            return_free_memory()
        return metrics | {"tokens/trained": float(tokens)}


def fit(
    update: Callable[[list[Row]], StepMetrics], rows: Sequence[Row], size: int, steps: int, seed: int, done: int = 0
) -> Iterator[StepMetrics]:
    """`steps` optimizer steps, each on `size` rows (all, if there are fewer); yields the metrics of those after
    `done`. All rows in an order of the seed's, then all in another, and so on.
    """
    generator, order = torch.Generator().manual_seed(seed), list[int]()
    size = min(size, len(rows))
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("learning", total=steps, loss=math.nan)
        for step in range(1, steps + 1):
            while len(order) < size:
                order += torch.randperm(len(rows), generator=generator).tolist()
            batch, order = [rows[i] for i in order[:size]], order[size:]
            if step <= done:
                continue
            start = time.perf_counter()
            metrics = update(batch)
            seconds = time.perf_counter() - start
            bar.update(task, completed=step, loss=metrics["loss"])
            speed = sum(len(row.token_ids) for row in batch) / seconds
            passes = step * size / len(rows)
            yield {"step": step, **metrics, "epoch": passes, "tokens/per_second": speed, "time/train": seconds}
