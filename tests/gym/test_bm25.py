"""BM25: the formula, the order, and Chinese."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.bm25 import BM25, K1, B, terms

WORDS = st.sampled_from(["red", "blue", "shoe", "hat", "运动鞋", "红色"])
TEXTS = st.lists(WORDS, max_size=8).map(" ".join)


def reference_score(documents: list[list[str]], query: list[str], number: int) -> float:
    """The formula as it stands in the paper, one term after the other."""
    mean, score = sum(map(len, documents)) / len(documents) or 1.0, 0.0
    for term in dict.fromkeys(query):
        df = sum(term in document for document in documents)
        tf = documents[number].count(term)
        idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
        if tf:
            score += idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * len(documents[number]) / mean))
    return score


@given(st.lists(TEXTS, min_size=1, max_size=12), TEXTS, st.integers(1, 12))
def test_search_returns_the_best_by_the_formula_and_equal_ones_in_order(
    documents: list[str], query: str, limit: int
) -> None:
    found = BM25(documents).search(query, limit)
    cut = [terms(document) for document in documents]
    scores = [reference_score(cut, terms(query), number) for number in range(len(documents))]
    expected = sorted((n for n, score in enumerate(scores) if score > 0), key=lambda n: (-round(scores[n], 9), n))
    assert len(found) == min(limit, len(expected))
    assert [round(scores[n], 9) for n in found] == [round(scores[n], 9) for n in expected[:limit]]


def test_a_chinese_word_is_found_inside_a_sentence() -> None:
    index = BM25(["我想买一双蓝色的皮鞋", "我想买一双红色的运动鞋", "a red shoe"])
    assert index.search("红色 运动鞋", 1) == [1]
    assert index.search("RED", 3) == [2]
    assert index.search("xyz", 3) == [] == BM25([]).search("a", 3)
