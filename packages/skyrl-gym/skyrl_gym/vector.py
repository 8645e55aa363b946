"""Vector environments that are right for text.

Gymnasium's AsyncVectorEnv reads shared memory once, so that observations in text never change; here it shares none. A
finished environment is reset without options: what every episode should have is an argument of `make_vec`.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils.shared_memory import create_shared_memory

from skyrl_gym.registry import resolve_env_id
from skyrl_gym.spaces import UnicodeText


def make_vec(
    env_id: str, num_envs: int = 1, vectorization_mode: str = "sync", *, autoreset_mode: Any = "NextStep", **kwargs: Any
) -> gymnasium.vector.VectorEnv:
    """`num_envs` copies of an environment, by id or short name, in one process ("sync") or a process each ("async").
    `autoreset_mode` is a Gymnasium AutoresetMode or its value; further arguments are gymnasium.make_vec's (`wrappers`,
    `vector_kwargs`) and the environment's, as in `make_vec("webshop_lite", 8, split="val")`.
    """
    vectorization_mode = getattr(vectorization_mode, "value", vectorization_mode)
    if vectorization_mode not in ("sync", "async"):
        raise ValueError(f"vectorization_mode is {vectorization_mode!r}; valid ones are 'sync' and 'async'.")
    if num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}, expected at least 1.")
    settings = {"autoreset_mode": autoreset_mode, **kwargs.pop("vector_kwargs", {})}
    if vectorization_mode == "async":
        settings["shared_memory"] = False
    envs = gymnasium.make_vec(resolve_env_id(env_id), num_envs, vectorization_mode, settings, **kwargs)
    # Gymnasium writes the autoreset mode into the environment class's metadata, which all vector environments share.
    envs.metadata = dict(envs.metadata)
    envs._add_info = partial(_add_info, weakref.proxy(envs))  # type: ignore[method-assign]
    return envs


def _add_info(envs: Any, infos: dict[str, Any], info: dict[str, Any], index: int) -> Any:
    # Gymnasium's, whose arrays have the type of the first value: what does not fit makes them arrays of objects.
    for name, value in info.items():
        if isinstance(infos.get(name), np.ndarray) and infos[name].dtype != np.asarray(value).dtype:
            infos[name] = infos[name].astype(object)
    return envs.__class__._add_info(envs, infos, info, index)


def single_info(infos: dict[str, Any], index: int) -> dict[str, Any]:
    """The info that environment `index` gave, out of a vector environment's infos."""
    info = {}
    for name, values in infos.items():
        if f"_{name}" in infos and infos[f"_{name}"][index]:
            value = single_info(values, index) if isinstance(values, dict) else values[index]
            info[name] = value.item() if isinstance(value, np.generic) else value
    return info


def __getattr__(name: str) -> Callable[..., gymnasium.vector.VectorEnv]:
    """Makes "skyrl_gym.vector:<env id>" a vector_entry_point. Gymnasium does not tell an entry point which id it is
    called for, and a string, unlike a partial, can be in a spec's JSON."""
    if name in gymnasium.registry:
        return partial(make_vec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@create_shared_memory.register(UnicodeText)
def _refuse(space: UnicodeText, n: int = 1, ctx: Any = None) -> Any:
    raise CustomSpaceError("Text cannot be shared: skyrl_gym.make_vec, or vector_kwargs={'shared_memory': False}.")
