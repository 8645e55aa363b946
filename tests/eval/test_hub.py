"""Data sets of Hugging Face, from a stand-in for the hub: by revision, the right files only; gated and absent ones."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.eval.made_up import mmlu_pro

COMMIT = hashlib.sha1(b"made up").hexdigest()
FILES = {
    "data/test-00000.jsonl": json.dumps(mmlu_pro(1)),
    "data/validation-00000.jsonl": json.dumps(mmlu_pro(9, cot_content="The answer is (B).")),
    "data/train-00000.jsonl": json.dumps(mmlu_pro(5)),
    "tasks/train-00000.jsonl": '{"prompt": "1 + 1 = ?", "ground_truth": "2"}\n' * 3,
    "README.md": "# Made up",
}
LOAD = """
import os, sys
from skyrl_eval import benchmarks, data
from skyrl_eval.types import Source
from skyrl_trainer.errors import UserError
for token, name, *spec in map(str.split, sys.argv[1:]):
    os.environ["HF_TOKEN"] = token.strip("-")
    bench = benchmarks.find(name)
    if name == "mmlu-pro":
        type(bench).source = Source("made/up", "data/test-*.jsonl", "data/validation-*.jsonl")
    try:
        found = data.load(bench, *spec)
        asked = found.items[0].meta["asked"].count("Question:")
        print(found.source, found.revision, [item.item_id for item in found.items], asked)
    except UserError as error:
        print(error)
"""

TRAIN = """
import sys
from skyrl_trainer.data import load_samples
from skyrl_trainer.errors import UserError
for spec in sys.argv[1:]:
    try:
        samples = load_samples([spec])
        print(len(samples), samples[2].sample_id.rpartition("/")[2], samples[2].env_id, samples[2].ground_truth)
    except UserError as error:
        print(error)
"""


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "cais/hle" in self.path:
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        name = self.path.partition(f"/resolve/{COMMIT}/")[2]
        if name in FILES:
            text = FILES[name].encode()
            return self.answer(200, text, {"ETag": f'"{hashlib.sha1(text).hexdigest()}"', "X-Repo-Commit": COMMIT})
        if "/api/datasets/made/up/revision/" in self.path and self.path.split("?")[0].endswith(("/main", "/v2")):
            siblings = [{"rfilename": name} for name in FILES]
            return self.answer(200, json.dumps({"id": "made/up", "sha": COMMIT, "siblings": siblings}).encode(), {})
        if f"/api/datasets/made/up/tree/{COMMIT}" in self.path:
            tree = [{"type": "file", "path": name, "size": len(text), "oid": "0"} for name, text in FILES.items()]
            return self.answer(200, json.dumps(tree).encode(), {})
        return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_data_sets_of_the_hub(hub: str, tmp_path: Path) -> None:
    """In a process of its own, for the hub's address is read once."""
    more = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    asked = ("- mmlu-pro", "- mmlu-pro hf:made/up@v2", "- hle", "hf_made_up hle", "- gsm8k no/such@v1")
    command = [sys.executable, "-c", LOAD, *asked]
    done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=120)
    default, revision, gated, refused, absent = done.stdout.splitlines()
    assert default == revision == f"made/up {COMMIT} ['1'] 2"
    assert "HF_TOKEN is not set: you may not read the gated data set cais/hle" in gated
    assert "The token in HF_TOKEN may not read" in refused
    assert "--data no/such@v1 is neither a file here nor a data set" in absent


def test_training_data_of_the_hub(hub: str, tmp_path: Path) -> None:
    more = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    asked = ("made/up?split=tasks/train", "hf:made/up@v2?split=tasks", "made/up", "made/up?split=2024", "no/such")
    command = [sys.executable, "-c", TRAIN, *asked, "made/up?n=3", "made/up-v0"]
    done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=120)
    first, revision, schema, empty, absent, option, env = done.stdout.splitlines()
    assert first == "3 train#2 skyrl/text_math-v0 2" and revision == "3 up@v2:tasks#2 skyrl/text_math-v0 2"
    assert "field 'prompt' is missing" in schema
    assert empty == "Data source 'made/up' has no file *2024*.jsonl or *2024*.parquet on Hugging Face."
    assert "no/such is neither a file here nor a data set that Hugging Face gives out" in absent
    assert option == "Data source 'made/up' is a data set, whose only option is split; got n."
    assert "made/up-v0" in env and "Hugging Face" not in env
