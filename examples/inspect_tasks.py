"""A task of inspect (pip install inspect-ai openai): its solvers are the agent that is trained, its scorers the reward.

inspect wants another version of `fsspec` than the trainer, so it plays in an environment of its own, where this file is
a program: it writes the task's samples as rows of data, and then plays those that `agent` asks for, in the trainer.

    python examples/inspect_tasks.py my_tasks:sums sums.jsonl my_tasks:more val.jsonl
    skyrl-trainer train quickstart data.train_data='[sums.jsonl]' data.val_data='[val.jsonl]' \
      generator.agent.run=examples/inspect_tasks.py:agent

docs/environments/task_sets.md has the rest.
"""

import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from pkgutil import resolve_name
from socketserver import ForkingMixIn

PORT = int(os.environ.get("INSPECT_PORT", "8903"))
KIND = {"Content-Type": "application/json"}  # which the page of a browser cannot send


def agent(task):
    """In the trainer: the row's sample is played by inspect, whose model is this episode's endpoint."""
    sample = task.options["task"]["extra_info"]
    asked = {**sample, "url": task.base_url, "key": task.api_key, "name": task.model}
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}", json.dumps(asked).encode(), KIND)
        with urllib.request.urlopen(request) as reply:
            said = json.load(reply)
    except urllib.error.URLError as error:
        raise RuntimeError(f"inspect_tasks.py does not play samples at port {PORT} ({error.reason})") from None
    if "error" in said:
        raise RuntimeError(said["error"])
    return said


def played(task, index, url="http://nobody", key="none", name="policy", run=True):
    """What the sample earned: the mean of its scores, and success where each is 1. run: or only looks at the task."""
    from inspect_ai import eval
    from inspect_ai.model import get_model
    from inspect_ai.scorer import value_to_float

    model = get_model(f"openai-api/skyrl/{name}", base_url=url, api_key=key)
    # No retries: once the episode is over, its endpoint is gone.
    asked = {"limit": (index, index + 1), "epochs": 1, "max_retries": 0, "run_samples": run}
    with tempfile.TemporaryDirectory() as logs:
        [log] = eval(task, model, log_dir=logs, log_level="error", display="none", **asked)
        if log.status == "error":
            raise RuntimeError(log.error.message)
        values = [score.value for each in log.samples or () for score in each.scores.values()]
        if several := [value for value in values if isinstance(value, dict | list)]:
            raise RuntimeError(f"a scorer gave {several[0]}, and a reward is one number")
        scores = [value_to_float()(value) for value in values]
    return {"reward": sum(scores) / len(scores), "success": min(scores) >= 1} if run else None


class Player(BaseHTTPRequestHandler):
    def do_POST(self):
        if self.headers["Content-Type"] != KIND["Content-Type"]:
            self.send_error(415)
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            if (task := self.server.tasks.get(name := asked.pop("task"))) is None or asked["index"] >= len(
                task.dataset
            ):
                raise LookupError(f"no sample {asked['index']} of {name!r} is played here: write the rows again")
            said = played(task, **asked)
        except Exception as error:
            said = {"error": f"inspect: {error}"}
        with suppress(BrokenPipeError):  # the episode is over
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_):
        """A line for each episode would be too many."""


class Server(ForkingMixIn, HTTPServer):
    """A process for each sample, for inspect evaluates one thing at a time; forked, for its import takes seconds."""

    max_children, request_queue_size = 1024, 1024


def main(*words):
    """words: the name of a task, the file for its samples, and so on."""
    sys.path.insert(0, os.getcwd())
    if not words or len(words) % 2:
        sys.exit("usage: inspect_tasks.py MODULE:TASK ROWS.jsonl [MODULE:TASK ROWS.jsonl ...]")
    try:
        tasks = {name: resolve_name(name)() for name in words[::2]}
    except (ImportError, AttributeError, ValueError) as error:
        sys.exit(f"inspect: a task is named as module:function, and is in a file here: {error}")
    for (name, task), rows in zip(tasks.items(), words[1::2], strict=True):
        try:
            played(task, 0, run=False)  # imports what all samples need
        except Exception as error:  # inspect's own are printed by its display, which is off
            sys.exit(f"inspect: {name}: {error}")
        if not task.scorer:
            sys.exit(f"inspect: {name} has no scorer, which would say what an answer is worth")
        with Path(rows).open("w") as file:
            for index, sample in enumerate(task.dataset):
                said = sample.input if isinstance(sample.input, str) else sample.input[-1].text
                row = {"prompt": said, "ground_truth": sample.target, "env_class": "skyrl/prompt-v0"}
                file.write(json.dumps(row | {"extra_info": {"task": name, "index": index}}) + "\n")
        print(f"{name}: {len(task.dataset)} samples, in {rows}")
    with Server(("127.0.0.1", PORT), Player) as server:
        server.tasks = tasks
        print(f"They are played at port {PORT}.", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
