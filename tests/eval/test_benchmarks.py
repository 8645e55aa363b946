"""Each benchmark's grading on made-up items, by its official rules; parity where an oracle exists."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import math_verify
import pytest

from skyrl_eval import benchmarks
from skyrl_eval.benchmarks.common import Context, final
from skyrl_eval.benchmarks.judged import decrypt
from skyrl_eval.benchmarks.math import boxed, equivalent, number
from skyrl_eval.judge import Judge, JudgeFailed, parse_match
from skyrl_eval.prompts import fill
from skyrl_eval.types import Item, Verdict
from tests.eval.made_up import PASSWORD, ROWS, attempt, encrypted, items
from tests.eval.scripted_server import match, served


def graded(item: Item, answer: str, context: Context | None = None, **fields: Any) -> Verdict:
    return benchmarks.find(item.bench).grade(item, attempt(item, answer, **fields), context or Context())


@pytest.mark.parametrize("name", ["hle", "browsecomp", "deepsearchqa", "mmlu", "mmlu-pro", "gpqa", "math", "gsm8k"])
def test_every_benchmark_asks_its_question_and_has_prompts_with_sources(name: str) -> None:
    module = benchmarks.find(name)
    sources = (Path(benchmarks.__file__).parents[1] / "prompts/SOURCES.md").read_text()
    for item in items(name):
        sample = module.env(item)
        assert item.question.split("?")[0] in sample.options["task"]["question"]
        assert sample.sample_id == f"{name}:{item.item_id}"
    for prompt in module.prompts:
        assert f"`{prompt}.txt`" in sources


@pytest.mark.parametrize("text", ["", "Ada Müller", "x" * 1000, "日本 \n\0"])
def test_browsecomp_decryption_round_trip(text: str) -> None:
    assert decrypt(encrypted(text, "another password"), "another password") == text
    if text:
        with pytest.raises(UnicodeDecodeError):
            decrypt(encrypted("ÿ" * 64, PASSWORD), "not the password")


@pytest.mark.parametrize(
    ("reply", "correct", "confidence"),
    [
        (match("yes", 70), "yes", 70),
        ("```json\n" + match("no") + "\n```", "no", 80),
        ("extracted_final_answer: 7\nreasoning: fits\ncorrect: yes\nconfidence: 55%", "yes", 55),
        ("**Correct:** yes", "yes", 100),
        ("correct: no, because\n...\n- correct : YES", "yes", 100),
        ('{"extracted_final_answer": "7", "correct": "no"}', "no", 100),
        ('{"correct": "yes", "confidence": 0.9,}', "yes", 90),
        ('{"correct": "yes", "confidence": 1.0}', "yes", 100),
        ('{"correct": "yes", "confidence": 1}', "yes", 1),
        ('{"confidence": 0.9, "correct": "yes", "strict": true}', "yes", 90),
        ("confidence: 0.9\ncorrect: yes", "yes", 90),
        ('{"correct": "yes", "confidence": "0.5%"}', "yes", 0),
        ("correct: yes\nconfidence: 0.5 %", "yes", 0),
        ("correct: yes\nconfidence: 1.5", "yes", 2),
        (r'{"reasoning": "It says \(x\), \sqrt{2} and \$5.", "correct": "no", "confidence": 40}', "no", 40),
        (r'{"reasoning": "a \\(b\\) \"c\" \u00e9", "correct": "yes"}', "yes", 100),
        ('{"correct": "no", "reasoning": {"correct": "yes"}}', "no", 100),
        ('{"judgement": {"correct": "no"}} or rather {"correct": "yes"}', "yes", 100),
        ("correct: no\nconfidence: about 85%", "no", 85),
        ("correct: yes/no", None, None),
        ('{\n"extracted_final_answer": "7",\n"correct": "no"\n', "no", 100),
        ("This is incorrect: yes", None, None),
        ("It is correct.", None, None),
        ("", None, None),
    ],
)
def test_a_judgement_is_read_from_json_or_from_its_own_line(
    reply: str, correct: str | None, confidence: int | None
) -> None:
    found = parse_match(reply)
    assert (found and found.correct, found and found.confidence) == (correct, confidence)


@pytest.mark.parametrize("name", ["hle", "browsecomp"])
def test_judged_answers(name: str, tmp_path: Path) -> None:
    item = items(name)[0]
    with served(lambda request: (200, match("yes" if "Answer: 7" in str(request) else "no", 130))) as (url, requests):
        context = Context(Judge(url, "judge", tmp_path / "judge"))
        right = graded(item, "<think>Hm, 8?</think>Answer: 7", context)
        wrong = graded(item, "Answer: 8", context)
        nothing = graded(item, "<think>It never ends", context, stop="length")
    assert (right.score, right.status, right.confidence, right.answer) == (1.0, "correct", 1.0, "7")
    assert (right.judge_prompt_tokens, right.judge_completion_tokens) == (11, 5)
    assert (wrong.score, wrong.status) == (0.0, "wrong")
    assert (nothing.score, nothing.status) == (0.0, "truncated")
    assert len(requests) == 2
    prompt = requests[0]["messages"][0]["content"]
    assert f"[correct_answer]: {item.gold}\n" in prompt and "[response]: Answer: 7\n" in prompt
    assert "Hm, 8?" not in prompt and "0|\\%|" in prompt
    assert requests[0]["response_format"]["json_schema"]["schema"]["required"][-1] == "strict"
    with pytest.raises(JudgeFailed, match="No judge"):
        graded(item, "Answer: 7")


def rating(details: dict[str, bool], excessive: list[Any]) -> str:
    inner = {"Explanation": "-", "Correctness Details": details, "Excessive Answers": excessive}
    return "```json\n" + json.dumps({"Answer Correctness": inner}) + "\n```"


@pytest.mark.parametrize(
    ("details", "excessive", "score", "rate"),
    [
        ({"Ix": True, "Ox": True}, [], 1.0, "fully_correct"),
        ({"Ix": True, "Ox": True}, ["Ux"], 0.8, "correct_with_excessive"),
        ({"Ix": True, "Ox": True}, [1999], 0.8, "correct_with_excessive"),
        ({"Ix": True, "Ox": False}, [], 2 / 3, "partially_correct"),
        ({"Ix": False, "Ox": False}, ["Ux"], 0.0, "fully_incorrect"),
    ],
)
def test_deepsearchqa(details: dict[str, bool], excessive: list[str], score: float, rate: str, tmp_path: Path) -> None:
    module, item = benchmarks.find("deepsearchqa"), items("deepsearchqa")[0]
    with served(lambda request: (200, rating(details, excessive))) as (url, requests):
        verdict = graded(item, "Ix and Ox", Context(Judge(url, "judge", tmp_path / "judge")))
    assert verdict.score == pytest.approx(score) and verdict.detail["rate"] == rate
    assert module.summary([verdict])[rate] == 1.0
    prompt = requests[0]["messages"][0]["content"]
    assert "Prompt Type: Set Answer\n<answer>\nIx, Ox\n</answer>" in prompt and '"Belgium": true' in prompt


@pytest.mark.parametrize("number", [0, 1])
def test_deepsearchqas_judge_is_asked_again_where_it_names_no_part_of_the_answer(number: int, tmp_path: Path) -> None:
    """Also of the answer None, the empty set, which is one part: nothing is made up of an empty judgement."""
    item, replies = items("deepsearchqa")[number], [rating({}, []), rating({"x": True}, [])]
    with served(lambda request: (200, replies.pop(0) if replies else rating({}, []))) as (url, requests):
        context = Context(Judge(url, "judge", tmp_path / "judge"))
        verdict = graded(item, "None", context)
        assert verdict.score == 1.0 and verdict.detail["rate"] == "fully_correct" and len(requests) == 2
        with pytest.raises(JudgeFailed, match="says what cannot be read"):
            graded(item, "Nobody", context)


def test_deepsearchqa_keeps_the_answer_none() -> None:
    assert items("deepsearchqa")[1].gold == "None"
    assert items("deepsearchqa", [ROWS["deepsearchqa"][1] | {"answer": None}])[0].gold == "None"


LETTERS = [  # a reply, and what the official scripts read in it: of MMLU, GPQA (simple-evals) and MMLU-Pro
    ("So it is four.\nAnswer: B", "B", "B", "B"),
    ("answer: $B$", "B", "B", "B"),
    ("**Answer: B**", "B", "B", "B"),
    ("**Answer:** B", "B", "", "B"),
    ("**Answer**: B", "B", "", "B"),
    ("Answer: A\nNo, wait.\nAnswer: B.", "A", "A", "A"),
    ("Answer: C", "C", "C", "C"),
    ("Answer: Because", "B", "B", "B"),
    ("Answer: Definitely B", "D", "D", "D"),
    ("four", "", "", ""),
    ("\\boxed{B}", "", "", "B"),
    ("Answer: $\\boxed{B}$", "B", "", "B"),
    ("Answer: \\boxed{B}", "B", "", "B"),
    ("Answer: \\text{B}", "B", "", "B"),
    ("Answer: \\(B\\)", "B", "", "B"),
    ("答案：B", "B", "", "B"),
    ("答案: B", "B", "", "B"),
    ("Antwort: B", "B", "", "B"),
    ("Answer: b", "b", "b", ""),
    ("answer:\nB", "", "", "B"),
    ("Answer : B", "B", "B", "B"),
    ("Answer\t:\tB", "B", "B", "B"),
    ("ANSWER: B", "B", "B", "B"),
    ("Answer: (B)", "", "", "B"),
    ("Answer: [B]", "", "", "B"),
    ("The answer is B.", "", "", "B"),
    ("the answer is (B)", "", "", "B"),
    ("The answer is: B", "", "", "B"),
    ("The answer is **B**", "", "", "B"),
    ("My answer: B. But the answer is C", "B", "B", "C"),
    ("Answer: A or B", "A", "A", "A"),
    ("Final Answer: B", "B", "B", "B"),
    ("Answer: Ｂ", "B", "", ""),
    ("الإجابة: ب", "B", "", ""),
    ("Respuesta: D", "D", "", "D"),
    ("A is red, B is blue", "", "", "B"),
    ("I think it is C.", "", "", "C"),
    ("Perhaps A, or rather B", "", "", "B"),
    ("Answer - B", "", "", "B"),
    ("answer: none of these", "", "", ""),
    ("Answer: A then Answer: D on one line", "A", "A", "D"),
    ("Réponse : B", "B", "", "B"),
    ("The answer is **(B)**. I checked each of the choices.", "", "", "B"),
    ("So the answer is **B**, not C.", "", "", "B"),
    ("**Answer:** B\nA is too small.", "B", "", "B"),
]


@pytest.mark.parametrize(("reply", "mmlu", "gpqa", "pro"), LETTERS)
def test_letters_are_read_as_by_the_official_scripts(reply: str, mmlu: str, gpqa: str, pro: str) -> None:
    for name, letter in (("mmlu", mmlu), ("gpqa", gpqa), ("mmlu-pro", pro)):
        item = items(name)[0]
        found = graded(item, "<think>Answer: A</think>" + reply)
        right = "correct" if letter == item.gold else "wrong"
        assert (found.answer, found.status) == (letter, right if letter else "unparsed"), name


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("**Answer**: B", "B"),
        ("The answer is **B**.", "B"),
        ("answer: (b)", "B"),
        ("\\boxed{B}", "B"),
        ("Answer: $\\mathbf{B}$", "B"),
        ("$\\boxed{\\textbf{(B)}}$", "B"),
        ("The answer is I believe (B)", ""),
        ("So $\\boxed{\\text{B}}$.", "B"),
        ("答案：B", "B"),
        ("Answer: A\nNo, wait.\nAnswer: B.", "B"),
        ("Respuesta: B", ""),
        ("The answer is a bird.", ""),
        ("B", ""),
    ],
)
def test_leniency_reads_the_last_letter_however_it_is_written(reply: str, letter: str) -> None:
    assert graded(items("gpqa")[0], reply, Context(lenient=True)).answer == letter


@pytest.mark.parametrize("name", ["mmlu", "mmlu-pro", "gpqa", "math", "gsm8k"])
@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("text", ["0", "x" * 79 + "\n", "Answer: ", "answer: \\text", "_", "\n", "\\boxed{", "#### "])
def test_a_long_reply_takes_no_longer_than_its_length_to_read(name: str, lenient: bool, text: str) -> None:
    """At 60,000 characters, what is done for each pair of them takes a minute and more; once for each, a moment."""
    reply, start = f"answer: \\text{text * (60_000 // len(text))}!", time.process_time()
    graded(items(name)[0], reply, Context(lenient=lenient))
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("Answer: C\nAnswer: D, no, answer: A\nAnswer: B", "C"),
        ("No letter.\nanswer: none, answer: D, no, answer:\nA\nAnswer: B", "A"),
        ("A\nB\nor C\nno: d", "C"),
    ],
)
def test_mmlu_pros_letter_is_the_last_of_the_first_line_that_has_one(reply: str, letter: str) -> None:
    assert graded(items("mmlu-pro")[0], reply).answer == letter


def test_gpqa_shuffles_by_the_records_id_alone() -> None:
    everything, few = items("gpqa"), items("gpqa", ROWS["gpqa"][::-3])
    by_id = {item.item_id: item for item in everything}
    assert all(by_id[item.item_id] == item for item in few)
    assert all(item.meta["choices"]["ABCD".index(item.gold)] == "glorpon" for item in everything)
    assert len(Counter(item.gold for item in everything)) == 4
    for item in everything:
        assert graded(item, f"Answer: {item.gold}").score == 1


@pytest.mark.parametrize(
    ("answer", "score", "strict"),
    [
        ("#### 1,200", 1, True),
        ("#### $1200.00", 1, True),
        ("So he has $1,200.", 1, False),
        ("First 3, then 1200", 1, False),
        ("#### 1. Eggs left: 9\n\n#### 2. Money: $1200\n\nAnswer: $1200", 1, False),
        ("#### 1) First\n1200 eggs", 1, False),
        ("#### 1200. That is all.", 1, True),
        ("So:\n#### 1200. She makes $18 per day for 2 days.\n", 1, True),
        ("#### 1200) done in 3 steps", 1, True),
        ("#### 1200 eggs in 3 days", 1, True),
        ("#### \u22121200", 0, False),
        ("1200 dollars, that is 12 notes", 0, False),
        ("none", 0, False),
    ],
)
def test_gsm8k_strict_and_flexible(answer: str, score: float, strict: bool) -> None:
    verdict = graded(items("gsm8k")[1], answer)
    assert (verdict.score, verdict.detail["strict"]) == (score, strict)
    assert benchmarks.find("gsm8k").summary([verdict]) == {"strict": float(strict)}


def test_numbers_and_boxes() -> None:
    assert [number(text) for text in ("$1,200.", "-3.50", "7.00", " 42 ")] == ["1200", "-3.50", "7", "42"]
    assert boxed("a \\boxed{1} b \\boxed{\\frac{1}{2}} c") == "\\frac{1}{2}"
    assert boxed("\\fbox{1} \\boxed {5}") == "5" and boxed("\\boxed{1} \\fbox{2}") == "2"
    assert boxed("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}" and boxed("\\boxed{\\left\\{1\\right.}") == "\\left\\{1\\right."
    assert boxed("so \\boxed 5$.") == "5" and boxed("\\boxed 5, \\boxed{1}") == "1"
    assert boxed("\\boxed{1") == boxed("1") == boxed("\\boxed{}") == ""
    assert final("<think>a</think> b") == "b" and final("a <think> b") == "" and final(" a ") == "a"


@pytest.mark.parametrize(
    "held", ["a\\\\{b}", "{a}\\\\", "\\begin{pmatrix}1\\\\{2}\\end{pmatrix}", "\\{1\\\\\\{2\\}\\}"]
)
def test_a_brace_after_a_row_break_counts_as_a_brace(held: str) -> None:
    assert boxed(f"So \\boxed{{{held}}}, that is {{it}}.") == held


def pairs() -> list[tuple[str, str, bool]]:
    """208 pairs of made-up answers, and whether they are the same by construction."""
    rng, found = random.Random(6), []
    for _ in range(13):
        a, b, c = rng.randint(2, 40), rng.randint(2, 40), rng.randint(2, 9)
        same = [
            (f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}"),
            (f"\\dfrac{{{a * c}}}{{{b * c}}}", f"\\frac{{{a}}}{{{b}}}"),
            (f"{a}\\sqrt{{{c}}}", f"\\sqrt{{{a * a * c}}}"),
            (f"{a}{{,}}000", f"{a}000"),
            (f"({a},{b})", f"({a}, {b})"),
            (f"{c}^{{2}}", str(c * c)),
            (f"{a}x+{b}", f"{b} + {a}x"),
            (f"\\text{{{'ab'[a % 2]}}}", "ab"[a % 2]),
        ]
        different = [
            (f"\\frac{{{a}}}{{{b}}}", f"\\frac{{{a + 1}}}{{{b}}}"),
            (str(a), str(a + 1)),
            (f"({a},{b})", f"({a},{b + 1})"),
            (f"\\sqrt{{{a}}}", f"\\sqrt{{{a + 1}}}"),
            (f"[{a},{a + b})", f"[{a},{a + b}]"),
            (f"{a}x+{b}", f"{a}x-{b}"),
            (f"{a}\\pi", f"{a}"),
            (str(a), ""),
        ]
        found += [(x, y, True) for x, y in same] + [(x, y, False) for x, y in different]
    return found


def test_math_equivalence_is_math_verifys_on_208_pairs() -> None:
    for gold, answer, same in pairs():
        verified = math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(f"${answer}$"))
        assert equivalent(gold, answer) == same == verified, (gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("32348", "32\\,348", True),
        ("380", "32\\,348", False),
        ("1000000", "1\\,000~000", True),
        ("0", "1\\,000\\,000", False),
        ("17", "17.", True),
        ("(1, 200)", "(1,\\ 200)", True),
        ("15", "15\\,\\text{cm}", True),
    ],
)
def test_math_reads_thin_spaces_between_thousands_and_a_full_stop(gold: str, answer: str, same: bool) -> None:
    assert equivalent(gold, answer) is same


def test_math_has_no_equal_emptiness_and_no_hanging() -> None:
    assert not equivalent("", "") and not equivalent(" ", "x")
    half = items("math")[0]
    assert half.gold == "\\frac{1}{2}"
    assert graded(half, "so \\boxed{0.5}").status == "correct"
    assert graded(half, "\\boxed{0.6}").status == "wrong"
    assert graded(half, "0.5").status == "unparsed"
    assert graded(half, "\\boxed{9^{9^{9^9}}}").score == 0


def test_a_prompts_braces_and_values_are_left_alone() -> None:
    item = items("hle", [ROWS["hle"][0] | {"question": "What is {response} in {x}?"}])[0]
    assert "{your chosen answer}" in benchmarks.find("hle").env(item).options["task"]["instructions"]
    filled = fill("hle_judge", question=item.question, response="R", correct_answer="C")
    assert "[question]: What is {response} in {x}?" in filled and re.search(r"\[response\]: R\n", filled)


def test_an_installed_package_brings_benchmarks_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "made_up_bench-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up-bench\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[skyrl_eval.benchmarks]\nmine = made_up_bench\n")
    (tmp_path / "made_up_bench.py").write_text(
        "from skyrl_eval.benchmarks import Benchmark, register_benchmark\n\n"
        "@register_benchmark\nclass Mine(Benchmark):\n    name = 'mine'\n"
    )
    command = (
        "from skyrl_eval import benchmarks; print(benchmarks.find('mine').name, 'mine' in benchmarks.names('agent'))"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run([sys.executable, "-c", command], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert done.stdout.decode().split() == ["mine", "True"], done.stderr
