"""`skyrl-trainer export --card` and `--push`: what is written, what a stand-in for the hub gets, what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import ModelCard

from skyrl_trainer import cli
from skyrl_trainer.report.history import read_metrics
from skyrl_trainer.settings import TinyConfig
from skyrl_trainer.tiny.init_policy import init_policy
from tests.trainer.report.synthetic import make_run

TOKEN = "hf_made_up"


STEPS = {"last": 30, "best": 20}
"""Newer ones were measured and not saved yet, a better one since; the run says of which step each policy is."""


def note(policy: Path, step: int) -> None:
    """As Learner.save_pretrained does."""
    policy.mkdir(exist_ok=True)
    path = policy / "config.json"
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), "skyrl_step": step}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "sums", max_steps=40, overrides=("trainer.learning_rate=2e-4",))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    for which in ("last", "best"):
        tiny = TinyConfig(config_kwargs={**sizes, "num_key_value_heads": 1})
        init_policy(folder / "model" / which, ["What is 1 + 1?"], tiny, seed=0)
        note(folder / "model" / which, STEPS[which])
    return folder


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_card_has_the_figures_of_the_policy_that_it_lies_beside(run: Path, which: str, tmp_path: Path) -> None:
    assert cli.main(["export", str(run), "--out", str(tmp_path / "out"), "--card", "--which", which]) == 0
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["reinforcement-learning", "grpo", "skyrl-trainer"] and card.data.base_model is None
    measured = [row for row in read_metrics(run) if "eval/success" in row]
    chosen = next(row for row in read_metrics(run) if row["step"] == STEPS[which])
    figures = f"| {measured[0]['eval/success']:.4g} | {chosen['eval/success']:.4g} |"
    assert f"| `eval/success` {figures}" in card.text and f"at step {chosen['step']:.0f} |" in card.text
    assert f"the {which} policy" in card.text and "\ntrainer.learning_rate: 0.0002\n" in card.text
    assert "trainer.max_steps" not in card.text, "a default"
    assert (tmp_path / "out/curve.png").read_bytes().startswith(b"\x89PNG") and "](curve.png)" in card.text


def test_a_policy_whose_step_was_not_noted_gets_no_card(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "old", max_steps=10)
    shutil.copytree(run / "model", tmp_path / "old" / "model")
    path = tmp_path / "old/model/last/config.json"
    path.write_text(path.read_text().replace("skyrl_step", "another"))
    assert cli.main(["export", str(tmp_path / "old"), "--out", str(tmp_path / "out"), "--card"]) == 2
    assert "which an older version did not note" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_card_names_the_model_that_was_trained_further(tmp_path: Path) -> None:
    from skyrl_trainer.report.card import write_card

    run = make_run(tmp_path / "run", max_steps=10, overrides=("trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct",))
    note(tmp_path, 10)
    write_card(run, "last", tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.base_model == "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize("evaluated", [True, False])
def test_at_first_means_before_the_first_step_also_of_what_it_could_not_tell(evaluated: bool, tmp_path: Path) -> None:
    """Tokens per success, for example, where nothing had succeeded; steps have no evaluation in between."""
    from skyrl_trainer.report.card import write_card

    run = make_run(tmp_path / "run", max_steps=4)
    rows = [{"step": 0, "eval/success": 0.0}] * evaluated + [{"step": 1, "reward/mean": 0.0, "reward/total": 0.25}]
    rows += [{"step": 2, "reward/total": 0.5, "eval/success": 0.5, "eval/tokens/per_success": 106.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    note(tmp_path, 2)
    write_card(run, "last", tmp_path)
    card = (tmp_path / "README.md").read_text()
    first = " 0" if evaluated else ""
    for row in (f"`eval/success` |{first} | 0.5", "`eval/tokens/per_success` | | 106", "`reward/total` | 0.25 | 0.5"):
        assert f"| {row} |" in card
    assert "`eval/...`: tasks of `text_math?split=val" in card, "which may be those of training"


def test_what_cannot_be_done_is_said_before_anything_is_copied(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert cli.main(["export", str(run), *words]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    out = ("--out", str(tmp_path / "out"))
    assert "--push a/b/c failed (" in refused(*out, "--push", "a/b/c")
    assert "give --out DIR" in refused("--trajectories", str(tmp_path / "out"), "--card")
    assert "--which belong to a policy" in refused("--trajectories", str(tmp_path / "out"), "--which", "best")
    (run / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    try:
        assert "--card needs a run of reinforcement learning" in refused(*out, "--card")
    finally:
        (tmp_path / "metrics.jsonl").rename(run / "metrics.jsonl")
    monkeypatch.setattr("skyrl_trainer.report.card.find_spec", lambda name: None)
    assert "pip install 'skyrl-trainer[card]'" in refused(*out, "--card")


class Hub(BaseHTTPRequestHandler):
    """Takes small files within the commit and weights as large files, as the hub does."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        self.answer({}, 404)

    def do_PUT(self) -> None:
        self.seen[self.path] = hashlib.sha256(self.body()).hexdigest()
        self.answer({})

    def do_POST(self) -> None:
        text, home = self.body(), f"http://{self.headers['Host']}"
        if "/made/full/" in self.path:
            return self.answer({}, 413)
        if self.path.endswith("/commit/main"):
            self.seen["commit"] = [json.loads(line) for line in text.splitlines()]
            return self.answer({"commitUrl": f"{home}/made/up/commit/1", "commitOid": "1", "pullRequestUrl": None})
        asked = json.loads(text)
        if self.path == "/api/repos/create":
            self.seen["created"] = asked
            allowed = asked["name"] != "closed" and self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self.answer({"url": f"{home}/made/{asked['name']}"}, 200 if allowed else 403)
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            large = {file["path"]: file["path"].endswith("safetensors") for file in asked["files"]}
            files = [{"path": path, "uploadMode": "lfs" if large[path] else "regular"} for path in large]
            return self.answer({"files": [{**file, "shouldIgnore": False} for file in files]})
        if self.path.endswith("/objects/batch"):
            objects = [{**each, "actions": {"upload": {"href": f"{home}/{each['oid']}"}}} for each in asked["objects"]]
            return self.answer({"transfer": "basic", "objects": objects})
        return self.answer({}, 404)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, found: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def export(hub: str, run: Path, out: Path, repo: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """In a process of its own, for the hub's address is read once."""
    more = {"HF_ENDPOINT": hub, "HF_HOME": str(out.parent / "hf"), "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    more |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "NO_PROXY": "127.0.0.1"}
    words = ("export", str(run), "--out", str(out), "--card", "--push", repo)
    command = [sys.executable, "-m", "skyrl_trainer", *words]
    return subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=180)


def test_a_policy_and_its_card_arrive_as_they_are(hub: str, run: Path, tmp_path: Path) -> None:
    Hub.seen.clear()
    done = export(hub, run, tmp_path / "out", "made/up")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub}/made/up"
    assert Hub.seen["created"] | {"name": "up", "organization": "made", "visibility": "private"} == Hub.seen["created"]
    operations = [each for each in Hub.seen["commit"] if each["key"] in ("file", "lfsFile")]
    sent = {each["value"]["path"]: each["value"] for each in operations}
    assert set(sent) == {path.name for path in (tmp_path / "out").iterdir()}
    for name, value in sent.items():
        own = (tmp_path / "out" / name).read_bytes()
        if name == "model.safetensors":
            assert value["oid"] == hashlib.sha256(own).hexdigest() == Hub.seen[f"/{value['oid']}"]
        else:
            assert base64.b64decode(value["content"]) == own, name


def test_a_hub_that_refuses_costs_one_sentence(hub: str, run: Path, tmp_path: Path) -> None:
    for token, name in (("hf_other", "up"), (TOKEN, "closed")):
        done = export(hub, run, tmp_path / "out", f"made/{name}", token)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert f"--push made/{name} failed (" in done.stderr and "a token in HF_TOKEN that may write" in done.stderr
        assert not (tmp_path / "out").exists(), "it was refused before anything was copied"
    done = export(hub, run, tmp_path / "out", "made/full")
    assert done.returncode == 2 and f"The policy stays in {tmp_path / 'out'}." in done.stderr, done.stderr
    assert (tmp_path / "out/model.safetensors").is_file()


def test_a_hub_that_is_not_there_is_one_sentence(run: Path, tmp_path: Path) -> None:
    done = export("http://127.0.0.1:9", run, tmp_path / "out", "made/up")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "--push made/up failed (" in done.stderr and "it needs owner/name, the network" in done.stderr
