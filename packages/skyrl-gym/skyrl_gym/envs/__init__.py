"""The environments, each loaded when it is made; and SkyRL's `register` and `make` for classes on BaseTextEnv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

_ADAPTER = "skyrl_gym.adapters.skyrl:SkyRLEnv"


def register(id: str, entry_point: str | Callable[..., Any], kwargs: dict[str, Any] | None = None) -> None:
    """Registers a BaseTextEnv class, or its "module:Class", for `skyrl_gym.make` and `gymnasium.make`."""
    arguments = {"env_class": entry_point, "env_kwargs": kwargs or {}}
    if id in gymnasium.registry and gymnasium.registry[id].kwargs != arguments:
        raise ValueError(f"The id {id!r} is already registered for something else; choose another.")
    if id not in gymnasium.registry:
        gymnasium.register(id, _ADAPTER, kwargs=arguments, vector_entry_point=f"skyrl_gym.vector:{id}")


def make(id: str, **kwargs: Any) -> Any:
    """SkyRL's make(id, env_config=..., extras=...): an instance of a class of `register`, for one episode."""
    known = {name: spec.kwargs for name, spec in gymnasium.registry.items() if spec.entry_point == _ADAPTER}
    if id not in known:
        raise ValueError(f"skyrl_gym.envs.register knows {list(known)}, not {id!r}; other ids are for gymnasium.make.")
    return create(known[id]["env_class"], **known[id]["env_kwargs"], **kwargs)


def create(env_class: str | Callable[..., Any], **kwargs: Any) -> Any:
    return (load_env_creator(env_class) if isinstance(env_class, str) else env_class)(**kwargs)
