"""Behaviour cloning of expert trajectories with `trl.SFTTrainer`, so that reinforcement learning has a start.

    python -m skyrl_trainer.tiny.clone --policy DIR --out DIR --data text_math?split=train

Contract: demonstrations are token ids made exactly as a rollout makes them (the agent's chat prompt, then the action's
own ids and the end-of-turn token), so that the clone and the rollout never tokenize one text in two ways. The loss is
on the expert's tokens only. Cloning stops when it has fallen to `target_loss`: after a number of steps one seed's clone
knows half of its task and another's all of it; at a loss they know about the same. It runs in a process of its own,
because transformers' Trainer seeds the global random generators. Same arguments, same bytes; `--out` then holds a
Hugging Face model and nothing else.

A batch is computed as the learner computes it: the system message that its demonstrations share once, nothing padded,
the head only where an expert's token is predicted. Of an agent's demonstration most is the system message.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_trainer.agent.prompt import ChatPrompt, load_chat_prompt
from skyrl_trainer.config import load_config
from skyrl_trainer.data import Conversation, demonstrations, load_samples
from skyrl_trainer.errors import UserError
from skyrl_trainer.process_memory import return_free_memory
from skyrl_trainer.settings import Warmstart
from skyrl_trainer.tiny.init_policy import new_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, ProgressCallback
    from trl import SFTConfig

DEFAULTS = Warmstart()
LOSS_WINDOW = 10
"""Optimizer steps in one reading of the loss."""
MICRO_BATCH_TOKENS = 4096
"""In one forward and backward pass; the tokens of a shared beginning come on top."""
Pair = tuple[list[int], list[int]]
"""Ids and labels."""


def encode_conversation(prompt: ChatPrompt, tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> Pair:
    """The ids of an episode as a rollout has them, and labels: the id on the expert's tokens, -100 elsewhere.

    Example: user "1+1?", assistant "2" gives the ids of "<|im_start|>user\\n1+1?<|im_end|>\\n<|im_start|>assistant\\n"
    with the labels -100, then the ids of "2<|im_end|>" with themselves as labels.
    """
    ids: list[int] = []
    labels: list[int] = []
    instructions = ""
    for message in conversation:
        text = message["content"]
        if message["role"] == "system":
            instructions = text
            continue
        if message["role"] == "assistant":
            output = [*tokenizer.encode(text, add_special_tokens=False), prompt.end_of_turn_id]
            ids += output
            labels += output
        else:
            added = prompt.observation(text, ids) if ids else prompt.first(instructions, text)
            ids += added
            labels += [-100] * len(added)
    return ids, labels


def shared_lengths(conversations: Sequence[Conversation], pairs: Sequence[Pair]) -> list[int]:
    """How many first ids each demonstration has in common with all others of its system message; none is taught."""
    families: dict[str, list[int]] = {}
    for i, conversation in enumerate(conversations):
        families.setdefault(conversation[0]["content"] if conversation[0]["role"] == "system" else "", []).append(i)
    shared = [0] * len(pairs)
    for family in families.values():
        first, last = (end(pairs[i][0] for i in family) for end in (min, max))
        common = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        taught = min(next(place for place, label in enumerate(pairs[i][1]) if label >= 0) for i in family)
        for i in family:
            shared[i] = min(common, taught - 1)
    return shared


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows {"input_ids", "labels", "shared"} as segments (learner/segments.py), a shared beginning once.

    Example: ids [1, 2, 3, 4] and [1, 2, 5, 6], the last taught, shared 2: segments [1, 2], [3, 4], [5, 6].
    """
    import torch

    segments: list[tuple[list[int], int, int]] = []  # ids, the segment that they continue or -1, the first one's place
    begun: dict[tuple[int, ...], int] = {}
    predictors_N: list[int] = []
    targets_N: list[int] = []
    end = 0
    for row in rows:
        start, ids = row["shared"], row["input_ids"]
        beginning = tuple(ids[:start])
        if start and beginning not in begun:
            begun[beginning] = len(segments)
            segments.append((ids[:start], -1, 0))
            end += start
        segments.append((ids[start:], begun.get(beginning, -1), start))
        taught = [place for place, label in enumerate(row["labels"]) if label >= 0]
        predictors_N += [end + place - start - 1 for place in taught]
        targets_N += [ids[place] for place in taught]
        end += len(ids) - start
    return {
        "ids_P": torch.tensor([token for ids, _, _ in segments for token in ids]),
        "places_P": torch.tensor([first + i for ids, _, first in segments for i in range(len(ids))]),
        "predictors_N": torch.tensor(predictors_N),
        "targets_N": torch.tensor(targets_N),
        "lengths_S": [len(ids) for ids, _, _ in segments],
        "prefix_S": [prefix for _, prefix, _ in segments],
    }


def micro_batches(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows cut into collated batches of about MICRO_BATCH_TOKENS: larger tensors cost more time in the C library."""
    cuts, tokens = [0], 0
    for i, row in enumerate(rows):
        own = len(row["input_ids"]) - row["shared"]
        if tokens + own > MICRO_BATCH_TOKENS and i > cuts[-1]:
            cuts, tokens = [*cuts, i], 0
        tokens += own
    return {"batches": [collate(rows[start:end]) for start, end in pairwise([*cuts, len(rows)])]}


def clone_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Sum over the experts' tokens of a collated batch, in nats."""
    import torch

    from skyrl_trainer.learner.segments import Segments

    ids_P = batch["ids_P"]
    segments = Segments(batch["lengths_S"], batch["prefix_S"], ids_P.device)
    hidden_1PH = model.base_model(
        ids_P[None], position_ids=batch["places_P"][None], use_cache=False, segments=segments
    ).last_hidden_state
    logits_NV = model.get_output_embeddings()(hidden_1PH[0].index_select(0, batch["predictors_N"]))
    return torch.nn.functional.cross_entropy(logits_NV, batch["targets_N"], reduction="sum")


def warmstart(
    policy: Path,
    out: Path,
    conversations: Sequence[Conversation],
    seed: int = 0,
    options: Warmstart = DEFAULTS,
    seconds: float = math.inf,
) -> list[float]:
    """Clones the experts of `conversations` into `out`, a new or empty folder.

    After `seconds` cloning stops too, which is then not the same bytes twice. Returns the loss of every LOSS_WINDOW
    steps.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback
    from trl import SFTTrainer

    from skyrl_trainer.learner import segments
    from skyrl_trainer.learner.cpu_linear import use_onednn

    if not torch.cuda.is_available():
        # Batches of a tiny model gain little from more threads, lose much on a busy machine, and change bytes by them.
        torch.set_num_threads(1)
    prompt = load_chat_prompt(str(policy))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, attn_implementation=segments.NAME)
    use_onednn(model)
    dtype = model.config.dtype
    pairs = [encode_conversation(prompt, tokenizer, conversation) for conversation in conversations]
    if not pairs:
        raise UserError("There are no demonstrations to clone: set --num-demonstrations to 1 or more.")
    columns = {"input_ids": [ids for ids, _ in pairs], "labels": [labels for _, labels in pairs]}
    dataset = Dataset.from_dict(columns | {"shared": shared_lengths(conversations, pairs)})
    steps = max(1, round(options.epochs * len(pairs) / options.batch_size))
    with new_folder(out) as folder, tempfile.TemporaryDirectory() as scratch:
        args = _settings(scratch, steps, options, seed)

        class CloneTrainer(SFTTrainer):
            def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
                batches = self._prepare_inputs(inputs)["batches"]
                tokens = sum(len(batch["targets_N"]) for batch in batches)
                total = torch.zeros(())
                for batch in batches:
                    loss = clone_loss(model, batch) / tokens
                    self.accelerator.backward(loss)
                    total += loss.detach().cpu()
                return total

        trainer = CloneTrainer(model, args, micro_batches, dataset, processing_class=tokenizer)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(_progress(options.target_loss, seconds))
        trainer.train()
        model.to(dtype).save_pretrained(folder)  # type: ignore[arg-type]  # transformers' wrapper hides `to`
        tokenizer.save_pretrained(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _settings(scratch: str, steps: int, options: Warmstart, seed: int) -> SFTConfig:
    import torch
    from trl import SFTConfig

    return SFTConfig(
        output_dir=scratch,
        save_strategy="no",
        report_to="none",
        max_steps=steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=min(20, steps // 10),
        adam_beta2=0.99,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=min(LOSS_WINDOW, steps),
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


def _progress(target_loss: float, seconds: float) -> ProgressCallback:
    """A progress bar that shows the loss, and stops the training where it is low enough or has taken long enough."""
    from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

    deadline = time.monotonic() + seconds

    class Progress(ProgressCallback):
        def on_log(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            logs: dict[str, float] | None = None,
            **kwargs: object,
        ) -> None:
            if logs and "loss" in logs:
                return_free_memory()
                if self.training_bar is not None:
                    self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}")
                control.should_training_stop |= logs["loss"] <= target_loss or time.monotonic() > deadline

    return Progress()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", type=Path, required=True, help="folder of the policy to start from")
    parser.add_argument("--out", type=Path, required=True, help="new folder of the clone")
    parser.add_argument("--data", action="append", metavar="SPEC", help="env spec, may be repeated")
    parser.add_argument("--env-class", default="text_math", help="plays the rows of a file that name no env_class")
    parser.add_argument("--env-file", help="a Python file of yours that registers environments")
    for name, field in Warmstart.model_fields.items():
        option, kind = f"--{name.replace('_', '-')}", type(field.default)
        parser.add_argument(option, type=kind, default=field.default, help=field.description)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many; default: no limit")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    source = load_samples(args.data or ["text_math?split=train"], args.env_class, env_file=args.env_file)
    given = [f"trainer.policy.model.warmstart.{name}={getattr(args, name)}" for name in Warmstart.model_fields]
    options = load_config(None, given).trainer.policy.model.warmstart
    conversations = list(demonstrations(source, options.num_demonstrations, args.seed))
    losses = warmstart(args.policy, args.out, conversations, args.seed, options, args.seconds)
    print(
        f"Cloned {len(conversations)} expert episodes in {time.monotonic() - started:.0f} s: "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}. The policy is in {args.out}."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    try:
        run(parser.parse_args())
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
