# `make quickstart` and `make test` are all that a fresh machine needs: Python 3.11 or later, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch>=2.11
# Two workers with one thread each finish a test run sooner than one with two.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: install install-dev quickstart test test-full lint format clean

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml setup.py $(wildcard src/octavo/ops/cpu/*.cpp)
	$(BIN)/python -m pip install -q '$(TORCH)'
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

quickstart: install
	$(BIN)/octavo quickstart

test: install-dev
	$(PYTEST)

test-full: install-dev
	$(PYTEST) -m 'slow or not slow'

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info
