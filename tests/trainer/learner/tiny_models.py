"""Tiny random models and hand-made rollouts for the learner's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from skyrl_trainer.learner.batch import Row
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RewardBatch, RolloutBatch, Sample, Trajectory, Turn

VOCABULARY = 101


def save_model(folder: Path, kind: str = "qwen3", seed: int = 0, **changes: Any) -> str:
    """A random model with a tokenizer in a Hugging Face folder. gpt2 is float64 throughout when it is made so; the
    norms of Qwen3 always compute in float32."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "gpt2":
            settings = {"vocab_size": VOCABULARY, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 2}
            model = GPT2LMHeadModel(GPT2Config(**settings | changes))
        else:
            settings = {
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "tie_word_embeddings": True,
                "max_position_embeddings": 4096,
            }
            model = Qwen3ForCausalLM(Qwen3Config(**settings | changes))
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return str(folder)


def make_config(**changes: Any) -> Config:
    """The default configuration with a larger learning rate; `trainer={...}` and the like are merged into it."""
    trainer = {"learning_rate": 1e-3, "micro_batch_tokens": 256} | changes.pop("trainer", {})
    return Config.model_validate({"trainer": trainer, **changes})


def make_batch(
    seed: int = 0,
    groups: int = 4,
    generations: int = 4,
    equal: tuple[int, ...] = (),
    turns: int = 1,
    step: int = 1,
    rewritten: tuple[int, ...] = (),
) -> RewardBatch:
    """Ragged rollouts of random tokens and rewards; the groups in `equal` all earn the same. Before the turns in
    `rewritten` history was rewritten."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(0, VOCABULARY, (length,), generator=draw).tolist()

    rollouts = []
    for g in range(groups):
        prompt, group = tokens(3, 9), []
        for i in range(generations):
            played = []
            for t in range(turns):
                output = tokens(1, 15)
                logprobs = (-5 * torch.rand(len(output), generator=draw)).tolist()
                read = prompt if t == 0 else tokens(1, 5)
                played.append(Turn(read, output, logprobs, [0] * len(output), "", new_segment=t in rewritten))
            played[-1].reward = 1.1 if g in equal else float(torch.rand(1, generator=draw))
            group.append(Trajectory(f"{step}/{g}/{i}", Sample(f"s{g}", "env", g), i, seed=i, turns=played))
        rollouts.append(group)
    trajectories = [trajectory for group in rollouts for trajectory in group]
    return RewardBatch(
        rollouts=RolloutBatch(step, rollouts),
        trajectories=trajectories,
        group_index=[g for g in range(groups) for _ in range(generations)],
        rewards=[[turn.reward for turn in trajectory.turns] for trajectory in trajectories],
    )


def make_chats(system: int = 9, count: int = 12, turns: int = 3) -> list[Row]:
    """Chats of random tokens that begin with the same `system` tokens; what is taught comes in several turns."""
    draw = np.random.default_rng(0)
    beginning = draw.integers(0, VOCABULARY, system)
    rows = []
    for number in range(count):
        ids, taught = [beginning], [np.zeros(system, bool)]
        for _ in range(turns):
            asked, said = draw.integers(1, 6, 2)
            ids.append(draw.integers(0, VOCABULARY, asked + said))
            taught.append(np.arange(asked + said) >= asked)
        zeros = np.zeros(sum(map(len, ids)))
        rows.append(Row(f"chats.jsonl:{number + 1}", np.concatenate(ids), np.concatenate(taught), zeros, zeros))
    return rows
