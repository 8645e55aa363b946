"""sql_lite: the expert solves all, near misses and constants do not, no query gets out, Spider's rows are played."""

import itertools
import os
import re
import sqlite3
import time
from contextlib import closing

import gymnasium as gym
import pytest

from skyrl_gym.envs.sql_lite import tasks
from skyrl_gym.envs.sql_lite.queries import STEPS
from skyrl_gym.envs.sql_lite.results import ask, same

ID, SPLITS, LEVELS = "skyrl/sql_lite-v0", ("train", "val", "test"), (1, 2, 3, 4, 5)
FULL = os.environ.get("SKYRL_TEST_FULL") == "1"
SAMPLE = 1000 if FULL else 3


def drafts(difficulty, split="train", count=None):
    return [tasks.make(difficulty, split, index) for index in range(count or (200 if FULL else 8))]


def contents(draft, numbers):
    return [tasks.database(draft.domain, draft.planted, number) for number in numbers]


def graded(draft, numbers, queries):
    """Of each query whether it would be right."""
    databases = contents(draft, numbers)
    truth = [tasks.results(content, [draft.sql])[0] for content in databases]
    found = ask(databases, queries)
    return [same([each[place] for each in found], truth, draft.ordered) for place in range(len(queries))]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("difficulty", LEVELS)
def test_the_expert_solves_all_in_both_languages(difficulty, split):
    env = gym.make(ID, difficulty=difficulty, split=split)
    for seed, lang in itertools.product(range(SAMPLE), tasks.LANGS):
        env.reset(seed=seed, options={"lang": lang})
        over, turn = False, 0
        while not over:
            _, reward, over, truncated, info = env.step(env.unwrapped.expert_action())
            assert info["valid_action"] and not truncated
            turn += 1
        assert info["success"] and reward == pytest.approx(1.1) and turn == 1 + (difficulty >= 4), (seed, lang)


@pytest.mark.parametrize("difficulty", LEVELS)
def test_tasks_differ_and_no_query_is_in_two_splits(difficulty):
    owner, texts, counts = {}, set(), {split: min(1000 if FULL else 20, tasks.COUNTS[split]) for split in SPLITS}
    for split in SPLITS:
        for draft, _ in drafts(difficulty, split, counts[split]):
            assert owner.setdefault(draft.sql, split) == split == tasks.split_of(draft.sql)
            texts |= {(draft.domain, *draft.texts)}
    assert len(owner) == len(texts) == sum(counts.values())
    last = [tasks.make(difficulty, split, tasks.COUNTS[split] - 1)[0].sql for split in SPLITS]
    assert len({*last}) == 3


def test_a_question_says_the_same_in_both_languages():
    """Every constant of the query is in the text of either language, and no slot is left open."""
    for difficulty in LEVELS:
        for draft, _ in drafts(difficulty):
            for text in draft.texts:
                assert "{" not in text
                for _, _, constant in draft.planted:
                    assert re.search(rf"(?<![\w.]){re.escape(str(constant))}(?![\w])", text, re.ASCII), (constant, text)
            assert not re.search("[a-z]{9}", re.sub("“.*?”", "", draft.texts[1]))


def parts(sql):
    """What a query is made of: tables, conditions (of joins, too), aggregates and the rest of its clauses."""
    words = "FROM|JOIN|ON|AND|OR|WHERE|COUNT|SUM|AVG|MAX|MIN|DISTINCT|GROUP|HAVING|ORDER|LIMIT|IN|EXCEPT|INTERSECT"
    return len(re.findall(rf"\b(?:{words})\b", sql))


def test_a_higher_difficulty_has_more_parts():
    means = [
        sum(parts(draft.sql) for draft, _ in drafts(level, count=500 if FULL else 40)) / (500 if FULL else 40)
        for level in LEVELS
    ]
    assert all(lower + 0.5 < higher for lower, higher in itertools.pairwise(means)), means


# Grading.


@pytest.mark.parametrize("difficulty", LEVELS)
def test_no_near_miss_and_no_constant_is_right(difficulty):
    """Constants: the very rows of the shown database's result, and a part of it."""
    for draft, numbers in drafts(difficulty):
        assert len(numbers) >= tasks.LEAST
        misses = tasks.near_misses(draft.sql)
        assert len(misses) >= 5 and not any(graded(draft, numbers, misses))
        rows = tasks.results(contents(draft, numbers)[0], [draft.sql])[0]["rows"]
        told = " UNION ALL ".join("SELECT " + ", ".join(map(repr, row)) for row in rows[:400])
        assert graded(draft, numbers, [told, "SELECT 1", draft.sql]) == [False, False, True]


@pytest.mark.parametrize("difficulty", LEVELS)
def test_misses_that_the_generator_does_not_know_are_told_apart(difficulty):
    """A constant moved to its column's next value, and a column in place of another: all but three in a hundred."""
    missed = tried = 0
    for draft, numbers in drafts(difficulty, count=100 if FULL else 20):
        others = []
        for table, name, constant in draft.planted:
            values = tasks.columns(draft.domain, table)[name][3]
            following = values[(values.index(constant) + 1) % len(values)]
            others += [re.sub(rf"(?<= ){re.escape(repr(constant))}(?![\w.])", repr(following), draft.sql)]
        for table in draft.tables:
            for one, other in itertools.permutations(tasks.columns(draft.domain, table), 2):
                others += [re.sub(rf"^(SELECT .*?)\b{one}\b(.*? FROM)", rf"\1{other}\2", draft.sql)]
        others = [sql for sql in dict.fromkeys(others) if sql != draft.sql]
        found = graded(draft, numbers, others)
        missed, tried = missed + sum(found), tried + len(found)
    assert tried > 50 and missed / tried <= 0.03, (missed, tried)


@pytest.mark.parametrize("difficulty", LEVELS)
def test_another_way_to_write_the_query_is_right(difficulty):
    for draft, numbers in drafts(difficulty):
        lower = re.sub(r"\b[A-Z]{2,}\b", lambda word: word[0].lower(), re.sub("NULL", "null", draft.sql))
        named = re.findall(r"'[^']*'", draft.sql)
        assert re.findall(r"'[^']*'", lower) == named
        wide = tasks.results(contents(draft, numbers)[0], [draft.sql])[0]["columns"]
        names = [f"c{place}" for place in range(len(wide))]
        turned = f"WITH q({', '.join(names)}) AS ({draft.sql}) SELECT {', '.join(reversed(names))} FROM q"
        assert graded(draft, numbers, [lower, turned, f"{draft.sql};"]) == [True] * 3


def result(*rows, names="ab"):
    return {"columns": list(names), "rows": [list(row) for row in rows], "more": False}


def test_when_two_results_are_the_same():
    truth = [result((1, "x"), (2, "y"), (2, "y"), (None, "z"))]
    assert same([result((2, "y"), (None, "z"), (1, "x"), (2, "y"))], truth, False)
    assert not same([result((2, "y"), (None, "z"), (1, "x"), (2, "y"))], truth, True)
    assert same([result(("x", 1.0000001), ("y", 2), ("y", 2), ("z", None))], truth, True)
    assert not same([result((1, "x"), (2, "y"), (None, "z"))], truth, False), "a row is missing once"
    assert not same([result((1, "x"), (2, "y"), (2, "y"), (0, "z"))], truth, False), "NULL is not 0"
    assert not same([result(("1", "x"), ("2", "y"), ("2", "y"), (None, "z"))], truth, False), "text is no number"
    assert not same([result((1, "y"), (2, "x"), (2, "y"), (None, "z"))], truth, False), "paired otherwise"
    assert not same([result((1,), (2,), names="a")], [result((1, 1), (2, 2))], False), "a column is missing"
    assert same([result(names="a")], [result(names="b")], True) and not same([result()], [result(names="b")], True)
    assert not same([{"error": "no such column: x"}], [result()], False)
    assert not same([result((1, 2)) | {"more": True}], [result((1, 2))], False)
    # One order of the columns for all databases: these would need one each.
    assert not same([result((1, 2)), result((4, 3))], [result((1, 2)), result((3, 4))], False)


# What a query cannot do.

ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT "
DEEP = "(" * 5000 + "1" + ")" * 4000
ATTACKS = {
    "no end": (ENDLESS + "COUNT(*) FROM t", "interrupted"),
    "no end, in memory": (ENDLESS + "n FROM t ORDER BY 1 DESC", "interrupted|memory"),
    "long texts without end": (
        ENDLESS + "group_concat(hex(zeroblob(100000))) FROM t",
        "too big|memory|interrupted|Killed",
    ),
    "a cartesian product": ("SELECT COUNT(*) FROM " + ", ".join(f"member AS m{n}" for n in range(12)), "interrupted"),
    "GiBs by printf": ("SELECT length(printf('%2000000000d', 1)) > 0", "too big|^$"),
    "GiBs by zeroblob": ("SELECT length(zeroblob(2000000000))", "too big"),
    "GiBs by randomblob": ("SELECT hex(randomblob(2000000000))", "not authorized"),
    "one step that takes long": ("SELECT instr(zeroblob(1000000), zeroblob(500000) || x'01')", "Killed|^$"),
    "a pattern that takes long": ("SELECT hex(zeroblob(400000)) LIKE '" + "%0" * 900 + "x'", "Killed|complex|^$"),
    "another file": ("ATTACH '/etc/passwd' AS other", "not authorized"),
    "a new file": ("VACUUM INTO 'copy'", "denied|not authorized"),
    "a file, read": ("SELECT readfile('/etc/passwd')", "no such function"),
    "a file, written": ("SELECT writefile('x', 'y')", "no such function"),
    "an editor": ("SELECT edit('x', 'sh')", "no such function"),
    "a library": ("SELECT load_extension('/lib/x86_64-linux-gnu/libc.so.6')", "not authorized"),
    "a pointer": ("SELECT hex(fts3_tokenizer('simple'))", "not authorized"),
    "settings": ("PRAGMA query_only = 0", "not authorized"),
    "the schema as a table": ("PRAGMA writable_schema = 1", "not authorized"),
    "a row more": ("INSERT INTO member(name) VALUES ('x')", "not authorized"),
    "rows changed": ("UPDATE member SET name = 'x'", "not authorized"),
    "rows gone": ("DELETE FROM member", "not authorized"),
    "a table gone": ("DROP TABLE member", "not authorized"),
    "a table more": ("CREATE TABLE x AS SELECT 1", "not authorized"),
    "a table for a while": ("CREATE TEMP TABLE x(y)", "not authorized"),
    "a row more, and told": ("INSERT INTO member(name) VALUES ('x') RETURNING name", "not authorized"),
    "a transaction": ("BEGIN EXCLUSIVE", "not authorized"),
    "two statements": ("SELECT 1; SELECT 2", "one statement"),
    "a statement behind": ("SELECT 1; DROP TABLE member", "one statement"),
    "a deep expression": (f"SELECT {DEEP}", "overflow|syntax|depth|incomplete"),
    "a long chain": ("SELECT " + "1+" * 4000 + "1", "too large|depth"),
    "many columns": ("SELECT " + ", ".join("1" * 3000), "too many"),
    "a long query": ("SELECT '" + "x" * 500_000 + "'", "too big|too long|too large"),
    "the clock": ("SELECT datetime(' NOW ')", "not available|."),
    "today": ("SELECT CURRENT_DATE", "not authorized"),
    "chance": ("SELECT random()", "not authorized"),
    "no statement": ("-- nothing", "no query"),
    "half a character": ("SELECT '\ud800'", "."),
    "a null character": ("SELECT 1 \x00, 2", "."),
}


@pytest.fixture(scope="module")
def library():
    return tasks.database("library", (), 0)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name, library):
    query, expected = ATTACKS[name]
    start = time.monotonic()
    [[result]] = ask([library], [query], 20)
    assert time.monotonic() - start < 30 and re.search(expected, result.get("error", ""), re.IGNORECASE), result
    assert len(str(result)) < 20_000
    [[after]] = ask([library], ["SELECT COUNT(*), COUNT(name) FROM member"])
    assert after["rows"] == [[len(sqlite_rows(library)), len(sqlite_rows(library))]]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT printf('%.*c', 1000000, char(1))",
        f"SELECT {', '.join(['a.*'] * 150)} FROM (SELECT 1 AS '{chr(1) * 4900}') AS a",
    ],
    ids=["values", "names"],
)
@pytest.mark.parametrize("form", ["<sql>{}</sql>" * 8, "<answer>{}</answer>"])
def test_results_of_characters_that_json_spells_out_are_bounded(form, query):
    """A control character is six in JSON: eight results of a million were more than the sandbox gives back."""
    env = gym.make(ID)
    env.reset(seed=0)
    observation, reward, *_ = env.step(form.replace("{}", query))
    assert reward == 0 and observation.count("more than 1048576 characters") == form.count("<sql>")


def test_no_more_rows_come_back_than_are_asked_for(library):
    [[result]] = ask([library], [ENDLESS + "n FROM t"], 20)
    assert len(result["rows"]) == 20 and result["more"]
    [[result]] = ask([library], [ENDLESS + "hex(zeroblob(5000)) FROM t"])
    assert result == {"error": "the result has more than 1048576 characters"}


def sqlite_rows(content):
    with closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(content)
        return db.execute("SELECT * FROM member").fetchall()


def test_a_query_without_end_costs_those_beside_it_nothing_before_it(library):
    [[first, second, third]] = ask([library], ["SELECT 7", ENDLESS + "COUNT(*) FROM t", "SELECT 1"])
    assert first["rows"] == [[7]] and second["error"] == "interrupted" and STEPS == 20_000_000
    assert third.get("rows") in ([[1]], None)  # a short one may still run


def test_queries_find_nothing_of_a_process_that_knows_the_answer(library):
    """What runs them gets the databases and the queries, and no gold query."""
    env = gym.make(ID, difficulty=5)
    env.reset(seed=3)
    action = "<sql>SELECT name FROM pragma_database_list</sql><sql>SELECT name, sql FROM sqlite_master</sql>"
    observation = env.step(action)[0]
    assert env.unwrapped.task.ground_truth not in observation and "Error: not authorized" in observation


# Actions.


def played(*actions, **options):
    env = gym.make(ID, **options)
    env.reset(seed=1, options={"difficulty": 1})
    return [env.step(action) for action in actions], env.unwrapped.task


def test_several_queries_each_get_their_result():
    [(observation, reward, over, _, info)], _ = played(
        "I look.\n<sql>SELECT 1 AS one, NULL AS two</sql> and <sql>```sql\nSELECT 'a\nb'\n```</sql><sql>SELEC 1</sql>"
    )
    assert observation == (
        "<tool_response>\none | two\n1 | NULL\n(1 rows)\n</tool_response>\n"
        "<tool_response>\n'a\nb'\na b\n(1 rows)\n</tool_response>\n"
        '<tool_response>\nError: near "SELEC": syntax error\n</tool_response>'
    ).replace("'a\nb'", "'a b'")
    assert (reward, over, info["valid_action"]) == (0.0, False, False)
    assert [call["tool"] for call in info["tool_calls"]] == ["sql"] * 3


def test_results_are_bounded_and_so_are_queries():
    long = ENDLESS.replace("FROM t)", "FROM t WHERE n < 90)") + "n, hex(zeroblob(999)) FROM t"
    [first, second, third, fourth], _ = played(
        f"<sql>{long}</sql>", "<sql>SELECT 1</sql>" * 10, "<sql>SELECT 1", "no query"
    )
    assert "the first 20 rows; there are more" in first[0] and len(first[0]) < 4_200
    assert second[0].count("<tool_response>") == 9 and "Only the first 8 queries" in second[0]
    assert "(1 rows)" in third[0] and third[4]["valid_action"]  # one that is never closed reaches to the end
    assert fourth[0].startswith("No query and no answer") and not fourth[4]["valid_action"]


def test_the_last_answer_counts_and_queries_before_it_are_not_run():
    [(_, _, _, _, info)], task = played("<sql>SELECT 1</sql>")
    gold = task.ground_truth
    for action, reward in (
        (f"<answer>SELECT 1</answer> no: <answer>```sql\n{gold};\n```</answer>", 1.1),
        (f"<sql>DROP TABLE x</sql><answer>{gold}</answer>", 1.1),
        (f"<answer>{gold}</answer><answer>SELECT 1</answer>", 0.1),
        (f"<answer>{gold}</answer> That is all.</answer>", 1.1),
        ("<answer>SELECT nothing</answer>", 0.0),
        ("<answer></answer>", 0.0),
    ):
        [(observation, got, over, _, info)], _ = played(action)
        assert (observation, over, info["tool_calls"]) == ("", True, []) and got == pytest.approx(reward)
        assert bool(info["answer_error"]) == (reward == 0.0)
    [(_, _, over, _, _)], _ = played(f"<answer>{gold}</answer><sql>SELECT 1</sql>")
    assert not over  # a query after it: not the last word


def test_columns_are_shown_up_to_difficulty_3_and_can_be_looked_up_from_4():
    for difficulty, lang in itertools.product(LEVELS, tasks.LANGS):
        env = gym.make(ID, difficulty=difficulty, lang=lang)
        observation, info = env.reset(seed=5)
        assert ("CREATE TABLE" in observation) == (difficulty < 4)
        assert info["instructions"].startswith(("Answer a question", "请回答")[tasks.LANGS.index(lang)])
        if difficulty >= 4:
            found = env.step(env.unwrapped.expert_action())[0]
            assert found.count("CREATE TABLE") == len(env.unwrapped.task.data["look_up"]) >= 2


# Rows in Spider's schema.

SINGERS = """CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INTEGER);
INSERT INTO singer(name, age) VALUES ('Aya', 31), ('Ben', 52), ('Cleo', 40)"""
ROW = {"db_id": "concert", "question": "Who is older than 35, by name?"}
ROW |= {"query": "SELECT name FROM singer WHERE age > 35 ORDER BY name"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "concert").mkdir()
    more = "; INSERT INTO singer(name, age) VALUES ('Dee', 35), ('Abe', 36)"
    for name, script in (("concert", SINGERS), ("concert_2", SINGERS + more)):
        with closing(sqlite3.connect(tmp_path / "concert" / f"{name}.sqlite")) as db:
            db.executescript(script)
    return tmp_path


def test_rows_of_spider_are_played(folder):
    env = gym.make(ID, databases=folder)
    observation, _ = env.reset(options={"task": ROW})
    assert observation == f"Schema:\n{SINGERS.partition(';')[0]}\n\nQuestion: {ROW['question']}"
    assert "Ben | 52" in env.step("<sql>SELECT name, age FROM singer</sql>")[0]
    state = env.unwrapped.get_state()
    for query, reward in (
        ("SELECT name FROM singer WHERE age >= 36 ORDER BY name", 1.1),
        ("SELECT name FROM singer WHERE age > 35 ORDER BY age", 0.1),  # the order counts, as the gold query has one
        ("SELECT name FROM singer WHERE name IN ('Ben', 'Cleo') ORDER BY name", 0.1),  # wrong on the second file
        ("SELECT nme FROM singer", 0.0),
        (None, 1.1),
    ):
        env.unwrapped.set_state(state)
        action = env.unwrapped.expert_action() if query is None else f"<answer>{query}</answer>"
        assert env.step(action)[1] == pytest.approx(reward)
    row = {"prompt": ROW["question"], "db_id": "concert", "reward_spec": {"ground_truth": ROW["query"]}}
    assert env.reset(options={"task": row, "lang": "zh"})[0].endswith(f"问题：{ROW['question']}")
    assert env.step(f"<answer>{ROW['query']}</answer>")[1] == pytest.approx(1.1)


def test_what_is_wrong_with_a_row_is_said_in_a_sentence(folder):
    env = gym.make(ID, databases=str(folder))
    for change, says in (
        ({"db_id": None}, "field 'db_id' must be a string"),
        ({"question": " "}, "field 'question' must be a string"),
        ({"query": 7}, "field 'query' must be a string"),
        ({"db_id": "opera"}, "field 'db_id': there is no database '.*opera.sqlite'"),
        ({"db_id": "../concert"}, "field 'db_id': there is no database"),
        (
            {"query": "SELECT name FROM stadium"},
            "field 'query' fails on the database 'concert': no such table: stadium",
        ),
        ({"query": "DROP TABLE singer"}, "fails on the database 'concert': not authorized"),
    ):
        with pytest.raises(ValueError, match=says):
            env.reset(options={"task": ROW | change})
    with closing(sqlite3.connect(folder / "concert" / "concert_2.sqlite")) as db:
        db.executescript("ALTER TABLE singer RENAME TO singers")
    with pytest.raises(ValueError, match="fails on the database 'concert': no such table: singer"):
        gym.make(ID, databases=f"{folder}//").reset(options={"task": ROW})
    with pytest.raises(ValueError, match="needs gymnasium"):
        gym.make(ID).reset(options={"task": ROW})
    with pytest.raises(ValueError, match="There is no folder '/no/such'"):
        gym.make(ID, databases="/no/such")
    (folder / "concert" / "concert.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ValueError, match="file is not a database"):
        gym.make(ID, databases=f"{folder}/").reset(options={"task": ROW})
