"""Our environments in GEM's style: `make(id)`, `reset(seed)`, `step(action)`, `sample_random_action()`.

GEM has no system message: the first observation begins with the instructions.
"""

from typing import Any

import gymnasium

from skyrl_gym.registry import resolve_env_id


class GemEnv(gymnasium.Wrapper[str, str, str, str]):
    _seed: int | None = None  # for the first reset

    def reset(self, seed: int | None = None, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        seed, self._seed = self._seed if seed is None else seed, None
        if seed is not None:
            self.action_space.seed(seed)
        observation, info = self.env.reset(seed=seed, **kwargs)
        return f"{info.get('instructions', '')}\n\n{observation}".lstrip(), info

    def sample_random_action(self) -> str:
        """An admissible action where they are listed, else random characters."""
        space, admissible = self.action_space, self.get_wrapper_attr("admissible_actions")()
        return str(space.np_random.choice(admissible)) if admissible else space.sample()


def make(name: str, seed: int | None = None, **kwargs: Any) -> GemEnv:
    """An environment by its id or short name; further arguments are gymnasium.make's."""
    env = GemEnv(gymnasium.make(resolve_env_id(name), **kwargs))
    env._seed = seed
    return env
