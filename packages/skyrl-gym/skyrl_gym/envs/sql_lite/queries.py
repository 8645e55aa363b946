"""Runs queries on SQLite files, read-only and bounded. This file's text is what runs in python_exec's sandbox, so it
knows the standard library only; queries of our own run through it here.

What SQLite's authorizer and progress handler do not see (one long or large step) ends at the sandbox's limits.
"""

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterable
from typing import Any

STEPS = 20_000_000  # of SQLite's virtual machine, for all queries of a call: about a second
LONGEST_QUERY, LONGEST_VALUE, LONGEST_RESULT = 10_000, 1 << 20, 1 << 20
READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
PRAGMAS = ("table_info", "table_xinfo", "table_list", "foreign_key_list", "index_list", "index_info")
FORBIDDEN = {"random", "randomblob", "current_date", "current_time", "current_timestamp"}
FORBIDDEN |= {"load_extension", "fts3_tokenizer"}  # the second tells where in memory something lies
NOW = re.compile(r"'\s*now\s*'", re.IGNORECASE)


def permitted(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    fine = action in READING or (action == sqlite3.SQLITE_PRAGMA and str(first).lower() in PRAGMAS)
    fine = fine or (action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in FORBIDDEN)
    return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY


def answer(db: sqlite3.Connection, query: str, most: int) -> dict[str, Any]:
    """{"columns", "rows", "more"}, at most so many rows, or {"error": a sentence, SQLite's where it is one}."""
    if NOW.search(query):
        return {"error": "the current time is not available"}
    rows: list[list[Any]] = []
    try:
        cursor = db.execute(query)
        names = [column[0] for column in cursor.description or ()]
        size = len(json.dumps(names))  # as it is sent
        while size <= LONGEST_RESULT and len(rows) < most and (row := cursor.fetchone()) is not None:
            rows.append([value.hex() if isinstance(value, bytes) else value for value in row])
            size += len(json.dumps(rows[-1]))
        if size > LONGEST_RESULT:
            return {"error": f"the result has more than {LONGEST_RESULT} characters"}
        more = len(rows) == most and cursor.fetchone() is not None
    except MemoryError:
        return {"error": "out of memory"}
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: a lone surrogate, a null character
        return {"error": str(error)}
    return {"columns": names, "rows": rows, "more": more} if names else {"error": "this is no query with a result"}


def answers(files: Iterable[str], queries: Iterable[str], most: int) -> list[list[dict[str, Any]]]:
    """For each file the answer to each query."""
    ticks = iter(range(STEPS // 1000))
    found = []
    for file in files:
        address = f"file:{file}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(address, uri=True, isolation_level=None)) as db:
            db.text_factory = lambda raw: raw.decode("utf-8", "replace")
            db.execute("PRAGMA temp_store = 2")  # in memory
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
            db.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, LONGEST_QUERY)
            db.set_authorizer(permitted)
            db.set_progress_handler(lambda: next(ticks, None) is None, 1000)
            found.append([answer(db, query, most) for query in queries])
    return found
