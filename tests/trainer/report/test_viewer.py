"""trajectories.html: what is in the file, and what a person sees who clicks through it, in a real engine."""

from __future__ import annotations

import base64
import json
import math
import shutil
import subprocess
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from benchmarks.viewer import Browser, find_browser, make_run
from skyrl_trainer import cli
from skyrl_trainer.errors import UserError
from skyrl_trainer.report import viewer
from skyrl_trainer.report.history import MetricsWriter, write_spans
from skyrl_trainer.report.html import write_report
from skyrl_trainer.report.page import MAX_CHARACTERS
from skyrl_trainer.report.viewer import token_texts, write_viewer
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.types import RolloutBatch, Sample, StopReason, Trajectory, Turn
from tests.trainer.report.test_report import Page

HERE = Path(__file__).parent
NASTY = "</script><script>pwned=1;document.title='pwned'</script><!-- <img src=x onerror=pwned=1>\u2028{{index}}"


def byte_tokenizer() -> Tokenizer:
    """One token a byte: id = the byte, and 256 the end of a turn."""
    from tokenizers.pre_tokenizers import ByteLevel

    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept} | {byte: chr(256 + n) for n, byte in enumerate(moved)}
    assert set(letters.values()) == set(ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|im_end|>"])
    return made


BYTES = byte_tokenizer()


def decode(ids: list[int]) -> str:
    return BYTES.decode(ids, skip_special_tokens=False)


def said(action: str, observation: str = "", reward: float = 0.0, advantage: float | None = None, **more: Any) -> Turn:
    ids = [*action.encode(), 256]
    turn = Turn(
        [1, 2, 3], ids, [-0.5 * (n % 3) for n in range(len(ids))], [4] * len(ids), action, observation, reward, **more
    )
    turn.advantages = [] if advantage is None else [advantage * (-1) ** n for n in range(len(ids))]
    return turn


def tried(name: str, task: str, env: str, difficulty: int, turns: list[Turn], success: bool = False) -> Trajectory:
    sample = Sample(task, f"skyrl/{env}-v0", 7, {"split": "train", "difficulty": difficulty}, ground_truth=NASTY)
    made = Trajectory(name, sample, int(name[-1]), 7, turns, prompt=[{"role": "system", "content": NASTY}])
    if turns:
        turns[-1].info["success"] = success
    return made


def small_run(run: Path, name: str = "last") -> Path:
    """Two steps, four tasks, six trajectories: of success, failure, half characters, tools, and texts that attack."""
    (run / "model" / name).mkdir(parents=True)
    BYTES.save(str(run / "model" / name / "tokenizer.json"))
    store = JsonlTrajectoryStore(run / "trajectories")
    calls = [{"tool": "search", "args": {"q": NASTY, "x": math.nan}, "result": NASTY}]
    calls.append({"tool": None, "args": None, "error": "There is no tool 'serach'."})
    good = [said("a国€", NASTY, advantage=0.5, tool_calls=calls), said(NASTY, reward=1.1, advantage=0.5)]
    good[1].reward_parts, good[1].seconds = {"correct": 1.0, "format": 0.1}, {"generate": 0.25, "env": 0.01}
    other = [said("a国!", "no\ud800", advantage=-1.0), said("b", new_segment=True, info={"valid_action": False})]
    broken = tried("2/1/0", "shop#8", "webshop_lite", 2, [])
    broken.stop_reason, broken.error = StopReason.ENV_ERROR, NASTY
    shop = tried("2/1/1", "shop#9", "webshop_lite", 2, [said("x", reward=-1.0)])
    nan = tried("2/2/0", NASTY, "tool_use", 1, [said("y", reward=math.nan)])
    first = tried("2/0/0", "calc#1", "tool_use", 1, good, True)
    store.write(RolloutBatch(2, [[first, tried("2/0/1", "calc#1", "tool_use", 1, other)], [broken, shop], [nan]]))
    store.write(RolloutBatch(1, [[tried("1/0/0", "calc#2", "tool_use", 1, [said("z")])]]))
    return run


def index_of(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]], Page]:
    page = Page(out.read_text(encoding="utf-8"))
    index, *blocks, _ = page.scripts
    return (
        json.loads(index),
        [json.loads(zlib.decompress(base64.b64decode(block))) for block in blocks if block.strip()],
        page,
    )


# ---- The file


def test_an_index_row_and_a_block_a_trajectory(tmp_path: Path) -> None:
    out = tmp_path / "t.html"
    note = write_viewer(small_run(tmp_path / "run"), out)
    index, blocks, _ = index_of(out)
    assert note.startswith("6 trajectories, 2 steps from 1 to 2, 0.0 MB") and index["notes"] == []
    assert [row[0] for row in index["rows"]] == ["2/0/0", "2/0/1", "2/1/0", "2/1/1", "2/2/0", "1/0/0"]
    row = dict(zip(index["fields"], index["rows"][0], strict=True))
    assert row == {
        "id": "2/0/0", "step": 2, "task": "calc#1", "env": "tool_use-v0", "difficulty": 1, "reward": 1.1,
        "outcome": "success", "stop": "terminated", "turns": 2, "tokens": 8 + len(NASTY.encode()) + 1,
    }  # fmt: skip
    assert index["rows"][4][5] is None and len(blocks) == 6
    turn = blocks[0]["turns"][0]
    assert turn["texts"] == ["a", "", "", "国", "", "", "€", "<|im_end|>"] and turn["output_ids"][1:4] == [
        0xE5,
        0x9B,
        0xBD,
    ]
    assert (
        turn["advantages"] == [0.5, -0.5] * 4 and turn["prompt_ids"] == 3 and turn["tool_calls"][0]["args"]["x"] is None
    )
    assert blocks[1]["turns"][0]["observation"] == "no?"  # half of a pair of surrogates is no character
    assert blocks[1]["turns"][1]["context"] == "\x01\x02\x03" and blocks[0]["facts"]["right answer"] == NASTY


def test_the_colour_of_a_token_is_by_the_size_of_its_advantage(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    store = JsonlTrajectoryStore(run / "trajectories")
    for step in store.steps():
        batch = store.read(step)
        for turn in (turn for each in batch.trajectories for turn in each.turns):
            turn.advantages = [-0.75] * len(turn.output_ids)
        store.write(batch)
    write_viewer(run, tmp_path / "t.html")
    assert index_of(tmp_path / "t.html")[0]["scale"] == 0.75


def test_nothing_that_was_said_is_html(tmp_path: Path) -> None:
    run = small_run(tmp_path / "<i>{{blocks}}&")
    write_viewer(run, tmp_path / "t.html")
    index, _, page = index_of(tmp_path / "t.html")
    assert (
        page.tags.count("script") == 8 and not {"i", "img", "link", "iframe"} & set(page.tags) and page.addresses == []
    )
    assert index["name"] == run.name and index["rows"][4][2] == NASTY
    text = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "innerHTML" not in text and "document.write" not in text
    assert "http" not in page.scripts[-1] and "url(" not in text


def test_the_newest_that_fit_go_in_and_what_is_left_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = make_run(tmp_path / "run", 40, 8), tmp_path / "t.html"
    monkeypatch.setattr(viewer, "MAX_TRAJECTORIES", 13)
    assert "; 27 more are left out (at most 13 trajectories and 50 MB go in): --step" in write_viewer(run, out)
    index, blocks, _ = index_of(out)
    assert [row[1] for row in index["rows"]] == [4] * 10 + [3] * 3 and len(blocks) == 13
    monkeypatch.setattr(viewer, "MAX_TRAJECTORIES", 2_000)
    monkeypatch.setattr(viewer, "MAX_BYTES", 60_000)
    note = write_viewer(run, out)
    index, _, _ = index_of(out)
    assert 40_000 < out.stat().st_size < 60_000 and f"; {40 - len(index['rows'])} more are left out" in note
    monkeypatch.undo()
    write_viewer(run, out, steps=[2, 1])
    assert {row[1] for row in index_of(out)[0]["rows"]} == {1, 2}


def test_long_texts_are_cut_and_say_so(tmp_path: Path) -> None:
    turn = said("x" * (MAX_CHARACTERS + 5), "o" * (MAX_CHARACTERS + 1234))
    store = JsonlTrajectoryStore(tmp_path / "trajectories")
    store.write(RolloutBatch(1, [[tried("1/0/0", "t", "tool_use", 1, [turn])]]))
    note = write_viewer(tmp_path, tmp_path / "t.html")
    _, (block,), _ = index_of(tmp_path / "t.html")
    assert block["turns"][0]["observation"].endswith("o… (1,234 characters more)")
    assert "no tokenizer of this run is here" in note and block["turns"][0]["texts"] == []


def test_a_damaged_step_is_a_note(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    JsonlTrajectoryStore(run / "trajectories").path(2).write_bytes(b"nothing")
    assert "step_000002.jsonl.gz cannot be read" in write_viewer(run, tmp_path / "t.html")
    assert len(index_of(tmp_path / "t.html")[0]["rows"]) == 1


def test_a_torn_tokenizer_is_a_note_and_one_that_is_being_written_is_none(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    aside = run / "model/.tmp-best"
    aside.mkdir()
    (aside / "tokenizer.json").write_text("")
    assert "no tokenizer" not in write_viewer(run, tmp_path / "t.html")
    for damage in ("", "{}"):
        (run / "model/last/tokenizer.json").write_text(damage)
        assert "no tokenizer of this run is here" in write_viewer(run, tmp_path / "t.html")


def test_view_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run")
    assert cli.main(["view", str(run), "--step", "1", "-o", str(tmp_path / "one.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'one.html'}: 1 trajectory, step 1, 0.0 MB\n"
    assert cli.main(["view", str(run), "--step", "1", "7"]) == 2
    assert "no trajectories of --step 7: it has 2 steps from 1 to 2." in capsys.readouterr().err
    assert cli.main(["view", str(tmp_path)]) == 2
    assert "has no trajectories: give the folder of a run" in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/t\.html cannot be written: "):
        write_viewer(run, tmp_path / "file" / "t.html")


# ---- Tokens


@given(st.lists(st.sampled_from([97, 32, 0xE5, 0x9B, 0xBD, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 256]), max_size=40))
def test_token_texts_are_the_text(ids: list[int]) -> None:
    texts = token_texts(ids, decode)
    assert len(texts) == len(ids) and "".join(texts) == decode(ids)


@given(st.text(max_size=30))
def test_a_character_is_whole_and_stands_at_its_last_byte(text: str) -> None:
    texts = token_texts(list(text.encode()), decode)
    expected = [piece for letter in text for piece in [""] * (len(letter.encode()) - 1) + [letter]]
    # The replacement character looks as broken bytes do, so it waits for what follows.
    assert texts == expected or "\ufffd" in text


def test_a_character_of_byte_tokens_after_a_line_break_is_whole() -> None:
    """As in Llama 2, whose decoder takes all byte tokens that follow each other as one text."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ids = [256, 10, *"😀".encode(), 256]
    assert token_texts(ids, lambda ids: made.decode(ids, skip_special_tokens=False)) == [
        " a",
        "\n",
        "",
        "",
        "",
        "😀",
        " a",
    ]


# ---- A click-through


def in_chromium(program: str, page: Path, folder: Path) -> dict[str, Any]:
    browser = Browser(program, folder / "profile")
    try:
        browser.call("Page.navigate", url=page.as_uri())
        browser.wait("document.querySelectorAll('#list a').length > 0")
        return browser.run(f"{(HERE / 'viewer_clicks.js').read_text()}\nclicks()")
    finally:
        browser.close()


def in_node(program: str, page: Path, folder: Path, clicks: Path = HERE / "viewer_clicks.js") -> dict[str, Any]:
    command = [program, HERE / "viewer_dom.js", page, clicks]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_click_through(tmp_path: Path) -> None:
    write_viewer(small_run(tmp_path / "run"), page := tmp_path / "t.html")
    engines = [(in_chromium, find_browser()), (in_node, shutil.which("node"))]
    there = [(engine, program) for engine, program in engines if program]
    if not there:
        warnings.warn("The viewer's page was not opened: neither chromium nor node is on PATH.", stacklevel=1)
    for engine, program in there:
        check(engine(program, page, tmp_path))


def check(seen: dict[str, Any]) -> None:
    everything = ["2/0/0", "2/0/1", "2/1/0", "2/1/1", "2/2/0", "1/0/0"]
    assert seen["start"] == ["6 of 6", everything]
    assert seen["filters"] == {
        "env": ["2/1/0", "2/1/1"], "difficulty": ["2/1/0", "2/1/1"], "outcome": ["2/1/0"], "stop": ["2/1/0"],
        "step": ["1/0/0"], "low": ["2/0/0"], "high": ["2/1/1"], "search": ["2/1/1"],
    }  # fmt: skip
    assert seen["sorted"][0][:2] == ["2/1/1", "2/0/1"] and seen["sorted"][1][:2] == ["2/2/0", "2/0/0"]
    assert seen["sorted"][2] == "↓ reward"
    assert seen["down"] == ["2/0/0", "2/0/1", "#2/0/1"]
    # Half of the full colour's opacity: 0.5 of the page's largest advantage, 1.0, of 0.75.
    assert seen["tokens"][:4] == [
        ["a", "t plus", "0.375"],
        ["国", "t minus", "0.125"],
        ["€", "t plus", "0.125"],
        ["<|im_end|>", "t minus", "0.375"],
    ]
    assert "".join(text for text, *_ in seen["tokens"][4:]) == NASTY + "<|im_end|>"
    assert seen["tip"][:9] == ['"€"', "token", "5 of 8", "id", "226", "logprob", "-0.5", "advantage", "0.5"]
    assert [kind for _, kind, _ in seen["logprob"][:4]] == ["t", "t unlikely", "t unlikely", "t unlikely"]
    assert NASTY in seen["texts"] and "error: There is no tool 'serach'." in seen["texts"]
    assert (
        "turn 2 of 2reward 1.1 (correct 1, format 0.1)" in seen["about"][1]
        and "generate 0.25, env 0.01 s" in seen["about"][1]
    )
    assert seen["turn"] == ["1", "0"]
    assert seen["others"] == ["nothing", "2/0/1 (no success, 0)"]
    assert seen["compared"] == [["2/0/0", "2/0/1"], "first difference: turn 1, token 5", ["€", "!"], 2, "#2/0/0,2/0/1"]
    assert seen["back"] == "#2/0/0"
    assert seen["failed"] == [[NASTY], ["failed"]]
    assert seen["unknown"] == ["‹ listThere is no 9/9/9 on this page.", ["#"]]
    # The keys that scroll move what was opened, and what was folded stays so in another shade.
    assert seen["focus"] == ["detail", "shade"]
    assert seen["folds"][0] == seen["folds"][1] and set(seen["folds"][0]) == {True, False}
    assert seen["title"] == "run: trajectories" and seen["pwned"] == "undefined"


def test_the_benchmarks_trajectories_are_the_same_each_time(tmp_path: Path) -> None:
    files = [make_run(tmp_path / name, 4, 8) / "trajectories" / "step_000001.jsonl.gz" for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


LOOK = """
const texts = selector => [...document.querySelectorAll(selector)].map(node => node.textContent);
async function clicks() {
  if (!texts(".chart").length) {
    await new Promise(done => setTimeout(done, 50));
    location.hash = "#1/0/0";
    for (let k = 0; k < 100 && !texts("h2").length; k++) await new Promise(done => setTimeout(done, 10));
  }
  return { titles: texts("h2"), charts: texts("h3"), legends: texts(".legend"), calls: texts(".call") };
}
"""


def look(page: Path, folder: Path) -> dict[str, Any]:
    """What stands on a page when it is opened; of trajectories, on that of 1/0/0."""
    (clicks := folder / "look.js").write_text(LOOK)
    program = shutil.which("node")
    assert program, "node is not on PATH; this test opens a page"
    return in_node(program, page, folder, clicks)


def reported(folder: Path, steps: int, pauses: tuple[int, ...] = (), more: int = 0) -> Path:
    """report.html of a run that stood still for five minutes before each of `pauses`."""
    folder.mkdir()
    writer, now = MetricsWriter(folder), 1.79e9
    for step in range(1, steps + 1):
        now += 300 if step in pauses else 0
        writer.write({"step": step, "success": 0.5, "reward/mean": 0.2, **{f"more/{k}": 0.1 for k in range(more)}})
        write_spans(folder, step, {"rollout": [(now, now + 1)], "train": [(now + 1, now + 2)]})
        now += 2
    write_report([folder], page := folder / "report.html")
    return page


@pytest.mark.parametrize(("pauses", "first"), [((), 1), ((4,), 4), ((11,), 11), ((4, 8), 8), ((2, 16), 16)])
def test_a_report_shows_the_time_since_the_last_pause(tmp_path: Path, pauses: tuple[int, ...], first: int) -> None:
    seen = look(reported(tmp_path / "run", 16, pauses), tmp_path)
    assert f"Who worked when, steps {first} to 16" in seen["charts"] and seen["titles"][-1] == "Settings"


def test_a_report_of_a_long_run_is_drawn(tmp_path: Path) -> None:
    seen = look(reported(tmp_path / "run", 1_500, more=90), tmp_path)
    assert seen["titles"] == ["Curves", "Time", "Settings"]


def test_a_curve_of_training_is_not_called_held_out(tmp_path: Path) -> None:
    assert look(reported(tmp_path / "run", 3), tmp_path)["legends"][0] == "training"


def test_calls_of_tools_are_shown_whatever_the_env_reports(tmp_path: Path) -> None:
    calls: list[Any] = ["look(here)", {"tool": "sql", "args": {"q": 1}, "result": {"rows": [1, 2]}}]
    store = JsonlTrajectoryStore(tmp_path / "trajectories")
    store.write(RolloutBatch(1, [[tried("1/0/0", "mine#1", "mine", 1, [said("a", tool_calls=calls)])]]))
    write_viewer(tmp_path, page := tmp_path / "t.html")
    assert look(page, tmp_path)["calls"] == ['"look(here)"', 'sql {"q":1}→ {"rows":[1,2]}']


def test_turns_stand_in_the_order_in_which_they_were_played(tmp_path: Path) -> None:
    turns = [said("A1", info={"skyrl/call": 0}), said("A2", info={"skyrl/call": 2})]
    turns += [said("B1", info={"skyrl/call": 1}, new_segment=True), said("B2")]
    shown = viewer.from_trajectory(1, tried("1/0/0", "nim#1", "nim", 1, turns), decode).turns
    assert [turn["action"] for turn in shown] == ["A1", "B1", "A2", "B2"]
    assert not any("skyrl/call" in turn["info"] for turn in shown), "a mark of ours, not the environment's"
    assert [turn["context"] for turn in shown] == ["\x01\x02\x03", "\x01\x02\x03", None, None]
