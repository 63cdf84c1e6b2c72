# make optimize: environment, install, model, main job.  make test: environment, install, tests.
# Variables: PYTHON (3.11 or newer), VENV, DEPLOYMENT, ARGS (for specpilot optimize), PYTEST_ARGS,
#            TORCH_INDEX (extra package index, if the default one has no CPU build of torch for your system).

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
DEPLOYMENT ?= cpu_c1_smollm2-135m_dflash
ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help optimize install test test-cheats lint clean
.DEFAULT_GOAL := help

help:
	@echo "make optimize   create $(VENV), install, fetch the model, run the main job"
	@echo "make test       create $(VENV), run the tests"
	@echo "make test-cheats  run every planted cheat against the gate (minutes)"
	@echo "make lint       ruff and mypy"
	@echo "make clean      remove $(VENV) and build output (runs and models stay)"

# Stamps: a second call does nothing unless pyproject.toml changed.
$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; install one, or: make PYTHON=/path/to/python" >&2; exit 3; }
	@command -v "$(PYTHON)" >/dev/null 2>&1 && test ! -d "$(PYTHON)" \
		|| { echo "error: $(PYTHON) is not a program; give another: make PYTHON=/path/to/python" >&2; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "error: $(PYTHON) is not Python 3.11 or newer; give another: make PYTHON=/path/to/python" >&2; exit 3; }
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -c 'import pip' 2>/dev/null; then \
		$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -q pip; \
	else echo "error: $(PYTHON) has neither ensurepip nor pip: install the venv package (Debian: apt install python3-venv)" >&2; exit 3; fi
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(PIP) install -q $(INDEX) -e '.[engine]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml
	$(PIP) install -q $(INDEX) -e '.[engine,dev]'
	@touch $(VENV)/.installed $@

install: $(VENV)/.installed

optimize: $(VENV)/.installed
	$(BIN)/specpilot optimize --deployment $(DEPLOYMENT) $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-cheats: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m cheats tests/specpilot/gate

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy specpilot
	cd engines/slim && MYPYPATH=. $(abspath $(BIN))/mypy --config-file ../../pyproject.toml \
		--explicit-package-bases --cache-dir ../../.mypy_cache/slim slim_engine

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
