"""skyrl/swe-v0 (docs/eval/README.md): an issue of a repository, resolved with bash, view, replace and submit."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from skyrl_eval import prompts, sandbox, swe
from skyrl_eval.benchmarks.common import Context, final
from skyrl_gym.core import Info, Options, Outcome, Row, Task, TextEnv
from skyrl_gym.parsing import MAX_CALLS, parse_tool_calls
from skyrl_gym.tools.tool import ToolError, listed, responses, run_call, tool

SECONDS, OUTPUT, LINES = 30.0, 16 << 10, 200
LONGEST_PATCH, LONGEST_FILE = 1 << 20, 16 << 20
BUDGET = {"limit": str(MAX_CALLS), "seconds": f"{SECONDS:.0f}"}  # of an action's calls, for prompts
# An outer shell prints the code, and ends with 0, never with the command's. umask: a container's root writes for all.
SHELL = """. /opt/miniconda3/bin/activate testbed 2> /dev/null; umask 0
bash -c "$0"; code=$?; [ $code = 0 ] || echo "[exit code $code]"; exit 0"""
NO_CALL = prompts.text("no_call")


class ShellEnv(TextEnv):
    """Work in a sandbox by tools, until `submit`, or the step limit of Gymnasium's, `steps`."""

    tool_names: ClassVar[tuple[str, ...]]
    most_steps: ClassVar[int]

    def __init__(self, *, steps: int | None = None, **defaults: Any) -> None:
        super().__init__(**defaults)
        self._limit = self.most_steps if steps is None else steps
        self._tools = {name: tool(getattr(self, name)) for name in self.tool_names}
        self._opened = contextlib.ExitStack()
        self._failure: sandbox.SandboxFailed | None = None

    def _prompt(self, name: str, **values: str) -> str:
        return prompts.fill(name, tools=listed(self._tools), **values, **BUDGET)

    def submit(self) -> str:
        """Ends the task: what is there is judged."""
        return "Submitted."

    def _shell(self, command: str, binds: Sequence[sandbox.Bind], cwd: str, **where: Any) -> str:
        command = command.encode("utf-8", "replace").decode().replace("\0", "")
        try:
            done = sandbox.run(("bash", "-c", SHELL, command), binds, seconds=SECONDS, cwd=cwd, **where)
        except sandbox.SandboxFailed as error:
            self._failure = error
            raise
        text = done.output + (f"\n[stopped after {SECONDS:.0f} s]" if done.timed_out else "")
        return cut(text.strip("\n")) or "(no output)"

    def _made(self, action: str) -> list[dict[str, Any]]:
        made = []
        self._failure = None
        for call in parse_tool_calls(final(action)):  # none in its thoughts
            made.append(run_call(self._tools, call, longest=2 * OUTPUT))
            if self._failure:  # not for the model to read: the episode fails
                raise self._failure
            if submits(made):
                break
        # In a replay the commands do their work again, and say what they said.
        return made if self.recorded is None else [dict(call) for call in self.recorded]

    def close(self) -> None:
        with contextlib.suppress(Exception):  # what cannot be deleted stays
            self._opened.close()


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise ToolError(f"{path}: {getattr(error, 'strerror', 'a loop of links')}.") from error


class SWEEnv(ShellEnv):
    """The tasks are benchmarks' (SWEBench.env), each given as options["task"]."""

    choices = TextEnv.choices | {"lang": ("en",)}
    kept = ("steps", "patch")
    tool_names = ("bash", "view", "replace", "submit")
    most_steps = 100
    patch: str

    def bash(self, command: str) -> str:
        """Runs a bash command in /testbed; returns stdout and stderr, and the exit code where it is not 0."""
        binds = [(self._path / "testbed", "/testbed", True), (self._path / "tmp", "/tmp", True)]
        return self._shell(command, binds, "/testbed", **self._where)

    def view(self, path: str, start: int = 1) -> str:
        """Shows 200 numbered lines of a file from line `start` on, or the entries of a folder."""
        with _named(path):
            place = self._place(path)
            if place.is_dir():
                return cut("\n".join(sorted(entry.name + "/" * entry.is_dir() for entry in place.iterdir())))
            lines = self._read(place, path).split("\n")
        first = min(max(start, 1), len(lines))
        shown = [f"{number:6}  {line}" for number, line in enumerate(lines[first - 1 :][:LINES], start=first)]
        return cut("\n".join(shown) + f"\n[lines {first} to {first + len(shown) - 1} of {len(lines)}]")

    def replace(self, path: str, old: str, new: str) -> str:
        """Replaces `old`, which must stand in the file exactly once, by `new`; an empty `old` makes a new file."""
        with _named(path):
            place = self._place(path)
            if not old:
                if place.exists():
                    raise ToolError(f"{path} exists: give the text in it that is to be replaced as `old`.")
                place.parent.mkdir(parents=True, exist_ok=True)
            else:
                before = self._read(place, path)
                if (found := before.count(old)) != 1:
                    raise ToolError(f"`old` stands in {path} {found} times; it must stand there exactly once.")
                new = before.replace(old, new)
            place.write_bytes(new.encode("utf-8", "surrogateescape"))
        return f"{path} is written."

    def submit(self) -> str:
        """Ends the task: the changes in /testbed are the answer."""
        return super().submit()

    def task_from_row(self, row: Row, options: Options) -> Task:
        for name in ("question", "repo", "base_commit"):
            if not isinstance(row.get(name), str):
                raise ValueError(f"options['task'], field {name!r}: expected a string, got {row.get(name)!r}.")
        if row.get("tests"):
            swe.check()  # now, not once the agent has done its work
        data = {name: row.get(name) for name in ("repo", "base_commit", "container", "executor", "repos")}
        task_id = f"swe:{row['repo']}:{row['base_commit'][:12]}"
        return Task(task_id, row["question"], row.get("tests"), instructions=self._prompt("swe_system"), data=data)

    def count_tasks(self, options: Options) -> int:
        raise ValueError("skyrl/swe-v0 has no tasks of its own: give one as options['task'] (docs/eval/README.md).")

    def reset_info(self) -> Info:
        bare = prompts.fill("swe_system_bare", **BUDGET)
        return {"tools": [item.schema for item in self._tools.values()], "instructions_without_tools": bare}

    def begin(self, task: Task) -> str:
        self.set_env_state({"steps": 0, "patch": ""})
        return task.text

    def act(self, action: str) -> Outcome:
        made = self._made(action)
        submitted = submits(made)
        notes = [] if made else [NO_CALL]
        self.steps += 1
        over = submitted or self.steps == self._limit
        info: Info = {"tool_calls": made}
        known = [call["args"] is not None for call in made]
        patch = self._diff() if any(known) else self.patch
        if len(patch) > LONGEST_PATCH:
            notes.append(f"Your changes have {len(patch)} characters, more than {LONGEST_PATCH}: they do not count.")
            info["patch_too_long"], patch = len(patch), ""
        if over or self.steps == 1 or self.patch != patch:
            info["submission"] = patch
        self.patch = patch
        resolved = False
        if over:
            resolved, info["flags"] = self._resolved()
        said = "" if submitted else responses(made, *notes)
        return Outcome(said, {"resolved": float(resolved)}, bool(made) and all(known), resolved, submitted, info)

    def _diff(self) -> str:
        return swe.diff(self._path / "testbed", self._commit, **self._where)

    def _resolved(self) -> tuple[bool, list[str]]:
        tests, data = self.task.ground_truth, self.task.data
        if not tests or not self.patch:
            return False, []
        context = Context(executor=self._where["executor"], repos=self._repos)
        clean, flags = swe.guarded(tests, data, self.patch, context)
        return bool(clean) and swe.run_tests(tests, data, clean, context, guarded=True).resolved, flags

    # Where a path of the agent's is out here. Nothing of its runs between calls, so a link cannot change.
    def _place(self, path: str) -> Path:
        inside = PurePosixPath("/testbed", path)
        for name in ("testbed", "tmp"):
            root = self._path.resolve() / name
            if inside.is_relative_to(f"/{name}"):
                place = (root / inside.relative_to(f"/{name}")).resolve()
                if place.is_relative_to(root):
                    return place
        raise ToolError(f"{path} is not in /testbed or /tmp: use bash.")

    def _read(self, place: Path, path: str) -> str:
        if not place.is_file():
            raise ToolError(f"There is no file {path}.")
        if place.stat().st_size > LONGEST_FILE:
            raise ToolError(f"{path} has more than {LONGEST_FILE} bytes: use bash.")
        return place.read_bytes().decode("utf-8", "surrogateescape")

    def set_env_state(self, state: dict[str, Any]) -> None:
        """A fresh workspace with the patch applied; what git ignores and what is in /tmp is not brought back."""
        self.close()
        self._path, data = self._opened.enter_context(sandbox.folder("skyrl-swe-env-")), self.task.data
        for name in ("testbed", "tmp"):
            (self._path / name).mkdir()
        executor = data["executor"] or "namespace"
        self._where: dict[str, Any] = {"executor": executor, "image": data["container"] or ""}
        self._commit = data["base_commit"]
        self._repos = Path(data["repos"]) if data["repos"] else None
        if executor == "namespace":
            swe.workspace(data["repo"], self._commit, self._path / "testbed", self._repos)
        else:
            self._opened.callback(self.bash, "find . /tmp -mindepth 1 -delete")  # what is root's
            self._commit = snapshot(self._path / "testbed", **self._where)
        self.steps, self.patch = state["steps"], state["patch"]
        if self.patch:
            (self._path / "tmp/patch.diff").write_bytes(self.patch.encode("utf-8", "surrogateescape"))
            self.bash("git apply --whitespace=nowarn /tmp/patch.diff; rm /tmp/patch.diff")


def submits(made: Sequence[Mapping[str, Any]]) -> bool:
    return bool(made) and made[-1]["tool"] == "submit" and "result" in made[-1]


def snapshot(folder: Path, binds: Sequence[sandbox.Bind] = (), **where: Any) -> str:
    """Copies the /testbed of an image (or of `binds`) into the folder, and returns its only commit."""
    binds = [*binds, (folder, "/out", True), (swe.STEPS, "/steps", False)]
    done = sandbox.run(("bash", "/steps/snapshot.sh"), binds, seconds=600, **where)
    if done.code:
        raise sandbox.SandboxFailed(f"The image's /testbed cannot be copied: {done.output.strip()[-300:]}")
    return done.output.split()[-1]


def cut(text: str) -> str:
    """At most 16 KB of a command's output: its beginning and its end."""
    data = text.encode("utf-8", "replace")
    if len(data) <= OUTPUT:
        return text
    head, tail = (part.decode("utf-8", "ignore") for part in (data[: OUTPUT // 2], data[-OUTPUT // 2 :]))
    return f"{head}\n[... {len(data) - OUTPUT} bytes left out ...]\n{tail}"
