"""Tools that a language model calls: `@tool` (tool.py), a calculator, search and wiki over a corpus, python_exec."""

from skyrl_gym.tools.tool import Tool, ToolError, tool

__all__ = ["Tool", "ToolError", "tool"]
