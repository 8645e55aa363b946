"""What policies are worth at games of two: Kuhn's exploitability from exact probabilities, Nim's won positions.

    python benchmarks/players.py kuhn_poker runs/kuhn_poker        the start, the checkpoints that are kept, the last
    python benchmarks/players.py nim runs/nim [--difficulty 1]     greedy play of every won position, by split

Kuhn: the model gives the probability of each legal move, with any card or none before it and the end of turn behind it,
in each of the 12 information sets, at temperature 1. `legal` is their sum where it is the least; the policy is what
remains without other texts. All deterministic responses to it are tried. Nim: an episode for each task against the
perfect player, greedy. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import skyrl_gym  # noqa: F401 - registers the environments
from skyrl_gym.core import SPLITS
from skyrl_gym.players.game import ROLES
from skyrl_gym.players.kuhn_poker import MOVES, SETS, KuhnPoker, exploitability, value
from skyrl_gym.players.nim import NimEnv
from skyrl_trainer.agent.tokenizer import load_chat_prompt


def context(prompt: Any, name: str, lang: str) -> list[int]:
    """The ids that a role has read in an information set, its own moves included."""
    card, *moves = name.split()
    game, role = KuhnPoker(lang), ROLES[len(moves) % 2]
    other = next(each for each in "JQK" if each != card)
    deal = [card, other] if role == ROLES[0] else [other, card]
    game.reset(options={"deal": deal, "moves": moves[: ROLES.index(role)]})
    ids: list[int] = prompt.first(game.rules[lang], game.observe(role))
    for number in range(ROLES.index(role), len(moves), 2):
        said = [*prompt.encode(f"{card} {game.spelled(moves[number])}"), prompt.end_of_turn_id]
        game.reset(options={"deal": deal, "moves": moves[: number + 2]})
        ids = ids + said + prompt.observation(game.observe(role), said)
    return ids


@torch.no_grad()
def probability(model: Any, ids: list[int], answer: list[int]) -> float:
    logprobs_TV = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    return float(logprobs_TV.gather(1, torch.tensor(answer)[:, None]).sum().exp())


def kuhn(model: Any, prompt: Any, lang: str = "en") -> dict[str, Any]:
    game, policy, legal = KuhnPoker(lang), {}, []
    for name in SETS:
        ids = context(prompt, name, lang)
        chances = {
            move: sum(
                probability(model, ids, [*prompt.encode(f"{card}{game.spelled(move)}"), prompt.end_of_turn_id])
                for card in ("J ", "Q ", "K ", "")
            )
            for move in MOVES[name[2:]].split()
        }
        legal.append(sum(chances.values()))
        policy[name] = {move: chance / legal[-1] for move, chance in chances.items()}
    rounded = {name: {move: round(p, 3) for move, p in chances.items()} for name, chances in policy.items()}
    found = {"exploitability": exploitability(policy), "value": value(policy, policy), "legal": min(legal)}
    return found | {"policy": rounded}


def models(run: Path) -> dict[str, Any]:
    """The policy at the start, at each checkpoint and at the end."""
    found = {}
    for name, folder in {"start": run / "init/cloned", "last": run / "model/last"}.items():
        found[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for folder in sorted((run / "checkpoints").glob("step_*[0-9]")):
        model = AutoModelForCausalLM.from_pretrained(run / "init/cloned", dtype=torch.float32).eval()
        tensors = load_file(folder / "learner.safetensors")
        own = {key.removeprefix("model."): each for key, each in tensors.items() if key.startswith("model.")}
        names = {key for key, _ in model.named_parameters()}
        state = {key: own.get(key, own.get(key.removeprefix("model."))) for key in names}
        model.load_state_dict(state, strict=False)
        found[folder.name] = model
    return found


@torch.no_grad()
def nim(model: Any, prompt: Any, split: str, difficulty: int, most: int) -> tuple[int, int]:
    """Won and played of the first `most` tasks of a split, in English."""
    env, won = NimEnv(split=split, difficulty=difficulty, opponent="perfect"), 0
    count = min(most, env.num_tasks())
    for index in range(count):
        task_id = env.task_id(env.defaults, index)
        observation, info = env.reset(seed=index, options={"task_id": task_id})
        ids, over = prompt.first(info["instructions"], observation), False
        while not over:
            given = torch.tensor([ids])
            out = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=list(prompt.stop_token_ids),
            )
            said = out[0, len(ids) :].tolist()
            observation, _, over, _, info = env.step(prompt.decode(said))
            ids = ids + said + prompt.observation(observation, said)
        won += info["success"]
    return won, count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("game", choices=("kuhn_poker", "nim"))
    parser.add_argument("run", type=Path)
    parser.add_argument("--difficulty", type=int, default=1)
    parser.add_argument("--most", type=int, default=400, help="tasks of a split")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompt = load_chat_prompt(str(args.run / "init/cloned"))
    found: dict[str, Any] = {}
    for name, model in models(args.run).items():
        if args.game == "kuhn_poker":
            found[name] = kuhn(model, prompt)
            print(name, json.dumps(found[name]))
            del found[name]["policy"]
        elif name in ("start", "last"):
            found[name] = {split: nim(model, prompt, split, args.difficulty, args.most) for split in SPLITS}
            print(name, found[name])
    print(json.dumps({"game": args.game, **found}))


if __name__ == "__main__":
    main()
