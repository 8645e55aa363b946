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
    An action earns what its role gets until it acts again. Turns are copies with the episode's lists of advantages."""
    parts = []
    for group, episode in kept:
        order = episode.by_time()
        infos = [turn.info for turn in episode.turns]
        if not order or not infos[order[0]].keys() >= {"role", "rewards"}:
            parts.append((group, episode))
            continue
        for number, role in enumerate(infos[order[0]]["rewards"]):
            own: dict[int, Turn] = {}  # by place: segments stay together
            for place in order:
                if infos[place]["role"] == role:
                    acted = own[place] = replace(episode.turns[place], reward=0.0, info=dict(infos[place]))
                if own:
                    acted.reward += infos[place]["rewards"][role]
            if own:
                turns = [own[place] for place in sorted(own)]
                turns[-1].info["success"] = sum(turn.reward for turn in turns) > 0
                cut = episode.stop_reason is StopReason.LENGTH and infos[order[-1]]["role"] != role
                why = StopReason.TERMINATED if cut else episode.stop_reason  # the other's answer was too long
                parts.append((group + number * NEXT_ROLE, replace(episode, turns=turns, stop_reason=why)))
    return parts
