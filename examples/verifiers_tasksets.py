"""Tasksets of verifiers 0.4 (pip install verifiers) as environments: docs/environments/task_sets.md.

verifiers wants other versions of `mcp` and `openai` than the trainer, so it is served from an environment of its own.
A task is one turn: what it shows is its prompt, what it pays are the weighted rewards of its own methods and judges.
"""

import asyncio
import inspect

import gymnasium
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

from skyrl_gym import Outcome, Task, TextEnv

SPLITS = ("train", "val", "test")


class VerifiersTask(TextEnv):
    metadata = {**TextEnv.metadata, "waits": True}  # a judge is asked over a network
    choices = {"split": SPLITS}
    id_options = ("split",)

    def __init__(self, tasks, **options):
        super().__init__(**options)
        self._tasks = tasks

    def count_tasks(self, options):
        return len(self._tasks[options["split"]])

    def make_task(self, options, index):
        data = self._tasks[options["split"]][index].data
        answer, rules = getattr(data, "answer", None), data.system_prompt or ""
        place = {"split": options["split"], "index": index}
        return Task(self.task_id(options, index), data.prompt_text, answer, instructions=rules, data=place)

    def act(self, action):
        task = self._tasks[self.task.data["split"]][self.task.data["index"]]
        told = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        rules = [vf.SystemMessage(content=self.task.instructions)] if self.task.instructions else []
        said = [*rules, vf.UserMessage(content=self.task.text), vf.AssistantMessage(content=action)]
        nodes = [vf.MessageNode(message=each, parent=i - 1 if i else None) for i, each in enumerate(said)]
        nodes[-1].sampled = True
        state = {"task": told, "nodes": nodes, "is_completed": True, "ok": True}
        trace = vf.Trace(agent=vf.AgentInfo(config=vf.AgentConfig()), **state)
        asyncio.run(task.score(trace))
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        info = {"metrics": trace.metrics}
        return Outcome("", parts, True, sum(parts.values()) >= 1, terminated=True, info=info)

    def expert_action(self):
        if not isinstance(self.task.ground_truth, str):
            raise NotImplementedError("The data of this taskset have no `answer`.")
        return self.task.ground_truth


def register(name, limit=None, **config):
    """The installed taskset `name` as `verifiers/NAME-v0`; config: its configuration's fields. limit: of tasks, for a
    taskset without an end. Of ten tasks eight are train's, one is val's and one is test's."""
    taskset = load_taskset(taskset_config_type(name)(id=name, **config))
    if not taskset.bounded and limit is None:
        raise ValueError(f"The taskset {name!r} has no end: give a limit.")
    found = list(taskset if limit is None else taskset.take(limit))
    if len(found) < 10:
        raise ValueError(f"The taskset {name!r} has {len(found)} tasks, and 10 are needed for three splits.")
    if needs := " and ".join(missing(taskset, found[0])):
        raise ValueError(f"The taskset {name!r} needs {needs}: only tasks of one turn are played here.")
    parts = [[task for i, task in enumerate(found) if i % 10 in places] for places in (range(8), [8], [9])]
    tasks = dict(zip(SPLITS, parts, strict=True))
    short = name.split("/")[-1].split("@")[0]
    gymnasium.register(f"verifiers/{short}-v0", VerifiersTask, kwargs={"tasks": tasks})


def missing(taskset, task):
    """What its episodes need beyond a prompt and an answer."""
    judges = [judge.score for judge in task.plugged_judges()]
    hooks = [task.setup, task.finalize, *task.hooks("reward"), *task.hooks("metric"), *judges]
    own = [hook for hook in hooks if getattr(hook, "__func__", None) not in (vf.Task.setup, vf.Task.finalize)]
    empty = inspect.Parameter.empty
    runtimes = [inspect.signature(hook).parameters.get("runtime") for hook in own]
    if task.NEEDS_CONTAINER or any(one is not None and one.default is empty for one in runtimes):
        yield "a runtime"
    if task.toolsets(task.config) or taskset.toolsets(taskset.config):
        yield "tools"
    if not task.data.prompt_text or (not isinstance(task.data.prompt, str) and len(task.data.prompt) > 1):
        yield "a prompt of one text"
