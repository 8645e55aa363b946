"""All that runs beside the driver, here or where run/cluster.py puts it: Ray, engines, env and rollout workers."""

import os
import secrets
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray
import torch
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.engine.actor import ENGINES, engine_class
from skyrl_trainer.errors import EngineDied, UserError
from skyrl_trainer.registry import load
from skyrl_trainer.report.history import Spans
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.rollout.pool import at
from skyrl_trainer.run.engine_watch import EngineWatch
from skyrl_trainer.run.signals import Stopped
from skyrl_trainer.settings import Config
from skyrl_trainer.weight_sync.colocation import shares_gpus, sync_backend

if TYPE_CHECKING:
    from skyrl_trainer.engine.endpoint import Endpoint

OBJECT_STORE_BYTES = 256 * 2**20
"""Of a Ray of our own: only rollouts pass through it, weights do not."""
WORKED_SECONDS = 10.0
"""Limit of an engine's answer to when it computed."""
ENGINE_START_SECONDS = 600.0
"""Limit of loading the model into every engine."""


class Processes:
    """`with Processes(config, model_path) as processes`: `engines` are actors, and `rollouts` uses them."""

    engines: list[Any]
    rollouts: Rollouts

    def __init__(
        self, config: Config, model: str, plays: bool = True, learns: bool = False, endpoint: "Endpoint | None" = None
    ) -> None:
        """plays: whether `rollouts` are wanted. learns: whether engines get weights. endpoint: instead of engines."""
        self.config, self.model_path, self._learns = config, model, learns
        self._plays, self._endpoint = plays, endpoint

    def __enter__(self) -> Self:
        if self._plays and self.model_path:
            load_chat_prompt(self.model_path, self.config.generator.chat_template_kwargs)  # else it is a traceback
        start_ray(self.config)
        try:
            number = 0 if self._endpoint else self.config.generator.num_inference_engines
            places = None
            if self.config.ray.address:
                places = load("skyrl_trainer.run.cluster:Places")(self.config, self.model_path, number, self._learns)
            elif number:
                load("skyrl_trainer.run.cluster:find_places")(self.config, self._learns)
            self._keep_a_gpu()
            self.engines = [self._start_engine(i, places.engines[i] if places else {}) for i in range(number)]
            self._loading = [engine.ready.remote() for engine in self.engines]
            self.watch = places.watch(self.engines) if places else EngineWatch(self.engines)
            if self._plays:
                engines = [self._endpoint] if self._endpoint else self.engines
                make = places.rollouts if places else Rollouts
                self.rollouts = make(self.config, engines, self.model_path)
                self.rollouts.watch = self.watch.check
        except BaseException:
            ray.shutdown()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._plays:
                self.rollouts.close()
            for engine in self.engines:
                ray.kill(engine)
        finally:
            ray.shutdown()

    def wait_for_engines(self) -> None:
        """Blocks until every engine has loaded the model."""
        try:
            ray.get(self._loading, timeout=ENGINE_START_SECONDS)
        except GetTimeoutError as error:
            raise EngineDied(
                f"An engine did not load {self.model_path} within {ENGINE_START_SECONDS:.0f} s: "
                "start again if it was downloading; else free memory, or lower generator.max_model_len."
            ) from error
        except RayError as error:
            died = isinstance(error, ActorUnavailableError)  # and would be made again, which says nothing
            cause = "It died, or cannot be reached: start again." if died else getattr(error, "cause", error)
            reason = str(cause).strip() or type(cause).__name__
            raise EngineDied(f"An engine could not start. {reason}") from error

    def worked(self) -> Spans:
        """When each engine computed, since this was asked last; without those that do not answer."""
        there = [index for index in range(len(self.engines)) if index not in self.watch.away]
        asked = {f"engine {index}": self.engines[index].worked.remote() for index in there}
        spans = {}
        for name, answer in asked.items():
            with suppress(RayError):  # a dead one is the watch's to find
                spans[name] = ray.get(answer, timeout=WORKED_SECONDS)
        return spans

    # For a single learner, which is this process: Ray would give its GPU to an engine.
    def _keep_a_gpu(self) -> None:
        place = self.config.trainer.placement
        if not (self._learns and place.policy_num_gpus_per_node) or place.colocate_all or self.config.num_learners > 1:
            return
        here = at(ray.get_runtime_context().get_node_id(), only=True)
        self._keeper = ray.remote(_Keeper).options(num_cpus=0, num_gpus=1, **here).remote()
        (kept,) = ray.get(self._keeper.gpu_ids.remote(), timeout=ENGINE_START_SECONDS)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        torch.cuda.set_device(visible.index(str(kept)) if str(kept) in visible else int(kept))

    def _start_engine(self, index: int, where: dict[str, Any]) -> Any:
        generator, path = self.config.generator, Path(self.model_path)
        cls: Any = engine_class(self.config)
        actor = ray.remote(cls).options(
            num_cpus=1,
            num_gpus=generator.inference_engine_tensor_parallel_size if torch.cuda.is_available() else 0,
            max_concurrency=64,
            max_restarts=-1,  # EngineWatch counts them
            runtime_env={"env_vars": cls.env_vars()},
            **where,
        )
        return actor.remote(
            model_path=str(path.resolve()) if path.exists() else self.model_path,
            dtype=self.config.trainer.policy.model.dtype,
            max_model_len=generator.max_model_len,
            max_num_seqs=generator.max_concurrency,
            seed=self.config.trainer.seed + index,
            engine_kwargs=self._vllm_kwargs() | engine_kwargs_of(self.config, index),
        )

    def _vllm_kwargs(self) -> dict[str, Any]:
        if self.config.generator.backend not in ENGINES.built_in:
            return {}
        kwargs: dict[str, Any] = {"tensor_parallel_size": self.config.generator.inference_engine_tensor_parallel_size}
        sync = sync_backend(self.config) if self._learns else ""
        if sync == "adapter":
            kwargs |= load("skyrl_trainer.weight_sync.lora:adapter_kwargs")(self.config)
        if sync == "nccl":
            kwargs["weight_transfer_config"] = {"backend": "skyrl_nccl"}
        return kwargs | ({"enable_sleep_mode": True} if self._learns and shares_gpus(self.config) else {})


def start_ray(config: Config) -> None:
    """Joins `ray.address`, or starts a Ray of our own."""
    address, on_sigterm = config.ray.address, signal.getsignal(signal.SIGTERM)
    if ray.is_initialized():
        raise UserError("This process has a Ray already, and a run starts its own: call ray.shutdown() before it.")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's 15 lets any other busy process starve the engines: a rollout then takes many times as long.
    os.environ.setdefault("RAY_worker_niceness", "0")
    local: dict[str, Any] = {}
    if not address:
        cpus = max(os.cpu_count() or 1, config.generator.num_inference_engines)
        folder = f"{tempfile.gettempdir()}/ray"
        if not os.access(os.path.expanduser("~"), os.W_OK):  # where Ray keeps it
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        local = {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES, "_temp_dir": folder}
        for unused in ("monitor", "log_monitor", "api_server"):  # seconds each
            setattr(ray._private.node.Node, f"start_{unused}", lambda *_, **__: None)
        # Without its GCS a driver aborts after 60 s, too soon for the last save. (Below: of deaths Ray prints pages.)
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    ray._private.worker.listen_error_messages = lambda *_: None
    try:
        if address:
            load("skyrl_trainer.run.cluster:prepare")(address)
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", namespace="skyrl", **local)
    except SystemExit as error:  # Ray's own handler of SIGTERM raises it
        raise Stopped(signal.SIGTERM) from error
    except Exception as error:  # a plain one when Ray's processes do not come up in time
        if address:
            raise UserError(
                f"Could not join the Ray cluster at {address}: {str(error).rstrip('.')}. Check ray.address; if the "
                "cluster asks for a token, put its ~/.ray/auth_token on this machine or set RAY_AUTH_TOKEN."
            ) from error
        busy = "" if isinstance(error, OSError | ValueError) else " Is the machine overloaded?"
        raise UserError(f"A local Ray could not start: {error}.{busy}") from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


class _Keeper:  # of a GPU, in Ray's books
    def gpu_ids(self) -> list[Any]:
        return ray.get_gpu_ids()


def check_engines(config: Config, model_path: str, training: bool) -> None:
    """UserError where servers, an agent or this machine are not what the run needs; starts nothing."""
    generator = config.generator
    if generator.agent.run or generator.agent.tools not in ("env", "template"):
        load("skyrl_trainer.agent.agent_env:check_agent")(config)
    engine_class(config)
    load("skyrl_trainer.run.cluster:check_here")(config, training)
    if (urls := generator.engine_kwargs.get("urls")) is None:
        return
    if generator.backend != "openai_server":
        raise UserError(f"generator.engine_kwargs.urls needs generator.backend=openai_server, not {generator.backend}.")
    check_servers = load("skyrl_trainer.engine.server_process:check_servers")
    check_servers(urls, generator.num_inference_engines, model_path, training)


def engine_kwargs_of(config: Config, index: int) -> dict[str, Any]:
    """What the user gave, for one engine: its own URL instead of the list."""
    given = dict(config.generator.engine_kwargs)
    urls, _ = given.pop("urls", None), given.pop("default_chat_template_kwargs", None)
    return given | ({"url": urls[index]} if urls else {})
