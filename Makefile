# `make quickstart` and `make test` are all that a fresh machine needs: Python 3.11 or later, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch>=2.11
# Two workers with one thread each finish a test run sooner than one with two.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: help install install-dev quickstart test test-full lint format clean

help:
	@echo 'make install      a virtual environment in $(VENV) with the package'
	@echo 'make install-dev  the same with everything that tests and linters need'
	@echo 'make quickstart   the whole loop on a demo model'
	@echo 'make test         the fast tests: minutes on two cores'
	@echo 'make test-full    all tests: real peers, soaks, kills'
	@echo 'make lint         ruff, mypy, import-linter'
	@echo 'make format       what ruff can mend'
	@echo 'make clean        remove $(VENV) and what was built'

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml setup.py $(wildcard src/octavo/ops/cpu/*.cpp src/octavo/ops/cpu/*.h)
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
