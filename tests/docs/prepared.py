"""What a page takes for granted when its blocks are executed: files, servers, and names that it has explained."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import gymnasium

import skyrl_gym
from skyrl_trainer.agent.http_server import HTTPServer
from tests.docs.blocks import blocks
from tests.eval.test_eval_data import SWE
from tests.gym.mcp_servers import PLAIN
from tests.trainer.fakes import CHATML, tiny_tokenizer
from tests.trainer.learner.tiny_models import save_model

ROOT = Path(__file__).parents[2]


def with_gym(names: dict[str, Any], **others: Any) -> None:
    names |= {"gym": gymnasium, "skyrl_gym": skyrl_gym, "json": json, **others}


def environments(names: dict[str, Any]) -> None:
    from pyarrow import Table, parquet

    seeds = [block.text for block in blocks(ROOT / "tests/seeds/skyrl_overview.md", "python")]
    Path("my_package").mkdir()
    header = "import re\nfrom skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput\n\n"
    Path("my_package/env.py").write_text(header + seeds[1])
    prompt = [{"role": "user", "content": "6 * 7"}]
    row = {"prompt": prompt, "env_class": "multiply", "reward_spec": {"method": "rule", "ground_truth": "42"}}
    parquet.write_table(Table.from_pylist([row]), "train.parquet")
    with_gym(names, row=row)


def code_rows(names: dict[str, Any]) -> None:
    with_gym(names)
    row = {"text": "Double x.", "code": "def f(x):\n    return 2 * x", "test_list": ["assert f(2) == 4"]}
    names["replaced"] = lambda text: text.replace("env.reset(", 'gym.make("skyrl/code_rows-v0").reset(', "row" in text)
    names["row"] = row
    Path("mbpp.jsonl").write_text(json.dumps(row) + "\n")


def databases(names: dict[str, Any]) -> None:
    import sqlite3

    with_gym(names)
    Path("spider/database/zoo").mkdir(parents=True)
    with contextlib.closing(sqlite3.connect("spider/database/zoo/zoo.sqlite")) as zoo, zoo:
        zoo.execute("CREATE TABLE keeper (name TEXT, nights INTEGER)")
        zoo.execute("INSERT INTO keeper VALUES ('Ann', 1), ('Bo', 0)")


@contextlib.contextmanager
def tools(names: dict[str, Any]) -> Iterator[None]:
    """Articles, and two servers of tools: one that the environment starts, and one that runs."""
    with_gym(names)
    Path("articles.jsonl").write_text(json.dumps({"title": "Peru", "text": "Its capital is Lima."}) + "\n")
    Path("server.py").write_text(PLAIN.replace("sys.argv[1]", "'well'"))
    names["replaced"] = lambda text: text.replace("http://127.0.0.1:8000/mcp", names["fixture"]("url"))
    yield
    _, info = names["env"].reset(seed=1)
    assert {"calculator", "double", "add"} <= {each["function"]["name"] for each in info["tools"]}
    calls = [f'<tool_call>{{"tool": "{tool}", "args": {{"x": 20}}}}</tool_call>' for tool in ("double", "add")]
    said = names["env"].step("".join(calls))[0]
    assert "40" in said and "21" in said
    names["env"].close()


def harbor(names: dict[str, Any]) -> None:
    with_gym(names)
    Path("tasks/sum/tests").mkdir(parents=True)
    Path("tasks/sum/environment").mkdir()
    Path("tasks/sum/instruction.md").write_text("Write the sum into total.txt.")
    Path("tasks/sum/tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    Path("tasks/sum/environment/Dockerfile").write_text("FROM python:3.11-slim\nWORKDIR /app\n")


def guess(names: dict[str, Any]) -> None:
    page = ROOT / "docs/environments/write-your-own.md"
    (code,), (registry,) = blocks(page, "python"), blocks(page, "yaml")
    Path("guess_the_number.py").write_text(code.text)
    Path("guess.yaml").write_text(registry.text)


@contextlib.contextmanager
def benchmark(names: dict[str, Any]) -> Iterator[None]:
    """Tasks, and a clone of the repository that one is about."""
    Path("tasks.jsonl").write_text(json.dumps(SWE) + "\n")
    made = names["fixture"]("instance")
    Path("clones").symlink_to(made.repos)
    names |= {"commit": made.row["base_commit"], "gold": made.item.gold}
    yield
    assert "double(5) gives 7." in names["observation"]
    names["env"].close()


def plug_ins(names: dict[str, Any]) -> None:
    rows = [{"prompt": f"Write a sentence with {n} numbers.", "level": n} for n in range(20)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text("\n\n".join(block.text for block in blocks(ROOT / "docs/plug-ins.md", "python")))


def own_env(names: dict[str, Any]) -> None:
    (code,) = blocks(ROOT / "docs/tutorial.md", "python")
    Path("sort_digits.py").write_text(code.text)


def chats(names: dict[str, Any]) -> None:
    rows = [{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def policies(names: dict[str, Any]) -> None:
    save_model(Path("pol/clone"))


def trls(names: dict[str, Any]) -> None:
    """trl's own trainer gets what the page hands it, and keeps it."""
    names |= {"trl": SimpleNamespace(GRPOTrainer=dict), "arguments": {}}


@contextlib.contextmanager
def own_server(names: dict[str, Any]) -> Iterator[None]:
    """The page's server runs when the block after it plays."""
    said = io.StringIO()
    with contextlib.ExitStack() as running, contextlib.redirect_stdout(said):

        def replaced(text: str) -> str:
            if "127.0.0.1:8901" not in text:
                return text
            server = HTTPServer("127.0.0.1", 0)
            running.enter_context(server.running(names["app"]))
            return text.replace("127.0.0.1:8901", urlsplit(server.url).netloc)

        names["replaced"] = replaced
        yield
    assert "0 to 9 Each action is one JSON object" in said.getvalue() and "('right', 1.0)" in said.getvalue()


@contextlib.contextmanager
def served(names: dict[str, Any]) -> Iterator[None]:
    """The endpoint that the page asks, with an engine that always says the same."""
    from skyrl_trainer.agent.chat_api import application
    from skyrl_trainer.agent.prompt import ChatPrompt
    from skyrl_trainer.serve.server import Policy
    from skyrl_trainer.settings import GeneratorConfig
    from skyrl_trainer.tiny.init_policy import CHAT_TEMPLATE
    from tests.trainer.serve.test_serve_answers import SayingEngine

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    try:
        engine, prompt = SayingEngine(tokenizer), ChatPrompt(tokenizer)
        policy = Policy("quickstart", [engine], prompt, GeneratorConfig(max_model_len=1024))
        server = HTTPServer("127.0.0.1", 0)
        with server.running(application(policy)):
            address = server.url.removesuffix("/v1")
            names["replaced"] = lambda text: text.replace("http://127.0.0.1:8000", address)
            yield
    finally:
        tokenizer.chat_template = CHATML


PREPARED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "docs/agents/serving.md": served,
    "docs/agents/trajectories.md": policies,
    "docs/agents/your-environment.md": own_server,
    "docs/agents/your-script.md": trls,
    "docs/environments/README.md": environments,
    "docs/environments/code_lite.md": code_rows,
    "docs/environments/sql_lite.md": databases,
    "docs/environments/task_sets.md": harbor,
    "docs/environments/text_math.md": with_gym,
    "docs/environments/tool_use.md": tools,
    "docs/environments/write-your-own.md": guess,
    "docs/environments/write-your-own.zh.md": guess,
    "docs/eval/README.md": benchmark,
    "docs/plug-ins.md": plug_ins,
    "docs/sft.md": chats,
    "docs/tutorial.md": own_env,
    "README.md": chats,
    "README.zh-CN.md": chats,
}
