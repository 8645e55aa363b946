.DEFAULT_GOAL := help
.PHONY: help setup train test lint clean
export PYTHON
bin := .venv/bin
ifdef FULL
export SKYRL_TEST_FULL := $(FULL)
endif

help: ## this list; ARGS="a.b=c" goes on to skyrl-trainer or pytest
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## .venv with everything in it; PYTHON=... chooses the interpreter
	@scripts/setup.sh

train: setup ## trains a small policy: runs/quickstart
	$(bin)/skyrl-trainer train quickstart $(ARGS)

lint: setup ## ruff and mypy
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

test: lint ## lint and all tests; FULL=1 runs the sizes that the issues name
	OMP_NUM_THREADS=1 $(bin)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

clean: ## removes .venv and caches, leaves runs/
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist packages/*/dist
	find packages tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
