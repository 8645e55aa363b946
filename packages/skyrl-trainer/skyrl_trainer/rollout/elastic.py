"""Rollouts on a cluster (`ray.address`), whose nodes come and go: EnvWorkers on all, a RolloutWorker by its engine."""

import itertools
import time
from collections import Counter
from typing import Any

import ray

from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.rollout.pool import at, start_env_workers
from skyrl_trainer.rollout.rollout_worker import RolloutWorker
from skyrl_trainer.settings import Config

BESIDE_SECONDS = 2.0
"""Between the deaths of an engine and of its RolloutWorker that a node's death brings."""


def spread(nodes: list[str], cores: dict[str, float]) -> list[str]:
    """The node of each worker, in proportion to the nodes' cores; it stays where it is unless that node is crowded.
    nodes: where they are, on one that is not in `cores` if it died or is still to start. cores: by living node, the
    driver's first; it comes last where others have as much room."""
    found, count = list(nodes), Counter(nodes)

    def load(node: str, more: int = 0) -> float:
        return (count[node] + more) / (cores[node] or 1e-3)

    def emptiest() -> str:
        return min(reversed(cores), key=lambda node: load(node, 1))

    for index, node in enumerate(found):
        if node not in cores:
            found[index] = emptiest()
            count[found[index]] += 1
    while load(fullest := max(cores, key=load)) > load(target := emptiest(), 1):
        found[found.index(fullest)] = target
        count.update({fullest: -1, target: 1})
    return found


def _use(worker: RolloutWorker, env_workers: list[Any]) -> None:
    worker._env_workers = env_workers
    if worker._episodes is not None:
        worker._episodes._envs.use(env_workers)


class ElasticRollouts(Rollouts):
    """`engines` and `env_nodes`: the node of each; without engines of its own a RolloutWorker is anywhere."""

    def __init__(
        self, config: Config, engines: list[Any], tokenizer_path: str,
        nodes: list[str], env_nodes: list[str], cores: float,
    ) -> None:  # fmt: skip
        self._nodes = nodes
        self._env_nodes = env_nodes
        self._cores = cores
        self._retired: list[Any] = []
        """EnvWorkers that get no new episodes, until the nodes change again."""
        self._starting: dict[int, Any] = {}
        """RolloutWorkers' first answers."""
        super().__init__(config, engines, tokenizer_path)

    def _start_env_workers(self) -> list[Any]:
        return [self._env_worker(node) for node in self._env_nodes]

    def close(self) -> None:
        self.env_workers += self._retired
        super().close()

    def _env_worker(self, node: str) -> Any:
        timeout, agent = self._config.environment.step_timeout, self._config.generator.agent.run
        return start_env_workers(1, timeout, agent, num_cpus=self._cores, **at(node))[0]

    def _start_worker(self, index: int, **where: Any) -> Any:
        return super()._start_worker(index, **(at(self._nodes[index]) if self._nodes else {}))

    def settle(self, cores: dict[str, float]) -> None:
        """EnvWorkers leave nodes that died, and crowded ones, where they play what they have. cores: by living node."""
        leaving, self._retired = self._retired, []
        for index, node in enumerate(spread(self._env_nodes, cores)):
            if node != self._env_nodes[index]:
                group = self._retired if self._env_nodes[index] in cores else leaving
                group.append(self.env_workers[index])
                self.env_workers[index], self._env_nodes[index] = self._env_worker(node), node
        for worker in leaving:
            ray.kill(worker)
        for worker in self._workers:
            worker.__ray_call__.remote(_use, self.env_workers)

    # By others, where its engine has died with it: both were on one node.
    def _play_again(self, index: int) -> None:
        deadline = time.monotonic() + BESIDE_SECONDS
        while index in self._present and time.monotonic() < deadline:
            time.sleep(0.1)
            self.watch()
        super()._play_again(index)

    def leave(self, index: int) -> None:
        """An engine is away: others play its episodes."""
        ray.kill(self._workers[index])
        closes = [("close", key) for key in self._in_play[index]]
        for worker in (*self.env_workers, *self._retired):  # nobody else knows the envs
            worker.call_many.remote(closes)
            list(map(worker.alone.remote, closes))
        self._starting.pop(index, None)
        self._present = [other for other in self._present if other != index]
        playing, self._in_play[index] = list(self._in_play[index].values()), {}
        self._polls = {poll: other for poll, other in self._polls.items() if other != index}
        playing.sort(key=lambda each: each[0].trajectory_id)
        for _, found in itertools.groupby(playing, key=lambda each: each[0].trajectory_id.rpartition("/")[0]):
            group = list(found)
            self._waiting.append(([each for each, _ in group], group[0][1]))
        if self._present:
            self._hand_out(self._waiting, self._places)

    def come_back(self, index: int, node: str) -> None:
        """An engine has the policy again: a new RolloutWorker starts beside it, and plays once it is there."""
        self._nodes[index] = node
        self._workers[index], self._deaths[index] = self._start_worker(index), 0
        self._starting[index] = self._workers[index].stop_token_ids.remote()
        self.welcome()

    def welcome(self) -> None:
        """RolloutWorkers that have started get something to play; the first one at once, where there is no other."""
        for index, call in list(self._starting.items()):
            if not self._present or ray.wait([call], timeout=0)[0]:
                del self._starting[index]
                self._present = sorted({*self._present, index})
                self._hand_out(self._waiting, self._places)
