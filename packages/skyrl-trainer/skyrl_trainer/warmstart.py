"""Behaviour cloning of expert trajectories with `trl.SFTTrainer`, so that reinforcement learning has a start.

    python -m skyrl_trainer.warmstart --policy DIR --out DIR --data text_math?split=train

Contract: demonstrations are token ids made exactly as a rollout makes them (the agent's chat prompt, then the action's
own ids and the end-of-turn token), so that the clone and the rollout never tokenize one text in two ways. The loss is
on the expert's tokens only. Cloning stops when it has fallen to `target_loss`: after a number of steps one seed's clone
knows half of its task and another's all of it; at a loss they know about the same. It runs in a process of its own,
because transformers' Trainer seeds the global random generators. Same arguments, same bytes; `--out` then holds a
Hugging Face model and nothing else.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_trainer.agent.prompt import ChatPrompt, load_chat_prompt
from skyrl_trainer.data import Conversation, demonstrations, load_samples
from skyrl_trainer.errors import UserError
from skyrl_trainer.init_policy import new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProgressCallback

DEFAULT_DEMONSTRATIONS = 4000
DEFAULT_LEARNING_RATE = 1e-3
DEFAULT_EPOCHS = 8.0
DEFAULT_BATCH_SIZE = 32
DEFAULT_TARGET_LOSS = 0.3
LOSS_WINDOW = 10
"""Optimizer steps in one reading of the loss."""


def encode_conversation(
    prompt: ChatPrompt, tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> tuple[list[int], list[int]]:
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


def warmstart(
    policy: Path,
    out: Path,
    conversations: Iterable[Conversation],
    seed: int = 0,
    learning_rate: float = DEFAULT_LEARNING_RATE,
    epochs: float = DEFAULT_EPOCHS,
    batch_size: int = DEFAULT_BATCH_SIZE,
    target_loss: float = DEFAULT_TARGET_LOSS,
    seconds: float = math.inf,
) -> list[float]:
    """Clones the experts of `conversations` into `out`, a new or empty folder.

    `target_loss` is in nats a token; at 0 cloning goes through all `epochs`, or stops after `seconds` of them, which
    is then not the same bytes twice. Returns the loss of every LOSS_WINDOW steps.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback
    from trl import SFTConfig, SFTTrainer

    if not torch.cuda.is_available():
        # Batches of a tiny model gain little from more threads, lose much on a busy machine, and change bytes by them.
        torch.set_num_threads(1)
    prompt = load_chat_prompt(str(policy))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    dtype = model.config.dtype
    pairs = [encode_conversation(prompt, tokenizer, conversation) for conversation in conversations]
    if not pairs:
        raise UserError("There are no demonstrations to clone: set --num-demonstrations to 1 or more.")
    dataset = Dataset.from_dict({"input_ids": [ids for ids, _ in pairs], "labels": [labels for _, labels in pairs]})
    steps = max(1, round(epochs * len(pairs) / batch_size))
    with new_folder(out) as folder, tempfile.TemporaryDirectory() as scratch:
        args = SFTConfig(
            output_dir=scratch,
            save_strategy="no",
            report_to="none",
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
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
        )
        trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(_progress(target_loss, seconds))
        trainer.train()
        model.to(dtype).save_pretrained(folder)  # type: ignore[arg-type]  # transformers' wrapper hides `to`
        tokenizer.save_pretrained(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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
    parser.add_argument("--num-demonstrations", type=int, default=DEFAULT_DEMONSTRATIONS)
    parser.add_argument("--learning-rate", type=float, default=DEFAULT_LEARNING_RATE)
    parser.add_argument("--epochs", type=float, default=DEFAULT_EPOCHS)
    parser.add_argument("--batch-size", type=int, default=DEFAULT_BATCH_SIZE)
    parser.add_argument("--target-loss", type=float, default=DEFAULT_TARGET_LOSS, help="stop there; 0: never")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many; default: no limit")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    source = load_samples(args.data or ["text_math?split=train"], args.env_class, env_file=args.env_file)
    conversations = list(demonstrations(source, args.num_demonstrations, args.seed))
    losses = warmstart(
        policy=args.policy,
        out=args.out,
        conversations=conversations,
        seed=args.seed,
        learning_rate=args.learning_rate,
        epochs=args.epochs,
        batch_size=args.batch_size,
        target_loss=args.target_loss,
        seconds=args.seconds,
    )
    print(
        f"Cloned {len(conversations)} expert episodes in {time.monotonic() - started:.0f} s: "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}. The policy is in {args.out}."
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="skyrl-trainer warmstart", description=__doc__)
    add_arguments(parser)
    run(parser.parse_args(argv))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
