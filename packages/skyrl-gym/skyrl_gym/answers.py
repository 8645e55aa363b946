r"""Final answers, compared exactly; docs/environments/text_math.md has the grammar and all rules.

85   +085   85.0   ８５   8,500/100   85 km   Fraction(85)
1 3/4   1\frac34   1.75   175%   $1.75   Fraction(7, 4)
Knight   "knight"   \text{knight}.       "knight"
x^2+3y   3*y + x^{2}                     "3*y+x^2"
1, 2    (1, 2)    [1, 2]                 (Fraction(1), Fraction(2))
{1, 2}  {2, 1, 2}  \{1,2\}               frozenset of the same two
(0, 1]  \left(0, 1\right]                ("(", Fraction(0), Fraction(1), "]")
"""

from __future__ import annotations

import re
import signal
from decimal import Decimal
from fractions import Fraction
from threading import current_thread, main_thread
from typing import TypeAlias

Answer: TypeAlias = "Fraction | str | tuple[Answer, ...] | frozenset[Answer]"

LONGEST = 1000
_DEEPEST = 4
_CLOSING = {"(": ")", "[": "]", "{": "}", "⦃": "⦄"}  # the last pair stands for LaTeX's \{ and \}
_SIGNS = str.maketrans(
    {chr(wide): chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)}
    | {"−": "-", "，": ", ", "、": ", ", "。": ".", **dict.fromkeys("$¥￥€£", " ")}
)
_LATEX = [
    (re.compile(r"\\{"), "⦃"),
    (re.compile(r"\\}"), "⦄"),
    (re.compile(r"\\(?:left|right|[,!])"), ""),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2"),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r" \1/\2"),
    (re.compile(r"\\([$% ])"), r"\1"),
    (re.compile(r"\\(?:cdot|times)"), "*"),
]
_FACTOR = r"(?:[0-9]++(?:\.[0-9]++)?|[a-z]++(?:\^(?:[0-9]++|\{[0-9]++\}))?)(?:/[0-9]++)?"
_TERM = rf"{_FACTOR}(?:(?: ?\* ?|(?<=[0-9}}]) ?(?=[a-z])){_FACTOR})*"
_SUM = re.compile(rf"[+-]? ?{_TERM}(?: ?[+-] ?{_TERM})*")
_AMOUNT = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?(?:(?P<whole>[0-9]+) (?=[0-9.]+ ?/))?(?P<top>{_AMOUNT})"
    rf"(?: ?/ ?(?P<below>{_AMOUNT}))? ?(?P<percent>%|percent)?"
)
# Which math-verify takes for a sum of two numbers, and for no number.
_THIN_SPACE_OR_STOP = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?![\d/]))|\.\s*$")
_UNITS = re.compile(
    r"(?<=[0-9.]) ?(?:dollars?|cents?|yuan|euros?|(?:square |cubic )?(?:km|cm|mm|m|(?:kilo|centi|milli)?met(?:er|re)s?)"
    r"(?:\^?[23²³])?|kg|g|(?:kilo)?grams?|ml|l|lit(?:er|re)s?|degrees?|°C?|seconds?|minutes?|hours?|days?|weeks?|months?"
    r"|years?|美?元|角|分|[个只本人次张辆棵条件页岁年天秒升吨度]|小时|分钟|[平立]?方?[千厘毫]?米|公里|千?克|公斤|毫升)$",
    re.IGNORECASE,
)


def canonical(text: str) -> Answer | None:
    """What an answer says, or None for no answer; equal answers are equal objects. Never raises."""
    text = text.strip()
    if len(text) > LONGEST:
        return None
    if text.isascii() and text.isdigit():
        return Fraction(int(text))
    text = text.translate(_SIGNS).replace("{,}", ",")
    if "\\" in text:
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    text = re.sub(r"百分之 *([0-9./]+)", r"\1%", text)
    return _parse(" ".join(text.split()), _DEEPEST)


def written(truth: object) -> str:
    """A row's truth in this grammar, which has none of the exponents that Python writes: 0.0000001 for 1e-07."""
    return f"{Decimal(str(truth)):f}" if isinstance(truth, float) else str(truth)


def same(given: str, truth: str) -> bool:
    """Whether two texts state the same answer; False where either states none."""
    answer = canonical(given)
    return answer is not None and answer == canonical(truth)


def verified(given: str, truth: str) -> bool:
    """Whether math-verify takes the two for the same; ImportError without it. Its limits of five seconds are alarms:
    it has none outside the main thread, and an alarm that was set stays."""
    from math_verify import parse, verify

    seconds, alarm = 5 * (current_thread() is main_thread()), signal.getitimer(signal.ITIMER_REAL)
    try:
        texts = [_THIN_SPACE_OR_STOP.sub("", text) for text in (truth, given)]
        sides = [parse(f"\\boxed{{{text}}}", parsing_timeout=seconds) for text in texts]
        return bool(verify(*sides, timeout_seconds=seconds))
    finally:
        signal.setitimer(signal.ITIMER_REAL, *alarm)


def _parse(text: str, depth: int) -> Answer | None:
    text = text.removesuffix(".").rstrip()
    number = _NUMBER.fullmatch(text)
    if number is None and (unit := _UNITS.search(text)):
        number = _NUMBER.fullmatch(text, 0, unit.start())
    if number:
        return _number(number)
    if (text[:1], text[-1:]) in (("(", "]"), ("[", ")")):
        ends = [_parse(part, depth - 1) for part in _split(text[1:-1]) or ()] if depth else []
        known = [end for end in ends if end is not None]
        return (text[0], *known, text[-1]) if len(known) == len(ends) == 2 else None
    bracket = text[:1] if _CLOSING.get(text[:1]) == text[-1:] else ""
    parts = _split(text[1:-1]) if bracket else None
    if parts is None:  # no bracket, or as in "(1) or (2)"
        bracket, parts = "", _split(text)
    if parts is None or depth == 0:
        return None
    if not bracket and len(parts) == 1:
        word = text.strip("\"'“”‘’ ").casefold()
        return (word if word.isalpha() or not _SUM.fullmatch(word) else _in_order(word)) or None
    if len(parts) == 1 and (bracket == "(" or (bracket == "{" and parts != [""])):
        return _parse(parts[0], depth - 1)
    items = [_parse(part, depth - 1) for part in parts] if parts != [""] else []
    answers = tuple(item for item in items if item is not None)
    return None if len(answers) < len(items) else frozenset(answers) if bracket in ("{", "⦃") else answers


def _in_order(expression: str) -> str:
    terms = re.findall(rf"([+-]?) ?({_TERM})", re.sub("[{}]", "", expression))
    plain = [(sign or "+") + "*".join(sorted(re.findall(_FACTOR, term))) for sign, term in terms]
    # Words and numbers with nothing but hyphens between them are no sum, but a date, a code, an order of letters.
    is_sum = re.search(r"^-|.\+|[*/^]", "".join(plain))
    return "".join(sorted(plain) if is_sum else plain).removeprefix("+")


def _number(match: re.Match[str]) -> Fraction | None:
    whole, top, below = (Fraction((part or "0").replace(",", "")) for part in match.group("whole", "top", "below"))
    if match["below"] and not below:
        return None
    value = (whole + top / (below or 1)) / (100 if match["percent"] else 1)
    return -value if match["sign"] == "-" else value


def _split(text: str) -> list[str] | None:
    parts, begin, open_brackets = [], 0, []
    for position, character in enumerate(text):
        if character in _CLOSING:
            open_brackets.append(_CLOSING[character])
        elif character in ")]}⦄":
            if not open_brackets or open_brackets.pop() != character:
                return None
        elif character == "," and not open_brackets:
            parts.append(text[begin:position].strip())
            begin = position + 1
    return None if open_brackets else [*parts, text[begin:].strip()]
