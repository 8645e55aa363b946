r"""What is read out of a model's text.

Grammar of a boxed answer: `\boxed{`, then text in which braces are balanced, then `}`. Of several boxes the one that
opens last counts, among those that are closed: `\boxed{1} or \boxed{2}` answers 2, a box cut off by the end of the
text is not an answer, nor is one of more than 10,000 characters, and of nested boxes the innermost opens last. A
backslash does not escape a brace.
"""

from __future__ import annotations

_OPEN = "\\boxed{"
_LONGEST = 10_000


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` of `text`, or None. Takes time linear in the text's length."""
    end = len(text)
    while (start := text.rfind(_OPEN, 0, end)) >= 0:
        begin = start + len(_OPEN)
        close = _closing_brace(text, begin, min(end, begin + _LONGEST + 1))
        if close is not None:
            return text[begin:close]
        # This box is never closed, so an earlier one must close before it: each character is scanned once.
        end = start
    return None


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
