"""Items in the official schemas, all made up: no row of any benchmark is in this repository."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import zlib
from collections.abc import Sequence
from typing import Any

from skyrl_eval import benchmarks
from skyrl_eval.data import Row
from skyrl_eval.types import Attempt, Item

PASSWORD = "made-up password"


def encrypted(text: str, password: str = PASSWORD) -> str:
    """By the steps that BrowseComp publishes: a key as long as the text, made of the password's SHA-256."""
    data, digest = text.encode(), hashlib.sha256(password.encode()).digest()
    key = digest * (len(data) // len(digest)) + digest[: len(data) % len(digest)]
    return base64.b64encode(bytes(a ^ b for a, b in zip(data, key, strict=True))).decode()


def private_tests(tests: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def mmlu_pro(number: int, **changes: Any) -> dict[str, Any]:
    options = ["red", "green", "blue", "N/A"]
    row = {"question_id": number, "question": f"Which colour is number {number}?", "options": options, "answer": "B"}
    return row | {"answer_index": 1, "cot_content": "", "category": "art", "src": "made-up"} | changes


ROWS: dict[str, list[dict[str, Any]]] = {
    "hle": [
        {"id": "h1", "question": "How many legs has a glorp?", "answer": "7", "answer_type": "exactMatch", "image": ""},
        {
            "id": "h2",
            "question": "Which is a glorp?\nA. stone\nB. bird",
            "answer": "B",
            "answer_type": "multipleChoice",
            "image": "",
            "category": "Biology",
        },
        {
            "id": "h3",
            "question": "What is shown?",
            "answer": "a glorp",
            "answer_type": "exactMatch",
            "image": "data:image/png;base64,AAAA",
        },
    ],
    "browsecomp": [
        {"problem": encrypted("Who drew the map of Glorpia?"), "answer": encrypted("Ada Müller"), "canary": PASSWORD},
        {"problem": encrypted("Which year did Glorpia end?"), "answer": encrypted("1912"), "canary": PASSWORD},
    ],
    "deepsearchqa": [
        {
            "problem": "Name the moons of Glorp.",
            "problem_category": "Science",
            "answer": "Ix, Ox",
            "answer_type": "Set Answer",
        },
        {
            "problem": "Which glorps can fly?",
            "problem_category": "Science",
            "answer": "None",
            "answer_type": "Set Answer",
        },
        {
            "problem": "Who found Glorp?",
            "problem_category": "History",
            "answer": "Ada",
            "answer_type": "Single Answer",
        },
    ],
    "mmlu": [
        {"question": "2 + 2?", "subject": "made_up_sums", "choices": ["3", "4", "5", "6"], "answer": 1},
        {"question": "2 + 3?", "subject": "made_up_sums", "choices": ["3", "4", "5", "6"], "answer": 2},
    ],
    "mmlu-pro": [mmlu_pro(1), mmlu_pro(2, options=[f"shade {n}" for n in range(10)], answer="J")],
    "gpqa": [
        {
            "Question": f"Which particle is number {number}?",
            "Correct Answer": "glorpon",
            "Incorrect Answer 1": "electron",
            "Incorrect Answer 2": "muon",
            "Incorrect Answer 3": "pion",
            "Record ID": f"rec{number}",
            "High-level domain": "Physics",
        }
        for number in range(20)
    ],
    "math": [
        {
            "problem": "Half of one?",
            "solution": "It is $\\boxed{\\frac{1}{2}}$.",
            "level": "Level 1",
            "type": "Algebra",
        },
        {"problem": "Three squared?", "solution": "...", "answer": "9", "subject": "Algebra", "unique_id": "made/up/9"},
    ],
    "gsm8k": [
        {"question": "Ann has 1,000 pears and eats one. How many?", "answer": "1000 - 1 = <<1000-1=999>>999\n#### 999"},
        {"question": "Bob has 1,200 dollars. How many?", "answer": "That is all.\n#### 1,200"},
    ],
    "livecodebench": [
        {
            "question_title": "Double",
            "question_content": "Read n, print 2n.",
            "platform": "atcoder",
            "question_id": "made1",
            "contest_id": "made",
            "contest_date": "2026-01-01T00:00:00",
            "starter_code": "",
            "difficulty": "easy",
            "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
            "private_test_cases": private_tests([{"input": "5\n", "output": "10", "testtype": "stdin"}]),
            "metadata": "{}",
        },
        {
            "question_title": "Pairs",
            "question_content": "Return the sum and the difference.",
            "platform": "leetcode",
            "question_id": "made2",
            "contest_id": "made",
            "contest_date": "2026-01-02T00:00:00",
            "starter_code": "class Solution:\n    def pair(self, a: int, b: int) -> list[int]:",
            "difficulty": "medium",
            "public_test_cases": json.dumps([{"input": "3\n1", "output": "[4, 2]", "testtype": "functional"}]),
            "private_test_cases": json.dumps([{"input": "0\n0", "output": "[0, 0]", "testtype": "functional"}]),
            "metadata": json.dumps({"func_name": "pair"}),
        },
    ],
}


def items(bench: str, rows: Sequence[dict[str, Any]] | None = None, shots: Sequence[dict[str, Any]] = ()) -> list[Item]:
    """The items of checked rows, the made-up ones by default."""
    module = benchmarks.find(bench)
    checked: list[list[Row]] = [
        [module.Row.model_validate(row) for row in part] for part in (rows or ROWS[bench], shots)
    ]
    return module.tasks(*checked)


def attempt(item: Item, answer: str, sample: int = 0, **fields: Any) -> Attempt:
    return Attempt(item.bench, item.item_id, sample, answer, **fields)
