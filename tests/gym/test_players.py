"""Games of two roles: PettingZoo's own test, rules against solvers, solvers against a second way, and self-play."""

import copy
import itertools
import json
import random
import threading
import warnings
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import AECEnv
from pettingzoo.test import api_test, seed_test

from skyrl_gym import expert_trajectory
from skyrl_gym.core import SPLITS
from skyrl_gym.players.game import ROLES
from skyrl_gym.players.kuhn_poker import (
    DEALS,
    MOVES,
    SETS,
    VALUE,
    KuhnPoker,
    best_response,
    equilibrium,
    exploitability,
    value,
)
from skyrl_gym.players.nim import LEVELS, Nim, nim_sum, positions

GAMES = {"nim": Nim, "kuhn_poker": KuhnPoker}
every_game = pytest.mark.parametrize("name", GAMES)


def drawn_policy(seed: int) -> dict[str, dict[str, float]]:
    rng = random.Random(seed)
    chances = [rng.choice([0.0, 1.0, rng.random()]) for _ in SETS]
    return {
        name: dict(zip(MOVES[name[2:]].split(), (p, 1 - p), strict=True)) for name, p in zip(SETS, chances, strict=True)
    }


def test_resets_without_a_seed_go_on_from_the_last_one() -> None:
    """As Gymnasium's do: the same deals in every process."""
    deals = []
    for _ in range(2):
        game = Nim()
        game.reset(seed=0)
        deals.append([game.deal])
        for _ in range(5):
            game.reset()
            deals[-1].append(game.deal)
    assert deals[0] == deals[1] and len({*map(str, deals[0])}) > 1


@pytest.mark.parametrize("opponent", ["perfect", "perfect,perfect", "random,perfect"])
def test_an_expert_plays_the_built_in_opponents_that_are_asked_for(opponent: str) -> None:
    """A clone of one role; who is served elsewhere, or the policy itself, is replaced by random moves."""
    asked = [expert_trajectory("nim", seed, {"opponent": opponent}) for seed in range(20)]
    drawn = [expert_trajectory("nim", seed, {"opponent": "random"}) for seed in range(20)]
    assert asked != drawn
    for other in ("self", "http://127.0.0.1:9", "perfect,http://127.0.0.1:9"):
        assert [expert_trajectory("nim", seed, {"opponent": other}) for seed in range(20)] == drawn


def test_a_random_expert_and_a_random_opponent_draw_apart() -> None:
    """Else nobody would bet behind a check, and a clone would never read how the first player meets a bet."""
    talks = [expert_trajectory("kuhn_poker", seed, {"expert": "random", "opponent": "random"}) for seed in range(400)]
    first = ["first" in messages[1]["content"] for messages in talks]
    second_turns = sum(len(messages) == 5 for messages in talks)
    assert 0.15 < second_turns / sum(first) < 0.35  # a check, 1 in 2, and then a bet, 1 in 2


@every_game
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_pettingzoos_own_test_passes(name, lang):
    """It wants arrays: a text is shown as its bytes, and a number says which of the legal moves is taken, if any."""

    class Numbers(GAMES[name], AECEnv):
        def __init__(self):
            super().__init__(lang)
            self.observed, self.acted = Box(0, 255, (400,), np.uint8), Discrete(20)

        def observation_space(self, agent):
            return self.observed

        def action_space(self, agent):
            return self.acted

        def observe(self, agent):
            said = super().observe(agent).encode()
            return np.frombuffer(said.ljust(400, b" "), np.uint8)

        def step(self, action):
            legal = [self.spelled(move) for move in self.legal()]
            super().step(None if action is None else [*legal, *["nonsense"] * 20][action % 13])

    with warnings.catch_warnings():
        warnings.filterwarnings("error")
        warnings.filterwarnings("ignore", ".*has not defined a render.*")
        api_test(Numbers(), num_cycles=300)
        seed_test(Numbers, num_cycles=100)


def test_who_moves_wins_where_the_nim_sum_is_not_zero_and_perfect_play_does():
    @cache
    def wins(heaps):
        after = {tuple(sorted((*heaps[:i], left, *heaps[i + 1 :]))) for i, h in enumerate(heaps) for left in range(h)}
        return not all(wins(each) for each in after) if after else False

    for heaps in itertools.product(range(6), repeat=3):
        assert wins(tuple(sorted(heaps))) == (nim_sum(heaps) != 0)
        if any(heaps):
            game = Nim()
            game.reset(options={"deal": heaps})
            game.step(game.perfect(np.random.default_rng(0)))
            assert wins(tuple(sorted(game.heaps))) == (nim_sum(heaps) == 0), heaps


def test_splits_of_nim_share_no_position_and_all_are_there():
    for difficulty, (count, most) in LEVELS.items():
        found = {s: {tuple(sorted(heaps)) for heaps in positions(s, difficulty)} for s in SPLITS}
        assert not any(a & b for a, b in itertools.combinations(found.values(), 2)) and all(found.values())
        assert sum(len(positions(split, difficulty)) for split in found) == most**count
    everywhere = {split: {tuple(sorted(h)) for d in (1, 2, 3) for h in positions(split, d)} for split in found}
    assert not any(a & b for a, b in itertools.combinations(everywhere.values(), 2))


def test_kuhns_equilibria_have_his_value_and_cannot_be_exploited():
    for alpha in (0.0, 0.1, 1 / 6, 1 / 3):
        assert value(equilibrium(alpha), equilibrium(1 / 6)) == pytest.approx(VALUE, abs=1e-12)
        assert exploitability(equilibrium(alpha)) == pytest.approx(0, abs=1e-12)
    assert exploitability(equilibrium(0.34)) > 1e-3  # beyond 1/3 there is none
    assert exploitability({name: dict.fromkeys(MOVES[name[2:]].split(), 0.5) for name in SETS}) == pytest.approx(
        11 / 24
    )


def played(first, second):
    """What player_0 wins in the mean: every line of the game itself, with its probability."""

    def expected(deal, moves):
        game = KuhnPoker()
        game.reset(options={"deal": deal, "moves": moves})
        if game.over:
            return game.payoffs()[ROLES[0]]
        chances = (first, second)[len(moves) % 2][game.information_set(len(moves))]
        assert set(chances) == set(game.legal())
        return sum(chance * expected(deal, [*moves, move]) for move, chance in chances.items())

    return sum(expected(deal, []) for deal in DEALS) / len(DEALS)


def induced(policy, role):
    """A best response by backward induction over information sets, the deepest first: another way to the same."""
    response = {name: dict(chances) for name, chances in policy.items()}
    own = [name for name in SETS if len(name.split()) % 2 == 1 - ROLES.index(role)]
    sign = 1 if role == ROLES[0] else -1
    for name in sorted(own, key=lambda name: -len(name.split())):
        worth = {}
        for move in MOVES[name[2:]].split():
            # All of the role's earlier moves lead here, so that what the move is worth here decides.
            tried = response | {name: {other: float(other == move) for other in response[name]}}
            toward = name.split()[1:]
            for number in range(ROLES.index(role), len(toward), 2):
                above = " ".join([name[0], *toward[:number]])
                tried |= {above: {other: float(other == toward[number]) for other in response[above]}}
            worth[move] = sign * (played(tried, policy) if sign == 1 else played(policy, tried))
        best = max(worth, key=worth.get)
        response[name] = {move: float(move == best) for move in response[name]}
    return sign * (played(response, policy) if sign == 1 else played(policy, response))


@pytest.mark.parametrize("seed", range(5))
def test_values_and_best_responses_are_those_of_the_game(seed):
    one, other = drawn_policy(seed), drawn_policy(seed + 100)
    assert value(one, other) == pytest.approx(played(one, other))
    for role in ROLES:
        worth, response = best_response(one, role)
        both = (one | response, one) if role == ROLES[0] else (one, one | response)
        assert abs(value(*both)) == pytest.approx(abs(worth)) and worth == pytest.approx(induced(one, role))
    assert exploitability(one) >= -1e-12


@every_game
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_self_play_gives_each_role_its_own_context_and_reward(name, lang):
    env, sums = gym.make(f"skyrl/{name}-v0", opponent="self", expert="random", lang=lang).unwrapped, []
    for seed in range(60):
        _, info = env.reset(seed=seed)
        read, over = {}, False
        while not over:
            asked = info["request"]
            read[asked["role"]] = asked["messages"]
            mover, action = asked["role"], env.expert_action()
            json.dumps(env.get_state())
            _, reward, over, _, info = env.step(action)
            assert info["role"] == mover and reward == info["rewards"][ROLES[0]] == -info["rewards"][ROLES[1]]
        assert info["rewards"] == env.game.payoffs() and "request" not in info
        sums.append(reward)
        for role, messages in read.items():
            assert [m["role"] for m in messages] == [
                "system",
                *["user", "assistant"] * (len(messages) // 2 - 1),
                "user",
            ]
            alone = gym.make(f"skyrl/{name}-v0", lang=lang).unwrapped  # what one role reads, it reads here
            alone.reset(options={"task_id": env.task.task_id})
            assert messages[0]["content"] == alone.task.instructions
            if name == "kuhn_poker":
                card = env.game.deal[1 - ROLES.index(role)]
                assert all(f" {card}" not in message["content"] for message in messages[1:])
    assert len(set(sums)) > 1


@every_game
def test_a_text_that_is_no_move_loses_the_stake(name):
    env = gym.make(f"skyrl/{name}-v0").unwrapped
    for action in (
        "",
        "B 9",
        "Check or bet",
        "call",
        "B 0",
        "A -1",
        "B 1 1",
        "過牌",
        "x" * 10**6,
        "recheck",
        "AB 1",
        "不 B",
    ):
        env.reset(seed=3)
        if env.game.parse(action) != "illegal":
            continue
        observation, reward, over, _, info = env.step(action)
        assert (observation, reward, over) == (env.game.table(env.role), -env.game.stake, True)
        assert not info["valid_action"]
    game = GAMES[name]()
    game.reset(seed=1)
    game.step("nonsense")
    assert game.last()[:3] == (f"{game.opening(ROLES[1])} The other gives up. {game.table(ROLES[1])}", game.stake, True)
    with pytest.raises(ValueError, match="only action left is None"):
        game.step("check")


def test_the_perfect_opponent_never_loses_from_where_it_can_win_and_a_random_one_does():
    won = {opponent: [] for opponent in ("random", "perfect")}
    for opponent, results in won.items():
        env = gym.make("skyrl/nim-v0", opponent=opponent, expert="random", difficulty=2).unwrapped
        for seed in range(200):
            env.reset(seed=seed)
            over = False
            while not over:
                action = env.expert_action()
                left, mine = Nim(), env.role == env.game.agent_selection
                left.reset(options={"deal": env.game.deal, "moves": [*env.game.moves, env.game.parse(action)]})
                step = env.step(action)
                over = step[2]
                assert mine and (opponent == "random" or not nim_sum(left.heaps) or not nim_sum(env.game.heaps))
            results.append(step[-1]["success"])
    assert np.mean(won["perfect"]) < 0.15 < 0.3 < np.mean(won["random"])


@pytest.mark.parametrize("name", ["nim", "kuhn_poker"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_listed_moves_are_those_that_the_rules_allow(name, lang):
    env = gym.make(f"skyrl/{name}-v0", lang=lang)
    for seed in range(30):
        _, info = env.reset(seed=seed)
        over = False
        while not over:
            moves = info["admissible_actions"]
            assert [env.unwrapped.game.parse(move) for move in moves] == env.unwrapped.game.legal()
            _, _, over, _, info = env.step(moves[seed % len(moves)])
            assert info["valid_action"]
        assert info["admissible_actions"] == []
    env.reset(seed=0)
    assert env.step("nonsense")[-1]["admissible_actions"] == []


def test_success_at_kuhn_is_play_that_an_equilibrium_could_make():
    env = gym.make("skyrl/kuhn_poker-v0", opponent="perfect").unwrapped
    for seed in range(40):
        env.reset(seed=seed)
        name, over = env.game.information_set(len(env.game.moves)), False
        for move in MOVES[name[2:]].split():
            env.reset(seed=seed)
            _, _, over, _, info = env.step(move)
            if over:
                assert info["success"] == (equilibrium()[name][move] > 0)


class Served(BaseHTTPRequestHandler):
    """An endpoint that answers `check` or `call`, and keeps what it was asked."""

    asked: ClassVar[list[dict]] = []

    def reply(self, said):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def do_GET(self):
        self.reply({"data": [{"id": "past"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        word = "call" if "bets" in body["messages"][-1]["content"] else "check"
        self.reply({"choices": [{"message": {"role": "assistant", "content": word}}]})

    def log_message(self, *_):
        pass


def test_a_pool_of_served_policies_plays_the_other_role_and_the_seed_draws_one():
    with ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, records = f"http://127.0.0.1:{server.server_port}/v1", []
        for _ in range(2):
            Served.asked.clear()
            env, rewards = gym.make("skyrl/kuhn_poker-v0", opponent=f"random,{url},{url}#newer").unwrapped, []
            for seed in range(30):
                env.reset(seed=seed)
                other = next(role for role in ROLES if role != env.role)
                while not (step := env.step(env.expert_action()))[2]:
                    pass
                rewards.append(step[1])
                if env._opponent != "random":
                    own = [move for number, move in enumerate(env.game.moves) if env.game.mover(number) == other]
                    assert set(own) <= {"check", "call"}
            records.append((rewards, copy.deepcopy(Served.asked)))
        server.shutdown()
    assert records[0] == records[1] and {body["model"] for body in records[0][1]} == {"past", "newer"}
    assert len({body["seed"] for body in records[0][1]}) > 10
    with pytest.raises(RuntimeError, match=r"opponent http://127.0.0.1:1/v1: .*gave no answer .*serve a policy there"):
        env.reset(seed=1, options={"opponent": "http://127.0.0.1:1/v1", "task_id": "train:1:en:1"})
    with pytest.raises(ValueError, match="option 'opponent' is 'best'; valid values are 'random', 'perfect', 'self'"):
        env.reset(options={"opponent": "perfect,best"})


def test_after_an_opponent_that_gave_no_answer_nothing_is_played_in_its_place():
    """The agent's next action would be its opponent's move."""
    env = gym.make("skyrl/nim-v0", opponent="http://127.0.0.1:1/v1").unwrapped
    env.reset(options={"task_id": "train:1:en:15"})
    with pytest.raises(RuntimeError, match="gave no answer"):
        env.step("B 1")
    with pytest.warns(UserWarning, match="after the episode had ended"):
        assert env.step("B 1")[2]
    assert env.game.moves == ["B 1"]
    env = gym.make("skyrl/kuhn_poker-v0", opponent="http://127.0.0.1:1/v1").unwrapped
    with pytest.raises(RuntimeError, match="gave no answer"):
        for seed in range(12):  # until one gives the second role
            env.reset(seed=seed)
    with pytest.warns(UserWarning, match="after the episode had ended"):
        assert env.step("bet")[2] and not env.game.moves


def test_in_self_play_who_writes_only_nonsense_has_no_success():
    """Nor has the role that won by it without a move."""
    for name in ("nim", "kuhn_poker"):
        env = gym.make(f"skyrl/{name}-v0", opponent="self")
        for seed in range(20):
            env.reset(seed=seed)
            _, reward, over, _, info = env.step("nonsense")
            assert over and reward < 0 and not info["success"]


def test_an_opponent_whose_first_text_is_no_move_has_lost(monkeypatch):
    monkeypatch.setattr("skyrl_gym.players.pool.ask", lambda *_: "nonsense")
    env = gym.make("skyrl/kuhn_poker-v0", opponent="http://127.0.0.1:1/v1").unwrapped
    for seed in range(12):
        observation, _ = env.reset(seed=seed)
        if env.role == ROLES[1]:
            assert "The other gives up." in observation
            observation, reward, over, _, info = env.step(env.expert_action())
            assert (reward, over, info["success"]) == (env.game.stake, True, True)
            return
    raise AssertionError("no seed gave the second role")


@pytest.mark.parametrize("action", ["我选择过牌", "答案:过牌。", "过牌", "check 过牌"])
def test_chinese_needs_no_blank_before_a_move(action):
    game = KuhnPoker("zh")
    game.reset(seed=0)
    assert game.parse(action) == "check"
    nim = Nim("zh")
    nim.reset(options={"deal": [3, 2, 1]})
    assert nim.parse("我选B 1") == "B 1" and nim.parse("AB 1") == "illegal"


def test_a_card_that_nobody_paid_to_see_is_not_shown():
    for moves, shown in ((["bet", "fold"], False), (["check", "bet", "fold"], False), (["bet", "call"], True)):
        game = KuhnPoker()
        game.reset(options={"deal": ["Q", "K"], "moves": moves})
        assert game.over and ("K" in game.table(ROLES[0])) is shown
