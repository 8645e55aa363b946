"""Benchmarks of code: SWE-bench Verified by default; the same as `skyrl-trainer eval code`."""

import sys

from skyrl_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "code", *sys.argv[1:]]))
