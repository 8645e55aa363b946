"""Figures from items, attempts and verdicts (docs/eval): pure functions. What is not known is None, never 0."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from skyrl_eval.types import Attempt, Item, Verdict
from skyrl_gym.baseline import Z, wilson
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.metrics import pass_at_k

COUNTERS = ("steps", "tool_calls", "tool_errors", "prompt_tokens", "completion_tokens", "cached_tokens", "seconds")
STATUSES = ("correct", "wrong", "unparsed", "truncated", "ungraded", "missing")
Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@with_config(ConfigDict(extra="forbid"))
class Price(TypedDict):
    """US dollars for a million tokens. Example: {"prompt": 0.4, "completion": 1.6, "cached": 0.1}"""

    prompt: Dollars
    completion: Dollars
    cached: NotRequired[Dollars]


Prices = dict[str, Price]
"""By model."""


def clustered_error(means: Sequence[float], clusters: Sequence[str]) -> float | None:
    """The standard error of the mean of item means whose errors may go together within a cluster; None for one."""
    values, sums = np.asarray(means), defaultdict[str, float](float)
    for residual, cluster in zip(values - values.mean(), clusters, strict=True):
        sums[cluster] += residual
    m = len(sums)
    return None if m < 2 else math.sqrt(m / (m - 1) * sum(s * s for s in sums.values())) / len(values)


def pass_all_k(n: int, c: int, k: int) -> float:
    """The chance that all of k tries drawn are correct (pass^k)."""
    return math.comb(c, k) / math.comb(n, k)


def calibration_error(confidences: Sequence[float], correct: Sequence[float], official: bool = False) -> float | None:
    """HLE's root mean square calibration error, in bins of 100 (or of all, where they are fewer) by confidence."""
    # The official one leaves out the last bin: None below 200 items, where no bin, or the only one, would be left.
    n = len(confidences)
    if n < (200 if official else 1):
        return None
    order = np.argsort(np.asarray(confidences), kind="stable")
    gaps = (np.asarray(confidences) - np.asarray(correct, dtype=float))[order]
    bins = np.split(gaps, range(100, n // 100 * 100, 100))
    return math.sqrt(sum(len(part) / n * part.mean() ** 2 for part in (bins[:-1] if official else bins)))


def calibration(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Over all judged verdicts; `curve` is (confidence, share correct, count) in tenths of confidence."""
    judged = [(v.confidence, float(v.score == 1)) for v in verdicts if v.confidence is not None and v.score is not None]
    confidences, correct = ([pair[n] for pair in judged] for n in (0, 1))
    tenths = defaultdict[int, list[Any]](list)
    for pair in judged:
        tenths[min(int(pair[0] * 10), 9)].append(pair)
    curve = [[*np.mean(part, axis=0).round(6).tolist(), len(part)] for _, part in sorted(tenths.items())]
    found = {"all_bins": calibration_error(confidences, correct), "judged": len(judged), "curve": curve}
    return found | {"official": calibration_error(confidences, correct, official=True)}


def read_prices(path: Path) -> Prices:
    try:
        return TypeAdapter(Prices).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = " ".join(str(error).split(" [type=")[0].split())
        wanted = 'dollars for a million tokens by model, such as {"a-model": {"prompt": 0.4, "completion": 1.6}}'
        raise UserError(f"--prices {path}: expected JSON with {wanted} ({reason}).") from error


def cost(prompt: int | None, completion: int | None, cached: int, price: Price | None) -> float | None:
    """US dollars, None where they are unknown; cached tokens cost their own price, or the prompt's."""
    if price is None or prompt is None or completion is None:
        return None
    fresh = max(0, prompt - cached) * price["prompt"] + cached * price.get("cached", price["prompt"])
    return (fresh + completion * price["completion"]) / 1e6


def limit_reached(limits: Mapping[str, Any] | None, attempts: Sequence[Attempt]) -> str:
    """Which limit (facts["limits"] of a run: tokens, dollars, price) its attempts have reached; "" for none."""
    if not limits:
        return ""
    told = [(one.prompt_tokens, one.completion_tokens, one.cached_tokens) for one in attempts]
    if any(None in counts for counts, one in zip(told, attempts, strict=True) if one.stop != "error"):  # tried again
        return "nothing more is asked: the endpoint does not tell its tokens, so no limit can be kept"
    tokens = sum((prompt or 0) + (completion or 0) for prompt, completion, _ in told)
    dollars = sum(cost(*counts, limits["price"]) or 0.0 for counts in told)
    for name, spent in (("tokens", tokens), ("dollars", dollars)):
        if limits[name] is not None and not spent < limits[name]:
            return f"nothing more is asked: the limit of {limits[name]} {name} is reached"
    return ""


def summarise(
    items: Sequence[Item],
    samples: int,
    attempts: Sequence[Attempt],
    verdicts: Sequence[Verdict],  # also missing ones
    price: Price | None = None,
    judge_price: Price | None = None,
) -> dict[str, Any]:
    """What every benchmark has in results.json, for the selected items and k samples of each."""
    graded = {each.key: each for each in verdicts}
    scores = [[graded[item.key(sample)].score for sample in range(samples)] for item in items]
    means = [sum(score or 0.0 for score in row) / samples for row in scores]
    known = [[score for score in row if score is not None] for row in scores]
    right = [sum(score == 1 for score in row) for row in scores]
    status = Counter(each.status for each in verdicts)
    low, high = wilson(mean(means) or 0.0, len(items))
    paid = [one for one in attempts if one.key in graded]
    taken = list({one.key: one for one in paid}.values())  # of several attempts of a key the last one
    uncounted = sum(each.prompt_tokens is None for each in paid)
    totals = {name: sum(told) if (told := values_of(paid, name)) else None for name in COUNTERS}
    spent = [values_of(verdicts, name) for name in ("judge_prompt_tokens", "judge_completion_tokens")]
    judge_in, judge_out = (sum(told) if told else None for told in spent)
    told_all = all(len(told) == len(verdicts) for told in spent)
    prompt, completion, cached = (totals[name] for name in COUNTERS[3:6])
    powers = sorted({samples, *(2**e for e in range(samples.bit_length()))})
    by_part = defaultdict(list)
    for item, value in zip(items, means, strict=True):
        by_part[item.meta.get("category") or "all"].append(value)
    return {
        "items": len(items),
        "samples": samples,
        "accuracy": mean(means),
        "low": low,
        "high": high,
        "standard_error": clustered_error(means, [item.meta.get("cluster", item.item_id) for item in items]),
        "accuracy_graded": mean([sum(row) / len(row) for row in known if row]),
        "pass_at": {str(k): mean([pass_at_k(samples, c, k) for c in right]) for k in powers},
        "pass_all": {str(k): mean([pass_all_k(samples, c, k) for c in right]) for k in powers},
        "counts": {name: status[name] for name in STATUSES},
        "stops": dict(sorted(Counter(each.stop for each in taken).items())),
        "means": {name: mean(values_of(taken, name)) for name in COUNTERS},
        "totals": totals,
        "uncounted": uncounted,
        "price": price,
        "cost": None if uncounted else cost(prompt, completion, cached or 0, price),
        "judge_tokens": [judge_in, judge_out],
        "judge_cost": cost(judge_in, judge_out, 0, judge_price) if told_all else None,
        "by_category": {name: {"items": len(v), "accuracy": mean(v)} for name, v in sorted(by_part.items())},
    }


def values_of(records: Iterable[Attempt | Verdict], counter: str) -> list[Any]:
    """Of those that have it."""
    return [value for each in records if (value := getattr(each, counter)) is not None]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def compare(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, Any]:
    """Two runs on the items of both (mean scores by item): the paired difference b - a, and McNemar's test.
    Example: compare({"q1": 1, "q2": 0}, {"q1": 1, "q2": 1})["difference"] == 0.5
    """
    common = sorted(a.keys() & b.keys())
    gaps = np.array([b[name] - a[name] for name in common])
    error = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    better, worse = int((gaps > 0).sum()), int((gaps < 0).sum())
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1)) / 2**n
    difference = float(gaps.mean()) if common else None
    ends = np.clip([difference - Z * error, difference + Z * error], -1, 1) if common and error else None
    found = {"items": len(common), "difference": difference, "interval": None if ends is None else ends.tolist()}
    p = min(1.0, 2 * tail) if {*a.values(), *b.values()} <= {0, 1} else None
    return found | {"better": better, "worse": worse, "p": p}
