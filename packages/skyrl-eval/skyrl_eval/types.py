"""The records of an evaluation, each a line of JSON, in the order of their flow: Item -> Attempt -> Verdict."""

from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, str, int]
"""Benchmark, item, sample: what an attempt and its verdict are found by."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a benchmark.
    Example: Item("gsm8k", "5f0c", "Ann has 4 pears and eats one. How many are left?", gold="3")
    """

    bench: str
    item_id: str  # the data set's own, or a hash of the content: never a row number
    # As the data set has it; `env` of the benchmark puts the official instructions around it
    question: str
    gold: Any = field(default=None, repr=False)  # for the grader only: no env, prompt or transcript ever holds it
    meta: dict[str, Any] = field(default_factory=dict)  # for the grader and for results by part: category, cluster, ...
    image: str = ""  # a data URI

    def key(self, sample: int) -> Key:
        return self.bench, self.item_id, sample


@dataclass(slots=True)
class Record:
    """What is known of one try at an item."""

    bench: str
    item_id: str
    sample: int  # 0 to k-1: the number of the try

    @property
    def key(self) -> Key:
        return self.bench, self.item_id, self.sample


@dataclass(slots=True)
class Attempt(Record):
    """What one try at an item came to. Solving writes it; grading only reads it.
    Example: Attempt("hle", "q7", 0, answer="Answer: B\\nConfidence: 70%", prompt_tokens=212, completion_tokens=48)
    """

    answer: str  # the model's last message as it wrote it; for SWE-bench the patch
    stop: str = "done"
    """"done", "length" (tokens of a turn or of the context), "max_steps", "timeout", "error" (to be tried again), or
    what the endpoint's answer is where it is none, such as "refusal"."""
    error: str | None = None
    steps: int = 0  # turns of the model
    tool_calls: int = 0  # executed calls, failed ones among them
    tool_errors: int = 0
    prompt_tokens: int | None = 0
    """Summed over all requests: a context that is sent again counts again. None: not told."""
    completion_tokens: int | None = 0
    cached_tokens: int = 0  # those of the prompt tokens that the server says it had in its cache
    seconds: float = 0.0
    messages: list[dict[str, Any]] = field(default_factory=list)  # the transcript, as chat messages
    urls: list[str] = field(default_factory=list)  # every address that a tool fetched


@dataclass(slots=True)
class Verdict(Record):
    """What a grader says of an attempt.
    Example: Verdict("hle", "q7", 0, score=1.0, status="correct", answer="B", confidence=0.7, grader="3ab1...")
    """

    score: float | None
    """0 to 1; None: nobody knows (judge or sandbox failed)."""
    status: str
    """"correct", "wrong", "unparsed" (no answer found), "truncated" (cut off, not correct), "ungraded" or "missing"."""
    answer: str = ""  # what the grader took for the answer
    confidence: float | None = None  # 0 to 1, as the model stated it
    detail: dict[str, Any] = field(default_factory=dict)  # the benchmark's own figures: precision, flags, ...
    judge_prompt_tokens: int | None = 0  # of all tries at a readable reply; None: not told
    judge_completion_tokens: int | None = 0
    attempt: str = ""  # the hash of the answer that was graded
    grader: str = ""  # the hash of what decides: the grader's code, the prompts, the judge's model
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a benchmark's official data is. Example: Source("openai/gsm8k", "main/test-*.parquet", size=1319)."""

    repo: str = ""  # a data set on Hugging Face
    files: str = ""  # its files, as a glob pattern
    shots: str = ""  # the files of worked examples that are shown before the question
    size: int = 0  # items of the full set
    url: str = ""  # of a file that is not on Hugging Face
    sha256: str = ""  # the first digits of what that file must hash to
