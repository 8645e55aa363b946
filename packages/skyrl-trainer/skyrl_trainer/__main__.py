"""`python -m skyrl_trainer` is `skyrl-trainer`."""

from skyrl_trainer.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
