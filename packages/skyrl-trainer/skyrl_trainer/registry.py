"""A registry that a setting chooses from by name."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from skyrl_trainer.errors import UserError

T = TypeVar("T")
Entry = TypeVar("Entry")
load: Callable[[str], Any] = resolve_name
"""What a place names. Example: load("skyrl_trainer.learner.ppo:PPO")"""


class Registry(Generic[T]):
    """setting: that chooses. built_in: name -> "module:attribute", imported when it is chosen."""

    def __init__(self, setting: str, built_in: Mapping[str, str] | None = None) -> None:
        self.setting = setting
        self.built_in = dict(built_in or {})
        self._entries: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        return sorted({*self.built_in, *self._entries})

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """A decorator; a later registration of the same name replaces the earlier one."""

        def add(entry: Entry) -> Entry:
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """UserError with the valid names and the nearest."""
        if name not in self._entries:
            if name not in self.built_in:
                hint = "".join(f" Did you mean {near}?" for near in get_close_matches(name, self.names, n=1))
                known = f"choose one of {', '.join(self.names)}, or " if self.names else ""
                raise UserError(f"{self.setting}={name!r} is not registered; {known}register your own.{hint}")
            self._entries[name] = load(self.built_in[name])
        return self._entries[name]
