"""Whether a policy learns in TRL's own GRPOTrainer by the tools of our environments, on a CPU.

    python benchmarks/trl_environments.py text_math [--steps 60] [--seed 0]      (20 minutes)
    python benchmarks/trl_environments.py tool_use [--steps 30]                  (35 minutes)

A tiny policy clones the expert, whose actions are tool calls, until it would repeat `match` of the episodes word for
word; then nothing is ours but the environment, the weights and the chat template: calls are Qwen's, but the prompt
does not list the tools (200 tokens more of every prompt, four times the computation). tool_use is its first difficulty,
sums by `calculator`, and has that tool and `answer`. Held out: 200 tasks of split val, once each, by TRL's `evaluate`,
which samples. The last line is one JSON object: the mean reward held out before and after, and those of each rollout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from skyrl_trainer.tiny.init_policy import CHAT_TEMPLATE

TASKS: dict[str, dict[str, Any]] = {
    "text_math": {
        "options": {"difficulty": 1},
        "tiny": {},
        "batch": 32,
        "match": 0.2,
        "calls": 1,
        "learning_rate": 3e-4,
        "tokens": 64,
        "rollouts": 60,
    },
    "tool_use": {
        "options": {"difficulty": 1, "tools": ["calculator"]},
        "tiny": {"induction": True, "config_kwargs": {"vocab_size": 1024, "num_hidden_layers": 3}},
        "batch": 8,
        "match": 0.3,
        "calls": 2,
        "learning_rate": 2e-4,
        "tokens": 160,
        "rollouts": 30,
    },
}
DEMONSTRATIONS, GENERATIONS, HELD_OUT = 8000, 8, 200
MINI_BATCHES = 2
"""Optimizer steps of a rollout."""
TEMPLATE = "{% set tools = none %}" + CHAT_TEMPLATE
DONE = "Done."
"""What the expert says when the episode is over, for TRL asks once more then."""


def calls_of(action: str) -> list[dict[str, Any]]:
    """The expert's action as calls of the tools."""
    from skyrl_gym.parsing import ToolCall, parse_tool_calls

    if answer := re.fullmatch(r"\\boxed\{(.+)\}|<answer>(.+)</answer>", action, re.DOTALL):
        return [{"name": "answer", "arguments": {"answer": answer[1] or answer[2]}}]
    found = parse_tool_calls(action)
    assert found and all(isinstance(call, ToolCall) for call in found), action
    return [{"name": call.tool, "arguments": call.args} for call in found]


def demonstration(environment: Any, seed: int) -> list[dict[str, Any]]:
    """An episode of the expert as TRL's messages."""
    messages = [{"role": "user", "content": environment.reset(seed=seed, split="train")}]
    while not environment.done:
        calls = calls_of(environment.env.unwrapped.expert_action())
        asked = [{"type": "function", "function": call} for call in calls]
        messages.append({"role": "assistant", "content": "", "tool_calls": asked})
        for call in calls:
            result = getattr(environment, call["name"])(**call["arguments"])
            messages.append({"role": "tool", "name": call["name"], "content": result})
    return [*messages, {"role": "assistant", "content": DONE}]


def cloned(out: Path, kind: type[Any], task: dict[str, Any], seed: int) -> None:
    """Writes the clone of the expert into `out`."""
    from skyrl_trainer.settings import TinyConfig, Warmstart
    from skyrl_trainer.tiny.clone import clone
    from skyrl_trainer.tiny.init_policy import init_policy, make_tokenizer

    environment, start = kind(), out.parent / "random"
    talks = [demonstration(environment, 10_000 + number) for number in range(DEMONSTRATIONS)]
    writer = make_tokenizer([])
    writer.chat_template = TEMPLATE
    texts = [writer.apply_chat_template(talk, tokenize=False) for talk in talks[:2000]]
    init_policy(start, texts, TinyConfig.model_validate(task["tiny"]), seed)
    (start / "chat_template.jinja").write_text(TEMPLATE)
    print("the first demonstration:", texts[0], sep="\n", flush=True)
    options = Warmstart(target_exact_match=task["match"], batch_size=task["batch"])
    steps, loss, match = clone(str(start), out, talks, options, seed, math.inf)
    print(f"cloned in {steps} steps: loss {loss:.3f}, {match:.2f} word for word", flush=True)


def rows(split: str, count: int) -> Any:
    """As many tasks as TRL's data set."""
    from datasets import Dataset

    asked = [{"role": "user", "content": ""}]
    return Dataset.from_list([{"prompt": asked, "split": split, "seed": seed} for seed in range(count)])


def config(task: dict[str, Any], args: argparse.Namespace, folder: Path) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        str(folder.parent / "trl"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        seed=args.seed,
        max_steps=args.steps * MINI_BATCHES,
        learning_rate=task["learning_rate"],
        warmup_steps=5,
        per_device_train_batch_size=args.completions // MINI_BATCHES,
        steps_per_generation=MINI_BATCHES,
        adam_beta2=0.99,
        per_device_eval_batch_size=HELD_OUT,
        num_generations=GENERATIONS,
        num_generations_eval=1,
        max_completion_length=task["tokens"],
        max_tool_calling_iterations=task["calls"],
        gradient_checkpointing=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--steps", type=int, help="rollouts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--completions", type=int, default=256, help="per rollout")
    parser.add_argument("--clone", type=Path, help="a folder that an earlier call made, or where to make it")
    args = parser.parse_args()
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from skyrl_gym.adapters.trl import environment_factory

    task = TASKS[args.task]
    args.steps = args.steps or task["rollouts"]
    kind = environment_factory(args.task, **task["options"])
    folder = args.clone or Path(tempfile.mkdtemp(prefix="trl-environments-")) / "clone"
    if not folder.exists():
        cloned(folder, kind, task, args.seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = qwen3_template
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        args=config(task, args, folder),
        processing_class=tokenizer,
        train_dataset=rows("train", args.steps * args.completions // GENERATIONS),
        eval_dataset=rows("val", HELD_OUT),
        environment_factory=kind,
    )
    before, started = trainer.evaluate(), time.monotonic()
    print({key: value for key, value in before.items() if isinstance(value, float)}, flush=True)
    trainer.train()
    seconds, after = time.monotonic() - started, trainer.evaluate()
    rewards = [round(log["reward"], 3) for log in trainer.state.log_history if "reward" in log]
    found = {"task": args.task, "before": before["eval_reward"], "after": after["eval_reward"]}
    print(json.dumps({**found, "rewards": rewards, "seconds_per_rollout": seconds / args.steps}))


if __name__ == "__main__":
    main()
