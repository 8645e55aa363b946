"""alfworld_lite: rules against a second statement of them, tasks and splits, the expert and the random policy."""

from __future__ import annotations

import itertools
import json
import operator
import os
import random
import re

import gymnasium as gym
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import skyrl_gym
from skyrl_gym.envs.alfworld_lite.env import SLIPS
from skyrl_gym.envs.alfworld_lite.tasks import COUNTS, TYPES, make_data, reached
from skyrl_gym.envs.alfworld_lite.world import World, kind_of, layout, load, why_not

ENV = "skyrl/alfworld_lite-v0"
FULL = os.environ.get("SKYRL_TEST_FULL") == "1"
SPLITS, LEVELS, LANGS = ("train", "val", "test"), (1, 2, 3), ("en", "zh")
OBJECTS, RECEPTACLES, ROOMS = load()["objects"], load()["receptacles"], load()["rooms"]


def after(*commands: str) -> World:
    contents = {"countertop 1": ["mug 1", "pan 1"], "fridge 1": ["egg 1"], "cabinet 1": ["kettle 1"]}
    world = World(layout("kitchen", "seen", 0, 2), {"countertop 2": "desklamp 1"}, contents, "en")
    for command in commands:
        assert command in world.actions, command
        world.do(command)
    return world


def allowed(world: World, command: str) -> bool:
    """The rules of the commands once more, from the description of ALFWorld's, one command at a time."""
    at, held = world.at, world.held
    kind, open_here = kind_of(at or ""), not RECEPTACLES.get(kind_of(at or ""), {}).get("opens") or at in world.open
    can = OBJECTS[kind_of(held)] if held else {"can": (), "in": ()}
    if command.startswith("go to "):
        return command[6:] in world.layout.places and command[6:] != at
    if match := re.fullmatch(r"(open|close) (\w+ \d+)", command):
        return match[2] == at and RECEPTACLES[kind]["opens"] and (at in world.open) == (match[1] == "close")
    if match := re.fullmatch(r"(\w+) (\w+ \d+) (from|to|with) (\w+ \d+)", command):
        verb, thing, _, place = match.groups()
        if place != at or (thing != held and verb != "take"):
            return False
        if verb in ("take", "move"):
            return open_here and (held is None and thing in world.contents[at] if verb == "take" else kind in can["in"])
        return kind == {"heat": "microwave", "cool": "fridge", "clean": "sinkbasin"}[verb] and verb in can["can"]
    if match := re.fullmatch(r"use (\w+ \d+)", command):
        return at in world.lamps and world.lamps[at] == match[1]
    if match := re.fullmatch(r"examine (\w+ \d+)", command):
        seen = [at, world.lamps.get(at), *(world.contents[at] if open_here else [])] if at else []
        return match[1] in (*seen, held)
    return command in ("help", "inventory", "look")


def every_command(world: World) -> list[str]:
    """All commands that name things of this room, and two that it does not have."""
    places = [*world.layout.places, "moon 1"]
    things = [*itertools.chain(*world.contents.values()), "cow 1", *world.lamps.values(), *filter(None, [world.held])]
    verbs = {"take": "from", "move": "to", "heat": "with", "cool": "with", "clean": "with"}
    two = [f"{verb} {x} {verbs[verb]} {y}" for verb, x, y in itertools.product(verbs, things, places)]
    one = itertools.product(("go to", "open", "close", "use", "examine"), things + places)
    return ["help", "inventory", "look", *map(" ".join, one), *two]


@settings(max_examples=400 if FULL else 40, deadline=None)
@given(st.sampled_from(SPLITS), st.sampled_from(LEVELS), st.integers(0, 5_999), st.randoms(use_true_random=False))
def test_admissible_commands_are_those_that_the_rules_allow_and_objects_stay_in_one_place(split, level, index, rng):
    data = make_data(split, level, index)
    world = World(layout(*data["layout"]), data["lamps"], data["contents"], "en")
    objects = sorted(itertools.chain(*data["contents"].values()))
    assert len(set(objects)) == len(objects)
    state = operator.attrgetter(*World.STATE)
    for _ in range(12):
        assert world.actions == sorted({command for command in every_command(world) if allowed(world, command)})
        assert sorted([*itertools.chain(*world.contents.values()), *filter(None, [world.held])]) == objects
        tempting = [command for command in world.actions if command.split()[0] not in ("go", "examine", "help", "look")]
        command, before = rng.choice(rng.choice((world.actions, tempting))), repr(state(world))
        changes = command.split()[0] not in ("help", "inventory", "look", "examine", "heat", "cool", "clean")
        assert world.do(command) and (repr(state(world)) != before or not changes)


AT_COUNTER, WITH_MUG = ("go to countertop 1",), ("go to countertop 1", "take mug 1 from countertop 1")


@pytest.mark.parametrize(
    "before, command, reason",
    [
        (AT_COUNTER, "go to countertop 1", "already"),
        ((), "go to moon 1", "place"),
        ((), "put it down", "form"),
        ((), "fly to fridge 1", "command"),
        ((), "open fridge 1", "away"),
        (AT_COUNTER, "open countertop 1", "no_door"),
        (("go to fridge 1",), "close fridge 1", "is_shut"),
        (("go to fridge 1", "open fridge 1"), "open fridge 1", "is_open"),
        (("go to fridge 1",), "take egg 1 from fridge 1", "is_closed"),
        (AT_COUNTER, "take egg 1 from countertop 1", "unseen"),
        (WITH_MUG, "take pan 1 from countertop 1", "full_hand"),
        (AT_COUNTER, "move mug 1 to countertop 1", "empty"),
        ((*WITH_MUG, "go to cabinet 1"), "move mug 1 to cabinet 1", "is_closed"),
        ((*WITH_MUG, "go to stoveburner 1"), "move mug 1 to stoveburner 1", "unfit"),
        ((*WITH_MUG, "go to microwave 1"), "cool mug 1 with microwave 1", "tool"),
        ((*AT_COUNTER, "take pan 1 from countertop 1", "go to microwave 1"), "heat pan 1 with microwave 1", "unable"),
        (AT_COUNTER, "use desklamp 1", "lamp"),
        (("go to fridge 1",), "examine egg 1", "nothing_here"),
    ],
)
def test_what_each_command_needs_and_what_explain_says(before, command, reason):
    world = after(*before)
    pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(world.texts["why"][reason]))
    assert command not in world.actions and re.fullmatch(pattern, why_not(world, command))


def test_heat_and_cold_undo_each_other_and_cleaning_stays():
    world = after(*WITH_MUG, "go to sinkbasin 1", "clean mug 1 with sinkbasin 1")
    for command, marks in (("heat mug 1 with microwave 1", "hot"), ("cool mug 1 with fridge 1", "cool")):
        world.do(f"go to {command.split(' with ')[1]}")
        world.do(command)
        assert world.do("examine mug 1") == f"mug 1 is clean, {marks}."


PLACE, TAKE = "go to countertop 2;move mug 1 to countertop 2;", "take mug 1 from countertop 2;"
SCRIPTS = (
    PLACE,
    "go to countertop 2;use desklamp 1;",
    f"{PLACE}{TAKE}go to sinkbasin 1;clean mug 1 with sinkbasin 1;{PLACE}",
    f"go to microwave 1;heat mug 1 with microwave 1;{PLACE}",
    f"{PLACE}{TAKE}go to fridge 1;cool mug 1 with fridge 1;{PLACE}",
    f"{PLACE}go to countertop 1;take mug 2 from countertop 1;{PLACE.replace('mug 1', 'mug 2')}",
)


@pytest.mark.parametrize("task_type, script", list(zip(TYPES, SCRIPTS, strict=True)), ids=TYPES)
def test_a_task_is_done_by_what_its_type_asks_for_and_nothing_less(task_type, script):
    world = after(*WITH_MUG, "go to toaster 1")
    world.contents["countertop 1"] = ["mug 2"] if task_type == "pick_two_obj_and_place" else []
    for command in script.split(";")[:-1]:
        assert command in world.actions
        assert not reached(world, goal := {"type": task_type, "object": "mug", "target": "countertop"})
        world.do(command)
    assert reached(world, goal)


def play(env, rng: random.Random, random_steps: int, seed: int, **options):
    """An episode of so many random admissible actions, then the expert's: its steps, 0 if not solved."""
    _, info = env.reset(seed=seed, options=options)
    for step in itertools.count(1):
        action = rng.choice(info["admissible_actions"]) if step <= random_steps else env.unwrapped.expert_action()
        assert action in info["admissible_actions"]
        observation, reward, terminated, truncated, info = env.step(action)
        assert info["valid_action"] and reward == info["success"] and len(observation) < 2000
        if terminated or truncated:
            return step if info["success"] else 0


@pytest.mark.parametrize("split, level", list(itertools.product(SPLITS, LEVELS)))
def test_the_expert_always_wins_also_after_ten_random_steps(split, level):
    env, rng = gym.make(ENV, split=split, difficulty=level), random.Random(f"{split}{level}")
    for seed, lang, task_type in itertools.product(range(1000 if FULL else 12), LANGS, TYPES):
        assert 0 < play(env, rng, 0, seed, lang=lang, task_type=task_type) <= 15
        assert play(env, rng, 10, seed, lang=lang, task_type=task_type)


def test_an_expert_that_searches_goes_only_by_what_it_has_read():
    """It takes and lights nothing that it did not see before, but for slips, says what it is after, and wins."""
    slips = steps = 0
    for seed, level in itertools.product(range(40), LEVELS):
        env = gym.make(ENV, difficulty=level, expert="searches")
        seen, info = env.reset(seed=seed)
        changed, over = True, False
        while not over:
            action = env.unwrapped.expert_action()
            *thought, command = action.splitlines()
            assert len(thought) == changed, "a thought at the beginning, and whenever a thing was changed"
            assert all(words.split()[-1] in seen for words in thought)
            slip = command not in info["admissible_actions"]
            if slip:
                assert command.startswith("take ") and command.partition(" from ")[0][5:-2] in seen
            elif command.startswith(("take ", "use ")):
                assert command.partition(" from ")[0].partition(" ")[2] in seen
            observation, _, terminated, truncated, info = env.step(action)
            changed = not slip and not command.startswith(("go ", "open "))
            slips, steps = slips + slip, steps + 1
            seen, over = seen + observation, terminated or truncated
        assert info["success"] or level == 3  # its rooms can take more than 50 steps
    assert 0.03 < slips / steps < SLIPS


def test_a_random_policy_over_admissible_actions_wins_less_than_one_in_twenty_of_a_type_and_in_fifty_of_all():
    env, rng = gym.make(ENV), random.Random(0)
    for level in LEVELS:
        seeds, won = range(1000 if FULL else 60), 0
        for task_type in TYPES:
            wins = sum(play(env, rng, 50, seed, difficulty=level, task_type=task_type) > 0 for seed in seeds)
            assert wins < 0.05 * len(seeds)
            won += wins
        assert won <= 0.02 * len(TYPES) * len(seeds)


def test_layouts_are_many_and_unseen_rooms_are_far_from_all_seen_ones_at_every_difficulty():
    for (room, groups), level in itertools.product(ROOMS.items(), load()["levels"].values()):
        seen, unseen = (
            [set(layout(room, group, number, level["most"]).places) for number in range(len(groups[group]))]
            for group in ("seen", "unseen")
        )
        assert len(set(map(frozenset, seen))) == len(seen) == 9 and len(unseen) == 3
        assert min(len(one ^ other) for one, other in itertools.product(unseen, seen)) >= 11, "as its page says"
        assert min(len(one ^ other) for one, other in itertools.combinations(unseen, 2)) >= 4


def form(data) -> tuple:
    """What a memory of a task would hold: the goal, the room, and where one has to go, whatever a place's number."""
    lying = [place for place, names in data["contents"].items() for name in names if kind_of(name) == data["object"]]
    lamps = data["lamps"] if data["type"] == TYPES[1] else ()
    goal = data["type"], data["object"], data["target"]
    return *goal, *data["layout"][:3], *sorted(map(kind_of, lying)), *map(kind_of, lamps)


def test_tasks_are_of_their_type_split_and_rules_and_no_two_splits_have_one_that_could_be_remembered():
    homes: dict[tuple, str] = {}
    for level, split in itertools.product(LEVELS, SPLITS):
        for index in range(COUNTS[split] if FULL else 3000 if split == "train" else 600):
            data = make_data(split, level, index)
            assert data["type"] == TYPES[index % 6] and (data["layout"][1] == "unseen") == (split == "test")
            assert homes.setdefault(form(data), split) == split, data
            if index < (6000 if FULL else 300):
                world = World(layout(*data["layout"]), data["lamps"], data["contents"], "en")
                assert not reached(world, data)
                where = [(kind_of(place), kind_of(name)) for place, names in data["contents"].items() for name in names]
                assert all(place in OBJECTS[thing]["in"] for place, thing in where)
    goals = {split: sum(home == split for home in homes.values()) for split in SPLITS}
    assert min(goals.values()) >= (3000 if FULL else 1000), goals


def test_task_types_as_an_option_and_in_ids():
    env = gym.make(ENV, task_type=TYPES[3])
    _, info = env.reset(seed=1)
    assert info["task_type"] == TYPES[3] and int(info["task_id"].rpartition(":")[2]) % 6 == 3
    counts = {name: skyrl_gym.num_tasks(ENV, {"split": "val", "task_type": name}) for name in ("any", *TYPES)}
    assert counts == {"any": 6000} | dict.fromkeys(TYPES, 1000)
    assert env.reset(options={"task_id": "val:2:en:5999"})[1]["task_type"] == TYPES[5]
    with pytest.raises(ValueError, match="pick_two"):
        env.reset(options={"task_id": "val:2:en:5999", "task_type": TYPES[0]})
    tasks = [env.reset(options={"task_id": f"val:2:{lang}:7"}) and env.unwrapped.task for lang in LANGS]
    assert tasks[0].data == tasks[1].data and tasks[0].text != tasks[1].text
    demos = skyrl_gym.demonstrations(ENV, 2, {"split": "val", "task_type": TYPES[3]})
    assert [(demo["task_id"], demo["success"]) for demo in demos] == [("val:1:en:3", True), ("val:1:en:9", True)]


def test_spellings_of_a_command_and_what_is_not_one():
    env = gym.make(ENV)
    env.reset(options={"task_id": "train:1:en:0"})
    place = env.unwrapped.expert_action().removeprefix("go to ")
    for action in ("", " ", "\n", "go", "put", "put a b in", "x" * 10**6, f"go to {place} now", f"no{' ' * 400}look"):
        assert env.step(action)[:2] == ("Nothing happens.", 0.0)
    observation, *_, info = env.step(f"I think that I need it.\n\n  GO  to {place.upper()}.\n")
    assert info["valid_action"] and place in observation
    for stop in (".", "。", " . "):
        assert env.step("look" + stop)[4]["valid_action"]
    held = env.step(env.unwrapped.expert_action()) and env.unwrapped.get_state()["env"]["held"]
    for put in ("in/on", "in", "on"):
        assert env.step(f"put {held} {put} {place}")[4]["valid_action"]
        assert env.step(f"take {held} from {place}")[4]["valid_action"]
    env.reset(options={"task_id": "train:1:zh:0", "feedback": "explain"})
    assert env.step("dance")[0] == load("text.yaml")["zh"]["why"]["command"]


def test_the_state_goes_through_json_and_both_languages_have_the_same_sentences():
    env, twin, rng = gym.make(ENV, difficulty=2), gym.make(ENV), random.Random(3)
    env.reset(seed=9)
    for _ in range(20):
        env.step(rng.choice(env.unwrapped.admissible_actions()))
    twin.reset(seed=0)
    twin.unwrapped.set_state(json.loads(json.dumps(env.unwrapped.get_state())))
    for _ in range(20):
        assert env.unwrapped.admissible_actions() == twin.unwrapped.admissible_actions()
        assert env.step(action := rng.choice(env.unwrapped.admissible_actions()))[:3] == twin.step(action)[:3]

    english, chinese = ({**load("text.yaml")[lang], "goals": ""} for lang in LANGS)
    assert english.keys() == chinese.keys() and english["why"].keys() == chinese["why"].keys()
    assert sorted(re.findall(r"\{\w+\}", str(english))) == sorted(re.findall(r"\{\w+\}", str(chinese)))
