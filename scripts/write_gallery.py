"""docs/environments/gallery.md: real episodes of every environment of the registry, of the expert after one bad action.

    python scripts/write_gallery.py [--out docs/environments/gallery.md]

The same tasks every time (seed 7, held-out split), so that changes of an environment show in the page.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gymnasium as gym

import skyrl_gym

LONGEST = 900  # characters of a message that are shown
TURNS = 8  # at the beginning, and so many at the end
BAD_ACTION = "Let me think."
QUESTIONS = {"en": "A crate holds 12 eggs. How many do 4 crates hold?", "zh": "一箱有12个鸡蛋，4箱有多少个？"}
PROGRAMS = {"en": "Write a function f that doubles a number.", "zh": "编写函数f，把一个数加倍。"}
PROGRAM = {"code": "def f(x):\n    return 2 * x", "test_list": ["assert f(2) == 4", "assert f(0) == 0"]}
PROMPT = "skyrl/prompt-v0"
SENTENCES = {"en": "Write a sentence with two numbers.", "zh": "写一句含有两个数字的话。"}
ANSWERS = {"en": "Of 12 eggs 3 are brown.", "zh": "12个鸡蛋里有3个是棕色的。"}
SHOWN: dict[str, list[dict[str, Any]]] = {
    "skyrl/text_math-v0": [{}, {"family": "words", "difficulty": 3}, {"family": "logic", "difficulty": 2}],
    "skyrl/tool_use-v0": [{"difficulty": 4}, {"difficulty": 5}],
    "skyrl/code_lite-v0": [{"difficulty": 2}, {"difficulty": 5}],
    "skyrl/sql_lite-v0": [{"difficulty": 4}, {"difficulty": 2}],
}
"""Options of the tasks that are shown; of other environments, the defaults."""


HEAD = """# Gallery

Real episodes, written by `scripts/write_gallery.py`. The expert plays, in English and Chinese; in one episode of each
environment it first says something that is no action. For `skyrl/prompt-v0`, which has no expert, an answer is made up.
"""


def block(speaker: str, text: str) -> str:
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}\n[... {len(text) - LONGEST} more characters]"
    fence = "````" if "```" in shown else "```"
    return f"**{speaker}**\n\n{fence}text\n{shown}\n{fence}\n"


def transcript(env_id: str, lang: str, options: dict[str, Any], bad_action: bool) -> str:
    """An episode as markdown; of a long one the beginning and the end."""
    env: Any = gym.make(env_id, **({} if env_id == PROMPT else {"lang": lang}))
    try:
        observation, info = env.reset(seed=7, options={"split": "val", **options})
    except ValueError:  # played from dataset rows
        row = {"prompt": [{"role": "user", "content": QUESTIONS[lang]}], "reward_spec": {"ground_truth": "48"}}
        rows = {"skyrl/code_rows-v0": PROGRAM | {"prompt": PROGRAMS[lang]}, PROMPT: {"prompt": SENTENCES[lang]}}
        observation, info = env.reset(options={"task": rows.get(env_id, row)})
    head = [f"### Task `{info['task_id']}`\n"]
    if info["instructions"]:
        head.append(block("System", info["instructions"]))
    head.append(block("User", observation))
    turns: list[str] = []
    ended = False
    while not ended:
        expert = (lambda: ANSWERS[lang]) if env_id == PROMPT else env.unwrapped.expert_action
        action = BAD_ACTION if bad_action and not turns else expert()
        observation, reward, terminated, truncated, info = env.step(action)
        ended = terminated or truncated
        parts = ", ".join(f"{name} {value:g}" for name, value in info["reward_parts"].items())
        note = f"reward {reward:g} ({parts})" + (", solved" if info["success"] else ", over" if ended else "")
        answer = f"\n{block('User', observation)}" if observation else ""
        turns.append(f"{block('Agent', action)}{answer}\n{note}\n")
    env.close()
    if len(turns) > 2 * TURNS:
        turns[TURNS:-TURNS] = [f"[... {len(turns) - 2 * TURNS} turns]\n"]
    return "\n".join([*head, *turns])


def page() -> str:
    pages = [HEAD]
    for entry in [each for each in skyrl_gym.list_envs() if each.entry_point.startswith("skyrl_gym.")]:
        pages.append(f"## {entry.id}\n\n{entry.description}\n")
        shown = SHOWN.get(entry.id, [{}])
        pages += [transcript(entry.id, lang, options, False) for options in shown for lang in ("en", "zh")]
        pages.append(transcript(entry.id, "en", shown[0], True))
    return "\n".join(pages)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the gallery of real episodes.")
    parser.add_argument("--out", type=Path, default=Path("docs/environments/gallery.md"))
    out = parser.parse_args().out
    out.write_text(page(), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
