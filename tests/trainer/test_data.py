"""Where tasks come from: good specs give the same samples everywhere, bad ones a sentence at the start."""

from __future__ import annotations

import importlib
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import yaml

import skyrl_trainer
from skyrl_trainer import data
from skyrl_trainer.algorithms.samplers import sampler_class
from skyrl_trainer.data import SampleSource, held_out, load_samples
from skyrl_trainer.errors import UserError
from skyrl_trainer.tiny.demonstrations import conversation_texts, demonstrations
from skyrl_trainer.types import Sample

RECIPE = Path(skyrl_trainer.__file__).parent / "recipes" / "quickstart.yaml"
ROW = {
    "data_source": "mine",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12 * 34 = ?"}],
    "env_class": "text_math",
    "reward_spec": {"method": "rule", "ground_truth": "408"},
}


def task_text(sample: Sample) -> str:
    env = gymnasium.make(sample.env_id)
    return env.reset(seed=sample.seed, options=sample.options)[0]


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


OPENED = """
import gymnasium
from skyrl_gym import UnicodeText

opened = []


class Opens(gymnasium.Env):
    observation_space = action_space = UnicodeText(99)

    def reset(self, *, seed=None, options=None):
        opened.append(self)
        return f"task {seed}", {}

    def close(self):
        opened[:] = [each for each in opened if each is not self]
        raise ValueError("at its end")


gymnasium.register("test/Opens-v0", Opens)
"""


def test_every_env_that_is_made_for_its_first_texts_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "opens_mod.py").write_text(OPENED)
    monkeypatch.syspath_prepend(tmp_path)
    spec = "opens_mod:test/Opens-v0?size=5"
    try:
        source = load_samples([spec, write_rows(tmp_path / "rows.jsonl", ROW | {"env_class": "test/Opens-v0"})])
        opened = importlib.import_module("opens_mod").opened
        assert opened == [] and len(held_out(source, 4)) == 4 and opened == []
        texts = conversation_texts(load_samples([spec]), 3, 0, experts=False)
        next(texts), next(texts)
        assert len(opened) == 1 and len(list(texts)) == 4 and opened == []
    finally:
        gymnasium.registry.pop("test/Opens-v0", None)


def test_an_env_spec_is_a_lazy_list_of_samples() -> None:
    source = load_samples(["text_math?split=train&difficulty=2&lang=zh&size=1000000"])
    assert len(source) == 1_000_000
    sample = source[999_999]
    assert sample.env_id == "skyrl/text_math-v0"
    assert sample.options == {"split": "train", "difficulty": 2, "lang": "zh"}
    assert source[-1] == sample
    with pytest.raises(IndexError):
        source[1_000_000]
    assert "答案" in task_text(sample)


def test_a_mapping_and_a_string_are_the_same_and_seeds_differ() -> None:
    as_text = load_samples(["text_math?difficulty=2&split=train&size=50"])
    as_mapping = load_samples([{"env": "text_math", "split": "train", "difficulty": 2, "size": 50}])
    assert list(as_text) == list(as_mapping)
    other = load_samples(["text_math?difficulty=2&split=train&size=50"], seed=1)
    assert not {sample.seed for sample in as_text} & {sample.seed for sample in other}


def test_the_seed_of_a_task_is_the_same_number_as_a_float_however_large_the_runs_is() -> None:
    """As JSON of other programs has it."""
    seeds = [sample.seed for sample in load_samples([f"text_math?size=3&seed={2**63 - 1}"])]
    assert len({*seeds}) == 3 and all(int(float(seed)) == seed for seed in seeds)


def test_sources_are_concatenated_and_ids_are_unique(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ROW, {**ROW, "env_class": None})
    source = load_samples(["text_math?size=3", rows, "text_math?size=4&difficulty=2"], default_env_class="text_math")
    assert len(source) == 9
    assert len({sample.sample_id for sample in source}) == 9
    assert source[3].options == {"task": ROW}
    assert (source[3].ground_truth, source[4].env_id) == ("408", "skyrl/text_math-v0")
    assert [sample.options.get("difficulty") for sample in source[4:6]] == [None, 2]
    assert task_text(source[3]) == "12 * 34 = ?"


def test_parquet_rows(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame([ROW]).to_parquet(tmp_path / "rows.parquet")
    source = load_samples([str(tmp_path / "rows.parquet")])
    assert task_text(source[0]) == "12 * 34 = ?"


def test_a_users_file_registers_environments(tmp_path: Path) -> None:
    file = tmp_path / "my_envs.py"
    file.write_text(
        "import gymnasium\n"
        "from skyrl_gym.envs.text_math.env import TextMathEnv\n"
        "class Mine(TextMathEnv):\n    pass\n"
        "gymnasium.register('mine/other-sums-v0', Mine)\n"
    )
    source = load_samples(["mine/other-sums-v0?difficulty=2&size=2"], env_file=str(file))
    assert source[0].env_id == "mine/other-sums-v0"
    assert source[0].env_file == str(file)
    assert len(load_samples(["mine/other-sums-v0"], env_file=str(file))) > 0


BROKEN = """
import sys
import time

import gymnasium
from gymnasium.spaces import Text


class Broken(gymnasium.Env):
    observation_space = action_space = Text(100)

    def __init__(self, how):
        self.how = how

    def reset(self, *, seed=None, options=None):
        if self.how == "raises":
            return {}["lost"]
        if self.how == "exits":
            sys.exit(0)
        if self.how == "hangs":
            time.sleep(600)
        gives = {"lists": (["a", "message"], {}), "no_info": ("hello", None)}
        return gives.get(self.how, ("hello", {"instructions": None}))


for how in ("raises", "exits", "lists", "no_info", "none", "hangs"):
    gymnasium.register(f"mine/broken_{how}-v0", Broken, kwargs={"how": how}, disable_env_checker=True)
"""


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raises", r"cannot begin an episode: KeyError: 'lost' \(.*broken\.py, line 17\)"),
        ("exits", r"cannot begin an episode: SystemExit: 0 \(.*broken\.py, line 19\)"),
        ("lists", r"TypeError: reset gave \(\['a', 'message'\], {}\), and should give a text and a dict"),
        ("no_info", r"TypeError: reset gave \('hello', None\), and should give a text and a dict"),
    ],
)
def test_an_env_that_cannot_begin_says_where_it_went_wrong(how: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    with pytest.raises(UserError, match=sentence):
        load_samples([f"mine/broken_{how}-v0"], env_file=str(tmp_path / "broken.py"))


def test_an_env_that_hangs_at_the_start_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.setattr("skyrl_trainer.data.FIRST_SECONDS", 0.3)
    before = signal.getsignal(signal.SIGALRM)
    sentence = r"broken_hangs-v0 cannot begin an episode: TimeoutError: it took longer than 0.3 seconds \(.*, line 21\)"
    with pytest.raises(UserError, match=sentence):
        load_samples(["mine/broken_hangs-v0"], env_file=str(tmp_path / "broken.py"))
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] != 1.0


def test_instructions_that_are_none_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    samples = load_samples(["mine/broken_none-v0"], env_file=str(tmp_path / "broken.py"))
    assert list(conversation_texts(samples, 1, 0, experts=False)) == ["", "hello"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("text_maths?split=train", ["text_maths", "skyrl/text_math-v0"]),
        ("text_math?split=training", ["training", "'train'"]),
        ("text_math?dificulty=2", ["dificulty", "difficulty"]),
        ("text_math?split", ["split=train&difficulty=2"]),
        ("text_math?lang=en&lang=zh", ["'lang' twice"]),
        ("text_math?size=0", ["size is 0, not a whole number from 1 to"]),
        (f"text_math?size={10**20}", [f"size is {10**20}, not a whole number from 1 to 2**63"]),
        ("text_math?seed=x", ["seed is 'x'"]),
        ({"split": "train"}, ["names no env"]),
        ("", ["neither an env spec"]),
        ("nowhere.jsonl", ["nowhere.jsonl"]),
        ("nowhere.json", ["nowhere.json", "ends in .jsonl or .parquet"]),
    ],
)
def test_a_bad_spec_is_a_sentence(spec: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_samples([spec])
    for word in words:
        assert word in str(caught.value)


def test_a_row_that_its_env_refuses_is_named_wherever_it_stands(tmp_path: Path) -> None:
    refused = {**ROW, "reward_spec": {"ground_truth": ["10", "11"]}}
    with pytest.raises(UserError, match=r"rows\.jsonl row 3.*'reward_spec\.ground_truth' must be a number"):
        load_samples([write_rows(tmp_path / "rows.jsonl", ROW, ROW, refused, ROW)])


def test_of_a_file_that_takes_long_as_many_rows_are_tried_as_there_is_time_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others cost their episodes, but held-out tasks, whose texts are read at the start, are named then."""
    monkeypatch.setattr(data, "CHECK_SECONDS", 0.0)
    refused = {**ROW, "reward_spec": {"ground_truth": ["10", "11"]}}
    source = load_samples([write_rows(tmp_path / "rows.jsonl", ROW, refused)])
    assert len(source) == 2
    with pytest.raises(UserError, match=r"rows\.jsonl#1.*'reward_spec\.ground_truth' must be a number"):
        held_out(source, 2)


def test_bad_rows_and_lists_are_sentences(tmp_path: Path) -> None:
    unknown = write_rows(tmp_path / "unknown.jsonl", ROW, {**ROW, "env_class": "text_meth"})
    broken = write_rows(tmp_path / "broken.jsonl", {"prompt": ROW["prompt"]})
    unplayable = write_rows(tmp_path / "unplayable.jsonl", {**ROW, "reward_spec": {"ground_truth": ""}})
    failing = tmp_path / "failing.py"
    failing.write_text("1 / 0\n")
    for specs, env_file, words in [
        ([unknown], None, "row 2, field 'env_class'.*text_meth"),
        ([broken], None, "broken.jsonl row 1.*reward_spec"),
        ([unplayable], None, "unplayable.jsonl row 1.*ground_truth"),
        ([unknown + "?size=2"], None, "takes no options"),
        (["text_math?weight=0"], None, r"weight is 0, and must be a number above 0"),
        (["text_math?weight=much"], None, r"weight is 'much'"),
        (["text_math?tries=0"], None, r"tries is 0, and must be a whole number above 0"),
        (["text_math?tries=many"], None, r"tries is 'many'"),
        (["text_math?lang=en&difficulty=1", "text_math?difficulty=1&lang=en"], None, "listed twice"),
        ([], None, "is empty: give it"),
        (["text_math"], str(tmp_path / "none.py"), "none.py is not a Python file"),
        (["text_math"], str(failing), "failing.py failed with ZeroDivisionError"),
    ]:
        with pytest.raises(UserError, match=words):
            load_samples(specs, env_file=env_file)


def test_weights_share_out_demonstrations_and_leave_ids_and_held_out_tasks_alone() -> None:
    """Without any weight sources count by their size; a held-out set has as many of each source."""
    plain = ["text_math?size=900", "tool_use?size=300"]
    mixed = load_samples(["text_math?size=900", {"env": "tool_use", "size": 300, "weight": 3}])
    assert list(mixed.weights) == [1.0, 3] and list(load_samples(plain).weights) == []
    assert list(mixed) == list(load_samples(plain))

    def tools(source: SampleSource) -> int:
        return sum("calculator" in episode[0]["content"] for episode in demonstrations(source, 40, 0))

    assert tools(mixed) == 30 and tools(load_samples(plain)) < 20
    counts = Counter(sample.env_id for sample in held_out(mixed, 9))
    assert counts == {"skyrl/text_math-v0": 5, "skyrl/tool_use-v0": 4}


def test_an_env_without_an_expert_gives_its_first_turns_as_texts(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "?"}], "reward_spec": {"ground_truth": "7"}, "question": "Why?"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    samples = load_samples([str(path)], default_env_class="skyrl_eval:skyrl/question-v0")
    assert list(conversation_texts(samples, 10, 0, experts=False)) == ["", "Why?"]
    with pytest.raises(UserError, match=r"has no expert to clone.*num_demonstrations=0"):
        list(conversation_texts(samples, 10, 0))


def test_held_out_tasks_are_distinct_and_all_of_them_where_there_are_fewer() -> None:
    source = load_samples(["text_math?split=val&difficulty=3"])
    few = held_out(source, 3)
    assert len({task_text(sample) for sample in few}) == 3
    assert few == held_out(source, 3)
    every = held_out(load_samples(["text_math?split=val&difficulty=3&size=5000"]), 500)
    assert len(every) == len({task_text(sample) for sample in every}) == 75


def test_held_out_rows_are_tried_as_often_as_they_stand_in_their_file(tmp_path: Path) -> None:
    """DAPO's AIME has each row 32 times. And what is asked may be in the truth alone: a number to guess."""
    rows = [{**ROW, "reward_spec": {"ground_truth": str(truth)}} for truth in (1, 2, 2, 3)]
    source = load_samples([write_rows(tmp_path / "rows.jsonl", *rows)])
    assert [sample.ground_truth for sample in held_out(source, len(source))] == ["1", "2", "2", "3"]


def test_a_held_out_task_is_tried_as_often_as_its_source_says(tmp_path: Path) -> None:
    """Counted after `count`; neither a part of the samples' ids nor of what the env is told."""
    rows = [{**ROW, "reward_spec": {"ground_truth": str(truth)}} for truth in (1, 2)]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    source = load_samples([path + "?tries=3", {"env": "text_math", "split": "val", "tries": 2}])
    assert list(source) == list(load_samples([path, "text_math?split=val"]))
    chosen = held_out(source, 4)
    assert list(Counter(sample.sample_id for sample in chosen).values()) == [3, 2, 3, 2]
    assert [sample.ground_truth for sample in chosen if sample.ground_truth] == ["1"] * 3 + ["2"] * 3
    with pytest.raises(UserError, match=r"`tries` are held-out data's; here generator.num_generations says it"):
        sampler_class("uniform")(source, 0)


def test_the_quick_starts_500_held_out_tasks_are_in_neither_training_nor_demonstrations() -> None:
    data = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["data"]
    train = load_samples(data["train_data"])
    texts = {task_text(sample) for sample in held_out(load_samples(data["val_data"]), 500)}
    assert len(texts) == 500
    env = gymnasium.make(train[0].env_id)
    assert not texts & {env.reset(seed=sample.seed, options=sample.options)[0] for sample in train}
    shown = {message["content"] for episode in demonstrations(train, 4000, 0) for message in episode}
    assert not texts & shown
