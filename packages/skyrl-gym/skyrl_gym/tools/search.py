"""search and wiki over articles: the built-in ones, or those of a user's jsonl file of {"title", "text"} rows."""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from skyrl_gym.bm25 import BM25, terms
from skyrl_gym.data import read_jsonl
from skyrl_gym.tools.tool import ToolError

LONGEST_QUERY, MOST_RESULTS, SNIPPET = 120, 10, 160
Articles = Sequence[tuple[str, str]]


class Corpus:
    """Articles (title, text) with distinct titles, or a function that returns them when they are first read.
    made_by: a function and its arguments that make the same corpus, which a pickle holds in place of the articles.
    """

    def __init__(self, articles: Articles | Callable[[], Articles], made_by: Any = None) -> None:
        self._given, self._made_by = articles, made_by or (Corpus, (articles,))

    @cached_property
    def articles(self) -> Articles:
        return self._given() if callable(self._given) else self._given

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {title.casefold(): number for number, (title, _) in enumerate(self.articles)}

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a jsonl file; ValueError names file, line and field of the first row that is wrong."""
        articles: dict[str, tuple[str, str]] = {}
        for where, row in read_jsonl(Path(path)):
            for name in ("title", "text"):
                if not isinstance(row, dict) or not isinstance(row.get(name), str) or not row[name].strip():
                    raise ValueError(f"{where}: field {name!r} must be a string that is not empty, got {row!r:.80}.")
            title = row["title"].strip()
            if title.casefold() in articles:
                raise ValueError(f"{where}: field 'title': {title!r} is the title of an earlier row too.")
            articles[title.casefold()] = (title, row["text"])
        if not articles:
            raise ValueError(f"The corpus {path} has no rows; expected jsonl rows with 'title' and 'text'.")
        return cls(list(articles.values()), (cls.load, (path,)))

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # it never changes

    def __reduce__(self) -> Any:
        return self._made_by

    @cached_property
    def _texts(self) -> BM25:
        return BM25([f"{title} {text}" for title, text in self.articles])

    @cached_property
    def _titles(self) -> BM25:
        return BM25([_letter_pairs(title) for title, _ in self.articles])

    def search(self, query: str, k: int = 5) -> str:
        """Finds articles by the words in them; returns the titles of the best k, each with a snippet."""
        if not 1 <= k <= MOST_RESULTS or len(query) > LONGEST_QUERY:
            raise ToolError(f"k must be from 1 to {MOST_RESULTS}, and a query has at most {LONGEST_QUERY} characters.")
        words = sorted(terms(query), key=len, reverse=True)
        found = self._texts.search(query, k)
        return "\n".join(self._snippet(number, words) for number in found) or "No article has any of these words."

    def wiki(self, title: str) -> str:
        """Returns the article of that title, or the nearest titles when there is none."""
        number = self._numbers.get(title.strip().casefold())
        if number is not None:
            return "\n".join(self.articles[number])
        title = title[:LONGEST_QUERY]
        near = [self.articles[number][0] for number in self._titles.search(_letter_pairs(title), 3)]
        raise ToolError(f"There is no article {title!r}; the nearest titles are: {', '.join(near) or 'none'}.")

    def _snippet(self, number: int, words: list[str]) -> str:
        title, text = self.articles[number]
        lower = text.lower()
        place = next((place for word in words if (place := lower.find(word)) >= 0), 0)
        sentence = max(text.rfind(stop, 0, place) + 1 for stop in (". ", "。"))
        start = max(sentence, place - SNIPPET // 2)
        return f"{title}: {text[start : start + SNIPPET].strip()}"


def _letter_pairs(title: str) -> str:
    return " ".join(map("".join, pairwise(title.casefold())))
