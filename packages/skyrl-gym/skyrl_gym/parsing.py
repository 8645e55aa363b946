r"""What is read out of a model's text.

Grammar of a boxed answer: `\boxed{`, then text in which braces are balanced, then `}`. Of several boxes the one that
opens last counts, among those that are closed: `\boxed{1} or \boxed{2}` answers 2, a box cut off by the end of the
text is not an answer, nor is one of more than 10,000 characters, and of nested boxes the innermost opens last. A
backslash does not escape a brace.

A final answer is a box or `<answer>`, text, `</answer>`, where the first `</answer>` closes. The same rule holds for
both together: the one that opens last counts, among those that are closed. So `<answer>\boxed{5}</answer>` answers 5.
With `hashes`, `#### 18` is an answer too, up to the end of its line. Only a text's last 100,000 characters are read.
"""

from __future__ import annotations

_OPEN = "\\boxed{"
_LONGEST = 10_000
_READ = 100_000  # bounds the time that a hostile text takes to some milliseconds


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` of `text`, or None."""
    text = text[-_READ:]
    begin, end = _last_box(text)
    return text[begin:end] if begin >= 0 else None


def last_answer(text: str, *, hashes: bool = False) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `<answer>...</answer>` (with `hashes`, or `#### ...`)."""
    text = text[-_READ:] + "\n"
    found = [_last_box(text), _last_between(text, "<answer>", "</answer>")]
    if hashes:
        found.append(_last_between(text, "####", "\n"))
    begin, end = max(found)
    return text[begin:end] if begin >= 0 else None


def _last_between(text: str, opening: str, closing: str) -> tuple[int, int]:
    """Where the content of the last complete form begins and ends; (-1, -1) for none."""
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    return (start + len(opening), text.find(closing, start)) if start >= 0 else (-1, -1)


def _last_box(text: str) -> tuple[int, int]:
    end = len(text)
    while (start := text.rfind(_OPEN, 0, end)) >= 0:
        begin = start + len(_OPEN)
        close = _closing_brace(text, begin, min(end, begin + _LONGEST + 1))
        if close is not None:
            return begin, close
        # This box is never closed, so an earlier one must close before it: each character is scanned once.
        end = start
    return -1, -1


def _closing_brace(text: str, begin: int, end: int) -> int | None:
    """Where the brace that was opened just before `begin` is closed in text[begin:end], or None."""
    depth = 1
    position = begin
    while (close := text.find("}", position, end)) >= 0:
        depth += text.count("{", position, close) - 1
        if depth == 0:
            return close
        position = close + 1
    return None
