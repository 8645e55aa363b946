"""Data: every format gives the same items, mistakes name row and field, subsets are nested."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from dataclasses import replace
from http.client import IncompleteRead
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from skyrl_eval import benchmarks, data
from skyrl_eval.types import Item, Source
from skyrl_trainer import files
from skyrl_trainer.errors import UserError
from tests.eval.made_up import ROWS, items, mmlu_pro

ROOT = Path(__file__).parents[2]
TEST_PATCH = "diff --git a/test_a.py b/test_a.py\n--- a/test_a.py\n+++ b/test_a.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"
SWE = {
    "repo": "made/up",
    "instance_id": "made__up-1",
    "base_commit": "0" * 40,
    "patch": "diff --git a/a.py b/a.py\n",
    "test_patch": TEST_PATCH,
    "problem_statement": "It is broken.",
    "hints_text": "",
    "created_at": "2026-01-01",
    "version": "1.0",
    "FAIL_TO_PASS": '["test_a.py::test_one"]',
    "PASS_TO_PASS": "[]",
    "environment_setup_commit": "0" * 40,
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("bench", ["browsecomp", "deepsearchqa", "gpqa", "gsm8k"])
def test_every_format_gives_the_same_items_and_fingerprint(bench: str, tmp_path: Path) -> None:
    read = [
        data.load(benchmarks.find(bench), str(write(tmp_path / f"rows{suffix}", ROWS[bench])))
        for suffix in data.SUFFIXES
    ]
    assert all(found.items == read[0].items and found.sha256 == read[0].sha256 for found in read)
    assert len(read[0].items) == len(ROWS[bench])


def test_the_fingerprint_is_that_of_the_items_whatever_their_order(tmp_path: Path) -> None:
    rows = ROWS["gsm8k"]
    read = [
        data.load(benchmarks.find("gsm8k"), str(write(tmp_path / f"{number}.jsonl", changed))).sha256
        for number, changed in enumerate((rows, rows[::-1], [rows[0] | {"answer": "#### 998"}, rows[1]]))
    ]
    assert read[0] == read[1] != read[2]


def test_the_fingerprint_covers_all_that_is_shown_and_that_decides_a_verdict(tmp_path: Path) -> None:
    """Choices of which the right letter stays, the starting code, the kind of answer, and worked examples."""
    changes: dict[str, dict[str, Any]] = {
        "mmlu-pro": {"options": ["red", "green", "indigo"]},
        "gpqa": {"Incorrect Answer 1": "gluon", "Incorrect Answer 2": "muon"},
        "livecodebench": {"starter_code": "class Solution:"},
        "deepsearchqa": {"answer_type": "Single Answer"},
    }
    for bench, change in changes.items():
        row, module = ROWS[bench][0], benchmarks.find(bench)
        read = [data.load(module, str(write(tmp_path / f"{bench}.jsonl", [each]))) for each in (row, row | change)]
        assert read[0].items[0].gold == read[1].items[0].gold and read[0].sha256 != read[1].sha256, bench
    write(tmp_path / "test.jsonl", [mmlu_pro(1)])
    without = data.load(benchmarks.find("mmlu-pro"), str(tmp_path / "test.jsonl"))
    folder = tmp_path / "shown"
    folder.mkdir()
    write(folder / "test.jsonl", [mmlu_pro(1)])
    write(folder / "validation.jsonl", [mmlu_pro(9, cot_content="The answer is (B).")])
    assert data.load(benchmarks.find("mmlu-pro"), str(folder)).sha256 != without.sha256


def test_a_folder_is_read_whole_and_its_validation_file_is_shown_as_examples(tmp_path: Path) -> None:
    shot = mmlu_pro(9, cot_content="A: Let's think step by step. It is green. The answer is (B).")
    write(tmp_path / "validation.jsonl", [shot])
    write(tmp_path / "test-1.jsonl", [mmlu_pro(1)])
    write(tmp_path / "test-2.parquet", [mmlu_pro(2)])
    found = data.load(benchmarks.find("mmlu-pro"), str(tmp_path))
    assert [item.item_id for item in found.items] == ["1", "2"]
    examples = "no worked examples are shown, as no validation file is beside the test file"
    assert examples not in found.notes
    assert examples in data.load(benchmarks.find("mmlu-pro"), str(tmp_path / "test-1.jsonl")).notes
    asked = benchmarks.find("mmlu-pro").env(found.items[0]).options["task"]["question"]
    assert asked.startswith("Question:\nWhich colour is number 9?\nOptions:\nA. red\nB. green\nC. blue\nAnswer: Let's")
    assert "It is green. The answer is (B).\n\nQuestion:\nWhich colour is number 1?" in asked
    assert asked.endswith("C. blue\nAnswer: Let's think step by step.") and "N/A" not in asked


def test_five_examples_of_the_same_category_are_shown(tmp_path: Path) -> None:
    shots = [mmlu_pro(number, category=kind) for number in range(10, 17) for kind in ("art", "law")]
    for number, shot in enumerate(shots):
        shot["question_id"] = str(number)
    write(tmp_path / "validation.jsonl", shots)
    write(tmp_path / "test.jsonl", [mmlu_pro(1, category="law")])
    [item] = data.load(benchmarks.find("mmlu-pro"), str(tmp_path)).items
    asked = benchmarks.find("mmlu-pro").env(item).options["task"]["question"]
    assert re.findall(r"number (\d+)\?", asked) == ["10", "11", "12", "13", "14", "1"]


def test_images_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    path = str(write(tmp_path / "rows.jsonl", ROWS["hle"]))
    text = data.load(benchmarks.find("hle"), path)
    assert [item.item_id for item in text.items] == ["h1", "h2"]
    assert "1 items with images are left out" in text.notes
    everything = data.load(benchmarks.find("hle"), path, images=True)
    assert benchmarks.find("hle").env(everything.items[2]).options["task"]["image"] == "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("bench", "change", "said"),
    [
        ("hle", {"answer": None}, "row 2, field 'answer'"),
        ("hle", {"answer_type": "essay"}, "row 2, field 'answer_type'"),
        ("mmlu", {"answer": 4}, "row 2, field 'answer'"),
        ("mmlu", {"choices": ["a", "b"]}, "row 2, field 'choices'"),
        ("mmlu-pro", {"answer": "Z"}, "row 2, field 'answer'"),
        ("mmlu-pro", {"options": ["a", "N/A", "c"], "answer": "C"}, "field 'answer' is C, and field 'options' has 2"),
        ("gsm8k", {"answer": "42"}, "row 2, field 'answer'"),
        ("gsm8k", {"answer": "#### 18 dollars"}, "row 2, field 'answer'"),
        ("gsm8k", {"answer": "#### 50%"}, "row 2, field 'answer'"),
        ("gpqa", {"Correct Answer": None}, "row 2, field 'Correct Answer'"),
        ("math", {"solution": "no box", "answer": ""}, "field 'solution'"),
        ("deepsearchqa", {"answer_type": "Many"}, "row 2, field 'answer_type'"),
        ("browsecomp", {"canary": "another"}, "row 2, field 'problem'"),
        ("livecodebench", {"public_test_cases": "["}, "row 2, field 'public_test_cases'"),
    ],
)
def test_a_wrong_schema_names_the_row_and_the_field(
    bench: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    rows = [ROWS[bench][0], ROWS[bench][1] | change]
    with pytest.raises(UserError, match=re.escape(said)):
        data.load(benchmarks.find(bench), str(write(tmp_path / "rows.jsonl", rows)))


def test_of_a_folder_as_it_is_published_only_the_official_items_are_read(tmp_path: Path) -> None:
    """Not the rows to train on, nor the larger sets that hold the same questions once more."""
    rows = [json.dumps(ROWS["gsm8k"][0] | {"question": f"{n} + {n}?"}) + "\n" for n in range(6)]
    (tmp_path / "test.jsonl").write_text("".join(rows[:2]))
    (tmp_path / "test_socratic.jsonl").write_text("".join(rows[:2]))
    (tmp_path / "example_model_solutions.jsonl").write_text('{"another": "schema"}')
    (tmp_path / "train.jsonl").write_text("".join(rows[2:]))
    found = data.load(benchmarks.find("gsm8k"), str(tmp_path))
    assert [item.question for item in found.items] == ["0 + 0?", "1 + 1?"]
    assert found.notes == ["2 items of the official 1319 are in the data"]
    gpqa = benchmarks.find("gpqa").source
    for name in ("gpqa_diamond", "gpqa_main", "gpqa_extended"):
        (tmp_path / f"{name}.csv").touch()
    assert [path.name for path in data.locate(gpqa, str(tmp_path))[2]] == ["gpqa_diamond.csv"]
    (alone := tmp_path / "alone").mkdir()
    for names in (["train-0.jsonl"], ["mine.jsonl", "train-0.jsonl"]):
        (alone / names[0]).touch()
        assert [path.name for path in data.locate(gpqa, str(alone))[2]] == names[:1], "what there is, is read"


def test_more_items_than_the_official_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS["gsm8k"][:2]))
    gsm8k = benchmarks.find("gsm8k")
    monkeypatch.setattr(type(gsm8k), "source", replace(gsm8k.source, size=1))
    assert data.load(gsm8k, str(path)).notes == ["2 items of the official 1 are in the data"]


class Plain(benchmarks.Benchmark):
    name = "plain"

    class Row(data.Row):
        asked: str

    def item_of(self, row: Any) -> Item:
        return self.item(row.asked, row.asked, "")


def test_a_benchmark_needs_neither_a_prompt_nor_a_source(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"asked": "What is {this}?"}\n')
    (item,) = data.load(Plain(), str(path)).items
    assert Plain().env(item).options["task"]["question"] == "What is {this}?"
    with pytest.raises(UserError, match="names no source of its rows: give --data"):
        data.load(Plain(), None)


def test_what_is_not_a_row_or_not_a_file_is_named(tmp_path: Path) -> None:
    gsm8k = benchmarks.find("gsm8k")
    empty = tmp_path / "empty"
    empty.mkdir()
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS["gsm8k"][0]) + "\n{")
    with pytest.raises(UserError, match=r"rows\.jsonl row 2 is not JSON"):
        data.load(gsm8k, str(path))
    with pytest.raises(UserError, match="is not a file here that ends in"):
        data.load(gsm8k, str(tmp_path / "absent.parquet"))
    with pytest.raises(UserError, match="has no file that ends in"):
        data.load(gsm8k, str(empty))
    with pytest.raises(UserError, match="Did you mean gsm8k"):
        benchmarks.find("gsm9k")


def test_repeated_rows_get_ids_of_their_own_and_contradicting_ones_are_refused(tmp_path: Path) -> None:
    row = ROWS["gsm8k"][0]
    twice = data.load(benchmarks.find("gsm8k"), str(write(tmp_path / "twice.jsonl", [row, row])))
    assert twice.items[1].item_id == twice.items[0].item_id + "#2"
    rows = [ROWS["hle"][0], ROWS["hle"][0] | {"answer": "8"}]
    with pytest.raises(UserError, match="two different items with the id 'h1'"):
        data.load(benchmarks.find("hle"), str(write(tmp_path / "clash.jsonl", rows)))


def test_mmlus_questions_that_contradict_each_other_are_two(tmp_path: Path) -> None:
    rows = [ROWS["mmlu"][0] | {"answer": answer} for answer in (0, 1)]
    found = data.load(benchmarks.find("mmlu"), str(write(tmp_path / "two.jsonl", rows)))
    assert [item.gold for item in found.items] == ["A", "B"] and len({item.item_id for item in found.items}) == 2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gsm8k", {"answer": "It is ten.\n#### ten"}),
        ("gsm8k", {"answer": "#### "}),
        ("hle", {"answer": ""}),
        ("hle", {"question": ""}),
        ("gpqa", {"Question": ""}),
        ("gpqa", {"Correct Answer": ""}),
        ("livecodebench", {"private_test_cases": ""}),
    ],
)
def test_a_row_that_no_answer_or_any_would_be_right_for_is_none(name: str, change: dict[str, str]) -> None:
    schema = benchmarks.find(name).Row
    schema.model_validate(ROWS[name][0])
    with pytest.raises(ValidationError):
        schema.model_validate(ROWS[name][0] | change)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 3), st.randoms())
def test_subsets_are_nested_and_do_not_depend_on_the_order(small: int, large: int, seed: int, rng: Any) -> None:
    everything = [Item("b", str(number), "") for number in range(100)]
    shuffled = rng.sample(everything, 100)
    small, large = sorted((small, large))
    assert data.subset(everything, small, seed) == data.subset(shuffled, large, seed)[:small]
    assert sorted(item.item_id for item in data.subset(shuffled, None)) == sorted(item.item_id for item in everything)


def test_both_schemas_of_swe_bench_give_the_same_item_but_for_script_and_image() -> None:
    old = items("swe-verified", [SWE])[0]
    lists = {"FAIL_TO_PASS": ["test_a.py::test_one"], "PASS_TO_PASS": []}
    new_row = SWE | lists | {"eval_script": "#!/bin/bash\n", "image": "made/image", "log_parser": "parse_log_pytest"}
    new = items("swe-verified", [new_row])[0]
    assert old.gold["FAIL_TO_PASS"] == new.gold["FAIL_TO_PASS"] == ["test_a.py::test_one"]
    assert (old.item_id, old.question) == (new.item_id, new.question)
    assert new.gold["eval_script"] == "#!/bin/bash\n" and new.meta["container"] == "made/image"
    assert "pytest -rA test_a.py" in old.gold["eval_script"]
    assert old.meta["container"] == "swebench/sweb.eval.x86_64.made_1776_up-1:latest"
    with pytest.raises(ValidationError, match="FAIL_TO_PASS"):  # whose patch nothing would test
        items("swe-verified", [SWE | {"FAIL_TO_PASS": "[]"}])
    with pytest.raises(UserError, match="made__up-1, field 'eval_script'"):
        items("swe-verified", [SWE | {"FAIL_TO_PASS": '["test one (app.tests)"]'}])
    assert items("swe-multilingual", [new_row])[0].bench == "swe-multilingual"


def test_nothing_that_the_grader_knows_is_in_what_an_env_gets() -> None:
    secret = "471108154711"
    changed = {
        "hle": {"answer": secret},
        "deepsearchqa": {"answer": secret},
        "math": {"answer": secret},
        "gsm8k": {"answer": f"#### {secret}"},
        "livecodebench": {"private_test_cases": json.dumps([{"input": secret, "output": secret}])},
    }
    for bench, change in changed.items():
        for item in items(bench, [row | change for row in ROWS[bench]]):
            assert secret in str(item.gold)
            assert secret not in str(benchmarks.find(bench).env(item))
    graded = {"test_patch": TEST_PATCH.replace("a = 2", secret), "FAIL_TO_PASS": f'["{secret}::a"]'}
    swe = items("swe-verified", [SWE | {"patch": secret} | graded])[0]
    assert secret not in str(benchmarks.find("swe-verified").env(swe))
    for item in items("deepsearchqa"):
        assert item.meta["kind"] not in str(benchmarks.find("deepsearchqa").env(item))


def test_a_file_that_is_fetched_is_kept_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once: who reads it meanwhile never finds half of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    content = b"problem,answer\n"
    source = Source(url="https://made.up/tests.csv", sha256=hashlib.sha256(content).hexdigest()[:8])
    cached = tmp_path / "skyrl-eval/tests.csv"

    def fetched(answer: Any) -> None:
        def read() -> bytes:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(data.urllib.request, "urlopen", lambda *_, **__: SimpleNamespace(read=read))

    fetched(IncompleteRead(b"problem"))
    with pytest.raises(UserError, match=r"tests\.csv cannot be fetched"):
        data._download(source)
    fetched(content)
    with monkeypatch.context() as full:
        full.setattr(files, "flush", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(UserError, match=r"tests\.csv cannot be written: No space left"):
            data._download(source)
    assert not list(cached.parent.iterdir())
    assert data._download(source) == cached
    before = cached.stat().st_ino, cached.stat().st_mtime_ns
    assert data._download(source).read_bytes() == content
    assert (cached.stat().st_ino, cached.stat().st_mtime_ns) == before
