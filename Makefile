# make run        set up a virtual environment and serve on loopback
# make test       lint, type-check and test with every Python >= 3.11 of this machine
# make check      the same with one Python, for the daily work
# make conformance  the exchanges of tests/conformance against the reference, too
# make bench      this server and the reference in turns
# make everyday   our client and OpenSSH in turns; needs openssh-server

PYTHON ?= $(firstword $(shell sh scripts/interpreters.sh))
VENV := .venv
STAMP := $(VENV)/installed
PYTEST_ARGS ?=
PORT ?= 7700

.PHONY: run test check lint conformance reference bench everyday clean

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

run: $(STAMP)
	@echo "Talk to it with:  $(VENV)/bin/python -m websockets ws://127.0.0.1:$(PORT)"
	@echo "and type:         {\"id\":1,\"method\":\"initialize\",\"params\":{\"clientName\":\"me\"}}"
	@echo "Stop it with Ctrl-C. It listens on:"
	@exec $(VENV)/bin/exec-server --listen ws://127.0.0.1:$(PORT)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

check: lint
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test: lint
	sh scripts/test-all.sh $(PYTEST_ARGS)

reference:
	sh tests/conformance/install_reference.sh

conformance: $(STAMP) reference
	$(VENV)/bin/python -m pytest tests/conformance $(PYTEST_ARGS)

bench: $(STAMP)
	$(VENV)/bin/python -m bench $(BENCH_ARGS)

everyday: $(STAMP)
	$(VENV)/bin/python -m bench.everyday

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
