"""The space, the parser, dataset rows, the registry and the command line."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.spaces import Text
from hypothesis import given
from hypothesis import strategies as st

import skyrl_gym
from skyrl_gym import UnicodeText
from skyrl_gym.__main__ import main
from skyrl_gym.data import load_rows
from skyrl_gym.parsing import last_answer

GYM_SOURCES = str(Path(skyrl_gym.__file__).parent.parent)


class TestUnicodeText:
    def test_holds_any_string_up_to_its_length(self):
        space = UnicodeText(10)
        assert isinstance(space, Text)
        for text in ("", "你好 😀", "\x00\n", "\ud800", "0123456789"):
            assert text in space
        for other in ("01234567890", 5, None, b"x", ["x"]):
            assert other not in space

    def test_samples_are_short_printable_and_seeded(self):
        one, two = UnicodeText(1 << 16, seed=7), UnicodeText(1 << 16, seed=7)
        samples = [one.sample() for _ in range(100)]
        assert samples == [two.sample() for _ in range(100)]
        assert all(sample in one and len(sample) <= 64 and (sample.isprintable()) for sample in samples)

    def test_equality_repr_copy_and_pickle(self):
        space = UnicodeText(9)
        assert space == UnicodeText(9) != UnicodeText(8)
        assert space != Text(9, min_length=0) and repr(space) == "UnicodeText(9)"
        assert not space.is_np_flattenable  # there is no list of its characters
        assert copy.deepcopy(space) == space == pickle.loads(pickle.dumps(space))


class TestLastBoxed:
    @pytest.mark.parametrize(
        ("text", "content"),
        [
            ("\\boxed{85}", "85"),
            ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
            ("\\boxed{1} \\boxed{2}", "2"),
            ("\\boxed{1} \\boxed{2", "1"),
            ("\\boxed{1 \\boxed{2", None),
            ("\\boxed{\\boxed{5}}", "5"),
            ("\\boxed{ { 5}", None),
            ("} \\boxed{你好\x00}", "你好\x00"),
            ("\\boxed{}", ""),
            ("boxed{5} \\boxed 5", None),
            ("\\boxed {5} \\boxed\n{6}", "6"),
            ("", None),
            ("\\boxed{" + "7" * 10_000 + "}", "7" * 10_000),
            ("\\boxed{" + "7" * 10_001 + "}", None),
        ],
    )
    def test_grammar(self, text, content):
        assert last_answer(text) == content

    @given(st.text("\\boxed{}12", max_size=80))
    def test_agrees_with_the_definition(self, text):
        assert last_answer(text) == slow_last_boxed(text)


def slow_last_boxed(text: str) -> str | None:
    """The grammar as it is written, without regard to time."""
    for start in reversed(range(len(text))):
        if text.startswith("\\boxed{", start):
            depth = 0
            for position in range(start + 6, len(text)):
                depth += {"{": 1, "}": -1}.get(text[position], 0)
                if depth == 0:
                    return text[start + 7 : position]
    return None


ROW = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "1 + 1 = ？"}],
    "env_class": "text_math",
    "reward_spec": {"method": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train"},
}


class TestRows:
    def test_jsonl(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text("\ufeff" + json.dumps(ROW, ensure_ascii=False) + "\n\n" + json.dumps(ROW), encoding="utf-8")
        assert load_rows(path) == [ROW, ROW]
        assert load_rows(str(path)) == [ROW, ROW]

    def test_parquet(self, tmp_path):
        import pyarrow
        from pyarrow import parquet

        path = tmp_path / "rows.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([ROW, ROW]), path)
        assert load_rows(path) == [ROW, ROW]
        parquet.write_table(pyarrow.Table.from_pylist([ROW, {**ROW, "reward_spec": None}]), path)
        with pytest.raises(ValueError, match=r"rows.parquet row 2: field 'reward_spec.ground_truth' is missing"):
            load_rows(path)
        path.write_bytes(b"PAR0")
        with pytest.raises(ValueError, match="not a readable parquet file"):
            load_rows(path)

    @pytest.mark.parametrize(
        "first, said", [(0, "'reward_spec.ground_truth' is missing"), (1, "a ground truth is here")]
    )
    def test_rows_of_an_env_class_all_have_a_ground_truth_or_none_has(self, tmp_path, first, said):
        rows = [{"prompt": "1 + 1", "ground_truth": "2"}, {"prompt": "1 + 2"}]
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, [rows[first], rows[1 - first]])))
        with pytest.raises(ValueError, match=f"rows.jsonl:2: .*{said}.* earlier rows"):
            load_rows(path)

    @pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
    def test_flat_rows_verls_rows_and_rows_without_a_ground_truth(self, tmp_path, suffix):
        rows = [
            {"prompt": "1 + 1", "ground_truth": "2"},
            {"prompt": "1 + 1", "reward_model": {"style": "rule", "ground_truth": "2"}, "ground_truth": "3"},
            {"prompt": "Write a poem.", "env_class": "judge"},
        ]
        path = tmp_path / f"rows{suffix}"
        if suffix == ".parquet":
            from pyarrow import Table, parquet

            names = ("prompt", "env_class", "reward_model", "ground_truth")
            parquet.write_table(Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), path)
        else:
            path.write_text("\n".join(map(json.dumps, rows)))
        flat, verl, judged = load_rows(path)
        assert (flat["prompt"], flat["reward_spec"]) == ([{"role": "user", "content": "1 + 1"}], {"ground_truth": "2"})
        assert verl["reward_spec"] == {"style": "rule", "ground_truth": "2"} == verl["reward_model"]
        assert (judged["reward_spec"], judged["env_class"]) == ({}, "judge")
        for row in (flat, verl):
            env = gym.make("skyrl/text_math-v0")
            env.reset(options={"task": row})
            assert env.step("\\boxed{2}")[1] == 1.1

    def test_parquet_without_pyarrow(self, tmp_path, monkeypatch):
        path = tmp_path / "rows.parquet"
        path.write_bytes(b"")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ImportError, match=r"needs pyarrow"):
            load_rows(path)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"prompt": None}, "field 'prompt' is missing"),
            ({"prompt": 2}, "field 'prompt' must be a string or a list of messages, got 2"),
            ({"prompt": ["x"]}, "field 'prompt\\[0\\]' must be an object"),
            ({"prompt": [{"role": "bot", "content": "x"}]}, "field 'prompt\\[0\\].role' must be one of system, user"),
            ({"prompt": [{"role": "user", "content": 3}]}, "field 'prompt\\[0\\].content' must be a string, got 3"),
            ({"prompt": [{"role": "system", "content": "x"}]}, "no message with role 'user'"),
            ({"reward_spec": "2"}, "field 'reward_spec' must be an object"),
            ({"reward_spec": {"method": "rule"}}, "field 'reward_spec.ground_truth' is missing"),
            ({"reward_spec": None, "reward_model": "2"}, "field 'reward_model' must be an object, got '2'"),
            ({"env_class": 3}, "field 'env_class' must be a string"),
            ({"extra_info": "x"}, "field 'extra_info' must be an object"),
        ],
    )
    def test_a_wrong_field_is_named_with_file_and_line(self, tmp_path, change, sentence):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, **change}))
        with pytest.raises(ValueError, match=f"rows.jsonl:2: .*{sentence}"):
            load_rows(path)

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (b'{"prompt": ', "rows.jsonl:1: not one JSON object"),
            (b'{"prompt": ' + b"[" * 10**5, "rows.jsonl:1: not one JSON object"),
            (b'{"prompt": ' + b"9" * 5000 + b"}", "rows.jsonl:1: not one JSON object"),
            (b"\n[1]", "rows.jsonl:2: expected an object"),
            (b'{"a": "\xff"}', "rows.jsonl:1: not UTF-8"),
            (b"\n", "has no rows"),
        ],
    )
    def test_a_broken_file(self, tmp_path, content, sentence):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            load_rows(path)

    def test_no_such_file_or_format(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no data file"):
            load_rows(tmp_path / "none.jsonl")
        (tmp_path / "rows.csv").touch()
        with pytest.raises(ValueError, match=r"end in \.jsonl or \.parquet"):
            load_rows(tmp_path / "rows.csv")


ENTRY = """schema: 1
envs:
  - id: mine/sums-v0
    entry_point: skyrl_gym.envs.text_math.env:TextMathEnv
    description: Sums.
    kwargs: {difficulty: 4}
    max_episode_steps: 3
"""


@pytest.mark.usefixtures("clean_registry")
class TestRegistry:
    def test_a_file_of_ones_own(self, tmp_path):
        path = tmp_path / "mine.yaml"
        path.write_text(ENTRY)
        (entry,) = skyrl_gym.load_registry(path)
        assert entry.source == f"{path}:3" and entry in skyrl_gym.list_envs()
        assert gym.make("mine/sums-v0").reset(seed=1)[1]["task_id"].startswith("train:arithmetic:4:")
        assert gym.spec("mine/sums-v0").max_episode_steps == 3
        for text in (ENTRY, ENTRY.replace("Sums.", "More sums.")):
            path.write_text(text)
            skyrl_gym.load_registry(path)  # again: nothing happens
        path.write_text(ENTRY.replace("steps: 3", "steps: 8"))
        with pytest.raises(ValueError, match=r"'mine/sums-v0' is already registered by .*mine.yaml:3; rename one"):
            skyrl_gym.load_registry(path)

    def test_by_the_environment_variable(self, tmp_path):
        path = tmp_path / "mine.yaml"
        path.write_text(ENTRY)
        run = subprocess.run(
            [sys.executable, "-m", "skyrl_gym"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": GYM_SOURCES, "SKYRL_ENVS_REGISTRY": str(path)},
        )
        lines = run.stdout.splitlines()
        assert lines[1].startswith("skyrl/text_math-v0") and lines[-1].startswith("mine/sums-v0")

    @pytest.mark.parametrize(
        ("old", "new", "sentence"),
        [
            ("id: mine/sums-v0", "id: mine sums", ":3: field 'id' must be of the form 'namespace/name-v0'"),
            (".env:TextMathEnv", ".env", ":4: field 'entry_point' must be of the form 'package.module:Class'"),
            ("description:", "descripton:", ":5: unknown field 'descripton'. Did you mean description"),
            ("    description: Sums.\n", "", ":3: field 'description' is missing"),
            ("steps: 3", "steps: 0", ":7: field 'max_episode_steps' must be a whole number above 0, got 0"),
            ("{difficulty: 4}", "[4]", ":6: field 'kwargs' must be a mapping"),
            (
                "steps: 3",
                "steps: 3\n    reward_range: [5, 1]",
                ":8: field 'reward_range' must be a list of two numbers",
            ),
            ("steps: 3", "steps: 3\n    reward_range: [0, .nan]", ":8: field 'reward_range' must be a list of two"),
            ("Sums.", "2024-13-45", "cannot be read: month must be in 1..12"),
            ("schema: 1", "schema: 2", "expected 'schema: 1'"),
            ("schema: 1", "schema: 1\nmore: 2", "unknown field 'more'"),
            ("schema: 1", "schema: 1\nschema: 1", "a field stands twice at the top"),
            ("description:", "description: x\n    description:", "field twice"),
            ("  - id: mine/sums-v0", "  - sums\n  - id: mine/sums-v0", ":3: an entry of 'envs' is a mapping"),
            ("  - id", "  - [id", "cannot be read: .*line 3"),
            ("mine/sums-v0", "skyrl/text_math-v0", ":3: .* is already registered by .*envs-registry.yaml"),
            ("mine/sums-v0", "CartPole-v1", ":3: .* is already registered by a call"),
        ],
    )
    def test_errors_name_file_line_and_field(self, tmp_path, old, new, sentence):
        path = tmp_path / "mine.yaml"
        assert old in ENTRY
        path.write_text(ENTRY.replace(old, new))
        with pytest.raises(ValueError, match="mine.yaml.*" + sentence):
            skyrl_gym.load_registry(path)

    def test_nothing_of_a_bad_file_is_registered(self, tmp_path):
        path = tmp_path / "mine.yaml"
        path.write_text(ENTRY + ENTRY.partition("envs:\n")[2])
        with pytest.raises(ValueError, match=r":8: field 'id': 'mine/sums-v0' is also the id of .*:3"):
            skyrl_gym.load_registry(path)
        assert "mine/sums-v0" not in gym.registry
        with pytest.raises(ValueError, match="cannot be read"):
            skyrl_gym.load_registry(tmp_path / "none.yaml")

    def test_resolve_env_id(self):
        assert skyrl_gym.resolve_env_id("text_math") == "skyrl/text_math-v0"
        for env_id in ("skyrl/text_math-v0", "CartPole-v1", "skyrl_gym:skyrl/text_math-v0"):
            assert skyrl_gym.resolve_env_id(env_id) == env_id
        with pytest.raises(ValueError, match=r"no environment 'text_mth'. Did you mean text_math"):
            skyrl_gym.resolve_env_id("text_mth")
        with pytest.raises(ValueError, match=r"`python -m .*; `module:mine/x-v0` imports a module first.$"):
            skyrl_gym.resolve_env_id("mine/x-v0")
        with pytest.raises(ValueError, match="names the module 'no_such_module'"):
            skyrl_gym.resolve_env_id("no_such_module:mine/sums-v0")


class Plain(gym.Env):
    """What Gymnasium asks for, and nothing of a TextEnv."""

    observation_space = action_space = UnicodeText(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say hi.", {}

    def step(self, action):
        return "Bye.", float(action == "hi"), True, False, {}


class TestCommandLine:
    def play(self, monkeypatch, text, *arguments):
        import io

        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return main(["play", *arguments])

    def test_table(self, capsys):
        assert main([]) == 0
        assert re.search(r"^skyrl/text_math-v0 +- +0 to 1.1 +train val test", capsys.readouterr().out, re.MULTILINE)

    def test_a_person_plays(self, monkeypatch, capsys):
        assert self.play(monkeypatch, "\\boxed{109}\n", "text_math", "--task-id", "val:arithmetic:1:en:0") == 0
        out = capsys.readouterr().out
        assert "49 + 60 = ?" in out and "reward 1.1 (correct 1, format 0.1)" in out and out.endswith("Solved.\n")

    def test_the_end_of_input_stops(self, monkeypatch, capsys):
        assert self.play(monkeypatch, "", "text_math", "--seed", "3", "--lang", "zh") == 0
        assert "Stopped." in capsys.readouterr().out
        monkeypatch.setattr(sys, "stdin", None)  # closed, as by <&- in a shell
        assert main(["play", "text_math", "--seed", "3"]) == 0 and "Stopped." in capsys.readouterr().out

    def test_rows_are_an_option_of_envs_that_play_them(self, monkeypatch, capsys, tmp_path):
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"prompt": "2 + 2 = ?", "ground_truth": "4"}))
        assert self.play(monkeypatch, "\\boxed{4}\n", "gsm8k", "--option", f"rows={rows}") == 0
        assert capsys.readouterr().out.endswith("Solved.\n")
        for wrong, said in ((["--option", "rows=3"], "no data file 3"), ([], "--option rows=...")):
            assert self.play(monkeypatch, "", "gsm8k", *wrong) == 2
            assert said in capsys.readouterr().err

    def test_a_mistake_is_a_sentence(self, monkeypatch, capsys):
        assert self.play(monkeypatch, "", "text_math", "--difficulty", "77") == 2
        assert "valid values are 1, 2" in capsys.readouterr().err

    def test_a_person_types_a_block_of_code(self, monkeypatch, capsys):
        env = gym.make("skyrl/code_lite-v0")
        env.reset(options={"task_id": "val:1:en:0"})
        typed = f"hello\n{env.unwrapped.expert_action()}\n"
        assert self.play(monkeypatch, typed, "code_lite", "--task-id", "val:1:en:0") == 0
        assert capsys.readouterr().out.endswith("Solved.\n")
        assert self.play(monkeypatch, "```python\nx = 1\n", "code_lite", "--task-id", "val:1:en:0") == 0
        assert capsys.readouterr().out.endswith("Stopped.\n")

    @pytest.mark.usefixtures("clean_registry")
    def test_an_environment_that_is_no_text_env_is_played_and_has_no_expert(self, monkeypatch, capsys, tmp_path):
        gym.register("mine/plain-v0", Plain)
        assert self.play(monkeypatch, "hi\n", "mine/plain-v0") == 0
        out = capsys.readouterr().out
        assert "\nSay hi.\n> reward 1" in out and "\nBye.\n" in out
        assert main(["demos", "mine/plain-v0", "--n", "1", "--out", str(tmp_path / "demos.jsonl")]) == 2
        assert "mine/plain-v0 has no tasks and no expert: it is no TextEnv." in capsys.readouterr().err
        for ask in (skyrl_gym.num_tasks, skyrl_gym.expert_trajectory):
            with pytest.raises(ValueError, match="has no tasks and no expert: it is no TextEnv"):
                ask("mine/plain-v0")
        assert self.play(monkeypatch, "left\n", "CartPole-v1") == 2
        assert "CartPole-v1 acts by Discrete(2), and only text can be played." in capsys.readouterr().err

    @pytest.mark.parametrize("word", ["split", "split=", "split=2024-13-45", "split=[a"])
    def test_an_option_without_a_value_is_refused(self, capsys, word):
        with pytest.raises(SystemExit):
            main(["play", "text_math", "--option", word])
        said = capsys.readouterr().err
        assert f"'{word}' is not NAME=VALUE" in said or f"'{word}' has no value of YAML: put it in quotes" in said


def test_importing_is_cheap():
    """Nothing heavy comes with the import; the time itself is benchmarked, not tested, as machines vary."""
    code = "import sys, skyrl_gym; print([m for m in ('torch', 'ray', 'pyarrow', 'pandas') if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": GYM_SOURCES}
    )
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.usefixtures("clean_registry")
class TestDocumentation:
    PAGES = Path(__file__).parents[2] / "docs" / "environments"

    def test_the_first_example_runs(self, capsys):
        page = (self.PAGES / "README.md").read_text(encoding="utf-8")
        exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})
        assert "1.1 {'correct': 1.0, 'format': 0.1}" in capsys.readouterr().out

    def test_the_rows_that_are_shown_load_and_are_played(self, tmp_path):
        page = (self.PAGES / "README.md").read_text(encoding="utf-8")
        path = tmp_path / "rows.jsonl"
        path.write_text(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
        *rows, prompt = load_rows(path)
        assert len(rows) == 3
        env = gym.make(skyrl_gym.resolve_env_id(prompt["env_class"]))
        assert env.reset(options={"task": prompt})[0] == "Write a sentence with two numbers."
        assert env.step("One and 2.")[1:3] == (0.0, True)
        env = gym.make("skyrl/text_math-v0")
        for row in rows:
            assert env.reset(options={"task": row})[0] == "12 * 34 = ? Answer in \\boxed{}."
            assert env.step("\\boxed{408}")[1] == 1.1

    def test_the_table_of_text_math_is_right(self):
        rows = re.findall(
            r"^\| (\d) \|.*\| ([\d,]+) / ([\d,]+) / ([\d,]+) \| [\d.]+ \|$",
            (self.PAGES / "text_math.md").read_text(),
            re.MULTILINE,
        )
        assert len(rows) == 8
        for difficulty, *sizes in rows:
            for split, size in zip(("train", "val", "test"), sizes, strict=True):
                options = {"difficulty": int(difficulty), "split": split}
                assert skyrl_gym.num_tasks("text_math", options) == int(size.replace(",", ""))


@pytest.mark.parametrize("env_id, argument", [("webshop_lite", "catalog"), ("alfworld_lite", "tasks")])
@pytest.mark.parametrize(
    "text, said", [("[" * 100_000, "not a JSON file"), ("{}", "expected a list"), ("[]", "expected")]
)
def test_a_file_that_is_no_list_is_a_sentence(tmp_path, env_id, argument, text, said):
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(ValueError, match=f"own.json: {said}"):
        gym.make(f"skyrl/{env_id}-v0", **{argument: str(tmp_path / "own.json")})
