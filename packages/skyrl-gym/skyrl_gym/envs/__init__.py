"""The environments, each loaded when it is made; SkyRL's `register`, `spec` and `make` over Gymnasium's registry."""

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from skyrl_gym.envs.base_text_env import Env
from skyrl_gym.registry import add_env, resolve_env_id

_ADAPTER = "skyrl_gym.adapters.skyrl:SkyRLEnv"


def register(id: str, entry_point: str | Callable[..., Any], kwargs: dict[str, Any] | None = None) -> None:
    """Registers a BaseTextEnv class, or its "module:Class", with arguments: {"env_config": SearchEnvConfig()}."""
    arguments = {"env_class": entry_point, "env_kwargs": kwargs or {}}
    if id in gymnasium.registry and gymnasium.registry[id].kwargs != arguments:
        raise ValueError(f"The id {id!r} is already registered for something else; choose another.")
    add_env(id, _ADAPTER, kwargs=arguments)


def spec(env_id: str) -> EnvSpec:
    """Gymnasium's spec of an id or a short name; ValueError for an unknown one names the nearest."""
    return gymnasium.spec(resolve_env_id(env_id).rpartition(":")[2])


def make(id: str | EnvSpec, **kwargs: Any) -> Any:
    """SkyRL's make(id, env_config=..., extras=...): an instance of a class of `register`, for one episode."""
    name = id.id if isinstance(id, EnvSpec) else id
    known = {env_id: entry.kwargs for env_id, entry in gymnasium.registry.items() if entry.entry_point == _ADAPTER}
    if name not in known:
        raise ValueError(f"skyrl_gym.register knows {list(known)}, not {name!r}; other ids are for gymnasium.make.")
    return create(known[name]["env_class"], **{**known[name]["env_kwargs"], **kwargs})


def create(env_class: str | Callable[..., Any], **kwargs: Any) -> Any:
    env = (load_env_creator(env_class) if isinstance(env_class, str) else env_class)(**kwargs)
    if not isinstance(env, Env):
        raise TypeError(f"skyrl_gym.register is for BaseTextEnv classes; {env_class} made a {type(env).__name__}.")
    return env
