"""MMLU, MMLU-Pro and GPQA: a letter is the answer, read as the official scripts do, or by one rule (--lenient)."""

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from skyrl_eval import data
from skyrl_eval.benchmarks.common import NOTES, Benchmark, Context, ask, final, verdict
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample

CUE = "Answer: Let's think step by step."
WORDS = (
    "Answer|উত্তর|उत्तर|Antwort|답변|정답|답|答案|答|答复|答曰|الإجابة|الجواب|إجابة|الإجابة النهائية"
    "|الإجابة الصحيحة|الإجابة الصحيحة هي|الإجابة هي|الجواب النهائي|Respuesta|Risposta|答え|回答|解答"
    "|Jawaban|Réponse|Resposta|Jibu|Idahun|Ìdáhùn|Idáhùn|Àmọ̀nà|Àdáhùn|Ànúgọ|Àṣàyàn"
)
"""For "Answer", in the order in which simple-evals tries them."""
LETTERS = str.maketrans("أبجدঅবডঢＡＢＣＤ", "ABCD" * 3)
LENIENT = re.compile(
    r"(?:(?:(?i:\banswer)|答案)[\s*_]*(?:[:：]|is\b:?)(?:[\s*_$(\[{]|\\boxed|\\(?:text|math)[a-z]*|\\\()*"
    r"|\\boxed\{(?:\\(?:text|math)\w*\{)?\(?)(?!I [a-z])([A-J]|[a-j](?=\W*$))(?![a-z])",
    re.MULTILINE,
)
"""A letter behind "answer:" or "answer is", or in a box."""


class Choices(Benchmark):
    """The answer is a letter: what the first of the patterns that matches at all finds first."""

    lenient = True
    marks: ClassVar[str] = ""  # taken from a reply first
    patterns: ClassVar[tuple[str, ...]]

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        text = final(attempt.answer)
        found = LENIENT.findall(text) if context.lenient else ()
        answer = found[-1].upper() if found else self.official_letter(text)
        return verdict(item, attempt, float(answer == item.gold), answer)

    def official_letter(self, text: str) -> str:
        """As the official script reads it; a small letter is none of the choices to it."""
        text = re.sub(self.marks, "", text)
        found = (re.search(pattern, text) for pattern in self.patterns)
        return next((match[1].translate(LETTERS) for match in found if match), "")


class FourChoices(Choices):
    """Questions with the choices A to D in `meta["choices"]`, answered by a last line "Answer: LETTER"."""

    prompts = ("choices_question",)
    patterns: ClassVar[tuple[str, ...]] = (r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])",)

    def env(self, item: Item) -> Sample:
        choices = "\n".join(f"{letter}) {text}" for letter, text in zip("ABCD", item.meta["choices"], strict=True))
        return ask(item, fill("choices_question", letters="ABCD", question=item.question, choices=choices))


class MMLU(FourChoices):
    """14,042 questions in 57 subjects."""

    name = "mmlu"
    source = Source("cais/mmlu", "all/test-*.parquet", size=14042)
    notes = NOTES["mmlu"]
    marks = r"\*\*|\}\$|\\?\$|\\math(?:rm|bf)\{|\\?\{|\\(?:text|boxed|\()"  # Markdown and LaTeX
    patterns = tuple(rf"(?i){word}\s*[:：ঃ][ \t]*([A-Dأ-دঅবডঢＡＢＣＤ])" for word in WORDS.split("|"))

    class Row(data.Row):
        question: str
        subject: str = ""
        choices: Annotated[list[str], Field(min_length=4, max_length=4)]
        answer: Annotated[int, Field(ge=0, le=3)]

    def item_of(self, row: Row) -> Item:
        item_id = data.content_id(row.subject, row.question, row.choices, row.answer)
        return self.item(item_id, row.question, "ABCD"[row.answer], category=row.subject, choices=row.choices)


class GPQA(FourChoices):
    """Graduate-level questions; 198 in the diamond set (the default)."""

    name = "gpqa"
    source = Source("Idavidrein/gpqa", "gpqa_diamond.csv", size=198)
    notes = NOTES["gpqa"]

    class Row(data.Row):
        question: str = Field(alias="Question", min_length=1)
        correct: str = Field(alias="Correct Answer", min_length=1)
        incorrect1: str = Field(alias="Incorrect Answer 1")
        incorrect2: str = Field(alias="Incorrect Answer 2")
        incorrect3: str = Field(alias="Incorrect Answer 3")
        record_id: str | None = Field(default=None, alias="Record ID")
        domain: str = Field(default="", alias="High-level domain")

    def item_of(self, row: Row) -> Item:
        item_id = row.record_id or data.content_id(row.question)
        order = sorted(range(4), key=lambda place: data.content_id(item_id, place))
        texts = [row.correct, row.incorrect1, row.incorrect2, row.incorrect3]
        choices = [texts[place].strip() for place in order]
        return self.item(item_id, row.question, "ABCD"[order.index(0)], category=row.domain, choices=choices)


class MMLUPro(Choices):
    """12,032 questions with up to ten choices; five worked examples of the same category come first."""

    name = "mmlu-pro"
    source = Source("TIGER-Lab/MMLU-Pro", "data/test-*.parquet", "data/validation-*.parquet", size=12032)
    prompts = ("mmlu_pro_system",)
    marks = r"\*\*"
    patterns = (r"answer is \(?([A-J])", r"(?m)^.*[aA]nswer:\s*([A-J])", r"(?s)\A.*\b([A-J])\b")
    notes = NOTES["mmlu-pro"]

    class Row(data.Row):
        question_id: str
        question: str
        options: Annotated[list[str], Field(min_length=2, max_length=10)]
        answer: Annotated[str, Field(pattern="^[A-J]$")]
        category: str = ""
        cot_content: str = ""

        @model_validator(mode="after")
        def has_answer(self) -> Self:
            if ord(self.answer) - 65 >= (count := len(self.options) - self.options.count("N/A")):
                raise ValueError(f"field 'answer' is {self.answer}, and field 'options' has {count}")
            return self

        def asked(self) -> str:
            """The question, its choices without those that are "N/A", and the cue."""
            choices = [text for text in self.options if text != "N/A"]
            lines = [f"{chr(65 + place)}. {text}" for place, text in enumerate(choices)]
            return "\n".join(("Question:", self.question, "Options:", *lines, CUE))

    def tasks(self, rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
        examples: dict[str, list[str]] = {}
        for shot in shots:
            answer = shot.cot_content.removeprefix("A: Let's think step by step.").strip()
            examples.setdefault(shot.category, []).append(f"{shot.asked()} {answer}")
        items = []
        for row in rows:
            asked = "\n\n".join((*examples.get(row.category, [])[:5], row.asked()))
            items.append(self.item(row.question_id, row.question, row.answer, category=row.category, asked=asked))
        return items

    def env(self, item: Item) -> Sample:
        return ask(item, item.meta["asked"], fill("mmlu_pro_system", category=item.meta["category"]))
