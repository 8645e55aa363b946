"""Metrics against definitions written out anew, and against scipy."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from skyrl_eval import metrics
from skyrl_eval.types import Attempt, Item, Verdict
from skyrl_trainer.errors import UserError


def official_hle(confidence: np.ndarray, correct: np.ndarray, beta: int = 100) -> float:
    """HLE's published figure, derived from its description: bins of 100 by confidence, the rest in the last one, root
    of the weighted squares of (mean confidence - mean correct) over all bins but the last."""
    order = np.argsort(confidence, kind="stable")
    confidence, correct = confidence[order], correct[order]
    edges = [[i * beta, (i + 1) * beta] for i in range(len(confidence) // beta)]
    edges[-1][1] = len(confidence)
    total = 0.0
    for low, high in edges[:-1]:
        gap = np.nanmean(confidence[low:high]) - np.nanmean(correct[low:high])
        total += (high - low) / len(confidence) * gap**2
    return math.sqrt(total)


@pytest.mark.parametrize("n", [200, 201, 299, 300, 500, 2158, 2500])
@pytest.mark.parametrize("percent", [True, False])
def test_official_calibration_of_hle_from_200_up(n: int, percent: bool) -> None:
    rng = np.random.default_rng(n)
    confidence = rng.integers(80, 101, n) / 100 if percent else rng.random(n)
    correct = (rng.random(n) < 0.1).astype(float)
    found = metrics.calibration_error(confidence.tolist(), correct.tolist(), official=True)
    assert found == pytest.approx(official_hle(confidence, correct), abs=1e-12)


@pytest.mark.parametrize("n", [1, 50, 100, 150, 199])
def test_below_200_the_official_figure_is_none_and_all_bins_sees_overconfidence(n: int) -> None:
    confidence, correct = [0.9] * n, [0.0] * n
    assert metrics.calibration_error(confidence, correct, official=True) is None
    assert metrics.calibration_error(confidence, correct) == pytest.approx(0.9)


def test_calibration_counts_judged_verdicts_only() -> None:
    verdicts = [
        Verdict("hle", "a", 0, 1.0, "correct", confidence=1.0),
        Verdict("hle", "b", 0, 0.0, "wrong", confidence=0.25),
        Verdict("hle", "c", 0, None, "ungraded"),
        Verdict("hle", "d", 0, 0.0, "unparsed"),
    ]
    found = metrics.calibration(verdicts)
    assert found["judged"] == 2 and found["official"] is None
    assert found["all_bins"] == pytest.approx(abs(0.625 - 0.5))
    assert found["curve"] == [[0.25, 0.0, 1], [1.0, 1.0, 1]]


@settings(deadline=None)
@given(st.integers(1, 3000), st.data())
def test_wilson_is_the_score_interval(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    low, high = metrics.wilson(c / n, n)
    expected = stats.binomtest(c, n).proportion_ci(0.95, method="wilson")
    assert (low, high) == (pytest.approx(expected.low, abs=1e-6), pytest.approx(expected.high, abs=1e-6))
    assert 0 <= low <= c / n + 1e-12 and c / n - 1e-12 <= high <= 1


@settings(deadline=None)
@given(st.integers(1, 7), st.data())
def test_pass_at_k_and_pass_all_k_are_shares_of_all_choices_of_k(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert metrics.pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert metrics.pass_all_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_clustered_error_is_the_usual_one_without_clusters_and_larger_with_them() -> None:
    rng = random.Random(0)
    values = [rng.random() for _ in range(50)]
    alone = metrics.clustered_error(values, [str(i) for i in range(50)])
    assert alone == pytest.approx(np.std(values, ddof=1) / math.sqrt(50))
    twins, pairs = [value for value in values for _ in range(2)], [str(i) for i in range(50) for _ in range(2)]
    assert metrics.clustered_error(twins, pairs) == pytest.approx(alone)  # each value twice tells nothing new
    assert metrics.clustered_error([0.5], ["a"]) is None


def test_compare_is_paired_and_mcnemar_exact() -> None:
    a = {f"q{i}": float(i < 10) for i in range(40)} | {"only a": 1.0}
    b = {f"q{i}": float(3 <= i < 22) for i in range(40)} | {"only b": 1.0}
    found = metrics.compare(a, b)
    assert (found["items"], found["better"], found["worse"]) == (40, 12, 3)
    assert found["difference"] == pytest.approx(9 / 40)
    assert found["p"] == pytest.approx(stats.binomtest(3, 15).pvalue)
    gaps = [b[f"q{i}"] - a[f"q{i}"] for i in range(40)]
    assert found["interval"][0] == pytest.approx(np.mean(gaps) - metrics.Z * stats.sem(gaps))
    assert metrics.compare({}, {}) | {"p": 1.0} == metrics.compare({}, a)


def test_mcnemars_p_is_of_yes_and_no_alone() -> None:
    """An F1 that rose by a third is not an item that was won."""
    before, after = {f"q{i}": i % 2 / 2 for i in range(8)}, {f"q{i}": i % 2 / 2 + 0.25 for i in range(8)}
    found = metrics.compare(before, after)
    assert (found["better"], found["worse"], found["p"]) == (8, 0, None) and found["difference"] == 0.25
    assert metrics.compare({"q0": 0, "q1": 1}, {"q0": 1, "q1": 2 / 3})["p"] is None
    assert metrics.compare({"q0": 0, "q1": 0.5}, {"q0": 1, "q1": 0.5})["p"] is None
    wide = metrics.compare({f"q{n}": 1 for n in range(5)}, {f"q{n}": int(n == 0) for n in range(5)})
    assert wide["interval"][0] == -1.0, "no difference is larger"
    alike = metrics.compare({"q0": 0, "q1": 0}, {"q0": 1, "q1": 1})
    assert alike["difference"] == 1 and alike["interval"] is None, "no spread is no certainty"
    assert metrics.compare({"q0": 0, "q1": 1}, {"q0": 1, "q1": 1})["p"] == 1


def test_summary_of_a_run_with_everything_that_can_happen() -> None:
    items = [Item("b", name, "", meta={"category": name[0]}) for name in ("x1", "x2", "y1")]
    attempts = [Attempt("b", name, s, "", "done", prompt_tokens=100, completion_tokens=10, steps=2) for name, s in KEYS]
    statuses = ("correct", "wrong", "unparsed", "truncated", "ungraded")
    verdicts = [
        Verdict("b", name, s, score, status, judge_prompt_tokens=7, judge_completion_tokens=3)
        for (name, s), score, status in zip(KEYS, (1.0, 0.0, 0.0, 0.0, None), statuses, strict=True)
    ]
    verdicts.append(Verdict("b", "y1", 1, None, "missing"))
    price = {"prompt": 1.0, "completion": 2.0, "cached": 0.1}
    found = metrics.summarise(items, 2, attempts, verdicts, price, {"prompt": 10.0, "completion": 20.0})
    assert found["accuracy"] == pytest.approx(0.5 / 3)
    assert found["accuracy_graded"] == pytest.approx(0.25)
    assert found["counts"] == dict.fromkeys((*statuses, "missing"), 1)
    assert found["pass_at"] == {"1": pytest.approx(1 / 6), "2": pytest.approx(1 / 3)}
    assert found["pass_all"] == {"1": pytest.approx(1 / 6), "2": 0.0}
    three = [Verdict("b", "x1", s, 1.0, "correct") for s in range(3)]
    assert [*metrics.summarise(items[:1], 3, [], three)["pass_at"]] == ["1", "2", "3"]
    assert found["by_category"]["x"] == {"items": 2, "accuracy": 0.25}
    assert found["means"]["steps"] == 2 and found["totals"]["prompt_tokens"] == 500
    assert found["cost"] == pytest.approx((500 + 50 * 2) / 1e6)
    assert found["judge_tokens"] == [35, 15] and found["judge_cost"] == pytest.approx((350 + 300) / 1e6)
    assert metrics.summarise(items, 2, attempts, verdicts)["cost"] is None
    assert metrics.summarise(items[2:], 2, [], verdicts[-2:])["means"]["steps"] is None


def test_tokens_that_nobody_told_are_not_0() -> None:
    silent = [Attempt("b", "x1", 0, "", prompt_tokens=None, completion_tokens=None)]
    judged = [Verdict("b", "x1", 0, 1.0, "correct", judge_prompt_tokens=None, judge_completion_tokens=None)]
    price: metrics.Price = {"prompt": 1.0, "completion": 2.0}
    found = metrics.summarise([Item("b", "x1", "")], 1, silent, judged, price, price)
    assert found["totals"] | {"prompt_tokens": None, "completion_tokens": None} == found["totals"]
    assert found["totals"]["steps"] == 0 and found["judge_tokens"] == [None, None]
    assert (found["cost"], found["judge_cost"], found["uncounted"]) == (None, None, 1)


KEYS = [("x1", 0), ("x1", 1), ("x2", 0), ("x2", 1), ("y1", 0)]


def test_prices_are_read_and_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text('{"m": {"prompt": 1, "completion": 2.5}}')
    assert metrics.read_prices(path) == {"m": {"prompt": 1.0, "completion": 2.5}}
    wrong = {
        '{"m": {"prompt": 1}}': "m.completion",
        '{"m": {"prompt": -1, "completion": 1}}': "m.prompt",
        '{"m": {"prompt": NaN}}': "m.prompt",
        '{"m": {"prompt": 1, "completion": 1, "cached_tokens": 1}}': "m.cached_tokens",
    }
    for text, name in wrong.items():
        path.write_text(text)
        with pytest.raises(UserError, match=rf"--prices {path}: expected JSON.*{name}") as told:
            metrics.read_prices(path)
        assert "https://" not in str(told.value), "what pydantic says of it, without its address"
    path.unlink()
    with pytest.raises(UserError, match=rf"--prices {path}: expected JSON"):
        metrics.read_prices(path)


def test_cached_tokens_have_their_own_price() -> None:
    price: metrics.Price = {"prompt": 4.0, "completion": 8.0}
    assert metrics.cost(1_000_000, 0, 500_000, price) == 4.0
    assert (metrics.cost(10, 0, 40, price) or 0) > 0  # more in its cache than it was sent, a server says
    assert metrics.cost(1_000_000, 500_000, 500_000, price | {"cached": 1.0}) == pytest.approx(2 + 0.5 + 4)
