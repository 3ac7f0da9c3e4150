SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The Python that makes the environment; it has to be 3.11 or newer.
PYTHON ?= $(shell python3.11 -c '' >/dev/null 2>&1 && echo python3.11 || echo python3)
# Test processes at a time.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed
NOTEBOOK := $(VENV)/.notebook
DOCS := $(VENV)/.docs
# A file stays with one process, which compiles for all of its tests; tests/conftest.py has the order.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help install demo test test-all test-fast fuzz coverage mutants lint types format bench results notebook docs clean lock

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## Make .venv with the pinned dependencies and this project in it

# The stamp is written last, so an interrupted installation is taken up again by the next run.
$(INSTALLED): pyproject.toml requirements.lock
	@rm -f $@
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "This project needs Python 3.11 or newer, which '$(PYTHON)' is not: name one with make PYTHON=..." >&2; \
	    exit 1; \
	  }; \
	  $(PYTHON) -m venv --clear $(VENV); \
	}
	@echo "Installing the pinned dependencies into $(VENV)"
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

demo: $(INSTALLED) ## Run the demonstration
	$(BIN)/capsules demo

# Three tiers: `make test` has everything once and small, without the mark `slow`; `make test-fast`
# leaves out the mark `long` too; `make test-all` has everything.
test: lint types ## Lint, check the types, run the tests and the notebooks
	$(PYTEST) -m "not slow" tests

test-all: lint types ## The same with long runs, whole tables and the published scenes
	$(PYTEST) tests

test-fast: lint types ## The same without notebooks and without what takes long
	$(PYTEST) -m "not slow and not long" tests

fuzz: $(INSTALLED) ## Feed 20,000 damaged files, texts and options to the commands
	CAPSULES_FUZZ=20000 $(BIN)/python -m pytest -n 0 tests/capsules/test_fuzz.py

coverage: $(INSTALLED) ## Run `make test` and report which lines of the library it reaches
	$(PYTEST) -m "not slow" --cov=models --cov=guides --cov=inference --cov-report=term tests

mutants: $(INSTALLED) ## Break the core in many places and see that a test notices each
	$(BIN)/python -m tests.mutants

lint: $(INSTALLED) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## Check the types
	$(BIN)/mypy

format: $(INSTALLED) ## Format the code and sort the imports
	$(BIN)/ruff check --fix --exit-zero --select I .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## Run the benchmarks
	$(BIN)/python -m benchmarks

# With OUT=docs/results the tables in README and docs are filled in again; SCENES is a folder of the
# paper's test sets, from which the main tables then take their scenes.
OUT ?= build/results
results: $(INSTALLED) ## Make every table and picture of README and docs; resumes
	$(BIN)/python -m benchmarks.results $(OUT)

notebook: $(NOTEBOOK) ## Install Jupyter Lab and open it on notebooks/
	$(BIN)/jupyter lab notebooks

$(NOTEBOOK): requirements-notebook.lock $(INSTALLED)
	@rm -f $@
	@echo "Installing Jupyter Lab into $(VENV)"
	@$(PIP) install -c requirements.lock -r requirements-notebook.lock
	@touch $@

docs: $(DOCS) ## Build the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(DOCS): requirements-docs.lock $(INSTALLED)
	@rm -f $@
	@echo "Installing MkDocs into $(VENV)"
	@$(PIP) install -c requirements.lock -r requirements-docs.lock
	@touch $@

clean: ## Remove caches and build artefacts, not the environment
	rm -rf build dist *.egg-info .benchmarks .hypothesis .jax_cache .mypy_cache .pytest_cache .ruff_cache
	find . \( -path ./$(VENV) -o -path ./.git \) -prune -o \
	  \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +

# Prints the requirements of the groups named as arguments, with what building and running need.
define REQUIREMENTS
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    config = tomllib.load(file)
groups = config["project"]["optional-dependencies"]
print(*config["build-system"]["requires"], *config["project"]["dependencies"], sep="\n")
print(*(line for name in sys.argv[1:] for line in groups[name]), sep="\n")
endef
export REQUIREMENTS

lock: ## Resolve pyproject.toml again and write the three lock files
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	frozen() { $$pip freeze --all --exclude pip | LC_ALL=C sort -f; }; \
	for extra in "" notebook docs; do \
	  rm -rf "$$work/venv"; $(PYTHON) -m venv "$$work/venv"; \
	  python="$$work/venv/bin/python"; \
	  pip="$$python -m pip --disable-pip-version-check --quiet"; \
	  "$$python" -c "$$REQUIREMENTS" cluster dev networks $$extra > "$$work/wanted.txt"; \
	  touch "$$work/base.lock"; \
	  $$pip install -c "$$work/base.lock" -r "$$work/wanted.txt"; \
	  frozen > "$$work/all.lock"; \
	  if grep -Ev '^[A-Za-z0-9._-]+==[A-Za-z0-9.]+$$' "$$work/all.lock" >&2; then \
	    echo "These are not only names and versions." >&2; exit 1; \
	  fi; \
	  if [ -z "$$extra" ]; then cp "$$work/all.lock" "$$work/base.lock"; \
	  else grep -vxFf "$$work/base.lock" "$$work/all.lock" > "$$work/$$extra.lock"; fi; \
	done; \
	cp "$$work/base.lock" requirements.lock; \
	cp "$$work/notebook.lock" requirements-notebook.lock; \
	cp "$$work/docs.lock" requirements-docs.lock
	@wc -l requirements*.lock
