# Everything here works from a bare checkout with Python 3.12, make and git:
# `setup` makes the environment once, every other target waits for it.

VENV ?= .venv
PY := $(VENV)/bin/python
# Extra arguments, for instance: make test ARGS="-k piggyback -x"
ARGS ?=

# One thread per process: ranks share the cores, and sums over other thread counts differ in bits.
export OMP_NUM_THREADS ?= 1
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.DEFAULT_GOAL := help
.PHONY: help setup test unit acceptance gpu demo lint types format bench clean clean-venv

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv (or $VENV) with pinned versions; done once
	@VENV="$(VENV)" PYTHON="$(PYTHON)" sh tools/setup_env.sh

test: lint types unit ## lint, types and all tests that need neither a GPU nor an hour

unit: setup ## the tests alone
	CUDA_VISIBLE_DEVICES= $(PY) -m pytest -m "not acceptance and not gpu" $(ARGS)

acceptance: setup ## the full matrix and fault campaigns behind docs/coverage.md (hours)
	CUDA_VISIBLE_DEVICES= $(PY) -m pytest -m "acceptance and not gpu" --timeout 7200 $(ARGS)

gpu: setup ## the tests that need a CUDA device
	$(PY) -m pytest -m gpu $(ARGS)

demo: setup ## train a small GPT with and without injected faults and compare (minutes)
	$(PY) examples/demo/run_demo.py $(ARGS)

bench: setup ## what protection costs here, against unprotected training
	$(PY) benchmarks/overhead.py $(ARGS)

lint: setup ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup ## mypy
	$(PY) -m mypy

format: setup ## put the sources into the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove what tests, demo and tools leave behind (not the environment)
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

clean-venv: clean ## remove the environment as well
	rm -rf "$(VENV)"
