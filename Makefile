SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help install demo test-fast test test-long test-mutations test-goldens check-static check format bench clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Put the library and its tools into .venv

demo: $(INSTALLED) ## Train a tiny model on a laptop
	$(BIN)/python recipes/quickstart.py

test-fast: $(INSTALLED) ## Tests that take less than a minute together
	$(BIN)/pytest -m "not slow and not long"

test: check-static ## Static checks, then every test but the long ones
	$(BIN)/pytest -m "not long"

test-long: $(INSTALLED) ## Every test; the output is kept in docs/test-long.txt
	@mkdir -p docs
	$(BIN)/pytest --no-header | tee docs/test-long.txt

test-mutations: $(INSTALLED) ## Put known silent bugs into a copy, one at a time, and expect red
	$(BIN)/python -m tests.mutations

test-goldens: $(INSTALLED) ## Compare with recorded cases of other systems
	$(BIN)/python -m tests.goldens tests/data/goldens

check-static: $(INSTALLED) ## Format, lint, types, import layers, spelling
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

check: check-static test-fast ## What to run before a commit

format: $(INSTALLED) ## Rewrite the code as the static checks want it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(INSTALLED) ## Run every benchmark
	for script in benchmarks/*.py; do $(BIN)/python "$$script"; done

clean: ## Remove caches and builds, but neither .venv nor runs
	rm -rf build dist *.egg-info .coverage .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# torch goes first: only then can TORCH choose its version and build.
$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip show --quiet torch 2> /dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python >= 3.11, got " + sys.version)'
	$(PYTHON) -m venv .venv
