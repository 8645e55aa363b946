"""BrowseComp: 1,266 questions whose short answers are hard to find on the web, kept encrypted in the file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from itertools import cycle

from skyrl_eval import data
from skyrl_eval.benchmarks.common import MatchedAnswer, ask
from skyrl_eval.prompts import fill
from skyrl_eval.types import Item, Source
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample


def decrypt(text: str, password: str) -> str:
    """Base64 of the text XORed with the password's SHA-256, again and again."""
    key = cycle(hashlib.sha256(password.encode()).digest())
    return bytes(byte ^ next(key) for byte in base64.b64decode(text, validate=True)).decode()


class BrowseComp(MatchedAnswer):
    name = "browsecomp"
    url = "https://openaipublic.blob.core.windows.net/simple-evals/browse_comp_test_set.csv"
    source = Source(url=url, sha256="7b24471c", size=1266)
    judge = "gpt-4o"
    prompts = ("browsecomp_question", "hle_judge")
    notes = (
        "The published grader compares 'correct: yes' with 'yes' and is never satisfied; ours reads the word.",
        "A judge that gives no judgement leaves the item ungraded; the published grader counts it as wrong.",
    )

    class Row(data.Row):
        problem: str
        answer: str
        canary: str
        problem_topic: str = ""

    def tasks(self, rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
        items = []
        for number, row in enumerate(rows, start=1):
            try:
                problem, answer = decrypt(row.problem, row.canary), decrypt(row.answer, row.canary)
            except ValueError as error:
                raise UserError(
                    f"BrowseComp row {number}, field 'problem' or 'answer': not what 'canary' opens."
                ) from error
            items.append(self.item(data.content_id(problem), problem, answer, category=row.problem_topic))
        return items

    def env(self, item: Item) -> Sample:
        return ask(item, fill("browsecomp_question", question=item.question))


BENCHMARK = BrowseComp()
