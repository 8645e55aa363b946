"""OpenTelemetry spans (docs/observability.md): `episode`; in it `reset`, `turn`; in that `generate`, `step`."""

import os
from functools import cache
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from skyrl_trainer.rollout.env_worker import EnvReply
from skyrl_trainer.rollout.episode import Episode
from skyrl_trainer.types import Turn

if TYPE_CHECKING:
    from skyrl_trainer.rollout.episode import Context


@cache
def tracer() -> trace.Tracer:
    """Of this process."""
    os.environ.setdefault("OTEL_SERVICE_NAME", "skyrl")
    os.environ.setdefault("OTEL_BSP_SCHEDULE_DELAY", "1000")  # ms: a run's end kills its workers
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("skyrl_trainer")


class TracedEpisode(Episode):
    """The same episode; every span is ended, however it ends."""

    async def run(self) -> None:
        sample = self.trajectory.sample
        about = {"episode": self.trajectory.trajectory_id, "env": sample.env_id, "sample": sample.sample_id}
        with tracer().start_as_current_span("episode", attributes=about) as span:
            self.open = tracer().start_span("reset")
            try:
                await super().run()
            finally:
                if self.open.is_recording():
                    self.open.end()
                span.set_attribute("stop_reason", self.trajectory.stop_reason.value)
                span.set_attribute("tokens", self.trajectory.num_output_tokens)

    def _begin(self, reply: EnvReply) -> "Context":
        self.open.end()
        return super()._begin(reply)

    async def _ask(self, number: int, memory: "Context", new_ids: list[int], new_segment: bool) -> Turn | None:
        self.open = tracer().start_span("turn", attributes={"turn": number})
        with trace.use_span(self.open), tracer().start_as_current_span("generate") as span:
            turn = await super()._ask(number, memory, new_ids, new_segment)
            if turn is not None:
                span.set_attribute("tokens", len(turn.output_ids))
                span.set_attribute("weight_version", turn.weight_versions[-1] if turn.weight_versions else -1)
            return turn

    async def _act(self, turn: Turn, memory: "Context", said: str, reset_seconds: float) -> EnvReply:
        ends = self.open.is_recording()  # not twice
        with trace.use_span(self.open, end_on_exit=ends), tracer().start_as_current_span("step"):
            return await super()._act(turn, memory, said, reset_seconds)
