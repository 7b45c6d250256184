# make help prints these lines.
#
# make run          install the server into .venv and serve on loopback (PORT=7700)
# make dev          install the developers' tools into .venv
# make lint         ruff and mypy
# make test         lint, unit and fuzz tests and a selection of the others: five minutes
# make test-all     test, test-rest and test-others
# make test-rest    every test that test leaves out
# make test-hostile make test in surroundings that no test may depend on
# make test-others  unit tests with the other supported versions of Python, fuzz tests with the oldest
# make coverage     branch coverage of every package, and its floors
# make reference    install the reference, which test-all and bench then use (needs npm)
# make conformance  the exchanges of tests/conformance, against the reference too
# make versions     clients and servers of Codex since the first exec-server (needs npm); ten minutes
# make bench        this server and the reference in turns
# make soak         mixed traffic with faults, then a count of the rest: SECONDS=180
# make test-kernel  tests of the sandbox on Linux 6.1 of Debian, in qemu: KERNEL_ARGS="--root ramfs -k MINW"
# make test-fleet   50 nodes of a registry killed and 20 drained under load; needs postgresql
# make fuzz         every decoder and every method with random input: SECONDS=60
# make everyday     our client and OpenSSH, adapters and local backends in turns; needs openssh-server
# make adapters     the adapters in their frameworks, with the frameworks' own suites
# make wheels       look for wheels of all dependencies for macOS, Windows and Alpine
# make limits       write docs/limits.md from the constants of the code
#
# PYTHON=/path/to/python3 chooses the interpreter, after `make clean`.

# The newest one found.
PYTHON ?= $(lastword $(shell sh scripts/interpreters.sh))
VENV := .venv
STAMP := $(VENV)/dev-installed
PYTEST_ARGS ?=
PORT ?= 7700
# What make adds to the environment, which commands of the server would inherit: a `make` among them
# would take itself for a part of this one, and a development server would take our port.
MAKE_NAMES := MAKEFLAGS MAKELEVEL MAKEOVERRIDES MAKE_TERMERR MAKE_TERMOUT MFLAGS PORT PYTHON VENV

.PHONY: help run dev test test-all test-rest test-hostile test-others environments lint coverage conformance reference versions limits bench soak fuzz test-kernel test-fleet everyday adapters wheels clean

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

# The server alone: what `make run` needs.
$(VENV)/run-installed: pyproject.toml
	@sh scripts/setup-venv.sh "$(PYTHON)" $(VENV) .
	@touch $@

# The developers' tools too.
$(STAMP): pyproject.toml
	@sh scripts/setup-venv.sh "$(PYTHON)" $(VENV) '.[dev]'
	@touch $@ $(VENV)/run-installed

run: $(VENV)/run-installed
	@echo
	@echo "In another terminal, in this folder:"
	@echo "    $(VENV)/bin/exec-server exec ws://127.0.0.1:$(PORT) -- uname -a"
	@echo "    $(VENV)/bin/exec-server cp README.md ws://127.0.0.1:$(PORT):/tmp/"
	@echo "    CODEX_EXEC_SERVER_URL=ws://127.0.0.1:$(PORT) codex"
	@echo "The server listens on:"
	@exec env $(addprefix -u ,$(MAKE_NAMES)) $(VENV)/bin/exec-server --listen ws://127.0.0.1:$(PORT)

dev: $(STAMP)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	sh scripts/unit-tests.sh $(VENV) $(PYTEST_ARGS)
	sh scripts/run-pytest.sh $(VENV) -n auto --dist loadfile -m "quick and not reference" \
		tests/fuzz tests/integration tests/conformance $(PYTEST_ARGS)

test-all: export COVERAGE = 1
test-all: test test-rest test-others

test-rest: $(STAMP)
	sh scripts/test-rest.sh $(VENV) $(PYTEST_ARGS)

test-hostile: $(STAMP)
	sh scripts/hostile.sh $(MAKE) test

test-others: $(STAMP)
	sh scripts/test-others.sh "$(PYTHON)" $(PYTEST_ARGS)

# What test-others, test-kernel and adapters otherwise make when they are run.
environments: $(STAMP)
	sh scripts/other-venvs.sh "$(PYTHON)"
	$(VENV)/bin/python -m tests.kernel --build --skip-missing
	$(VENV)/bin/python scripts/adapter_suites.py --install "$(PYTHON)" $(ADAPTERS)

# The floors of the unit tests, then the tests of `make test` together, servers included.
coverage: $(STAMP)
	COVERAGE=1 sh scripts/unit-tests.sh $(VENV) $(PYTEST_ARGS)
	rm -rf .coverage-quick
	mkdir .coverage-quick
	cp .coverage-unit/data .coverage-quick/data.unit
	COVERAGE_FILE=$(CURDIR)/.coverage-quick/data sh scripts/run-pytest.sh $(VENV) -n auto \
		--dist loadfile -m "quick and not reference" \
		tests/fuzz tests/integration tests/conformance $(PYTEST_ARGS)
	COVERAGE_FILE=$(CURDIR)/.coverage-quick/data $(VENV)/bin/python -m coverage combine --quiet
	COVERAGE_FILE=$(CURDIR)/.coverage-quick/data $(VENV)/bin/python -m coverage report --skip-covered

reference:
	sh tests/conformance/install_reference.sh

conformance: $(STAMP) reference
	$(VENV)/bin/python -m pytest tests/conformance $(PYTEST_ARGS)

# ADAPTERS="fsspec inspect" selects some.
adapters: $(STAMP)
	$(VENV)/bin/python scripts/adapter_suites.py "$(PYTHON)" $(ADAPTERS)

# Prints the matrix of docs/compatibility.md.
versions: $(STAMP)
	$(VENV)/bin/python -m tests.versions $(VERSIONS_ARGS)

# Asks the package index; says so if it does not answer.
wheels: $(STAMP)
	$(VENV)/bin/python scripts/check_wheels.py

# Writes docs/limits.md.
limits:
	python3 scripts/limits.py

bench: $(STAMP)
	$(VENV)/bin/python -m bench --markdown - $(BENCH_ARGS)
	$(VENV)/bin/python -m bench.registry

soak: $(STAMP)
	$(VENV)/bin/python -m soak --seconds $(or $(SECONDS),180) $(SOAK_ARGS)

fuzz: $(STAMP)
	$(VENV)/bin/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(FUZZ_ARGS)
	$(VENV)/bin/python -m tests.fuzz --seconds $(or $(SECONDS),60) --only methods,methods-confined

# KERNEL_ARGS=--help lists the flags; other words go to pytest.
test-kernel: $(STAMP)
	$(VENV)/bin/python -m tests.kernel $(KERNEL_ARGS)

test-fleet: $(STAMP)
	EXEC_SERVER_FLEET_KILLS=50 EXEC_SERVER_FLEET_DRAINS=20 $(VENV)/bin/python -m pytest \
		tests/integration/test_registry_fleet.py $(PYTEST_ARGS)

everyday: $(STAMP)
	$(VENV)/bin/python -m bench.everyday

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz .coverage-*
