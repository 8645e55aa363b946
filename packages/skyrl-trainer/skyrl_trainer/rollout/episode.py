"""One episode, one coroutine: reset, then generate and step until somebody says that it is over."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from skyrl_trainer.agent.memory import Memory
from skyrl_trainer.agent.prompt import LONGEST_TEXT, ChatPrompt, first_messages
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.env_client import RemoteEnv
from skyrl_trainer.rollout.env_worker import EnvReply
from skyrl_trainer.settings import GeneratorConfig
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions, StopReason, Trajectory, Turn

if TYPE_CHECKING:  # loaded for users' agents and self-play alone
    from skyrl_trainer.agent.conversation import Conversation

    Context = Memory | Conversation

LONGEST_TOKEN = 256
"""Characters that one token may stand for: a longer text cannot fit, and is not encoded."""


class How(NamedTuple):
    """What episodes share that start together."""

    sampling: SamplingOptions
    seeded: bool
    """Give every request a generator of its own."""
    in_rounds: bool
    """By rollout/rounds.py."""
    first: bool
    """The engine takes its requests before others."""


def derive_seed(*parts: object) -> int:
    """A 48-bit seed from names and numbers, the same on every machine. Example: derive_seed(0, "3/0/1")."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest(), "big")


@dataclass(eq=False)
class Episode:
    """One episode; `run` fills in the trajectory's turns, stop reason and error."""

    trajectory: Trajectory
    env: RemoteEnv
    prompt: ChatPrompt
    generate: Callable[[GenerationRequest], Awaitable[GenerationOutput]]
    slot: asyncio.Semaphore
    """A place in the engine: held from the first request until no other token will be asked for."""
    how: How
    generator: GeneratorConfig
    timeout: float
    """Seconds of the whole episode: reset, queues, tokens, steps. Waiting for a slot does not count."""
    stands: int = 0
    """Reasons why the clock stands still."""
    clock: asyncio.Timeout = field(init=False)
    left: float = field(init=False)
    """Seconds on the clock while it stands."""
    paused: float = 0.0
    doing: str = "in its env's reset"
    held: bool = False

    async def run(self) -> None:
        """At its end the env is closed, the slot free. UserError: the engine's death, a prompt that can't be made."""
        start, env = time.monotonic(), self.env
        try:
            self.left = self.timeout
            async with asyncio.timeout(None if self.stands else self.left) as self.clock:
                await self.play()
        except TimeoutError:
            limit = f"generator.episode_timeout={self.timeout:g} seconds"
            self.stop(StopReason.TIMEOUT, f"The episode was not over after {limit}; it was {self.doing}.")
        except UserError:
            raise
        except Exception as error:
            # For example a chat template that refuses this observation: the others may go on.
            self.stop(StopReason.ENV_ERROR, f"{type(error).__name__} while the episode was {self.doing}: {error}")
        finally:
            self.release()
            await env.close()
        metrics = self.trajectory.metrics
        metrics["seconds"] = time.monotonic() - start
        if env.replays:
            metrics["env_replays"] = float(env.replays)
        if env.close_error is not None:
            metrics["env_close_errors"] = 1.0

    def stop(self, reason: StopReason, error: str | None = None) -> None:
        self.trajectory.stop_reason, self.trajectory.error = reason, error

    def release(self) -> None:
        if self.held:
            self.held = False
            self.slot.release()

    async def play(self) -> None:
        began = time.monotonic()
        reply = await self.env.reset()
        reset_seconds = time.monotonic() - began
        if reply.error is not None:
            return self.stop(StopReason.ENV_ERROR, reply.error)
        memory = self._begin(reply)
        new_ids, new_segment = memory.context, False
        if len(new_ids) >= self.generator.max_model_len:
            room = f"the context, generator.max_model_len={self.generator.max_model_len}"
            error = f"The first prompt has {len(new_ids)} tokens or more, too many for {room}."
            return self.stop(StopReason.ENGINE_ERROR, error)
        # Waiting for a place in the engine is the rollout's business, so the episode's clock stands still.
        self.hold()
        await self.slot.acquire()
        self.held = True
        self.go_on()
        for number in range(self.generator.max_turns):
            turn = await self._ask(number, memory, new_ids, new_segment)
            if turn is None:
                return None
            said, asked = memory.said(turn), memory.most or 0  # by its agent: to reach it is no cut
            own = len(turn.output_ids) == asked and asked < self.how.sampling.max_tokens
            cut = not (own or memory.at_stop or turn.output_ids[-1] in self.how.sampling.stop_token_ids)
            reply = await self._act(turn, memory, said, reset_seconds if number == 0 else 0.0)
            if reply.error is not None:
                return self.stop(StopReason.ENV_ERROR, reply.error)
            last = number + 1 == self.generator.max_turns
            while not (last or self._is_full(reply.observation)) and (refusal := memory.refusal(turn.info)):
                reply = await self._act(turn, memory, refusal, 0.0)
                if reply.error is not None:  # the agent does not take it
                    return self.stop(StopReason.LENGTH, reply.error)
            if reply.terminated or reply.truncated or last:
                over = StopReason.TRUNCATED if reply.truncated else StopReason.MAX_TURNS
                return self.stop(StopReason.LENGTH if cut else StopReason.TERMINATED if reply.terminated else over)
            if self._is_full(reply.observation):
                return self.stop(StopReason.LENGTH)
            new_ids, new_segment = memory.advance(self.trajectory.turns)
            if len(memory.context) >= self.generator.max_model_len:
                return self.stop(StopReason.LENGTH)

    # What stands before each output; too many ids, where the first text is too long to look at.
    def _begin(self, reply: EnvReply) -> "Context":
        instructions, tools = reply.info.get("instructions", ""), None
        if self.generator.agent.tools == "template" and reply.info.get("tools"):
            tools = reply.info["tools"]
            instructions = reply.info.get("instructions_without_tools", instructions)
        self.trajectory.prompt = first_messages(instructions, reply.observation)
        self.trajectory.metrics |= {"thinks": 1} if self.prompt.thinks else {}
        if self._is_full(instructions + reply.observation):
            return Memory(self.prompt, self.generator.agent, [0] * self.generator.max_model_len)
        if isinstance(request := reply.info.get("request"), dict) and "messages" in request:
            from skyrl_trainer.agent.conversation import Conversation

            self.trajectory.tools = request.get("tools")
            return Conversation(self.prompt, request, self.generator.max_model_len)
        self.trajectory.tools = tools
        first = self.prompt.first(instructions, reply.observation, tools)
        return Memory(self.prompt, self.generator.agent, first, reply.info.get("stop"))

    def _is_full(self, text: str) -> bool:
        too_long = len(text) > min(LONGEST_TEXT, LONGEST_TOKEN * self.generator.max_model_len)
        budget = self.generator.agent.max_episode_tokens
        return too_long or (budget is not None and self.trajectory.num_output_tokens >= budget)

    def hold(self) -> None:
        """Stops the clock."""
        self.stands += 1
        when = self.clock.when()
        if when is not None:
            self.left = when - asyncio.get_running_loop().time()
            self._set_clock(None)

    def go_on(self) -> None:
        """As often as `hold`: the clock runs again."""
        self.stands -= 1
        if not self.stands:
            self._set_clock(asyncio.get_running_loop().time() + self.left)

    async def pause(self, seconds: float) -> None:
        """Sleeps. The clock stands still in it, in all pauses together for no longer than the episode may take."""
        free = max(0.0, min(seconds, self.timeout - self.paused))
        self.paused += free
        self.hold()
        await asyncio.sleep(free)
        self.go_on()
        await asyncio.sleep(seconds - free)

    def _set_clock(self, when: float | None) -> None:
        with suppress(RuntimeError):  # it has run out, or the env is being closed
            self.clock.reschedule(when)

    async def _ask(self, number: int, memory: "Context", new_ids: list[int], new_segment: bool) -> Turn | None:
        self.doing = f"waiting for the tokens of turn {number}"
        trajectory, sampling = self.trajectory, replace(self.how.sampling, stops=memory.stops)
        room = min(memory.most or sampling.max_tokens, self.generator.max_model_len - len(memory.context))
        if self.generator.agent.max_episode_tokens is not None:
            room = min(room, self.generator.agent.max_episode_tokens - trajectory.num_output_tokens)
        if room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room, min_tokens=min(room, sampling.min_tokens))
        seed = derive_seed(trajectory.seed, number) if self.how.seeded else None
        began = time.monotonic()
        request_id, context = f"{trajectory.trajectory_id}#{number}", list(memory.context)
        output = await self.generate(GenerationRequest(request_id, context, sampling, seed, self.how.first))
        if number + 1 == self.generator.max_turns:
            self.release()
        for name, count in output.usage.items():
            trajectory.metrics[name] = trajectory.metrics.get(name, 0) + count
        if output.finish_reason == "error" or output.error is not None or not output.output_ids:
            self.stop(StopReason.ENGINE_ERROR, output.error or f"The engine answered turn {number} without a token.")
            return None
        turn = Turn(
            prompt_ids=new_ids,
            output_ids=output.output_ids,
            logprobs=output.logprobs,
            weight_versions=output.weight_versions,
            action=self.prompt.decode(output.output_ids),
            new_segment=new_segment,
            seconds={"generate": time.monotonic() - began},
        )
        trajectory.turns.append(turn)
        return turn

    async def _act(self, turn: Turn, memory: "Context", said: str, reset_seconds: float) -> EnvReply:
        self.doing = f"in its env's step {len(self.trajectory.turns) - 1}"
        began = time.monotonic()
        reply = await self.env.step(said)
        turn.seconds["env"] = turn.seconds.get("env", 0.0) + time.monotonic() - began + reset_seconds
        if reply.error is not None:
            return reply
        turn.observation, turn.reward, turn.info = reply.observation, reply.reward, reply.info
        turn.terminated, turn.truncated = reply.terminated, reply.truncated
        if isinstance(turn.info.get("reward_parts"), dict):  # what has a field of its own is stored once
            turn.reward_parts = turn.info.pop("reward_parts")
        if isinstance(turn.info.get("tool_calls"), list):
            turn.tool_calls = turn.info.pop("tool_calls")
        turn.info |= memory.marks
        return reply
