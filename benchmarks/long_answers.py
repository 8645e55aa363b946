"""Does credit reach the beginning of a long answer? GRPO and PPO where the first 9 of 100 tokens earn the reward.

    python benchmarks/long_answers.py --seeds 5

A random Qwen3 of two layers answers with 100 tokens; the answer earns 1 if most of its first 9 tokens are odd, all
others are noise, and a policy that learns nothing stays at one half. Every arm has the same learning rate and its
algorithm's defaults otherwise, but for what its name says. Sampling is transformers', and so no engine is needed.
The last line is one JSON object: the mean reward of the first and of the last five steps of each arm, by seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers import PreTrainedTokenizerFast as Fast

from skyrl_trainer.learner.compose import algorithm_class
from skyrl_trainer.learner.model import make_learner
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RewardBatch, RolloutBatch, Sample, Trajectory, Turn

VOCABULARY, PROMPT, FIRST, EDGE = 100, 4, 9, 5
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "ppo": ("ppo", {}),
    "ppo, gae_lambda 0.95": ("ppo", {"gae_lambda": 0.95}),
}


def save_model(folder: str, seed: int) -> None:
    """A random model, whose first answers are about uniform, and a tokenizer that nobody uses."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads)).save_pretrained(folder)
    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    Fast(tokenizer_object=Tokenizer(words), unk_token="w0").save_pretrained(folder)


@torch.no_grad()
def sampled(model: Any, prompts_BT: torch.Tensor, length: int, draw: torch.Generator) -> tuple[Any, Any]:
    """Answers and the log-probabilities of their tokens, [B, length] each."""
    cache, new_BT, tokens, logprobs = DynamicCache(), prompts_BT, [], []
    for _ in range(length):
        logps_BV = model(new_BT, past_key_values=cache).logits[:, -1].log_softmax(-1)
        new_BT = torch.multinomial(logps_BV.exp(), 1, generator=draw)
        tokens.append(new_BT)
        logprobs.append(logps_BV.gather(1, new_BT))
    return torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist()


def rollout(model: Any, step: int, groups: int, tries: int, length: int, draw: torch.Generator) -> RewardBatch:
    prompts_GT = torch.randint(0, VOCABULARY, (groups, PROMPT), generator=draw)
    answers, logprobs = sampled(model, prompts_GT.repeat_interleave(tries, 0), length, draw)
    trajectories = []
    for i, (answer, values) in enumerate(zip(answers, logprobs, strict=True)):
        g = i // tries
        reward = float(sum(token % 2 for token in answer[:FIRST]) > FIRST // 2)
        turn = Turn(prompts_GT[g].tolist(), answer, values, [step] * length, "", reward=reward, terminated=True)
        trajectories.append(Trajectory(f"{step}/{g}/{i % tries}", Sample(str(g), "even", g), i % tries, i, [turn]))
    batch = RolloutBatch(step, [trajectories[g * tries : (g + 1) * tries] for g in range(groups)])
    index = [i // tries for i in range(len(trajectories))]
    return RewardBatch(batch, trajectories, index, [[t.turns[0].reward] for t in trajectories])


def learn(arm: str, seed: int, args: argparse.Namespace) -> list[float]:
    """The mean reward of each step."""
    name, options = ARMS[arm]
    settings = {"learning_rate": args.learning_rate, "algorithm": {"name": name, "options": options}}
    config = Config.model_validate({"trainer": {"seed": seed, **settings}})
    draw, rewards = torch.Generator().manual_seed(seed), []
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, seed)
        learner = make_learner(config, folder, args.steps)
        algorithm = algorithm_class(name)(config).start(learner)
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for step in range(1, args.steps + 1):
            model.load_state_dict(dict(learner.named_tensors()), strict=False)
            batch = rollout(model, step, args.groups, args.tries, args.length, draw)
            rewards.append(sum(turns[0] for turns in batch.rewards) / len(batch.rewards))
            algorithm.update(batch)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--tries", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in args.arms}
    for seed in range(args.seeds):
        for arm in args.arms:
            rewards = learn(arm, seed, args)
            found[arm].append((sum(rewards[:EDGE]) / EDGE, sum(rewards[-EDGE:]) / EDGE))
            print(f"{arm}, seed {seed}: {found[arm][-1][0]:.3f} to {found[arm][-1][1]:.3f}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
