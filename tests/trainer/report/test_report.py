"""What a run leaves for people: metrics.jsonl, the table, the tracker's files and report.html."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import resource
import signal
import time
import warnings
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.viewer import Browser, find_browser
from skyrl_trainer import files
from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.history import MetricsWriter, read_metrics
from skyrl_trainer.report.html import write_report
from skyrl_trainer.report.page import write_page
from skyrl_trainer.report.table import LiveTable, header, row
from skyrl_trainer.report.trackers import Tracker
from skyrl_trainer.report.viewer import write_viewer
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from tests.trainer.report.synthetic import NASTY, make_run, rollouts, trajectory


class Page(HTMLParser):
    """Elements by tag, and the text of every script, as a browser cuts them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)

    @property
    def runs(self) -> list[dict]:
        return json.loads(self.scripts[0])["runs"]


def page_of(*runs: Path) -> Page:
    out = runs[0].parent / "out.html"
    write_report(list(runs), out)
    return Page(out.read_text(encoding="utf-8"))


def index_of(out: Path) -> dict:
    return json.loads(Page(out.read_text(encoding="utf-8")).scripts[0])


# ---- metrics.jsonl


def test_metrics_come_back_and_what_is_not_a_number_is_null_on_disk(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 0, "eval/success": 0.5})
    writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 0, "eval/success": 0.5}', '{"step": 1, "loss": null, "grad_norm": null}']
    rows = read_metrics(tmp_path)
    assert rows[0] == {"step": 0.0, "eval/success": 0.5}
    assert math.isnan(rows[1]["loss"])


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(6):
        writer.write({"step": step, "loss": 0.1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote
    writer = MetricsWriter(tmp_path, last_step=3)
    for step in (4, 5):
        writer.write({"step": step, "loss": 0.2})
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows] == [0.1] * 4 + [0.2] * 2


def test_a_new_run_keeps_an_older_runs_metrics_beside(tmp_path: Path) -> None:
    for loss in (1.0, 2.0, 3.0):
        MetricsWriter(tmp_path).write({"step": 1, "loss": loss})
    assert [read_metrics(tmp_path)[0]["loss"]] == [3.0]
    (tmp_path / "metrics.1.jsonl").unlink()  # by hand: the next one must not take the place of the second
    MetricsWriter(tmp_path).write({"step": 1, "loss": 4.0})
    kept = {path.name: json.loads(path.read_text())["loss"] for path in tmp_path.iterdir()}
    assert kept == {"metrics.1.jsonl": 3.0, "metrics.2.jsonl": 2.0, "metrics.jsonl": 4.0}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2, is no JSON object of numbers with a step: 'nonsense'"):
        read_metrics(tmp_path)

    for line in ('{"loss": 1}', '{"step": null}', '{"step": "one"}', "[]"):
        (tmp_path / "metrics.jsonl").write_text(line + '\n{"step": 1}\n')
        with pytest.raises(UserError, match=r"metrics.jsonl, line 1, is no JSON object of numbers with a step"):
            MetricsWriter(tmp_path, last_step=1)


@pytest.mark.parametrize("torn", [b'{"step": 2, "a\xff', b"\xff\xfe", b'{"loss": 0.5', b'{"loss": 0.5}'])
def test_a_torn_last_line_is_left_out_whatever_its_bytes(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + torn)
    assert read_metrics(tmp_path) == [{"step": 1.0}]
    MetricsWriter(tmp_path, last_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


# ---- The table


def test_redirected_output_is_one_plain_line_a_step() -> None:
    out = io.StringIO()
    with LiveTable(2, console=Console(file=out, width=40)) as table:
        table.phase("starting Ray and the engines")  # so that its first minute is not silent
        table.step({"step": 0, "eval/success": 0.39, "time/eval": 1.0})
        table.phase("rollout")
        table.step({"step": 1, "reward/total": 0.5, "kl/engine_learner": math.nan, "tokens/per_second": 12345.6})
        table.note("saved [red]checkpoints/step_1[/red]")
        table.step({"step": 2, "reward/total": 0.5, "failed": 3.0, "eval/failed": 1.0})
    began, *lines = out.getvalue().splitlines()
    assert began == "starting Ray and the engines ..." and lines[0] == header()
    assert lines[1].split() == ["0", "0.390", "1.00s"]
    assert lines[2].split()[:4] == ["1", "0.500", "12,346", "nan"]
    assert lines[3] == "saved [red]checkpoints/step_1[/red]"
    assert lines[5] == "step 2: 4 episodes failed; `skyrl-trainer view` shows why"
    assert len(lines) == 6 and "\x1b" not in out.getvalue()


def test_a_phase_in_a_programs_own_words_is_no_markup() -> None:
    """A closing tag that nothing has opened would end the run, as it is drawn."""
    out = io.StringIO()
    with LiveTable(2, console=Console(file=out, width=90, force_terminal=True)) as table:
        table.phase("a warning of [/usr/lib/x]")
    assert "a warning of (/usr/lib/x)" in out.getvalue()


def test_a_terminal_has_the_same_rows() -> None:
    out = io.StringIO()
    with LiveTable(2, console=Console(file=out, width=100, force_terminal=True)) as table:
        table.phase("rollout")
        table.step({"step": 1, "reward/total": 0.5})
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert header() in plain and row({"step": 1, "reward/total": 0.5}).rstrip() in plain.replace("\r", "\n")


def test_rows_and_header_are_equally_wide() -> None:
    full = {"step": 50, "reward/total": 1.0, "eval/success": 0.9, "tokens/per_second": 1e5, "kl/engine_learner": 3e-6}
    times = {"time/rollout": 12.3, "time/train": 4.5, "time/sync": 0.03, "time/eval": 2.2}
    assert len(row(full | times)) == len(row({"step": 1})) == len(header()) < 80


# ---- Trackers


def test_tensorboard_files_lie_in_the_run_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Tracker(load_config(None, [f"trainer.run_dir={tmp_path}"]))
    tracker.log({"step": 3, "loss": 0.25, "entropy": math.nan})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.25)]
    assert events.Tags()["scalars"] == ["loss"]


def test_tensorboard_of_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = load_config(None, [f"trainer.run_dir={tmp_path}"])
    for last_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        tracker = Tracker(config, last_step)
        for step in steps:
            tracker.log({"step": step, "loss": step + last_step / 10})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, round(event.value, 1)) for event in events.Scalars("loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2)]


def test_tensorboard_shows_the_first_held_out_tries_as_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Tracker(load_config(None, [f"trainer.run_dir={tmp_path}"]))
    for step, solved in ((0, 0.5), (1, None), (2, 1.0)):  # the second has no evaluation: its tries are the first's
        figures = {"step": float(step), "loss": 0.25} | ({} if solved is None else {"eval/success": solved})
        tracker.log(figures, tried=[trajectory(step, place, 0, 0.5, f"say {place}") for place in range(4)])
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Tags()["tensors"]) == 4
    shown = events.Tensors("held_out/3/text_summary")
    found = {event.step: event.tensor_proto.string_val[0].decode() for event in shown}
    assert [*found] == [0, 2] and "\n    [assistant]\n    say 3" in found[0]
    assert found[2].startswith(f"{trajectory(2, 3, 0, 0.5, '').sample.sample_id}, reward 0.5\n\n")


def test_no_tracker_is_a_choice_and_writes_nothing(tmp_path: Path) -> None:
    tracker = Tracker(load_config(None, ["trainer.logger=none", f"trainer.run_dir={tmp_path}"]))
    tracker.log({"step": 1, "loss": 0.1})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_cannot_start_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(UserError, match=r"trainer.logger=wandb cannot start: .*[^.]; use trainer.logger=tensorboard"):
        Tracker(load_config(None, ["trainer.logger=wandb"]))


# ---- report.html


def test_a_report_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    assert page.addresses == [] and len(page.scripts) == 2
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    text = (tmp_path / "out.html").read_text()
    assert "default-src 'none'" in text and "@import" not in text and "url(" not in text
    assert re.findall(r"https?://[^\s\"']+", text) == ["http://www.w3.org/2000/svg"]


def test_what_a_run_says_stays_text(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", max_steps=3, overrides=(f"trainer.project_name={NASTY!r}",)))
    assert page.tags.count("script") == 2 and "b" not in page.tags
    settings = {name: json.loads(value) for name, value, _ in page.runs[0]["settings"]}
    assert settings["trainer.project_name"] == NASTY
    assert "innerHTML" not in page.scripts[1] and "document.write" not in page.scripts[1]


def test_a_runs_name_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<i>{{data}}&", max_steps=1)
    page = page_of(run)
    assert "i" not in page.tags and page.runs[0]["name"] == run.name


def test_a_report_links_trajectories_of_the_first_middle_and_last_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", max_steps=9).rename(tmp_path / "a run: it's #1")
    (found,) = page_of(run).runs
    assert found["trajectories"] == "a%20run%3A%20it%27s%20%231/trajectories.html"
    page = run / "trajectories.html"
    rows = index_of(page)["rows"]
    assert [row[1] for row in rows] == [9] * 17 + [5] * 17 + [1] * 17
    assert "6 more steps are stored" in index_of(page)["notes"]
    assert found["metrics"]["kl/engine_learner"][6] == [7.0, None]


def test_a_run_with_many_trajectories_writes_few_with_its_report(tmp_path: Path) -> None:
    run, rng = make_run(tmp_path / "run", max_steps=3), random.Random(0)
    batch = rollouts(4, rng)
    batch.groups *= 40
    JsonlTrajectoryStore(run / "trajectories").write(batch)
    write_report([run], run / "report.html")
    index = index_of(run / "trajectories.html")
    assert [row[1] for row in index["rows"]] == [4] * 32 + [3] * 17 + [1] * 17
    assert index["notes"][0].startswith("648 more are left out (at most 96 trajectories and 2 MB go in): --step of")


def test_a_page_of_all_trajectories_stays_until_there_are_newer_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", max_steps=9)
    page = run / "trajectories.html"
    write_viewer(run, page)
    full = page.read_bytes()
    write_report([run], run / "report.html")
    assert page.read_bytes() == full
    JsonlTrajectoryStore(run / "trajectories").write(rollouts(10, random.Random(0)))
    write_report([run], run / "report.html")
    assert {row[1] for row in index_of(page)["rows"]} == {1, 6, 10}


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a" / "run", max_steps=2)
    two = make_run(tmp_path / "b" / "run", max_steps=2, overrides=("trainer.learning_rate=1e-4",))
    left, right = page_of(one, two).runs
    assert left["name"] != right["name"]
    changed = [a[0] for a, b in zip(left["settings"], right["settings"], strict=True) if a[1] != b[1]]
    assert changed == ["trainer.learning_rate"]


def test_a_reader_sees_the_curves_and_what_differs_and_follows_the_link(tmp_path: Path) -> None:
    program = find_browser()
    if program is None:
        warnings.warn("Chromium is not here: the page was not opened.", stacklevel=1)
        return
    one = make_run(tmp_path / "a" / "run", max_steps=20, overrides=(f"trainer.project_name={NASTY!r}",))
    two = make_run(tmp_path / "b" / "run", max_steps=20, gain=0.2, seed=1)
    page_of(one, two)
    browser = Browser(program, tmp_path / "profile")
    try:
        browser.call("Page.navigate", url=(tmp_path / "a" / "out.html").as_uri())
        browser.wait("document.querySelectorAll('.chart path').length > 20")
        browser.run(
            "document.querySelector('.chart svg').dispatchEvent(new PointerEvent('pointermove', {clientX: 300}))"
        )
        assert re.fullmatch(r"step \d+", browser.run("document.querySelector('.tip b').innerText"))
        shown = browser.run("document.body.innerText")
        for expected in ("Success", "Tokens per second", "warm start 0.3", "gained by learning", NASTY[:40]):
            assert expected in shown
        assert "NaN" not in shown and "undefined" not in shown
        assert browser.run("[...document.querySelectorAll('.facts td:first-child')].map(cell => cell.innerText)") == [
            "trainer.project_name",
        ]
        assert browser.run("document.title + document.querySelectorAll('main script, main b b').length").endswith(
            "run0"
        )
        browser.run("document.querySelectorAll('a')[1].click()")
        browser.wait("document.querySelectorAll('#list a').length > 20")
        assert browser.run("location.pathname").endswith("/b/run/trajectories.html")
    finally:
        browser.close()


def test_an_empty_run_has_gaps_and_no_errors(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    (found,) = page_of(run).runs
    assert (found["metrics"], found["settings"], found["trajectories"]) == ({}, [], None)
    assert found["notes"] == ["no config.yaml, so no settings", "no trajectories stored"]


def test_a_damaged_trajectory_file_is_a_note(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", max_steps=2)
    store = JsonlTrajectoryStore(run / "trajectories")
    store.path(2).write_bytes(b"nothing")
    assert page_of(run).runs[0]["trajectories"] == "run/trajectories.html"
    index = index_of(run / "trajectories.html")
    assert {row[1] for row in index["rows"]} == {1} and "step_000002.jsonl.gz" in index["notes"][-1]
    store.path(1).write_bytes(b"nothing")
    store.path(2).write_bytes(b"nothing")
    (found,) = page_of(run).runs
    assert found["trajectories"] is None and "step_000001.jsonl.gz cannot be read" in found["notes"][0]


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run folder: it has no config.yaml"):
        write_report([tmp_path], tmp_path / "out.html")


def test_a_page_of_the_future_is_written_anew(tmp_path: Path) -> None:
    """The clock was set back: else the page would stay as it is until its time comes."""
    run = make_run(tmp_path / "run", max_steps=2)
    page = run / "trajectories.html"
    page.write_text("old")
    for ahead, written in ((1.0, False), (86400.0, True)):
        newest = max(path.stat().st_mtime for path in (run / "trajectories").glob("*.gz"))
        os.utime(page, (newest + ahead, newest + ahead))
        time.sleep(max(0.0, newest + 1.1 - time.time()))
        write_report([run], run / "report.html")
        assert (page.read_text() != "old") == written


def test_a_full_disk_leaves_a_page_as_it_was_and_the_next_report_is_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", max_steps=2)
    write_report([run], run / "report.html")
    pages = {path: path.read_bytes() for path in (run / "report.html", run / "trajectories.html")}
    os.utime(run / "trajectories.html", (0, 0))  # older than the trajectories
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(UserError, match=r"report\.html cannot be written: File too large"):
            write_report([run], run / "report.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path: path.read_bytes() for path in pages} == pages
    (run / "trajectories.html").unlink()
    write_report([run], run / "report.html")
    assert {path: path.read_bytes() for path in pages} == pages


def test_a_page_that_two_processes_write_at_once_is_of_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`skyrl-trainer report` beside a training."""
    flush, page = files.flush, tmp_path / "report.html"

    def meanwhile(path: Path) -> None:
        monkeypatch.setattr(files, "flush", flush)
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            write_page(page, "the other's", {}, "", "")
        flush(path)

    monkeypatch.setattr(files, "flush", meanwhile)
    write_page(page, "ours alone", {}, "", "")
    assert "ours alone" in page.read_text() and list(tmp_path.iterdir()) == [page]


def test_a_full_disk_stays_a_sentence_when_the_file_is_closed(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    with Path("/dev/full").open("w") as writer._file, suppress(OSError):
        with pytest.raises(UserError, match="free some space"):
            writer.write({"step": 1.0})
        writer.close()
        assert writer._file.closed
