.DEFAULT_GOAL := help
.PHONY: help setup train test lint ruff docs clean
export PYTHON
bin := .venv/bin
ifdef FULL
export SKYRL_TEST_FULL := $(FULL)
endif

help: ## this list; ARGS="a.b=c" goes on to skyrl-trainer or pytest
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## .venv with everything in it; PYTHON=... chooses the interpreter
	@scripts/setup.sh

train: ## trains a small policy: runs/quickstart
	@echo "make train: sets up .venv (once), then trains a small policy to add two-digit numbers for 3 to 8 minutes"
	@scripts/setup.sh
	$(bin)/skyrl-trainer train quickstart $(ARGS)

lint: ruff ## ruff and mypy
	$(bin)/mypy

ruff: setup
	$(bin)/ruff check .
	$(bin)/ruff format --check .

test: ruff ## lint and all tests; FULL=1: the sizes that a release is held to
ifdef FULL
	@bash -c 'python=python3; source scripts/pip_settings.sh; \
	  $(bin)/uv pip install --quiet --python $(bin)/python -c requirements/constraints.txt -r requirements/full.txt'
endif
	@echo "mypy, and beside it pytest"; $(bin)/mypy & types=$$!; \
	  OMP_NUM_THREADS=1 $(bin)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS); \
	  tests=$$?; wait $$types && exit $$tests

docs: setup ## the documentation site: site/index.html
	@$(bin)/python -c "import mkdocs_awesome_nav, mkdocs_jupyter" 2>/dev/null || bash -c 'python=python3; \
	  source scripts/pip_settings.sh; $(bin)/uv pip install --python $(bin)/python -e "packages/skyrl-trainer[docs]"'
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build

clean: ## removes .venv and caches, leaves runs/
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis dist packages/*/dist
	find packages tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
