"""The spans that an OpenTelemetry collector gets of episodes on fakes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from skyrl_trainer.rollout import tracing
from skyrl_trainer.rollout.env_client import EnvClient
from skyrl_trainer.rollout.episode import Episode
from skyrl_trainer.rollout.rollout_worker import Episodes
from skyrl_trainer.settings import GeneratorConfig
from tests.trainer.fakes import FakeEngineClient, FakeEnvWorker
from tests.trainer.rollout.test_episodes import play, shells


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The spans that were sent, once they are flushed."""
    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        tracing.tracer.cache_clear()
        yield spans
        tracing.tracer.cache_clear()
        server.shutdown()


def test_each_episode_is_a_tree_of_spans(collector: list[Any]) -> None:
    options = [{"turns": 1}, {"turns": 3}, {"turns": 3, "raise_at": 0}, {"turns": 3, "raise_at": 2}]
    played = asyncio.run(play(shells(options), FakeEngineClient(), [FakeEnvWorker()]))
    tracing.tracer().span_processor.force_flush()  # type: ignore[attr-defined]
    names = {span.span_id: span.name for span in collector}
    tree = Counter((names.get(span.parent_span_id), span.name) for span in collector)
    turns = sum(len(trajectory.turns) for trajectory in played)
    assert tree == {
        (None, "episode"): 4,
        ("episode", "reset"): 4,
        ("episode", "turn"): turns,
        ("turn", "generate"): turns,
        ("turn", "step"): turns,
    }
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for span in collector)
    for trajectory in played:
        (root,) = (s for s in collector if s.name == "episode" and value(s, "episode") == trajectory.trajectory_id)
        own = [span for span in collector if span.trace_id == root.trace_id]
        assert value(root, "stop_reason") == trajectory.stop_reason.value
        assert value(root, "env") == "fake" and value(root, "tokens") == trajectory.num_output_tokens
        tokens = sorted(value(span, "tokens") for span in own if span.name == "generate")
        assert tokens == sorted(len(turn.output_ids) for turn in trajectory.turns)


def value(span: Any, key: str) -> Any:
    (found,) = (each.value for each in span.attributes if each.key == key)
    return getattr(found, found.WhichOneof("value"))


def test_nothing_is_traced_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint, kind in ((None, Episode), ("http://127.0.0.1:1", tracing.TracedEpisode)):
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
        if endpoint:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        assert Episodes(lambda _: None, None, EnvClient([]), GeneratorConfig())._episode is kind
