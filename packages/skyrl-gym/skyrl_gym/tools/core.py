"""SkyRL's tool groups, for environments written for it: the methods that `tool` marks."""

from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "skyrl_tool"


def tool(method: Method) -> Method:
    """Marks a method of a ToolGroup as a tool, under the method's name."""
    setattr(method, _MARK, True)
    return method


class ToolGroup:
    """Tools that share state, such as a connection; `name` tells it from an environment's other groups."""

    def __init__(self, name: str) -> None:
        self.name = name
        names = (name for name in dir(type(self)) if hasattr(getattr(type(self), name), _MARK))
        self._tools = {name: getattr(self, name) for name in names}

    def get_name(self) -> str:
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        return self._tools.get(name)

    def get_tool_names(self) -> list[str]:
        return list(self._tools)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self._tools, self.name)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in self._tools:
            raise ValueError(f"The tool group {self.name!r} has no tool {name!r}, only {', '.join(self._tools)}.")
        return self._tools[name](*args, **kwargs)
