"""Self-play: the turns of each role of an episode as a trajectory of its own, with its own reward, group and advantage.

An env says in the info of each step who has acted, `role`, and what each role got by it, `rewards`, as PettingZoo has
it: {"role": "player_1", "rewards": {"player_0": 1.0, "player_1": -1.0}}.
"""

from dataclasses import replace

from skyrl_trainer.types import StopReason, Trajectory, Turn

NEXT_ROLE = 1 << 20
"""From the number of a role's groups to that of the next role's; no batch has as many groups."""


def by_role(kept: list[tuple[int, Trajectory]]) -> list[tuple[int, Trajectory]]:
    """Trajectories with their groups' numbers: for an episode of self-play one for each role that has acted.

    An action earns what its role gets until it acts again. Turns are copies that share their list of advantages with
    the episode's.
    """
    parts = []
    for group, episode in kept:
        order = sorted(episode.turns, key=lambda turn: turn.info.get("call", len(episode.turns)))
        if not order or not order[0].info.keys() >= {"role", "rewards"}:
            parts.append((group, episode))
            continue
        for number, role in enumerate(order[0].info["rewards"]):
            turns: list[Turn] = []
            for turn in order:
                if turn.info["role"] == role:
                    turns.append(replace(turn, reward=0.0, info=dict(turn.info)))
                if turns:
                    turns[-1].reward += turn.info["rewards"][role]
            if turns:
                turns[-1].info["success"] = sum(turn.reward for turn in turns) > 0
                cut = episode.stop_reason is StopReason.LENGTH and order[-1].info["role"] != role
                why = StopReason.TERMINATED if cut else episode.stop_reason  # the other's answer was too long
                parts.append((group + number * NEXT_ROLE, replace(episode, turns=turns, stop_reason=why)))
    return parts
