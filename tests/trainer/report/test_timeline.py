from pathlib import Path

from skyrl_trainer.report.history import TIMELINE, read_spans, write_spans


def test_a_line_torn_by_a_crash_costs_itself_and_what_was_written_behind_it(tmp_path: Path) -> None:
    assert read_spans(tmp_path) == []
    write_spans(tmp_path, 1, {"train": [(0.0, 1.00049)]})
    with (tmp_path / TIMELINE).open("a") as file:
        file.write('{"step": 2, "tra')
    for step in (2, 3):
        write_spans(tmp_path, step, {})
    assert read_spans(tmp_path) == [{"step": 1, "train": [[0.0, 1.0]]}, {"step": 3}]


def test_what_a_resumed_run_made_again_is_there_once_and_nothing_that_was_undone(tmp_path: Path) -> None:
    for step, begun in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (2, 5.0), (3, 6.0)):
        write_spans(tmp_path, step, {"train": [(begun, begun + 0.5)]})
    assert [(row["step"], row["train"][0][0]) for row in read_spans(tmp_path)] == [(1, 1.0), (2, 5.0), (3, 6.0)]


def test_lines_of_others_are_left_out(tmp_path: Path) -> None:
    (tmp_path / TIMELINE).write_text('[1]\n{"train": []}\n7\n')
    write_spans(tmp_path, 1, {})
    assert read_spans(tmp_path) == [{"step": 1}]
