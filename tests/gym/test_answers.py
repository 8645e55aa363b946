"""Answers: one object for every spelling, and where a model's text holds its answer."""

import itertools
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_gym.answers import canonical, same
from skyrl_gym.parsing import last_answer

ALIKE = r"""
85 | +085 | 85.0 | 85. | ８５ | {85} | $85$ | \$85 | 8,500/100 | \frac{170}{2} | 8500% | （85） | ((85)) | 170 / 2
7/4 | 1 3/4 | 1\frac34 | 1\frac{3}{4} | \dfrac{7}{4} | 1.75 | 1.750 | 175\% | 175 percent | 百分之175 | + 7/4 | ¥1.75
-1/2 | −0.5 | -.5 | - 1/2 | -\frac{1}{2} | \frac{-1}{2} | -$0.50 | -50 %
1000 | 1,000 | 1{,}000 | 1\,000 | 1,000.00 | $1,000
12.5 | 12.5元 | 25/2 小时 | 12.5 km^2 | 12.5 square metres | 12.5 平方米 | 12.5 Dollars.
knight | Knight | "KNIGHT". | \text{knight} | “knight”
骑士, 无赖 | 骑士，无赖 | 骑士、无赖 | (骑士, 无赖)。
1, 2 | (1, 2) | [1,2] | \left(1, 2\right) | 1.0, 4/2 | (1,2).
{1, 2} | {2,1} | \{2, 1, 2\} | {1, 4/2} | \left\{1, 2\right\}
(1, 2] | \left(1, 2\right] | （1，2]
{(1, 2), (2, 1)} | {[2, 1], (1, 2)}
1, 0 | (1,000) | 1, 000
x+1 | 1+x | 1 + x | $1 + x$ | (x+1) | +1+x.
3x^2 - y/2 + 1 | 1-y/2+3*x^{2} | -y/2 + 1 + 3 x^2 | 1 + x^2 \cdot 3 - y/2
2ab | 2 ab | ab*2 | 2 \cdot ab | +2AB
1, x+y | (1, y + x)
x^2-5x-6 | x^2-6-5x | -5x+x^2-6
10+20 | 20 + 10
2024-01-05 | 2024 - 01 - 05
A-B-D-C | a - b - d - c
"""
ALONE = ["2, 1", "{}", r"\{5\}", "[1, 2)", "km", "50", "1 2", "5 apples", "1e3"]
ALONE += ["1-x", "x-1", "-x-1", "1+2x", "1+x2", "x^2+1", "x^3+1", "2ba", "a*2*b*b", "x", "2x+3x", "5x"]
ALONE += ["(x+1)(x-1)", "x^2-1", "no", "on", "e-mail", "mail", "47+38", "47+38+x-x", "x/2", "2x/3x"]
ALONE += ["2024-05-01", "a-c-b-d", "3-5-4", "3-4-5", "555-1234-777", "555-777-1234", "he-ne-ar", "he-ar-ne"]
ALONE += ["01-02-2020", "01-2020-02", "+1-555-777", "+1-777-555", "gb-45-123", "gb-123-45"]
NOTHING = [
    "",
    " ",
    ".",
    "3/0",
    "1 3/0",
    "(",
    "1)",
    "(1, 2, 3]",
    "[1)",
    "(1, 2], 3",
    "1,,2",
    "1, 2,",
    "((((((1))))))",
    "9" * 1001,
    "''",
]


def test_spellings_of_one_answer_are_the_same_and_others_are_not():
    rows = [line.split(" | ") for line in ALIKE.strip().splitlines()] + [[text] for text in ALONE]
    for one, other in itertools.product(rows, repeat=2):
        for given_, truth in itertools.product(one, other):
            assert same(given_, truth) == (one == other), (given_, truth)
    assert not [text for text in NOTHING if canonical(text) is not None or same(text, text)]


FRACTIONS = st.fractions(min_value=-(10**9), max_value=10**9, max_denominator=10**6)


@settings(deadline=None)
@given(FRACTIONS, st.integers(1, 99), st.decimals(-(10**9), 10**9, places=4))
def test_spellings_of_a_number(value, factor, decimal):
    sign, top, below = ("-" if value < 0 else ""), abs(value.numerator), value.denominator
    assert same(f"{sign}\\frac{{{factor * top}}}{{{factor * below}}}", str(value))
    assert same(f"{sign}{top // below} {top % below}/{below}", str(value))
    assert same(f"{sign}{100 * top}/{below}%", f"{sign}{top:,}/{below:,}")
    assert canonical(f"{decimal:f}") == Fraction(decimal) == canonical(f"{decimal:,f}")


TEXTS = st.text("0123456789,./(){}[] %$-aA", max_size=7)


@settings(deadline=None)
@given(st.lists(TEXTS | FRACTIONS.map(str), max_size=4))
def test_same_is_an_equivalence(texts):
    answers = [canonical(text) for text in texts]
    for (one, a), (other, b) in itertools.product(zip(texts, answers, strict=True), repeat=2):
        assert same(one, other) == same(other, one) == (a is not None and a == b)


def test_of_several_answers_the_one_that_opens_last_counts():
    one, two = "\\boxed{1}", "<answer>2</answer>"
    for text, answer in {one + two: "2", two + one: "1", two + one[:-1]: "2", one + two[:-1]: "1"}.items():
        assert last_answer(text) == last_answer(text, mark="####") == answer
    assert last_answer("<answer>\\boxed{5}</answer>") == last_answer("\\boxed{<answer>5</answer>}") == "5"
    assert last_answer("<answer>1 <answer>2</answer> 3</answer>") == "2" and last_answer("<answer></answer>") == ""
    assert last_answer("#### 18") is None and last_answer(f"{one} #### 18") == "1"
    for text, answer in {"#### 17\n#### 18\nso": " 18", f"{one} #### 18": " 18", f"#### 18 {one}": "1"}.items():
        assert last_answer(text, mark="####") == answer
        assert last_answer(text.replace("####", "Answer:"), mark="Answer:") == answer
