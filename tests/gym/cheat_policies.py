"""Policies that do not do what a task asks for. A benchmark is worth what the best of them earns.

    PYTHONPATH=. python tests/gym/cheat_policies.py    # success in 200 tasks of val: family, difficulty, language

A policy is a generator of actions; it is sent what reset and step return, (observation, info).

The line: a cheat of alfworld_lite has one recipe for every task. It knows the words of the goal, the admissible
commands and which of them it gave; it does not read what is seen, and opens no door. One that also lights, heats, cools
and cleans where it can does what the types of tasks ask for: `walk_and_do_it_all` is no cheat, but a player without
doors. A cheat of questions answers with a constant (the best one, found with hindsight; of puzzles the best for each
kind) or with what stands in the question; one that computes with its numbers, solves. `found` asks the search for the
whole question and copies from one place of the first article.
"""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import gymnasium as gym

import skyrl_gym  # noqa: F401  (registers the environments)

Moves = Generator[str, tuple[str, dict[str, Any]], None]
Policy = Callable[[str, dict[str, Any]], Moves]


def first_admissible(_: str, info: dict[str, Any]) -> Moves:
    while True:
        _, info = yield info["admissible_actions"][0]


def random_admissible(first: str, info: dict[str, Any]) -> Moves:
    rng = random.Random(first)
    while True:
        _, info = yield rng.choice(info["admissible_actions"])


def goal_words(first: str) -> set[str]:
    return set(re.findall(r"[a-z]+", first.rpartition("\n")[2].lower()))


def most_words_of_the_goal(first: str, info: dict[str, Any]) -> Moves:
    """Of the commands that it gave least often, the first that shares most words with the goal."""
    wanted, given = goal_words(first), Counter[str]()
    while True:
        action = min(info["admissible_actions"], key=lambda each: (given[each], -len(wanted & set(each.split()))))
        given[action] += 1
        _, info = yield action


def walk_take_and_put(first: str, info: dict[str, Any], also: tuple[str, ...] = ()) -> Moves:
    """From place to place in their order; takes what the goal names, goes where the goal says and puts it down."""
    wanted, given = goal_words(first), set[str]()
    places = [action for action in info["admissible_actions"] if action.startswith("go to ")]
    tour = itertools.cycle(places)
    while True:
        fresh = [(action, *action.split()) for action in info["admissible_actions"] if action not in given]
        steps = [action for action, *words in fresh if action.startswith(also) and words[1] in wanted] if also else []
        steps += [a for a, *words in fresh if words[0] == "take" and words[1] in wanted and words[4] not in wanted]
        steps += [action for action, *words in fresh if words[0] == "move" and words[4] in wanted]
        holding = not any(action.startswith("take ") for action in info["admissible_actions"])
        steps += [action for action, *words in fresh if holding and words[0] == "go" and words[2] in wanted]
        action = (steps or [next(tour)])[0]
        given = given | {action} if action.startswith("go ") else {action}
        _, info = yield action


walk_and_do_it_all = partial(walk_take_and_put, also=("use ", "heat ", "cool ", "clean "))


def constant(answer: str, *_: Any) -> Moves:
    while True:
        yield f"\\boxed{{{answer}}} <answer>{answer}</answer>"


def copied(pick: Callable[[list[str]], str], first: str, _: dict[str, Any]) -> Moves:
    """A number of the question; of a puzzle, the people in the order of their names."""
    numbers = re.findall(r"\d+(?:\.\d+)?", first.split("\\boxed")[0])
    names = re.match(r"(?:Each of )?(.+?)(?: ran a | is either | are invited|参加|每人|受邀)", first)
    return constant(pick(numbers) if numbers else re.sub(" and |、|和", ", ", names[1] if names else "none"))


def found(place: int, first: str, _: dict[str, Any]) -> Moves:
    """The title of the first article that a search for the whole question finds, or a number in it."""
    call = json.dumps({"tool": "search", "args": {"query": first}}, ensure_ascii=False)
    seen, _ = yield f"<tool_call>{call}</tool_call>"
    title, _, article = seen.removeprefix("<tool_response>\n").partition("\n")[0].partition(": ")
    yield from constant(dict(enumerate([title, *re.findall(r"\d+", article)])).get(place, "none"))


HOUSEHOLD: dict[str, Policy] = {
    each.__name__: each for each in (first_admissible, random_admissible, most_words_of_the_goal, walk_take_and_put)
}
COPIED: dict[str, Policy] = {
    "first number": partial(copied, lambda numbers: numbers[0]),
    "last number": partial(copied, lambda numbers: numbers[-1]),
    "largest number": partial(copied, lambda numbers: max(numbers, key=float)),
}
FOUND: dict[str, Policy] = {f"found {place}": partial(found, place) for place in range(3)}


def success(policy: Policy, env: gym.Env[str, str], options: Mapping[str, Any], tasks: int = 200) -> float:
    """How often it succeeds, over the tasks that seeds pick."""
    solved = 0
    for seed in range(tasks):
        observation, info = env.reset(seed=seed, options=dict(options))
        moves, over = policy(observation, info), False
        action = next(moves)
        while not over:
            observation, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
            action = "" if over else moves.send((observation, info))
        solved += info["success"]
    return solved / tasks


def best_constants(env: gym.Env[str, str], options: Mapping[str, Any], tasks: int = 200) -> Policy:
    """For each kind of question, which its last words tell, the answer that is right most often."""
    truths: dict[str, Counter[str]] = {}
    for seed in range(tasks):
        first, _ = env.reset(seed=seed, options=dict(options))
        truths.setdefault(kind(first), Counter())[str(env.unwrapped.task.ground_truth)] += 1  # type: ignore[attr-defined]
    best = {name: found.most_common(1)[0][0] for name, found in truths.items()}
    return lambda first, _: constant(best[kind(first)])


def kind(question: str) -> str:
    return next((word for word in ("knave", "无赖", "race", "赛跑", "party", "聚会") if word in question), "other")


def panel(name: str, options: Mapping[str, Any], tasks: int = 200) -> dict[str, float]:
    """The success of every cheat of an environment under these reset options."""
    env = gym.make(f"skyrl/{name}-v0")
    policies = HOUSEHOLD if name == "alfworld_lite" else COPIED | {"constant": best_constants(env, options, tasks)}
    return {label: success(policy, env, options, tasks) for label, policy in policies.items()}


MATH = {"arithmetic": range(1, 9), "words": range(1, 6), "logic": range(1, 6)}
KINDS: list[tuple[str, dict[str, Any], bool]] = [
    *(("alfworld_lite", {"difficulty": level}, level == 3) for level in (1, 2, 3)),
    *(
        ("text_math", {"family": family, "difficulty": level}, level == levels[-1])
        for family, levels in MATH.items()
        for level in levels
    ),
    *(("tool_use", {"difficulty": level}, level == 6) for level in range(1, 7)),
]
"""Every environment, its options, and whether it is the highest difficulty of its family."""

BESIDE = {"alfworld_lite": {"walk_and_do_it_all": walk_and_do_it_all}, "tool_use": FOUND}


if __name__ == "__main__":
    for (name, options, _), lang in itertools.product(KINDS, ("en", "zh")):
        chosen = {**options, "lang": lang, "split": "val"}
        rates, env = panel(name, chosen), gym.make(f"skyrl/{name}-v0")
        others = {label: success(policy, env, chosen) for label, policy in BESIDE.get(name, {}).items()}
        print(name, *options.values(), lang, max(rates.values()), rates, others or "", flush=True)
