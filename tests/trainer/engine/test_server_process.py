"""Servers that somebody else started: what is not what a run needs is one sentence, before anything is spent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_trainer.config import Config, load_config
from skyrl_trainer.engine.openai_server import OpenAIServerEngine
from skyrl_trainer.engine.server_process import as_flag
from skyrl_trainer.errors import UserError
from skyrl_trainer.run.processes import check_engines, engine_kwargs_of
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions


class OtherServer(BaseHTTPRequestHandler):
    """Has the answers that a test puts on the server, by their paths."""

    def do_GET(self) -> None:
        status, text = self.server.answers.get(self.path, (404, "<html>no such page</html>"))  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def other() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), OtherServer)
    server.answers = {}  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()


MODELS = '{"object": "list", "data": [{"id": "other-model", "root": "%s"}]}'


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({}, "no OpenAI server: /v1/models gave 404 '<html>no such page</html>'"),
        ({"/v1/models": (200, MODELS % "elsewhere")}, "but other-model"),
        ({"/v1/models": (200, MODELS % "CLONE")}, "has no /inference/v1/generate"),
        ({"/v1/models": (200, MODELS % "CLONE"), "/inference/v1/generate": (400, "{}")}, "takes no weights from us"),
    ],
)
def test_a_url_that_is_not_what_training_needs_is_one_sentence(
    other: HTTPServer, answers: dict[str, tuple[int, str]], sentence: str
) -> None:
    other.answers = answers  # type: ignore[attr-defined]
    url = f"http://127.0.0.1:{other.server_port}"
    config = with_urls(url)
    with pytest.raises(UserError) as caught:
        check_engines(config, "CLONE", training=True)
    assert url in str(caught.value) and sentence in str(caught.value)


def with_urls(*urls: str, backend: str = "openai_server") -> Config:
    words = [f"generator.engine_kwargs={{seed: 1, urls: {[*urls]}}}", f"generator.backend={backend}"]
    return load_config(None, words)


def test_a_server_that_takes_no_weights_will_do_for_evaluation(other: HTTPServer) -> None:
    other.answers = {"/v1/models": (200, MODELS % "CLONE"), "/inference/v1/generate": (400, "{}")}  # type: ignore[attr-defined]
    config = with_urls(f"http://127.0.0.1:{other.server_port}/")
    check_engines(config, "CLONE", training=False)
    check_engines(config, "other-model", training=False)
    assert engine_kwargs_of(config, 0) == {"seed": 1, "url": f"http://127.0.0.1:{other.server_port}/"}


def test_urls_that_nobody_can_use_are_one_sentence() -> None:
    for config, sentence in (
        (with_urls("http://127.0.0.1:1"), "http://127.0.0.1:1 does not answer"),
        (with_urls("not a url"), "not a url does not answer"),
        (with_urls(), "should be a list of generator.num_inference_engines=1"),
        (with_urls("http://a", "http://b"), "should be a list of generator.num_inference_engines=1"),
        (with_urls("http://a", backend="vllm"), "needs generator.backend=openai_server"),
    ):
        with pytest.raises(UserError, match=sentence):
            check_engines(config, "CLONE", training=True)


def test_a_backend_that_nobody_has_registered_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"generator.backend='x' is not registered; choose one of .*vllm"):
        check_engines(load_config(None, ["generator.backend=x"]), "CLONE", training=True)


def test_engine_arguments_as_options_of_the_server() -> None:
    given = {
        "max_num_seqs": 4,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "weight_transfer_config": {"a": 1},
    }
    flags = [as_flag(name, value) for name, value in given.items()]
    assert flags == [
        "--max-num-seqs=4", "--enforce-eager", "--no-enable-prefix-caching", '--weight-transfer-config={"a": 1}',
    ]  # fmt: skip


CHOICE = {"logprobs": {"content": []}, "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"choices": [CHOICE]}, "weight_versions"),
        ({"choices": [CHOICE | {"weight_versions": [{"version": 3}]}]}, "AttributeError"),
        (None, "TypeError"),
    ],
)
def test_an_answer_of_another_form_is_an_error_of_its_request(answer: Any, said: str) -> None:
    """As of a proxy, or of a server of another version: nobody waits for it until the episode's end."""

    async def scenario() -> list[GenerationOutput]:
        engine = OpenAIServerEngine("m", "float32", 64, 4, 0, {"url": "http://127.0.0.1:1"})
        engine._serving, engine._http = True, SimpleNamespace(ask=ask)  # type: ignore[assignment]
        await engine.submit("c", [GenerationRequest("r", [1, 2], SamplingOptions(4))])
        return await engine.collect("c", 20.0)

    async def ask(*_: Any) -> Any:
        return answer

    [output] = asyncio.run(scenario())
    assert output.finish_reason == "error" and said in str(output.error)
