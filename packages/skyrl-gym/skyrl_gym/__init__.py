"""Text environments on the Gymnasium API.

The import registers envs-registry.yaml, and the files that SKYRL_ENVS_REGISTRY names, with Gymnasium, as
`gymnasium.make("skyrl_gym:skyrl/...")` does too. No environment's code is loaded before it is made.
"""

from gymnasium import pprint_registry

from skyrl_gym import data, envs
from skyrl_gym.core import Outcome, Task, TextEnv
from skyrl_gym.envs import make, register, spec
from skyrl_gym.envs.base_text_env import Env
from skyrl_gym.play import demonstrations, expert_trajectory, num_tasks
from skyrl_gym.registry import EnvEntry, list_envs, load_registry, register_all, resolve_env_id
from skyrl_gym.spaces import UnicodeText
from skyrl_gym.vector import make_vec
from skyrl_gym.wrappers import HistoryWindow, InvalidActionBudget, RecordEpisodes, replay

__all__ = [
    "Env",
    "EnvEntry",
    "HistoryWindow",
    "InvalidActionBudget",
    "Outcome",
    "RecordEpisodes",
    "Task",
    "TextEnv",
    "UnicodeText",
    "data",
    "demonstrations",
    "envs",
    "expert_trajectory",
    "list_envs",
    "load_registry",
    "make",
    "make_vec",
    "num_tasks",
    "pprint_registry",
    "register",
    "replay",
    "resolve_env_id",
    "spec",
]

register_all()
