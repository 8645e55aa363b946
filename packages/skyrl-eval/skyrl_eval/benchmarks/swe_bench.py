"""SWE-bench Verified and Multilingual: issues of repositories, each resolved by a patch that its tests accept."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from skyrl_eval import data, swe
from skyrl_eval.benchmarks.common import NOTES, Benchmark, Context, verdict
from skyrl_eval.prompts import fill
from skyrl_eval.sandbox import EXECUTORS
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample

SWE_ENV = "skyrl_eval:skyrl/swe-v0"
Tests = Annotated[list[str], BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value)]


class SWEBench(Benchmark):
    """Verified: 500 issues of 12 Python repositories."""

    name = "swe-verified"
    kind, executors, steps, slow = "code", EXECUTORS, 100, True
    source = Source("SWE-bench/SWE-bench_Verified", "data/test-*.parquet", size=500)
    prompts = ("swebench_task", "swe_system", "swe_system_bare")
    notes = NOTES["swe-verified"]

    class Row(data.Row):
        """Both schemas: that of swebench 4 (lists as JSON text, no eval_script) and that of swebench 5."""

        repo: str
        instance_id: str
        base_commit: str
        patch: str
        test_patch: str
        problem_statement: str
        fail_to_pass: Tests = Field(alias="FAIL_TO_PASS", min_length=1)
        pass_to_pass: Tests = Field(alias="PASS_TO_PASS")
        eval_script: str = ""
        image: str = ""
        log_parser: str = "parse_log_pytest"
        eval_type: str = "pass_and_fail"

    def item_of(self, row: Row) -> Item:
        tests = [*row.fail_to_pass, *row.pass_to_pass]
        if not row.eval_script and not all("::" in test for test in tests):
            raise UserError(
                f"{row.instance_id}, field 'eval_script': missing, and one can be made for pytest's tests only. "
                "Use the data of swebench 5, which has it."
            )
        image = row.image or f"swebench/sweb.eval.x86_64.{row.instance_id.replace('__', '_1776_')}:latest".lower()
        script = row.eval_script or swe.pytest_script(row.base_commit, row.test_patch, tests)
        gold = row.model_dump(by_alias=True, exclude={"problem_statement", "image"}) | {"eval_script": script}
        meta = {"repo": row.repo, "base_commit": row.base_commit, "container": image}
        return self.item(row.instance_id, row.problem_statement, gold, **meta, category=row.repo, cluster=row.repo)

    def env(self, item: Item) -> Sample:
        """The repository and the issue; the patches, the tests and the script stay with the grader."""
        task = {"question": fill("swebench_task", repo=item.meta["repo"], question=item.question)}
        task |= {name: item.meta[name] for name in ("repo", "base_commit", "container")}
        return Sample(f"{item.bench}:{item.item_id}", SWE_ENV, 0, {"task": task})

    def check(self, context: Context) -> None:
        super().check(context)
        swe.check()

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        """The attempt's answer is its patch."""
        patch = attempt.answer if attempt.answer.endswith("\n") else attempt.answer + "\n"
        if not patch.strip():
            return verdict(item, attempt, 0.0, "")
        tested = self._run(item, attempt, patch, context)
        clean, flags = swe.guarded(item.gold, item.meta, patch, context)
        guarded = False
        if tested.resolved and clean:
            again = self._run(item, attempt, clean, context, guarded=True)
            guarded, flags = again.resolved, flags + ["forges_outcomes"] * again.forged
        detail = {"resolved_guarded": guarded, "timed_out": tested.timed_out, "flags": flags}
        return verdict(item, attempt, float(tested.resolved), f"{len(patch)} characters", detail=detail)

    def _run(self, item: Item, attempt: Attempt, patch: str, context: Context, guarded: bool = False) -> swe.Tested:
        tested = swe.run_tests(item.gold, item.meta, patch, context, guarded)
        if context.logs:
            folder = context.logs / item.item_id / str(attempt.sample)
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in (("test_output.txt", tested.log), ("patch.diff", patch)):
                place = folder / f"{'guarded-' * guarded}{name}"
                place.write_text(text, encoding="utf-8", errors="surrogateescape")
        return tested

    def summary(self, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        details = [one.detail for one in verdicts]
        return {
            "resolved_guarded": sum(bool(detail.get("resolved_guarded")) for detail in details) / len(details),
            "timed_out": sum(bool(detail.get("timed_out")) for detail in details),
            "flags": dict(sorted(Counter(flag for detail in details for flag in detail.get("flags", [])).items())),
        }


class Multilingual(SWEBench):
    """300 issues of 41 repositories in nine languages, in the schema of swebench 5."""

    name = "swe-multilingual"
    source = Source("SWE-bench/SWE-bench_Multilingual", "data/test-*.parquet", size=300)
    notes = SWEBench.notes[1:]
