"""code_lite: its tasks say what they ask, their tests tell wrong programs, and no submission makes up a verdict."""

import base64
import itertools
import json
import os
import pickle
import re
import time
import zlib
from collections import Counter

import gymnasium as gym
import pytest

import skyrl_gym
from skyrl_gym.data import load_rows
from skyrl_gym.envs.code_lite import judge, tasks
from skyrl_gym.parsing import last_code

FULL = os.environ.get("SKYRL_TEST_FULL") == "1"
ID, ROWS_ID, SPLITS, LANGS = "skyrl/code_lite-v0", "skyrl/code_rows-v0", ("train", "val", "test"), ("en", "zh")
CELLS = [(split, level) for split in SPLITS for level in tasks.LEVELS]


def block(code):
    return f"```python\n{code}\n```"


@pytest.fixture(scope="module")
def env():
    return gym.make(ID).unwrapped


@pytest.fixture(scope="module")
def rows_env():
    return gym.make(ROWS_ID).unwrapped


# Tasks.


@pytest.mark.parametrize("split, level", CELLS)
def test_the_source_does_in_the_sandbox_what_the_functions_did_here(env, split, level):
    for seed, lang in itertools.product(range(1000 if FULL else 3), LANGS):
        _, info = env.reset(seed=seed, options={"split": split, "difficulty": level, "lang": lang})
        result = env.step(env.expert_action())
        assert (result[1], result[2]) == (1.1, True), (info["task_id"], result)


def test_numbers_that_an_odd_one_less_an_even_one_would_never_reach_make_no_task():
    """Less 6 again and again, from 8 million millions: a reset took hours."""
    parts = [("line number", 9)] * 12 + [("halving number", 6)]
    with pytest.raises(OverflowError):
        tasks.run(parts, 1999, 4)
    assert tasks.tests("f", parts) is None
    assert tasks.run([("halving number", 6)], 99_999, 4) == 3 * 10 + 16_666


@pytest.mark.parametrize("split, level", CELLS)
def test_a_program_with_a_step_left_out_or_none_passes_no_task(split, level):
    for index in range(40 if FULL else 1):
        name, parts, tests = tasks.make(split, level, index)
        for wrong in tasks.near_misses(parts):
            code = tasks.source(name, wrong) if wrong else f"def {name}(given, k=0):\n    return given"
            code = code.replace(", k):", "):").replace("):", ", k=4):", 1) if wrong else code
            failure = judge.call_failure(code, tests, "", rows=False)
            assert failure, (index, wrong)
        assert judge.call_failure(tasks.source(name, parts), tests, "", rows=False) is None


@pytest.mark.parametrize("level", tasks.LEVELS)
def test_no_program_is_in_two_splits_whatever_the_order_of_its_steps(level):
    """In full of two steps every program there is; of more, a sample."""
    homes = {}
    for split in SPLITS:
        size = tasks.programs(split, level)
        number = size if FULL and level == 1 else 30_000 if FULL else 500
        found = {tuple(tasks.program(split, level, place * size // number)) for place in range(number)}
        assert len(found) == number
        for parts in found:
            assert homes.setdefault(tuple(sorted(map(str, parts))), split) == split
            kinds = [(tasks.steps()[part].source, tasks.steps()[part].target) for part, _ in parts]
            assert len(parts) == level + 1
            assert all(one[1] == other[0] for one, other in itertools.pairwise(kinds))


@pytest.mark.parametrize("split, level", CELLS)
def test_there_are_enough_tasks_and_all_differ(env, split, level):
    count = tasks.count(split, level)
    assert count == env.num_tasks({"split": split, "difficulty": level}) >= (900 if level == 1 else 20_000)
    every = FULL and level == 1
    picked = range(count) if every else [*range(15), *range(count - 15, count)]
    texts = []
    for index in picked:
        name, parts, tests = tasks.make(split, level, index)
        texts.append(tasks.text("en", name, parts, tests[:3]).partition("\n")[2])
        values = [value for _, value in tests]
        assert len(tests) >= 19 and len(set(values)) >= 5 and max(map(values.count, values)) <= 8
    assert len(set(texts)) == len(picked)
    assert sum(tasks.count(each, 1) for each in SPLITS) > 9000


def test_sentences_say_which_step_is_meant_and_are_in_their_language():
    for lang in LANGS:
        said = Counter()
        for step in tasks.steps().values():
            for k in step.ks:
                sentence = step.says[lang].replace("{k}", str(k))
                said[step.source, sentence] += 1
                assert not re.search(r"[{}$]", sentence)
                assert bool(re.search("[一-鿿]", sentence)) == (lang == "zh")
        assert set(said.values()) == {1}


def test_every_step_comes_up_and_each_can_matter():
    """Of two steps, in a task that its tests tell from the one with the step left out."""
    seen = set()
    for split in SPLITS:
        for index in range(tasks.count(split, 1) if FULL else 150):
            seen |= {part for part, _ in tasks.make(split, 1, index)[1]}
    assert seen == set(tasks.steps()) if FULL else len(seen) > 0.8 * len(tasks.steps())


def test_examples_in_the_question_are_right_and_the_hidden_tests_others(env):
    for seed in range(20):
        text, _ = env.reset(seed=seed, options={"difficulty": 1 + seed % 5, "lang": LANGS[seed % 2]})
        shown = re.findall(r"^(\w+\(.*\)) == (.*)$", text, re.MULTILINE)
        tests = env.task.data["tests"]
        assert [list(each) for each in shown] == tests[:3]
        assert not {call for call, _ in tests[:3]} & {call for call, _ in tests[3:]}


# What an action is, and what comes of it.


@pytest.mark.parametrize(
    "text, code",
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("So:\n```py\nx = 1\n```\nor\n  ```python  \nx = 2\ny = 3\n ``` \nDone.", "x = 2\ny = 3"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1"),
        ("```python\nx = 1\n```python\nx = 2\n```", "x = 2"),
        ("```\nx = 1\n```\n```text\n[1]\n```", "x = 1"),
        ("```python\n```", ""),
        ("```python x = 1 ```", None),
        ("x = 1", None),
        ("```json\n1\n```", None),
        ("", None),
        ("```", None),
    ],
)
def test_the_last_complete_block_is_read(text, code):
    assert last_code(text) == code


def test_reading_a_megabyte_takes_no_longer_than_its_end():
    assert last_code("```python\n" * 100_000) is None
    assert last_code("```python\nx\n```\n" + "`" * 1_000_000) is None


def broken(env, where):
    """The expert's code, but wrong from a call of a test on, the first one being 0."""
    name = re.match(r"def (\w+)", env.task.ground_truth)[1]
    late = f"\nright, calls = {name}, []\ndef {name}(*given):\n    calls.append(given)\n"
    return block(env.task.ground_truth + late + f"    return right(*given) if len(calls) <= {where} else 'never'")


@pytest.mark.parametrize("lang", LANGS)
def test_a_failure_tells_the_call_and_of_hidden_tests_never_what_is_right(env, lang):
    for seed in range(10):
        env.reset(seed=seed, options={"difficulty": 3, "lang": lang})
        state, tests = env.get_state(), env.task.data["tests"]
        said, reward, *_ = env.step(broken(env, 1))
        assert tests[1][0][:300] in said and tests[1][1] in said and "'never'" in said and reward == 0.1
        env.set_state(state)
        said, *_, info = env.step(broken(env, 7))
        assert tests[7][0][:300] in said and "'never'" in said and not info["success"]
        for test in state["task"]["data"]["tests"][7:]:
            test[1] = "'something else'"
        env.set_state(state)
        assert env.step(broken(env, 7))[0] == said


def test_the_reward_pays_the_block_of_the_first_action_alone(env):
    env.reset(seed=3)
    wrong, right = block("1"), env.expert_action()
    assert [env.step(action)[1] for action in (wrong, wrong, right)] == [0.1, 0.0, 1.0]
    env.reset(seed=3)
    assert [env.step(action)[1] for action in ("no block", right)] == [0.0, 1.0]
    limited = gym.make(ID)
    limited.reset(seed=3)
    assert [limited.step("?")[3] for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    "code, said",
    [
        ("def {name}(*x:\n    pass", r"fails before the first test: SyntaxError: .*line 1"),
        ("x = 1 / 0", r"fails before the first test: ZeroDivisionError: .*\(line 1\)"),
        ("x = 1", r"Test 1 of 19 fails: {name}\(.*\) raises NameError"),
        ("def {name}(*x):\n    return [][1]", r"Test 1 of 19 .* raises IndexError: .* \(line 2\)"),
        ("def {name}(*x):\n    return (n for n in x)", "gives <generator object .* at 0x...>; expected"),
        ("def {name}(*x):\n    return str(iter(x))", "gives '<tuple_iterator object at 0x...>'; expected"),
        ("def {name}(*x):\n    return hex(255)", "gives '0xff'; expected"),
        ("def {name}(*x):\n    raise ValueError('y' * 10**6)", "raises ValueError: y{200,300}"),
        ("def {name}(*x):\n    return 'y' * 10**4", "gives 'y{200,300}"),
        ("def {name}(*x):\n    while True: pass", "takes too long, or ends the program"),
    ],
)
def test_what_goes_wrong_is_told_within_bounds(env, code, said):
    env.reset(seed=5)
    name = re.match(r"def (\w+)", env.task.ground_truth)[1]
    observation, *_, info = env.step(block(code.format(name=name)))
    assert re.search(said.format(name=name) if "{name}" in said else said, observation), observation
    assert len(observation) < 1200 and info["valid_action"]


def test_what_a_program_prints_and_how_it_spells_values_does_not_matter(env):
    env.reset(seed=1, options={"task_id": next(list_task(env))})
    name = re.match(r"def (\w+)", env.task.ground_truth)[1]
    extra = f"\nprint('loaded')\nown = {name}\ndef {name}(*given):\n    print('=', given, flush=True)\n"
    assert env.step(block(f"{env.task.ground_truth}{extra}    return tuple(own(*given))"))[4]["success"]


def list_task(env):
    for index in range(100):
        env.reset(options={"task_id": f"train:2:en:{index}"})
        if env.task.ground_truth.endswith("return numbers"):
            yield env.task.task_id


def test_a_recorded_verdict_is_taken_and_nothing_run(env, monkeypatch):
    env.reset(seed=2)
    state, action = env.get_state(), block("1 / 0")
    outcome = env.step(action)
    monkeypatch.setattr(judge, "_run", lambda *_: pytest.fail("it was run"))
    env.set_state(state)
    env.feed_external(outcome[4]["tool_calls"])
    assert env.step(action) == outcome


def test_a_record_is_for_the_episode_that_it_was_fed_to(env):
    env.reset(seed=2)
    calls = env.step(env.expert_action())[4]["tool_calls"]
    env.feed_external(calls)
    env.reset(seed=3)
    assert env.step(block("pass"))[1] < 1.0


# Attacks. Each earns nothing: what is right is not where the code runs.

ATTACKS = {
    "exit": "import sys\nsys.exit(0)",
    "exit in the call": "import sys\ndef {name}(*x):\n    sys.exit(0)",
    "end of the process": "import os\nos._exit(0)",
    "end of the process in the call": "import os\ndef {name}(*x):\n    os._exit(0)",
    "equal to all": "class E:\n    __eq__ = lambda *_: True\n    __ne__ = lambda *_: False\n"
    "def {name}(*x):\n    return E()",
    "a list that is equal to all": "class E(list):\n    __eq__ = lambda *_: True\n    __repr__ = lambda _: '_'\n"
    "def {name}(*x):\n    return E()",
    "other built-ins": "import builtins\nbuiltins.repr = builtins.print = builtins.eval = lambda *x, **y: True",
    "print that says it all": "import sys\nsys.__stdout__.write('=True\\n' * 99)\ndef {name}(*x):\n    return True",
    "lines of its own": "import os\nos.write(1, b'=None\\n' * 99)\nos._exit(0)",
    "code in its lines": "import os\nos.write(1, b'=None\\n' + b'=__import__(\"os\").getpid()\\n' * 99)\nos._exit(0)",
    "deep lines": "import os\nos.write(1, b'=None\\n=' + b'[' * 9000 + b'\\n=' + b'-' * 5000 + b'1\\n')\nos._exit(0)",
    "a number that cannot be shown": "import os\nos.write(1, b'=None\\n' + b'!0x' + b'f' * 5000 + b'\\n')\nos._exit(0)",
    "literals that are shown otherwise": "import os\nos.write(1, b'=None\\n=1e999\\n=...\\n' * 9)\nos._exit(0)",
    "long numbers": "def {name}(*x):\n    return 10 ** 10_000",
    "endless output": "import os\ndef {name}(*x):\n    while True: os.write(1, b'=1\\n' * 10_000)",
    "a gigabyte of output": "def {name}(*x):\n    print('x' * 2**30)",
    "endless": "while True: pass",
    "endless list": "def {name}(*x):\n    y = []\n    y.append(y)\n    return y",
    "threads": "import threading, os\ndef work():\n    while True: os.write(1, b'=None\\n')\n"
    "threading.Thread(target=work, daemon=True).start()\ndef {name}(*x):\n    return None",
    "other frames": "import sys\ndef {name}(*x):\n    sys._getframe(1).f_locals['calls'].clear()\n    return True",
    "a trace": "import sys\nsys.settrace(lambda *_: None)\ndef {name}(*x):\n    sys.modules['__main__'].main = None",
    "memory": "x = bytearray(10 ** 10)",
    "processes": "import os\nwhile True: os.fork()",
    "the package's files": "import skyrl_gym.envs.code_lite.tasks",
    "nothing": "",
    "surrogates": "x = '\ud800'",
    "a null": "x = '\0'",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_earns_nothing(env, attack):
    env.reset(seed=11, options={"difficulty": 4})
    name = re.match(r"def (\w+)", env.task.ground_truth)[1]
    observation, reward, ended, _, info = env.step(block(ATTACKS[attack].replace("{name}", name)))
    assert (reward, ended, info["success"]) == (0.1, False, False) and len(observation) < 1200
    assert env.step(env.expert_action())[4]["success"]


def test_what_is_right_is_not_where_the_code_runs(env, monkeypatch):
    """The child gets a text, and nothing else: in it is every call, and no value that is expected."""
    sent, run, looked = [], judge._run, 0
    monkeypatch.setattr(judge, "_run", lambda *given, **more: sent.append(repr(given)) or run(*given, **more))
    for seed in range(30):
        env.reset(seed=seed, options={"difficulty": 1 + seed % 5})
        env.step(block("x = 1"))
        tests, text = env.task.data["tests"], sent[-1]
        assert all(repr([call])[2:-2] in text for call, _ in tests)
        for _, value in tests:
            if len(value) > 12 and not any(value in call for call, _ in tests):
                assert value not in text and repr(value)[1:-1] not in text
                looked += 1
    assert looked > 50


# Rows. All are made up.

ADD = {
    "task_id": 1,
    "text": "Write a function that adds two tuples, place by place.",
    "code": "def add(a, b):\n    return tuple(x + y for x, y in zip(a, b))",
    "test_setup_code": "import math",
    "test_list": [
        "assert add((1, 2), (3, 4)) == (4, 6)",
        "assert set(add((1,), (2,))) == {3}",
        "assert not add((), ()), 'empty'",
        "assert math.isclose(sum(add((0.1,), (0.2,))), 0.3) and add((1,), (1,)) != add((2,), (1,))",
    ],
    "challenge_test_list": ["assert sum(add((1, 1), (2, 2))) == 6"],
}
SANITIZED = {
    "prompt": "Write a function that finds the mean of a list.",
    "code": "def mean(x):\n    return statistics.fmean(x)",
    "test_imports": ["import statistics"],
    "test_list": ["assert mean([1, 3]) == 2", "assert mean([5]) == 5"],
}


def contest(kind, public, private, **fields):
    """A row in LiveCodeBench's schema, its private tests as the data set has most of them."""
    public, private = ([{"input": x, "output": y, "testtype": kind} for x, y in each] for each in (public, private))
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(private)))).decode()
    fields = {"starter_code": "", "metadata": "{}"} | fields
    question = "Print, or return, the sum of all numbers."
    return {
        "question_content": question,
        "public_test_cases": json.dumps(public),
        "private_test_cases": packed,
    } | fields


STDIN = contest(
    "stdin",
    [("1 2\n", "3\n")],
    [("4 5 6", "15"), ("1.50 1", "2.5")],
    code="print(sum(float(x) if '.' in x else int(x) for x in open(0).read().split()))",
)
CALLED = contest(
    "functional",
    [("[1, 2]\n[3]", "[1, 2, 3]")],
    [("[]\n[]", "[]")],
    starter_code="class Solution:\n    def join(self, a: List[int], b: List[int]) -> List[int]:\n",
    metadata=json.dumps({"func_name": "join"}),
    code="class Solution:\n    def join(self, a: List[int], b: List[int]) -> List[int]:\n        return a + b",
)
ROWS = {"mbpp": ADD, "sanitized": SANITIZED, "stdin": STDIN, "functional": CALLED}


@pytest.mark.parametrize("lang", LANGS)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_rows_solution_passes_and_less_does_not(rows_env, row, lang):
    text, info = rows_env.reset(options={"task": row, "lang": lang})
    asked = row.get("text") or row.get("prompt") or row["question_content"]
    assert text.startswith(asked) and "```python" in info["instructions"] and row["code"] not in text
    assert row.get("starter_code", "") in text and (row.get("test_list") or [""])[0] in text
    assert rows_env.step(block("def add(a, b): return ()\nadd.x = 1"))[1] == 0.1
    assert rows_env.step(rows_env.expert_action())[1:3] == (1.0, True)
    assert gym.make(ID).reset(options={"task": row, "lang": lang}) == (text, info)


def test_functions_of_a_row_need_no_class_and_programs_may_read_as_they_like(rows_env):
    rows_env.reset(options={"task": CALLED})
    assert rows_env.step(block("def join(a, b): return (*a, *b)"))[4]["success"]
    for code in (
        "print(eval(input().replace(' ', '+')))",
        "import sys\nprint(sum(map(float, sys.stdin.read().split())))",
    ):
        rows_env.reset(options={"task": STDIN})
        assert rows_env.step(block(code + "\nsys.exit(0)"))[4]["success"]


def test_a_programs_input_may_have_many_lines(rows_env):
    """Spelled as a literal, in which a line's end has two characters, it was too long to be run."""
    rows_env.reset(options={"task": contest("stdin", [("1\n", "1")], [("1\n" * 440_000, "440000")])})
    assert rows_env.step(block("print(len(sys.stdin.readlines()))"))[4]["success"]


@pytest.mark.parametrize(
    "row, code, said",
    [
        (ADD, "def add(a, b): return a", r"add\(\(1, 2\), \(3, 4\)\) gives \(1, 2\); expected: assert add\(\(1, 2\)"),
        (
            ADD,
            "def add(a, b): return (4, 6) if len(a) > 1 else (3,)",
            r"Test 3 of 5, .*add\(\(\), \(\)\) gives \(3,\), w",
        ),
        (ADD, "def add(a, b): return [x + y for x, y in zip(a, b)]", r"gives \[4, 6\]; expected"),
        (ADD, "def add(a, b): return (4, 6)[:1 / len(a[1:])]", r"raises TypeError: .* \(line 1\)"),
        (STDIN, "print(3)", r"Test 2 of 3, .*the input '4 5 6' gives '3\\n', which is wrong"),
        (STDIN, "print(1 / 0)", "ZeroDivisionError"),
        (STDIN, "input()\ninput()", "raises EOFError"),
        (CALLED, "def join(a, b): return a", r"join\(\[1, 2\], \[3\]\) gives \[1, 2\]; expected: \[1, 2, 3\]"),
    ],
)
def test_of_a_row_too_the_first_failure_is_told(rows_env, row, code, said):
    rows_env.reset(options={"task": row})
    observation = rows_env.step(block(code))[0]
    assert re.search(said, observation), observation


@pytest.mark.parametrize("row", [ADD, CALLED], ids=["mbpp", "functional"])
def test_numbers_of_one_hash_do_not_hold_up_the_envs_process(rows_env, row):
    """A set of them is made in quadratic time, where the sandbox's limits do not apply."""
    same = "b','.join(str(k * (2**61 - 1)).encode() for k in range(1, 20_000))"
    code = f"import os\ns = b'=None\\n=' + b'{{' + {same} + b'}}\\n'\nwhile s: s = s[os.write(1, s):]\nos._exit(0)"
    rows_env.reset(options={"task": row})
    begun = time.process_time()
    assert not rows_env.step(block(code))[4]["success"] and time.process_time() - begun < 5.0


FORGED = [
    "class E:\n    __getattr__ = lambda *_: E()\n    __eq__ = lambda *_: True\ndef add(a, b):\n    return E()",
    "class E(tuple):\n    __eq__ = lambda *_: True\n    __ne__ = lambda *_: True\ndef add(a, b):\n    return E()",
    "import math, builtins\nmath.isclose = builtins.sum = lambda *_: True\ndef add(a, b):\n    return (4, 6)",
    "import sys\nsys.__stdout__.write('=True\\n' * 20)\ndef add(a, b):\n    return True",
    "import builtins\nbuiltins.AssertionError = ValueError\ndef add(a, b):\n    return None",
    "import os\ndef add(a, b):\n    os._exit(0)",
    "import os\nos.write(1, b'=None\\n' + b'=1, 2\\n=1 #\\n=(4, 6)\\r\\n' * 9)\nos._exit(0)",
    "import os\nos.write(1, b'=None\\n' + b'=(lambda: 1)()\\n=[].__class__\\n' * 9)\nos._exit(0)",
    "import os\nos.write(1, b'=None\\n' + (b'=0x' + b'f' * 5000 + b'\\n') * 9)\nos._exit(0)",
    "import os\nos.write(1, b'=None\\n' + b'=...\\n=1e999\\n' * 9)\nos._exit(0)",
]


@pytest.mark.parametrize("code", FORGED)
@pytest.mark.parametrize("row", [ADD, STDIN, CALLED], ids=["mbpp", "stdin", "functional"])
def test_no_verdict_of_a_row_can_be_made_up(rows_env, row, code):
    rows_env.reset(options={"task": row})
    for form in (code, code.replace("def add(", "def join(")):
        assert not rows_env.step(block(form))[4]["success"]


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"test_list": None}, "TypeError"),
        ({"test_list": [], "challenge_test_list": []}, "no tests"),
        ({"test_list": ["assert sum([]) == 0"]}, r"'assert sum\(\[\]\) == 0' is no assert with a call"),
        ({"test_list": ["print(add(1, 2))"]}, "is no assert"),
        ({"test_list": ["assert add("]}, "SyntaxError"),
        ({"test_list": [f"assert add({'-' * 100_000}1)"]}, "MemoryError|RecursionError"),
        ({"test_list": [f"assert add((), {'7' * 900_000!r})"]}, "more than 900000 characters"),
        ({"code": None}, "'code' and 'test_list'"),
        ({"code": "def add("}, "SyntaxError"),
        ({"text": None}, "field 'prompt' is missing"),
        ({"prompt": [{"role": "assistant", "content": "Hm"}, {"role": "user", "content": "?"}]}, "system and user"),
    ],
)
def test_what_is_wrong_in_a_row_of_mbpp_is_told(rows_env, change, problem):
    with pytest.raises(ValueError, match=problem):
        rows_env.reset(options={"task": ADD | change})


class Hostile:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"public_test_cases": "[1"}, "JSONDecodeError"),
        ({"public_test_cases": "[" * 100_000}, "RecursionError"),
        ({"public_test_cases": "[{}]"}, "KeyError: 'input'"),
        ({"private_test_cases": None}, "TypeError"),
        ({"private_test_cases": "!"}, "LiveCodeBench"),
        ({"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()}, "not just text"),
        ({"metadata": '{"func_name": "f(1)"}'}, "func_name is 'f\\(1\\)'"),
        ({"metadata": '{"func_name": "join"}', "private_test_cases": '[{"input": "x", "output": "1"}]'}, "JSONDecode"),
        (
            contest("functional", [], [(json.dumps("\n" * 300_000), "1")], metadata=CALLED["metadata"]),
            "more than 900000",
        ),
    ],
)
def test_what_is_wrong_in_a_row_of_livecodebench_is_told(rows_env, change, problem):
    with pytest.raises(ValueError, match=problem):
        rows_env.reset(options={"task": STDIN | change})


def test_rows_without_a_solution_have_no_expert(rows_env):
    rows_env.reset(options={"task": {name: value for name, value in STDIN.items() if name != "code"}})
    with pytest.raises(ValueError, match="no reference solution"):
        rows_env.expert_action()


def test_files_as_the_data_sets_have_them_are_played_by_many_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [ADD, STDIN])))
    assert [row["prompt"][0]["content"] for row in load_rows(path)] == [ADD["text"], STDIN["question_content"]]
    envs = skyrl_gym.make_vec("code_rows", 3, rows=path, autoreset_mode="SameStep")
    envs.reset(seed=0)
    for _ in range(3):
        actions = tuple(each.unwrapped.expert_action() for each in envs.envs)
        _, rewards, ended, _, _ = envs.step(actions)
        assert rewards.tolist() == [1.1] * 3 and ended.all()
    with pytest.raises(ValueError, match=r"rows='train\.jsonl'"):
        skyrl_gym.make_vec("code_rows", 1).reset(seed=0)
