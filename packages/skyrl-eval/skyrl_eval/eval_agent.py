"""Benchmarks of agents and of reasoning: HLE by default; the same as `skyrl-trainer eval agent`."""

import sys

from skyrl_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "agent", *sys.argv[1:]]))
