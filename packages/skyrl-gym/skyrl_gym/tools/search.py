"""search and wiki over a corpus of articles: the built-in one, or a user's jsonl file of {"title", "text"} rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from skyrl_gym.bm25 import BM25, terms
from skyrl_gym.data import _read_jsonl
from skyrl_gym.tools.tool import Tool, ToolError, tool

_LONGEST_QUERY, _MOST_RESULTS, _SNIPPET = 200, 10, 160


class Corpus:
    """Articles with distinct titles, which are found whatever their case. Indices are built on first use."""

    def __init__(self, articles: Sequence[tuple[str, str]]) -> None:
        self.articles = articles
        self._by_title = {title.casefold(): number for number, (title, _) in enumerate(articles)}

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        """Reads a jsonl file; ValueError names file, line and field of the first row that is wrong."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no corpus file {path}; expected jsonl rows with 'title' and 'text'.")
        lines: dict[str, str] = {}
        articles = []
        for where, row in _read_jsonl(Path(path)):
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected an object with 'title' and 'text', got {type(row).__name__}.")
            for name in ("title", "text"):
                if not isinstance(row.get(name), str) or not row[name].strip():
                    raise ValueError(f"{where}: field {name!r} must be a string that is not empty.")
            title = row["title"].strip()
            if title.casefold() in lines:
                raise ValueError(f"{where}: field 'title': {title!r} is also the title at {lines[title.casefold()]}.")
            lines[title.casefold()] = where
            articles.append((title, row["text"]))
        if not articles:
            raise ValueError(f"The corpus {path} has no rows; expected jsonl rows with 'title' and 'text'.")
        return cls(articles)

    @cached_property
    def _index(self) -> BM25:
        return BM25([f"{title} {text}" for title, text in self.articles])

    @cached_property
    def _title_index(self) -> BM25:
        return BM25([_letter_pairs(title) for title, _ in self.articles])

    def search(self, query: str, k: int) -> str:
        """The best articles by BM25, a line each: number, title, and the text about the longest word that it shares."""
        words = sorted(terms(_short(query)), key=len, reverse=True)
        if not 1 <= k <= _MOST_RESULTS:
            raise ToolError(f"k must be from 1 to {_MOST_RESULTS}, got {k}.")
        found = self._index.search(query, k)
        if not found:
            raise ToolError("No article has any of these words.")
        lines = [f"{place}. {self._snippet(number, words)}" for place, number in enumerate(found, start=1)]
        return "\n".join(lines)

    def wiki(self, title: str) -> str:
        """The article of that title."""
        number = self._by_title.get(_short(title).strip().casefold())
        if number is None:
            near = self._title_index.search(_letter_pairs(title), 3)
            titles = ", ".join(self.articles[number][0] for number in near)
            raise ToolError(f"There is no article {title!r}. {f'Nearest titles: {titles}.' if near else ''}".strip())
        return "\n".join(self.articles[number])

    def _snippet(self, number: int, words: list[str]) -> str:
        title, text = self.articles[number]
        lower = text.lower()
        place = next((place for word in words if (place := lower.find(word)) >= 0), 0)
        start = max(text.rfind(". ", 0, place) + 1, text.rfind("。", 0, place) + 1, place - _SNIPPET // 2)
        return f"{title}: {text[start : start + _SNIPPET].strip()}"


def corpus_tools(corpus: Callable[[], Corpus]) -> list[Tool]:
    """search and wiki over what `corpus` returns at the time of a call."""

    @tool
    def search(query: str, k: int = 5) -> str:
        """Finds articles by the words in them; returns the titles of the best k with a snippet of each."""
        return corpus().search(query, k)

    @tool
    def wiki(title: str) -> str:
        """Returns the article of that title, or the nearest titles when there is none."""
        return corpus().wiki(title)

    return [search, wiki]


def _short(query: str) -> str:
    if len(query) > _LONGEST_QUERY:
        raise ToolError(f"At most {_LONGEST_QUERY} characters, got {len(query)}.")
    return query


def _letter_pairs(title: str) -> str:
    """Pairs of neighbouring letters as words, by which BM25 finds misspelt titles."""
    return " ".join(map("".join, pairwise(title.casefold())))
