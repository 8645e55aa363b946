"""sql_lite (docs/environments/sql_lite.md): a question about a database, answered by a query; others look at it."""

import re
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

from skyrl_gym.core import Options, Outcome, Row, Task, TextEnv
from skyrl_gym.data import ground_truth, read_row, require, row_id
from skyrl_gym.envs.sql_lite import tasks
from skyrl_gym.envs.sql_lite.results import MOST_MIB, Result, ask, same, sandbox
from skyrl_gym.envs.tool_use.env import last_answer
from skyrl_gym.parsing import MAX_CALLS
from skyrl_gym.tools.tool import MAX_OUTPUT, responses

SHOWN_ROWS, LONGEST_CELL = 20, 400
SCHEMA = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
_FENCE = re.compile(r"\s*+(?:```\w*+)?\s*+")


class SqlLiteEnv(TextEnv):
    """Difficulties: 1 and 2 one table, 3 two; 4 two and 5 three or four, whose columns the agent has to look up.
    databases: Spider's folder `database`, for rows with `db_id`, `question` and `query` as options["task"].
    """

    choices = TextEnv.choices | {"difficulty": (1, 2, 3, 4, 5)}
    kept = ("looked",)

    def __init__(self, *, databases: str | PathLike[str] | None = None, **defaults: Any) -> None:
        super().__init__(**defaults)
        if databases is not None and not Path(databases).is_dir():
            raise ValueError(f"There is no folder {str(databases)!r}; databases is Spider's folder 'database'.")
        self._folder = None if databases is None else str(databases)

    def _says(self, name: str, lang: str) -> str:
        return str(tasks.world()["texts"][name][tasks.LANGS.index(lang)])

    def _made(self, task_id: str, query: str, options: Options, frame: str, *shown: str, **data: Any) -> Task:
        rules = self._says("instructions", options["lang"]).format(most=MAX_CALLS, rows=SHOWN_ROWS)
        text = self._says(frame, options["lang"]).format(*shown)
        return Task(task_id, text, query, instructions=rules, data=data)

    def count_tasks(self, options: Options) -> int:
        return tasks.COUNTS[options["split"]]

    def make_task(self, options: Options, index: int) -> Task:
        split, level, lang = (options[name] for name in self.id_options)
        draft, numbers = tasks.make(level, split, index)
        question = draft.texts[tasks.LANGS.index(lang)]
        [schema] = tasks.results(tasks.database(draft.domain, (), 0), [SCHEMA])
        frame, shown, look_up = "schema", _lines(schema), list[str]()
        if level >= 4:
            frame, look_up = "tables", list(draft.tables)
            shown = ", ".join(tasks.world()["domains"][draft.domain])
        planted = list(map(list, draft.planted))
        data = {"domain": draft.domain, "planted": planted, "numbers": list(numbers), "ordered": draft.ordered}
        task_id = self.task_id(options, index)
        return self._made(task_id, draft.sql, options, frame, shown, question, **data, look_up=look_up)

    def task_from_row(self, row: Row, options: Options) -> Task:
        where = "options['task']"
        if not isinstance(row, dict) or "prompt" in row:
            row = read_row(row, where)
            said = [each["content"] for each in row["prompt"] if each["role"] == "user"]
            row = {**row, "question": "\n\n".join(said), "query": ground_truth(row)}
        for name in ("db_id", "question", "query"):
            value = row.get(name)
            require(isinstance(value, str) and value.strip() != "", where, name, "a string with text", value)
        if self._folder is None:
            raise ValueError(f"{where} needs gymnasium.make(id, databases='spider/database').")
        db_id, question, query = row["db_id"], row["question"], row["query"]
        [[schema, gold], *hidden] = ask(_files(self._folder, db_id), [SCHEMA, query])
        for found in (schema, gold, *(each for _, each in hidden)):
            if "error" in found or found["more"]:
                why = found.get("error", "the result is too long")
                raise ValueError(f"{where}: field 'query' fails on the database {db_id!r}: {why}.")
        shown, task_id = _lines(schema), row_id([db_id, question, query])
        ordered = "order by" in query.lower()
        return self._made(task_id, query, options, "schema", shown, question, db_id=db_id, ordered=ordered, look_up=[])

    def _databases(self) -> list[bytes]:
        data = self.task.data
        if "db_id" in data:
            return _files(str(self._folder), data["db_id"])
        planted = tuple(map(tuple, data["planted"]))
        return [tasks.database(data["domain"], planted, number) for number in data["numbers"]]

    def begin(self, task: Task) -> str:
        sandbox().start()
        self.looked = False
        return task.text

    def act(self, action: str) -> Outcome:
        answer = last_answer(action, "</sql>")
        if answer is not None:
            return self._judge(_bare(answer))
        queries = [_bare(text.partition("</sql>")[0]) for text in action.split("<sql>", MAX_CALLS + 1)[1:]]
        found = ask(self._databases()[:1], queries[:MAX_CALLS], SHOWN_ROWS)[0] if queries else []
        if len(queries) > MAX_CALLS:
            found += [{"error": f"Only the first {MAX_CALLS} queries of a message are run."}]
        calls = [{"tool": "sql", "args": {"query": query}} for query in queries]
        made = [call | _shown(result) for call, result in zip(calls, found, strict=False)]
        self.looked = self.looked or any("result" in call for call in made)
        valid = 0 < len(made) == sum("result" in call for call in made)
        observation = responses(made) or self._says("neither", self.task.lang)
        return Outcome(observation, {"answer": 0.0, "format": 0.0}, valid, info={"tool_calls": made})

    def _judge(self, query: str) -> Outcome:
        databases, data = self._databases(), self.task.data
        gold, given = self.task.ground_truth, ask(databases, [query])
        truth = ask(databases, [gold]) if "db_id" in data else [tasks.results(each, [gold]) for each in databases]
        mine, theirs = ([result for (result,) in each] for each in (given, truth))
        right = same(mine, theirs, data["ordered"])
        problem = mine[0].get("error", "")
        info = {"tool_calls": [], "answer_error": problem}
        parts = {"answer": 1.0 * right, "format": 0.1 * (not problem)}
        return Outcome("", parts, not problem, right, terminated=True, info=info)

    def expert_action(self) -> str:
        """At difficulties 4 and 5 looks up the columns of the tables that matter first."""
        if self.task.data["look_up"] and not self.looked:
            ask_for = "<sql>SELECT sql FROM sqlite_master WHERE name = '{}'</sql>"
            return "\n".join(map(ask_for.format, self.task.data["look_up"]))
        return f"<answer>{self.task.ground_truth}</answer>"


def _lines(schema: Result) -> str:
    return "\n".join(statement for (statement,) in schema["rows"])


def _bare(query: str) -> str:
    return _FENCE.sub("", query, count=1).strip().removesuffix("```").strip()


def _shown(result: Result) -> dict[str, str]:
    if "error" in result:
        return {"error": result["error"][:MAX_OUTPUT]}
    rows = [["NULL" if value is None else str(value)[:LONGEST_CELL] for value in row] for row in result["rows"]]
    lines = [" | ".join(" ".join(cell.split("\n")) for cell in row) for row in [result["columns"], *rows]]
    count = f"({len(rows)} rows)" if not result["more"] else f"(the first {len(rows)} rows; there are more)"
    text = "\n".join(lines)
    cut = "... (cut)" if len(text) > MAX_OUTPUT else ""
    return {"result": f"{text[:MAX_OUTPUT]}{cut}\n{count}"}


# <folder>/<db_id>/<db_id>.sqlite, and after it up to seven others that lie beside it, as in test suites.
@lru_cache(maxsize=4)
def _files(folder: str, db_id: str) -> list[bytes]:
    shown = Path(folder, db_id, f"{db_id}.sqlite")
    if Path(db_id).name != db_id or not shown.is_file():
        raise ValueError(f"options['task']: field 'db_id': there is no database {str(shown)!r}.")
    paths = [shown, *(path for path in sorted(shown.parent.glob("*.sqlite")) if path != shown)][:8]
    if sum(path.stat().st_size for path in paths) > MOST_MIB << 20:
        raise ValueError(f"options['task']: the databases in {str(shown.parent)!r} have more than {MOST_MIB} MiB.")
    return [path.read_bytes() for path in paths]
