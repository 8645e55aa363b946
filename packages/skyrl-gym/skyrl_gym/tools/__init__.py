"""Tools that a language model calls; tool.py says how to write one."""
