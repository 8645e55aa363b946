"""skyrl/harbor-v0 (docs/environments/task_sets.md): tasks in Harbor's folders, with the tools bash and submit."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

from skyrl_eval import sandbox
from skyrl_eval.swe_env import NO_CALL, ShellEnv, submits
from skyrl_gym.core import Choices, Options, Outcome, Task
from skyrl_gym.tools.tool import responses

TEST_SECONDS = 600.0
WORKDIR = re.compile(r"^WORKDIR (/(?:app|code|data|home|opt|project|repo|root|src|srv|testbed|work)\S*)$", re.MULTILINE)
BUILDS = re.compile(rf"^[ \t]*+(?!#|FROM |{WORKDIR.pattern[1:]}|COPY (?:\.|[\w-]+\.\w+) \./?$)\S.*", re.MULTILINE)
"""Lines of a Dockerfile for which it is not enough to copy the folder to the working directory."""


class HarborEnv(ShellEnv):
    """tasks: the folder of tasks, of gymnasium.make or of a reset. image="ignored": also those that build an image."""

    choices: ClassVar[Choices] = {"image": ("refused", "ignored")}
    id_options = ()
    path_options = ("tasks",)
    kept = ("steps", "commands")
    tool_names = ("bash", "submit")
    most_steps = 50

    def bash(self, command: str) -> str:
        """Runs a bash command; returns stdout and stderr, and the exit code where it is not 0."""
        self.commands.append(command)
        return self._shell(command, self._binds, self.task.data["work"])

    def count_tasks(self, options: Options) -> int:
        return len(_folders(options.get("tasks")))

    def make_task(self, options: Options, index: int) -> Task:
        folder = _folders(options["tasks"])[index]
        file = folder / "environment/Dockerfile"
        steps = file.read_text(encoding="utf-8") if file.is_file() else ""
        if (builds := BUILDS.search(steps)) and options["image"] == "refused":
            raise ValueError(f"{file} has {builds[0]!r:.80}, and no image is built: see to it, and give image=ignored.")
        data = {"folder": str(folder), "work": ["/app", *WORKDIR.findall(steps)][-1]}
        instructions = self._prompt("harbor_system", work=data["work"])
        text = (folder / "instruction.md").read_text(encoding="utf-8")
        return Task(self.task_id(options, index), text, None, instructions=instructions, data=data)

    def begin(self, task: Task) -> str:
        sandbox.check("namespace")
        self.set_env_state({"steps": 0, "commands": []})
        return task.text

    def act(self, action: str) -> Outcome:
        made = self._made(action)
        submitted = submits(made)
        self.steps += 1
        reward = self._reward() if submitted or self.steps == self._limit else 0.0
        valid = bool(made) and all(call["args"] is not None for call in made)
        said = responses(made, *([] if made else [NO_CALL]))
        return Outcome(said, {"tests": reward}, valid, reward >= 1, submitted, {"tool_calls": made})

    # Of tests that run when nothing that the agent has started does.
    def _reward(self) -> float:
        tests, work = Path(self.task.data["folder"], "tests"), self.task.data["work"]
        with sandbox.folder("skyrl-harbor-") as logs:
            binds = [*self._binds, (tests, "/tests", False), (logs, "/logs/verifier", True)]
            sandbox.run(("bash", "/tests/test.sh"), binds, seconds=TEST_SECONDS, cwd=work)
            plain, named = (sandbox.read_back(logs / name) for name in ("reward.txt", "reward.json"))
        try:
            reward = float(plain or json.loads(named)["reward"])
        except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
            return 0.0
        return min(max(0.0, reward), 1.0)  # 0 for no number

    def expert_action(self) -> str:
        file = Path(self.task.data["folder"], "solution/solve.sh")
        if not file.is_file():
            raise NotImplementedError(f"{file} is not there: this task has no expert.")
        calls = {"tool": "bash", "args": {"command": file.read_text(encoding="utf-8")}}, {"tool": "submit"}
        return "\n".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)

    def set_env_state(self, state: dict[str, Any]) -> None:
        """The commands are run again, in a fresh folder."""
        self.close()
        work = self._opened.enter_context(sandbox.folder("skyrl-harbor-")) / "work"
        shutil.copytree(Path(self.task.data["folder"], "environment"), work, symlinks=True)
        (work / "Dockerfile").unlink(missing_ok=True)
        (temporary := work.with_name("tmp")).mkdir()
        self._binds = [(work, self.task.data["work"], True), (temporary, "/tmp", True)]
        self.steps, self.commands = state["steps"], list[str]()
        for command in state["commands"]:
            self.bash(command)


def _folders(tasks: Any) -> list[Path]:
    found = sorted(path.parents[1].resolve() for path in Path(str(tasks)).glob("*/tests/test.sh"))
    if not found:
        raise ValueError(f"tasks is {tasks!r}; expected a folder of Harbor's tasks, NAME/tests/test.sh and so on.")
    return found
