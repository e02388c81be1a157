# Every target is self-sufficient: on a fresh machine with Python 3.11+ and make, it creates .venv first.
#   make demo    adapt a small network to new classes and write a report, in runs/demo
#   make test    all checks and all tests but the long grids of tests/hostile
#   make coverage    the same tests, and the lines of the package that they run
#   make test-peers    fits in MAPIE, crepes, cleanlab, setfit, evidently and timm, each in an environment that it makes
#   make test-hostile    tests/hostile with its long grids;  make test-long    all long tests;  make test-all    everything
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.installed-docs
SOURCES := src tests $(wildcard benchmarks experiments docs/conf.py)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One test a core, each with one thread: with more threads than cores a busy machine takes a multiple of the time.
export OMP_NUM_THREADS ?= 1
# Tests start many processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
PARALLEL := -n auto --maxprocesses 4

# The libraries that fits are used in; those of a line live together.
PEERS_conformal := mapie crepes cleanlab datasets sentence-transformers
PEERS_setfit := setfit
PEERS_evidently := evidently 'pandas<3'
PEERS_timm := timm
PEERS := conformal setfit evidently timm

.PHONY: demo test tests coverage test-peers $(PEERS:%=test-peers-%) test-hostile test-long test-all check style types format docs bench clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/linnet demo --out runs/demo

# What takes a second first; types are checked beside the tests, since that keeps one core busy for a minute.
test: style
	+$(MAKE) --no-print-directory -j2 types tests

tests: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL)

coverage: $(INSTALLED)
	$(BIN)/pip install -q pytest-cov
	$(BIN)/python -m pytest $(PARALLEL) --cov=linnet --cov-report=term:skip-covered

test-peers: $(PEERS:%=test-peers-%)

$(PEERS:%=test-peers-%): test-peers-%: $(VENV)-peers/%/.installed
	$(VENV)-peers/$*/bin/python -m pytest -rs tests/integrations/test_other_libraries.py

# What pandas or numpy a library wants is its own matter: only torch is held.
$(VENV)-peers/%/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-peers/$*
	$(VENV)-peers/$*/bin/pip install -q torch==2.13.0 -e '.[sklearn,text]' pytest hypothesis jaxtyping beartype $(PEERS_$*)
	@touch $@

# An empty -m takes the tests that are marked as long, which pyproject.toml leaves out otherwise.
test-hostile: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) tests/hostile -m ""

# The long tests alone, stopped at the first that fails; with BUDGET=1800 those that fit into 1800 seconds.
test-long: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m long --maxfail=1 $(if $(BUDGET),--budget $(BUDGET))

test-all: check
	$(BIN)/python -m pytest $(PARALLEL) -m ""

check: style types

style: $(INSTALLED)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/codespell

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# A page for each public name is made in docs/api; those of names that are gone would be warnings.
# Executes the notebooks, which takes two minutes of one core.
docs: $(DOCS_INSTALLED)
	rm -rf docs/api
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -b html docs docs/_build/html

# What lacks its peers or data is skipped with a message that says how to name them.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/run_all.py --out runs/benchmarks

clean:
	rm -rf $(VENV) $(VENV)-peers build dist docs/_build docs/api .mypy_cache .ruff_cache .pytest_cache .hypothesis

# One pip call, so that nothing installed later can move torch.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "linnet needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt torch==2.13.0 -e '.[dev]'
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/pip install -c constraints.txt torch==2.13.0 -e '.[dev,docs]'
	@touch $@
