"""Options of a command line, from a table."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TYPES = {"int": int, "float": float, "path": Path}


def add_options(parser: argparse.ArgumentParser, table: Mapping[str, Mapping[str, Any]]) -> None:
    """By an option's name the arguments of `add_argument`, its type as one of TYPES says."""
    for name, given in table.items():
        kind = {"type": TYPES[given["type"]]} if "type" in given else {}
        parser.add_argument(f"--{name}", **{**given, **kind})
