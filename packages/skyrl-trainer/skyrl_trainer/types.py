"""The records that flow through the system, in the order in which they flow.

    Sample -> Turn -> Trajectory -> RolloutBatch -> RewardBatch -> AdvantageBatch -> TrainingBatch -> StepMetrics

Shape suffixes used across the project:

    N  sampled tokens, of a micro-batch or of a trajectory
    P  all tokens of a micro-batch, without padding    S  its segments
    M  trajectories of a rollout, mini-batch or group
    T  tokens of one sequence                          B  sequences side by side
    V  vocabulary                                      K  keys that a query sees; the canary's likeliest tokens
    H  hidden size; heads, where D follows it          D  width of a head
    R  tokens that a segment continues                 F  rotary frequencies; fresh tokens
    1  a batch of one, where a model wants a batch
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an EnvWorker unpickles a Sample and must not load torch
    from torch import Tensor

PLAYED: ContextVar[Any] = ContextVar("PLAYED", default=None)
"""The Episode that an asyncio task plays: its clock stands still while a request of it waits for a rate limit."""
StepMetrics = dict[str, float]
"""One step's figures by name, for example {"step": 3, "reward/mean": 0.61, "time/rollout": 1.9}."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One task, before anybody has tried it.
    Example: Sample("text_math?split=train#17", "skyrl/text_math-v0", 17, {"split": "train"})
    """

    sample_id: str
    """Unique within a data source, and the same in every run."""
    env_id: str
    """What `gymnasium.make` takes."""
    seed: int
    """Given to `env.reset(seed=...)`: an env is a function of seed, options and actions."""
    options: dict[str, Any] = field(default_factory=dict)
    """Given to `env.reset(options=...)`: split, difficulty, lang, or {"task": a data row}."""
    ground_truth: Any = None
    """For reward functions only; never in a prompt."""
    env_file: str | None = None
    """A user's Python file that registers `env_id`; every EnvWorker loads it first."""
    agent: str | list[str] | None = None
    """A user's agent that plays it, `my.py:agent` or a command; None: ours."""


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """The samples of an evaluation, each to be tried `num_generations` times; training draws groups (run/tries.py).
    Example: PromptBatch(3, [a, b], 2) leads to eval/3/0/0, eval/3/0/1, eval/3/1/0 and eval/3/1/1.
    """

    step: int
    samples: list[Sample]
    num_generations: int
    offset: int = 0
    """The number of the first sample: an evaluation of many goes in parts."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the engine turns logits into tokens; temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Benchmarks force a length with it: no stop token is sampled before."""
    top_logprobs: int = 0
    """How many alternatives to return per position, beside the sampled token: for the canary."""
    stops: tuple[str, ...] = ()
    """Texts that end it too (engine/stops.py)."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Tokens in. Example: GenerationRequest("3/0/1#0", [1, 8, 9], SamplingOptions(max_tokens=64), seed=7)"""

    request_id: str
    """trajectory id # turn; unique among the requests in flight."""
    prompt_ids: list[int]
    options: SamplingOptions
    seed: int | None = None
    """A generator of its own for this request, so that its tokens do not depend on its neighbours."""
    first: bool = False
    """To be taken before those that wait in the engine's queue."""
    streams: bool = False
    """Somebody reads the tokens while they are sampled."""


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """Tokens out. Example: GenerationOutput("3/0/1#0", [5, 2], [-0.1, -0.7], [4, 4], "stop")"""

    request_id: str
    output_ids: list[int]
    """Every sampled token, the stop token included."""
    logprobs: list[float]
    """log p of each output token under the distribution that it was sampled from (temperature applied)."""
    weight_versions: list[int]
    """The version of the policy that sampled each token."""
    finish_reason: str
    """"stop", "length" or "error"."""
    error: str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    usage: dict[str, int] = field(default_factory=dict)
    """What whoever served it counts: prompt_tokens, completion_tokens, cached_tokens."""


class StopReason(StrEnum):
    """Why an episode ended. Each is a counter in the metrics, `stop/<reason>`."""

    TERMINATED = "terminated"
    """The env said that the task is over."""
    TRUNCATED = "truncated"
    """The env's step limit."""
    LENGTH = "length"
    """A token budget: of the last turn (the env may then have ended), the context or the episode."""
    MAX_TURNS = "max_turns"
    TIMEOUT = "timeout"
    """The wall-clock limit of the whole episode."""
    ENV_ERROR = "env_error"
    """The env raised, hung, crashed, or gave what no env may give."""
    ENGINE_ERROR = "engine_error"

    @property
    def failed(self) -> bool:
        """A failed episode is counted, and leaves its group: nothing is learned from it."""
        return self in (StopReason.TIMEOUT, StopReason.ENV_ERROR, StopReason.ENGINE_ERROR)


@dataclass(slots=True)
class Turn:
    """What the policy read, what it wrote, and what the env answered.
    Example: Turn([1, 8, 9], [5, 2], [-0.1, -0.7], [4, 4], "\\boxed{42}", reward_parts={"format": 0.1}, reward=0.1)
    """

    prompt_ids: list[int]
    """Ids added before this output: the whole prompt in a segment's first turn, the observation's ids later."""
    output_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    action: str
    """The decoded output, given to `env.step`; never encoded again."""
    observation: str = ""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """{"tool", "args", "result" or "error"} each, as the env reports them in its info."""
    info: dict[str, Any] = field(default_factory=dict)
    """The env's info: for metrics and for people, not for the policy."""
    new_segment: bool = False
    """The memory policy has rewritten history before this turn: `prompt_ids` is the whole context that was read."""
    advantages: list[float] = field(default_factory=list)
    """One per sampled token, once the trajectory has been learned from."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds of {"generate", "env"}."""


@dataclass(slots=True)
class Trajectory:
    """The turns of one episode. A failed episode is a trajectory too.
    Example: Trajectory("3/0/1", sample, generation=1, seed=991, turns=[turn], stop_reason=StopReason.TERMINATED)
    """

    trajectory_id: str
    sample: Sample
    generation: int
    seed: int
    """Seeds the sampling of every turn (with the turn's number), where trainer.deterministic is on."""
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason = StopReason.TERMINATED
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    prompt: list[dict[str, str]] = field(default_factory=list)
    """The messages before the first turn: the env's instructions (if any) and its first observation."""
    tools: list[dict[str, Any]] | None = None
    """The schemas that the chat template wrote before the first turn."""
    scores: dict[str, float | None] = field(default_factory=dict)
    """What each reward function gave, without its weight; None where it does not apply."""
    encoded: list[bytes] = field(default_factory=list, repr=False, compare=False)  # by rollout.store, where played

    @property
    def env_reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def success(self) -> bool:
        return bool(self.turns and self.turns[-1].info.get("success", False))

    @property
    def num_output_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    def by_time(self) -> list[int]:
        """The places of the turns in the order in which they were sampled: an agent's stand segment by segment."""
        calls = [turn.info.get("skyrl/call", math.inf) for turn in self.turns]  # a failed one has none
        return sorted(range(len(calls)), key=calls.__getitem__)

    def segments(self) -> list[list[Turn]]:
        """The turns, cut where history was rewritten: within a segment each context begins with the one before it."""
        segments: list[list[Turn]] = []
        for turn in self.turns:
            if turn.new_segment or not segments:
                segments.append([])
            segments[-1].append(turn)
        return segments

    def token_ids(self) -> list[int]:
        """The whole episode as the model saw it: prompt, output, observation, output, ...; segment after segment."""
        return [token for turn in self.turns for token in (*turn.prompt_ids, *turn.output_ids)]

    def loss_mask(self) -> list[int]:
        """1 on every token that the policy sampled, 0 on prompts and observations; as long as `token_ids()`."""
        return [bit for turn in self.turns for bit in [0] * len(turn.prompt_ids) + [1] * len(turn.output_ids)]

    def rollout_logprobs(self) -> list[float]:
        """The engine's logprobs, 0.0 where the mask is 0; as long as `token_ids()`."""
        return [x for turn in self.turns for x in [0.0] * len(turn.prompt_ids) + turn.logprobs]


@dataclass(slots=True)
class RolloutBatch:
    """All trajectories of a step, failed ones too, by sample. Example: RolloutBatch(3, [[a0, a1], [b0, b1]])"""

    step: int
    groups: list[list[Trajectory]]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [each for group in self.groups for each in group]


@dataclass(slots=True)
class RewardBatch:
    """Rollouts with the reward that will be learned from."""

    rollouts: RolloutBatch
    trajectories: list[Trajectory]
    """Those of accepted groups that did not fail, in order."""
    group_index: list[int]
    """Which sample each of them belongs to."""
    rewards: list[list[float]]
    """Per trajectory and turn. Example: rewards[0] = [0.0, 1.1]"""
    kl_penalties: list[list[float]] | None = None
    """Per trajectory and sampled token: what the KL to the reference policy takes off its reward."""


@dataclass(slots=True)
class AdvantageBatch:
    """A number per sampled token of each trajectory, turn after turn. Example: [[0.7, 0.7], [-0.7]]"""

    rewards: RewardBatch
    advantages: list[list[float]]
    returns: list[list[float]] | None = None
    """What a critic is to predict, laid out in the same way; None where there is none."""


@dataclass(slots=True)
class TrainingBatch:
    """A micro-batch, ready for the device: P tokens in S segments, one after the other, without padding.

    A segment is a context of a trajectory; where several begin with the same prompt (what stands before the first
    sampled token), the prompt is a segment, which goes through the model once, and what follows it in each is another.

    Example: prompt [7, 8] and the answers [5, 2] and [6] have ids_P [7, 8, 5] (a last token predicts nothing, so it is
    left out), places_P [0, 1, 2], lengths_S [2, 1], prefix_S [-1, 0], target_ids_N [5, 2, 6], and predictors_N
    [1, 2, 1]: both first tokens are predicted at the prompt's last position.
    """

    ids_P: Tensor
    places_P: Tensor
    """int64: where a token stands in its trajectory."""
    lengths_S: list[int]
    prefix_S: list[int]
    """The number of the segment that this one continues; -1: it begins a context."""
    predictors_N: Tensor
    """int64: at which of the P tokens each sampled token is predicted."""
    target_ids_N: Tensor
    trajectory_N: Tensor
    """int64: whose token it is."""
    turn_N: Tensor
    """int64: in which turn of its trajectory it was sampled."""
    group_N: Tensor
    """int64: which sample its trajectory is a try of."""
    fresh_F: Tensor
    """int64: which of the N tokens the newest weights have sampled."""
    advantages_N: Tensor
    rollout_logprobs_N: Tensor
    old_logprobs_N: Tensor | None
    """None: the only optimizer step of a rollout, whose ratio is 1 by definition."""
    ref_logprobs_N: Tensor | None
    returns_N: Tensor | None
    """What the critic is to predict; None without one."""
    values_N: Tensor | None
    """What the critic predicted before the rollout's first optimizer step."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """What a learner needs to go on: tensors by name, and numbers that JSON keeps exactly."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
