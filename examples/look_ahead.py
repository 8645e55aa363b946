"""Best of n with look-ahead: before each action, n random plays on copies of the environment; the best one's first
action is taken.

    python examples/look_ahead.py [EPISODES]

It compares this with the random policy in the shop. No model is needed: a search that may look at rewards finds
episodes worth learning from.
"""

import copy
import random
import sys

import gymnasium

import skyrl_gym  # registers the environments

DEPTH = 6


def play(env: gymnasium.Env, info: dict, steps: int, rng: random.Random) -> tuple[list[str], float]:
    """Random admissible actions, and the sum of their rewards."""
    actions, total, over = [], 0.0, False
    while not over and len(actions) < steps:
        actions.append(rng.choice(info["admissible_actions"]))
        _, reward, terminated, truncated, info = env.step(actions[-1])
        total, over = total + float(reward), terminated or truncated
    return actions, total


def look_ahead(env: gymnasium.Env, info: dict, n: int, rng: random.Random) -> float:
    """Plays an episode to its end; the sum of its rewards."""
    total, over, best = 0.0, False, (list[str](), 0.0)
    while not over:
        tries = [play(copy.deepcopy(env), info, DEPTH, rng) for _ in range(n)]
        kept = [best] if best[0] else []  # what is left of the best plan so far may stay the best
        actions, promised = max([*kept, *tries], key=lambda tried: tried[1])
        _, reward, terminated, truncated, info = env.step(actions[0])
        total, over = total + float(reward), terminated or truncated
        best = actions[1:], promised - float(reward)
    return total


def compare(episodes: int, n: int = 16) -> tuple[float, float]:
    """The mean reward of the random policy and of look-ahead, on the same tasks."""
    env, rng = gymnasium.make("skyrl/webshop_lite-v0"), random.Random(0)
    alone = ahead = 0.0
    for seed in range(episodes):
        alone += play(env, env.reset(seed=seed)[1], 20, rng)[1]
        ahead += look_ahead(env, env.reset(seed=seed)[1], n, rng)
    return alone / episodes, ahead / episodes


if __name__ == "__main__":
    random_alone, with_look_ahead = compare(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
    print(f"{skyrl_gym.spec('webshop_lite').id}: random {random_alone:.2f}, with look-ahead {with_look_ahead:.2f}")
