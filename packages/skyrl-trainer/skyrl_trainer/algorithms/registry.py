"""A registry that a recipe's setting chooses from; its error lists what may be chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from skyrl_trainer.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """Example: `TRAINERS = Registry("trainer.algorithm.name")`, then `@TRAINERS.register("mine")` on a class."""

    def __init__(self, setting: str) -> None:
        self.setting = setting
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator; a later registration of the same name replaces the earlier one."""

        def add(entry: T) -> T:
            self._entries[name] = entry
            return entry

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> T:
        """Raises UserError with the valid names."""
        if name not in self._entries:
            names = ", ".join(sorted(self._entries))
            raise UserError(f"{self.setting}={name!r} is not registered; choose one of {names}, or register your own.")
        return self._entries[name]
