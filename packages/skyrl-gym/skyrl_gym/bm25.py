"""BM25 over a list of texts, in plain Python (Robertson and Zaragoza, 2009, with the +1 in the logarithm of Lucene).

Scores are sums in a fixed order, and equal ones come in the order of the documents.
"""

import heapq
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

K1, B = 1.2, 0.75
_PIECE = re.compile(r"[一-鿿㐀-䶿]+|[^\W_一-鿿㐀-䶿]+")


def terms(text: str) -> list[str]:
    """The words of a text. Chinese has no spaces: "Red 运动鞋" -> ["red", "运", "动", "鞋", "运动", "动鞋"]."""
    found = []
    for piece in _PIECE.findall(text.lower()):
        if "㐀" <= piece[0] <= "鿿":
            found += [*piece, *map("".join, pairwise(piece))]
        else:
            found.append(piece)
    return found


class BM25:
    """An inverted index with every weight computed beforehand; for up to about 50,000 documents.
    Example: BM25(["a red shoe", "a blue shoe"]).search("blue", 10) == [1]
    """

    def __init__(self, documents: Sequence[str]) -> None:
        counts = [Counter(terms(each)) for each in documents]
        lengths = [sum(count.values()) for count in counts]
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        document_frequency = Counter(term for count in counts for term in count)
        self._postings: dict[str, list[tuple[int, float]]] = {term: [] for term in document_frequency}
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            penalty = K1 * (1 - B + B * length / mean)
            for term, frequency in count.items():
                df = document_frequency[term]
                idf = math.log(1 + (len(counts) - df + 0.5) / (df + 0.5))
                self._postings[term].append((number, idf * frequency * (K1 + 1) / (frequency + penalty)))

    def search(self, query: str, limit: int) -> list[int]:
        """The numbers of at most `limit` documents that share a term with the query, best first."""
        scores: dict[int, float] = {}
        for term in dict.fromkeys(terms(query)):
            for number, weight in self._postings.get(term, ()):
                scores[number] = scores.get(number, 0.0) + weight
        return heapq.nsmallest(limit, scores, key=lambda number: (-scores[number], number))
