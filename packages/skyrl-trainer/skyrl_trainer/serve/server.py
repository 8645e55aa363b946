"""`skyrl-trainer serve` and `train --serve`: an OpenAI-compatible HTTP server in front of our engines.

Errors are the dialect's JSON: 400 for a request that makes no sense, 404 for another model, 503 for a dead engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from skyrl_trainer.agent.chat_api import application
from skyrl_trainer.agent.http_server import HTTPServer
from skyrl_trainer.agent.parsers import with_parsers
from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.run.guardian import guarded
from skyrl_trainer.run.processes import Processes, check_engines
from skyrl_trainer.run.run import Run
from skyrl_trainer.serve.answers import Policy
from skyrl_trainer.settings import Config

WATCH_SECONDS = 2.0


class PolicyServer(HTTPServer):
    """Serves a policy."""

    @contextmanager
    def beside(self, run: Run) -> Iterator[None]:
        """Serves the policy of a training that has given its engines their first weights."""
        config = run.config
        prompt = with_parsers(ChatPrompt(run.learner.tokenizer), config.generator.agent)
        policy = Policy(config.trainer.run_name, run.processes.engines, prompt, config.generator)
        with self.running(application(policy)):
            run.table.note(f"{config.trainer.run_name} is served at {self.url}")
            yield


def serve(config: Config, model_path: str, name: str, server: PolicyServer) -> None:
    """Serves a model on disk under `name` until Ctrl-C, on engines of its own; one that dies is started again."""
    check_engines(config, model_path, training=False)
    prompt = with_parsers(load_chat_prompt(model_path), config.generator.agent)
    with guarded(), Processes(config, model_path, plays=False) as processes:
        processes.wait_for_engines()
        with server.running(application(Policy(name, processes.engines, prompt, config.generator))):
            print(f"{name} is served at {server.url}", flush=True)
            print(f"Its context has {config.generator.max_model_len} tokens.", flush=True)
            while True:
                processes.watch.check(WATCH_SECONDS)
