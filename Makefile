# Everything a checkout needs: each target sets up $(VENV) by itself; `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_WORKERS ?= -n auto --maxprocesses 8

# PYTHON as given; where nobody gave one, the first of these that is new enough.
PYTHONS := $(if $(filter file,$(origin PYTHON)),$(PYTHON) python3.13 python3.12 python3.11 python3.14 python,$(PYTHON))
PY := $(VENV)/bin/python
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest $(PYTEST_WORKERS)
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-interpret test-lowering check lint format typecheck bench-cpu wheel setup clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## run a language model on a packed cache, in PyTorch and JAX (ARGS="--model DIR")
	$(PY) -m examples.demo $(ARGS)

test: $(READY) ## run the tests (ARGS="-k store", ARGS="-m gpu")
	$(PYTEST) $(ARGS)
	@# Triton interprets kernels in a process of its own; 5: ARGS select no test there.
	TRITON_INTERPRET=1 $(PYTEST) $(ARGS) || test $$? -eq 5

test-interpret: $(READY) ## run the Triton kernels on the CPU, in Triton's interpreter
	TRITON_INTERPRET=1 $(PYTEST) $(ARGS)

test-lowering: ## compile tq_jax's kernels for a GPU, without one; needs Python 3.12
	tools/lowering.sh $(ARGS)

check: lint typecheck test ## lint, types and tests

lint: $(READY) ## check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(READY) ## repair style and formatting
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: $(READY) ## check the types of tq_core and tq_cli
	$(PY) -m mypy

bench-cpu: $(READY) ## measure on the CPU
	$(PY) -m bench cpu $(ARGS)

wheel: $(READY) ## build the wheel into dist/ and check what is in it
	rm -rf dist
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PY) tools/check_wheel.py dist

setup: $(READY) ## only create and fill the environment

$(READY): pyproject.toml tools/setup_env.py tools/constraints-cpu.txt
	@for python in $(PYTHONS); do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        exec $$python tools/setup_env.py --venv "$(VENV)"; \
	    fi; \
	done; \
	echo "error: Python 3.11 or newer is needed, tried: $(PYTHONS). Name one: make PYTHON=/path/to/python3" >&2; \
	exit 1
	@touch $@

clean: ## remove build products and caches
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path "./$(VENV)" -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environment too
	rm -rf "$(VENV)" .venv-lowering
