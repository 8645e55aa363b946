"""Files in the originals' schemas become what the lite environments play; what is wrong in them is said."""

import json
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec

import skyrl_gym
from skyrl_gym.openenv.episode import Episode

ROOT = Path(__file__).parents[2]


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


# WebShop. Made up, in the form of its three files.


def item(asin, name, **fields):
    options = {"Size": [{"value": "Small"}, {"value": "X/Large", "image": None}], "Color": [{"value": "Red"}]}
    return {
        "asin": asin,
        "name": name,
        "category": "fashion",
        "query": "Soft Socks",
        "product_category": "Clothing › Socks",
        "full_description": "Socks that stay up.",
        "small_description": ["Cotton", None],
        "pricing": "$4.50$9.00",
        "customization_options": options,
        "images": ["x.jpg"],
        **fields,
    }


ITEMS = [
    *(item(f"B00000000{n}", f"Warm Socks {n}") for n in range(8)),
    item("B000000000", "the same asin again"),
    item("nan", "no asin"),
    item("B0000000AA", "", pricing=None),
    item("B0000000AB", "Bare Socks", small_description="one text", customization_options=None, pricing=None),
]
MINED = {
    each["asin"]: {
        "attributes": ["machine wash", "soft"],
        "instruction": "find me soft socks",
        "instruction_attributes": ["soft"],
    }
    for each in ITEMS[:8]
}
HUMAN = {
    f"B00000000{n}": [
        {
            "instruction": f"I want {n} soft socks.",
            "instruction_attributes": ["soft"],
            "instruction_options": ["x/large"],
        },
        {"instruction": "socks", "instruction_attributes": [], "instruction_options": []},
        {"instruction": "blue", "instruction_attributes": ["soft"], "instruction_options": ["blue"]},
    ]
    for n in range(8)
}


@pytest.fixture
def files(tmp_path):
    for name, value in (("items", ITEMS), ("mined", MINED), ("human", HUMAN)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def catalog(files, *more, **changed):
    paths = {"items": files / "items.json", "attributes": files / "mined.json", "out": files / "out.json"} | changed
    return run("webshop_data.py", *(part for name, path in paths.items() for part in (f"--{name}", path)), *more)


def played(path):
    """Every goal of every split, by the expert: instructions, and the purchase's reward."""
    env, found = gym.make("skyrl/webshop_lite-v0", catalog=path, matching="strict"), []
    for split in ("train", "val", "test"):
        for difficulty in (1, 2, 3):
            options = {"split": split, "difficulty": difficulty}
            try:
                count = env.unwrapped.num_tasks(options)
            except ValueError:
                continue
            for index in range(count):
                observation, _ = env.reset(options={"task_id": f"{split}:{difficulty}:en:{index}"})
                over = False
                while not over:
                    _, reward, over, _, _ = env.step(env.unwrapped.expert_action())
                found.append((observation, reward))
    return found


def test_peoples_instructions_of_webshop_are_goals(files):
    done = catalog(files, "--human", files / "human.json")
    assert done.returncode == 0, done.stderr
    assert "out.json: 9 products, 8 goals" in done.stdout
    assert "left out: 3 products" in done.stdout and "8 instructions without attributes" in done.stdout
    assert "8 instructions whose options the product does not have" in done.stdout
    goals = played(files / "out.json")
    assert len(goals) == 8 and {reward for _, reward in goals} == {1.0}
    assert all(any(f"I want {n} soft socks, and price" in goal for goal, _ in goals) for n in range(8))


def test_synthetic_goals_of_webshop_are_combinations_of_options(files):
    done = catalog(files)
    assert done.returncode == 0 and "9 products, 16 goals" in done.stdout, done.stderr
    goals = played(files / "out.json")
    assert len(goals) == 16 and sum("size: x | large" in goal for goal, _ in goals) == 8
    assert "4 products, 8 goals" in catalog(files, "--first", 4).stdout


def test_what_is_wrong_in_webshops_files_is_said(files):
    (files / "broken.json").write_text("[{")
    (files / "other.json").write_text(json.dumps({"C1": MINED["B000000001"]}))
    for more, changed, says in (
        ((), {"items": files / "none.json"}, "none.json: not a JSON file in UTF-8 that can be read"),
        ((), {"items": files / "broken.json"}, "broken.json: not a JSON file"),
        ((), {"items": files / "mined.json"}, "mined.json: expected a list of products with 'asin' and 'name'"),
        ((), {"attributes": files / "items.json"}, "items.json: expected an object of products' attributes by asin"),
        (("--human", files / "items.json"), {}, "expected an object of lists of instructions by asin"),
        ((), {"attributes": files / "other.json"}, "9 products, but no goal"),
    ):
        done = catalog(files, *more, **changed)
        assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr, done.stderr


# ALFWorld. Made up, in the form of its games.


GOAL = """(:goal (and (exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r) (isHot ?o)
  (objectType ?o MugType) (receptacleType ?r ShelfType) (objectType ?l FloorLampType))))))"""
"""Facts of what there is to be, of variables."""


def state(*facts):
    return "(define (problem x) (:init\n" + "\n".join(f"  ({fact})" for fact in facts) + f"\n) {GOAL})"


KITCHEN = state(
    *(f"receptacleType {name} {kind}Type" for name, kind in (
        ("Cabinet_bar_1", "Cabinet"), ("Cabinet_bar_2", "Cabinet"), ("Fridge_bar_1", "Fridge"),
        ("Microwave_bar_1", "Microwave"), ("SinkBasin_bar_1", "SinkBasin"), ("Shelf_bar_1", "Shelf"),
        ("PaintingHanger_bar_1", "PaintingHanger"),
    )),
    *(f"objectType {name} {kind}Type" for name, kind in (
        ("Mug_bar_1", "Mug"), ("Mug_bar_2", "Mug"), ("Fork_bar_1", "Fork"), ("Spoon_Ladle_bar_1", "Chandelier"),
    )),
    "inReceptacle Mug_bar_1 Cabinet_bar_2", "inReceptacle Mug_bar_2 Fridge_bar_1",
    "inReceptacle Fork_bar_1 Shelf_bar_1",
    "inReceptacle Spoon_Ladle_bar_1 Shelf_bar_1", "openable Cabinet_bar_1",
)  # fmt: skip
BEDROOM = state(
    "receptacleType Desk_bar_1 DeskType", "receptacleType Bed_bar_1 BedType", "objectType Book_bar_1 BookType",
    "objectType FloorLamp_bar_1 FloorLampType", "receptacleAtLocation Bed_bar_1 loc_3",
    "objectAtLocation FloorLamp_bar_1 loc_3", "inReceptacle Book_bar_1 Desk_bar_1",
)  # fmt: skip
GAMES = {  # by folder: the task's type, object, target, lamp, floor plan and what it begins with
    "train/heat": ("pick_heat_then_place_in_recep", "Mug", "Shelf", "", 7, KITCHEN),
    "train/two": ("pick_two_obj_and_place", "Mug", "Shelf", "", 12, KITCHEN),
    "valid_seen/clean": ("pick_clean_then_place_in_recep", "Mug", "Cabinet", "", 7, KITCHEN),
    "valid_unseen/look": ("look_at_obj_in_light", "Book", "", "FloorLamp", 310, BEDROOM),
    "valid_unseen/unknown": ("pick_and_place_simple", "Chandelier", "Shelf", "", 7, KITCHEN),
}


@pytest.fixture
def games(tmp_path):
    for number, (name, (kind, thing, place, lamp, plan, begin)) in enumerate(GAMES.items()):
        folder = tmp_path / "json_2.1.1" / name / "trial_T2019"
        folder.mkdir(parents=True)
        wanted = {"object_target": thing, "parent_target": place, "toggle_target": lamp, "mrecep_target": ""}
        about = {"task_type": kind, "pddl_params": wanted, "scene": {"floor_plan": f"FloorPlan{plan}"}}
        (folder / "traj_data.json").write_text(json.dumps(about))
        if number % 2:
            (folder / "initial_state.pddl").write_text(begin)
        else:
            (folder / "game.tw-pddl").write_text(json.dumps({"pddl_problem": begin, "solvable": True}))
    return tmp_path / "json_2.1.1"


def test_games_of_alfworld_are_played(games, tmp_path, monkeypatch):
    done = run("alfworld_data.py", "--games", games, "--out", tmp_path / "tasks.json")
    assert done.returncode == 0, done.stderr
    assert "4 tasks, {'train': 2, 'val': 1, 'test': 1}" in done.stdout
    assert "left out: 1 (field 'object' is 'chandelier'" in done.stdout
    env = gym.make("skyrl/alfworld_lite-v0", tasks=tmp_path / "tasks.json")
    for split, kinds in (("train", ["pick_heat", "pick_two"]), ("val", ["pick_clean"]), ("test", ["look_at"])):
        assert env.unwrapped.num_tasks({"split": split}) == len(kinds)
        for index, kind in enumerate(kinds):
            for lang in ("en", "zh"):
                _, info = env.reset(options={"task_id": f"{split}:1:{lang}:{index}"})
                assert info["task_type"].startswith(kind)
                twin = gym.make("skyrl/alfworld_lite-v0", tasks=tmp_path / "tasks.json").unwrapped
                twin.set_state(json.loads(json.dumps(env.unwrapped.get_state())))
                over = False
                while not over:
                    action = env.unwrapped.expert_action()
                    result = env.step(action)
                    assert twin.step(action) == result
                    over = result[2]
                assert result[4]["success"]
    observation, _ = env.reset(options={"task_id": "train:1:en:0"})
    assert "cabinet 1, cabinet 2, fridge 1, microwave 1, shelf 1, sinkbasin 1" in observation
    assert env.reset(options={"split": "train", "task_type": "pick_two_obj_and_place"})[1]["task_id"] == "train:1:en:1"
    with pytest.raises(ValueError, match=r"has no task of split 'val' and this task_type"):
        env.reset(options={"split": "val", "task_type": "look_at_obj_in_light"})
    spec = EnvSpec("test/alfworld-v0", env.spec.entry_point, kwargs={"tasks": tmp_path / "tasks.json"})
    monkeypatch.setitem(gym.registry, spec.id, spec)
    (demo,) = skyrl_gym.demonstrations(spec.id, 1, {"task_type": "pick_two_obj_and_place"})
    assert demo["task_id"] == "train:1:en:1" and demo["success"]
    session = Episode(spec.id)  # a client of a server names a task of a type by its number
    assert session.reset({"task_id": 0, "task_type": "pick_two_obj_and_place"})["observation"]["text"]
    for wrong in ({"task_id": 1}, {"task_id": -1}, {"task_id": 0, "split": "dev"}):
        with pytest.raises(ValueError, match=r"task_id 'train:1:en:|task_id (-?1|0) is not"):
            session.reset({"task_type": "pick_two_obj_and_place"} | wrong)


def test_what_is_wrong_in_alfworlds_files_is_said(games, tmp_path):
    def fails(says):
        done = run("alfworld_data.py", "--games", games, "--out", tmp_path / "tasks.json")
        assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr, done.stderr

    game = games / "train/heat/trial_T2019"
    (game / "game.tw-pddl").write_text(json.dumps({"walkthrough": []}))
    fails("game.tw-pddl: field 'pddl_problem' must be a string, got None")
    (game / "game.tw-pddl").unlink()
    fails("neither initial_state.pddl nor game.tw-pddl is beside traj_data.json")
    (game / "initial_state.pddl").write_text(KITCHEN)
    (game / "traj_data.json").write_text("{}")
    fails("traj_data.json: fields 'pddl_params' and 'scene.floor_plan' are needed")
    (game / "traj_data.json").write_text("not JSON")
    fails("traj_data.json: not a JSON file in UTF-8 that can be read")
    games = tmp_path / "empty"
    fails("no game that can be played")


TASK = {"split": "train", "type": "pick_and_place_simple", "object": "mug", "target": "shelf", "room": "kitchen"}
TASK |= {"places": {"cabinet": 2, "shelf": 1}, "contents": {"cabinet 2": ["mug 1", "fork 1"]}, "lamps": {}}


@pytest.mark.parametrize(
    "change, says",
    [
        ({"split": "dev"}, "task 1: field 'split' is 'dev'; valid ones are train, val, test"),
        ({"target": "moon"}, "field 'target' is 'moon'; valid ones are"),
        ({"places": {"cabinet": 0}}, "field 'places': 'cabinet' is no known kind with a count from 1 to 99"),
        ({"contents": []}, "field 'contents' must be an object"),
        ({"contents": {"cabinet 3": ["mug 1"]}}, "'mug 1' at 'cabinet 3': no known object at one of"),
        ({"contents": {"cabinet 2": ["mug 1", "mug 1"]}}, "names an object twice"),
        ({"contents": {"cabinet 2": "mug 1"}}, "None at 'cabinet 2'"),
        ({"places": {"cabinet": 100, "shelf": 1}}, "'cabinet' is no known kind with a count from 1 to 99"),
        ({"contents": {"shelf 1": ["mug 1"]}}, "it is done already, or not in 50 steps"),
        ({"contents": {}}, "it is done already, or not in 50 steps"),
        ({"type": "pick_heat_then_place_in_recep"}, "it is done already, or not in 50 steps"),
        ({"type": "look_at_obj_in_light", "target": "desklamp"}, "it is done already, or not in 50 steps"),
    ],
)
def test_what_is_wrong_in_a_file_of_tasks_is_said(change, says, tmp_path):
    (tmp_path / "fine.json").write_text(json.dumps([TASK]))
    assert gym.make("skyrl/alfworld_lite-v0", tasks=tmp_path / "fine.json").unwrapped.num_tasks() == 1
    (tmp_path / "wrong.json").write_text(json.dumps([TASK | change]))
    with pytest.raises(ValueError, match=says):
        gym.make("skyrl/alfworld_lite-v0", tasks=tmp_path / "wrong.json")


@pytest.mark.parametrize(
    "script, given",
    [("webshop_data.py", ("--items", "i", "--attributes", "a")), ("alfworld_data.py", ("--games", "g"))],
)
def test_a_folder_that_is_not_there_is_said_before_anything_is_read(script, given, tmp_path):
    done = run(script, *given, "--out", tmp_path / "none" / "out.json")
    assert done.returncode == 2 and f"--out: there is no folder {tmp_path / 'none'}" in done.stderr
