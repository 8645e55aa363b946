"""How soon the trajectory viewer is there: a page of synthetic multi-turn trajectories in headless Chromium.

    python benchmarks/viewer.py [--trajectories 2000] [--tokens 130] [--rounds 3]

The clock runs from the navigation until the list is painted and the trajectory that the address names stands open with
its shaded tokens; the browser is up before. Chromium (or Chrome) must be on PATH. The last line is one JSON object:
{"trajectories": on the page, "bytes": of it, "seconds": the median of the rounds, "limit": 3.0}.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from skyrl_trainer.report.viewer import write_viewer
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.types import RolloutBatch, Sample, StopReason, Trajectory, Turn

LIMIT = 3.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
THINGS = ["river", "bridge", "copper", "engine", "garden", "museum", "运河", "桥梁", "Straße", "café", "€40", "railway"]
SYSTEM = (
    "You answer questions with tools. Call one as <tool_call>{...}</tool_call>, answer as <answer>...</answer>.\n" * 6
)
OPEN = "document.querySelectorAll('#list a').length > 0 && document.querySelectorAll('.t').length > 0"


class Browser:
    """Headless Chromium over its debugging pipe: messages are JSON that ends with a zero byte. Close it after use."""

    def __init__(self, program: str, folder: Path, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """folder: for the browser's profile."""
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]
        flags += ["--disable-dev-shm-usage", "--no-first-run", f"--window-size={width},{height}"]
        command = ["bash", "-c", f'exec "$@" 3<&{to_child} 4>&{from_child}', "bash", program, *flags, "about:blank"]
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(to_child, from_child), **quiet)
        os.close(to_child)
        os.close(from_child)
        self._number, self._rest, self._session = 0, b"", None
        pages = [x for x in self.call("Target.getTargets")["targetInfos"] if x["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        if dark:
            media = [{"name": "prefers-color-scheme", "value": "dark"}]
            self.call("Emulation.setEmulatedMedia", features=media)

    def call(self, method: str, **params: Any) -> Any:
        """Sends a command and waits for its answer, a minute at most."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            while b"\0" not in self._rest:
                if not select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]:
                    raise TimeoutError(f"The browser did not answer {method} within a minute.")
                chunk = os.read(self._from, 2**20)
                if not chunk:
                    raise RuntimeError(f"The browser ended before it answered {method}.")
                self._rest += chunk
            line, self._rest = self._rest.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"].get("exception", done["exceptionDetails"]).get("description"))
        return done["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> None:
        """Until the expression is true."""
        until = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > until:
                raise TimeoutError(f"After {seconds:g} seconds this is still false: {script}")
            time.sleep(0.01)

    def close(self) -> None:
        os.close(self._to)  # a browser without its pipe ends
        os.close(self._from)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(THINGS) if rng.random() < 0.5 else str(rng.randrange(1000)) for _ in range(count))


def tokenizer(rng: random.Random) -> Tokenizer:
    """A byte-level one with few merges, so that most characters beyond ASCII are several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([words(rng, 400).replace("运河", "").replace("€", ""), SYSTEM], trainer)
    made.add_special_tokens(["<|im_end|>"])
    return made


def episode(rng: random.Random, tokens: Tokenizer, step: int, sample: int, generation: int, size: int) -> Trajectory:
    """4 to 8 turns; attempts at one task begin alike, and one in forty fails."""
    kind, turns = sample % 3, rng.randint(4, 8)
    env = ("tool_use", "webshop_lite", "alfworld_lite")[kind]
    task = Sample(
        f"{env}?split=train#{sample}", f"skyrl/{env}-v0", sample, {"split": "train", "difficulty": 1 + sample % 4}
    )
    made = Trajectory(f"{step}/{sample}/{generation}", task, generation, rng.randrange(2**48))
    made.prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": words(random.Random(sample), 30)}]
    success, advantage = rng.random() < 0.4, rng.gauss(0, 1)
    for number in range(turns):
        same = number == 0 and generation % 2
        text = words(random.Random(sample) if same else rng, max(4, size // 3))
        args = {"query": text[:20], "k": number}
        asked = json.dumps({"tool": "search", "args": args}, ensure_ascii=False)
        action = f"I look for the {text}.\n<tool_call>{asked}</tool_call>"
        ids = [*tokens.encode(action).ids, tokens.token_to_id("<|im_end|>")]
        last, failed = number == turns - 1, rng.random() < 0.1
        call = {"tool": "search", "args": args} | ({"error": "no such page"} if failed else {"result": words(rng, 12)})
        turn = Turn(list(range(40)), ids, [-rng.expovariate(2) for _ in ids], [step + (number > 3)] * len(ids), action)
        turn.observation = (
            "" if last else f"<tool_response>\n{call.get('result', 'Error: no such page')}\n</tool_response>"
        )
        turn.reward, turn.reward_parts = (1.05, {"answer": 1.0, "tool_calls": 0.05}) if last and success else (0.0, {})
        turn.tool_calls, turn.terminated, turn.new_segment = [call], last, number == 5
        turn.info = {"success": last and success, "valid_action": not failed}
        turn.advantages = [advantage + 0.3 * rng.gauss(0, 1) for _ in ids]
        turn.seconds = {"generate": rng.uniform(0.2, 2), "env": rng.uniform(0, 0.1)}
        made.turns.append(turn)
    if rng.random() < 0.025:
        made.stop_reason, made.error = (
            StopReason.ENV_ERROR,
            "The env raised in its step: ZeroDivisionError: division by zero",
        )
    made.metrics["seconds"] = rng.uniform(2, 12)
    return made


def make_run(run: Path, trajectories: int, size: int = 48, steps: int = 4, group: int = 8) -> Path:
    """A run folder with a tokenizer and that many stored trajectories; size: about the tokens of a turn."""
    rng = random.Random(5)
    tokens = tokenizer(rng)
    (run / "model" / "last").mkdir(parents=True)
    tokens.save(str(run / "model" / "last" / "tokenizer.json"))
    store = JsonlTrajectoryStore(run / "trajectories")
    for step in range(1, steps + 1):
        count = trajectories * step // steps - trajectories * (step - 1) // steps
        groups = [range(at, min(at + group, count)) for at in range(0, count, group)]
        store.write(
            RolloutBatch(
                step, [[episode(rng, tokens, step, n, k, size) for k in range(len(g))] for n, g in enumerate(groups)]
            )
        )
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=130, help="of a turn, about")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    program = find_browser()
    if program is None:
        raise SystemExit("There is no Chromium on PATH: install it (Debian: apt install chromium), or Chrome.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = make_run(Path(folder) / "run", args.trajectories, args.tokens)
        out, start = run / "trajectories.html", time.perf_counter()
        done = write_viewer(run, out)
        print(f"{done}, written in {time.perf_counter() - start:.1f} s", flush=True)
        seconds = []
        for number in range(args.rounds):
            browser = Browser(program, Path(folder) / f"profile-{number}")
            try:
                start = time.perf_counter()
                browser.call("Page.navigate", url=f"{out.as_uri()}#4/0/0")
                browser.wait(OPEN)
                browser.run("new Promise(requestAnimationFrame).then(() => 1)")
                seconds.append(time.perf_counter() - start)
                shown = browser.run("rows.length")
                print(f"round {number + 1}: {seconds[-1]:.2f} s", flush=True)
            finally:
                browser.close()
        result = {"trajectories": shown, "bytes": out.stat().st_size}
        print(json.dumps(result | {"seconds": round(statistics.median(seconds), 3), "limit": LIMIT}))


if __name__ == "__main__":
    main()
