"""RLlib's PPO trains a small policy of its own on two text environments: no language model, one process, no GPU.

    python examples/rllib_ppo.py [webshop_lite] [alfworld_lite] [--steps 60000] [--seed 0]

The policy reads the vectors of `discrete_actions.py` and chooses among the admissible actions. One network
scores every action of a state, so that what is learned about an action holds in whichever place it is listed. It sees
which words occur and not what they mean: in the built-in shop, whose goals say everything in other words, it learns
nothing, and so its shop has a catalog of its own.

It trains on the train split, then plays 1,000 episodes of val, always with the highest score, and so does a policy that
chooses evenly among the same actions. The last line is one JSON object, {env: {"random": success, "ppo": success,
"steps": n, "seconds": s}}, where seconds are those of training.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing leaves this machine

import gymnasium as gym
import numpy as np
import ray
import torch
from discrete_actions import Column, DiscreteActions
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.tune.registry import register_env
from torch import nn

EPISODES, WIDTH, HIDDEN = 1000, 64, 64
ENVS = {"webshop_lite": {}, "alfworld_lite": {"task_type": "pick_and_place_simple"}}
SIZE = {"webshop_lite": 24, "alfworld_lite": 40}  # of the action space: at least the most actions of a state
STEPS = {"webshop_lite": 60_000, "alfworld_lite": 300_000}
# Chance solves 1 task in 150: high entropy keeps the policy wide until it has something to learn from.
ENTROPY = [[0, 0.05], [250_000, 0.01]]
TRAINING = {
    "webshop_lite": dict(gamma=0.95, lr=2e-3, train_batch_size_per_learner=2048, entropy_coeff=0.01),
    "alfworld_lite": dict(gamma=0.97, lr=5e-4, train_batch_size_per_learner=4096, entropy_coeff=ENTROPY),
}

KINDS = ["mug", "lamp", "scarf", "kettle", "pillow", "basket", "tray", "candle", "vase", "blanket"]
ATTRIBUTES = ["wooden", "woollen", "scented", "handmade", "washable", "heavy", "slim", "striped", "quilted", "padded"]
COLORS = ["red", "blue", "green", "black", "white", "grey", "pink", "brown", "orange", "purple"]


def write_catalog(path: Path, products: int = 600) -> None:
    """Products in WebShop's schema; their goals are by its synthetic rule, in the words of the page."""
    rng, rows = random.Random(0), []
    for number in range(products):
        kind, attribute = rng.choice(KINDS), rng.choice(ATTRIBUTES)
        row = {"asin": f"B{number:09d}", "name": f"{attribute} {kind}", "query": kind, "Attributes": [attribute]}
        row |= {"category": "home", "product_category": f"Home › {kind}", "pricing": f"${rng.randint(10, 90)}.00"}
        rows.append(row | {"customization_options": {"color": [{"value": each} for each in rng.sample(COLORS, 6)]}})
    path.write_text(json.dumps(rows))


def make_env(name: str, split: str) -> DiscreteActions:
    return DiscreteActions(gym.make(f"skyrl/{name}-v0", split=split, **ENVS[name]), SIZE[name], WIDTH)


class ActionScorer(TorchRLModule, ValueFunctionAPI):
    """Scores of N actions from the features: (B, (3 + N) * W) to (B, N); H is the hidden size."""

    def setup(self):
        self.of_state, self.of_action = nn.Linear(3 * WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.both = nn.Sequential(nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
        self.score = nn.Linear(HIDDEN, 1)
        self.value = nn.Sequential(nn.ReLU(), nn.Linear(2 * HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def encode(self, batch):
        """The state (B, H), each action in it (B, N, H), and 1 where there is an action (B, N, 1)."""
        rows_BRW = batch[Columns.OBS].unflatten(-1, (-1, WIDTH))
        state_BH, actions_BNW = self.of_state(rows_BRW[..., :3, :].flatten(-2)), rows_BRW[..., 3:, :]
        both_BNH = self.both(state_BH.unsqueeze(-2) + self.of_action(actions_BNW))
        return state_BH, both_BNH, actions_BNW[..., Column.THERE : Column.THERE + 1]

    def _forward(self, batch, **kwargs):
        _, both_BNH, there_BN1 = self.encode(batch)
        return {Columns.ACTION_DIST_INPUTS: self.score(both_BNH).masked_fill(there_BN1 == 0, -1e9).squeeze(-1)}

    def compute_values(self, batch, embeddings=None):
        state_BH, both_BNH, there_BN1 = self.encode(batch)
        mean_BH = (both_BNH * there_BN1).sum(-2) / there_BN1.sum(-2).clamp(min=1)
        return self.value(torch.cat([state_BH, mean_BH], -1)).squeeze(-1)


def success(name, choose):
    """The share of the val split's episodes that `choose(features, mask)`, an index, solves."""
    env, solved = make_env(name, "val"), 0
    for episode in range(EPISODES):
        features, info = env.reset(seed=episode)
        terminated = truncated = False
        while not (terminated or truncated):
            features, _, terminated, truncated, info = env.step(choose(features, env.action_masks()))
        solved += info["success"]
    return solved / EPISODES


def train(name, steps, seed):
    register_env(name, lambda _: make_env(name, "train"))
    config = PPOConfig().environment(name).env_runners(num_env_runners=0, num_envs_per_env_runner=16)
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=ActionScorer)).debugging(seed=seed, log_level="ERROR")
    config.training(lambda_=0.95, grad_clip=0.5, minibatch_size=256, num_epochs=4, **TRAINING[name])
    algorithm, done, begin = config.build_algo(), 0, time.monotonic()
    while done < steps:
        result = algorithm.train()["env_runners"]
        done = int(result["num_env_steps_sampled_lifetime"])
        print(f"{name}: {done:,} steps, mean return {result['episode_return_mean']:.3f}", flush=True)
    seconds, policy, rng = round(time.monotonic() - begin), algorithm.get_module(), np.random.default_rng(seed)

    @torch.no_grad()
    def best(features, mask):
        scores_BN = policy.forward_inference({Columns.OBS: torch.from_numpy(features[None])})
        return int(scores_BN[Columns.ACTION_DIST_INPUTS].argmax())

    rates = {"random": success(name, lambda _, mask: rng.choice(mask.nonzero()[0])), "ppo": success(name, best)}
    algorithm.stop()
    shutil.rmtree(algorithm.logdir)  # RLlib makes it in ~/ray_results; here it is empty
    return rates | {"steps": done, "seconds": seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", metavar="env", help=f"of {', '.join(ENVS)}; all if left out")
    parser.add_argument("--steps", type=int, help=f"of each environment; {STEPS} if left out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.envs) - set(ENVS):
        parser.error(f"there is no {unknown.pop()!r} here; choose from {', '.join(ENVS)}")
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        ENVS["webshop_lite"]["catalog"] = path = Path(folder) / "catalog.json"
        write_catalog(path)
        print(json.dumps({name: train(name, args.steps or STEPS[name], args.seed) for name in args.envs or ENVS}))
