#!/bin/sh
# Runs every test that `make test` leaves out, with the interpreter of a virtual environment: first
# those that may share the machine, then those that measure it, two at a time.
# usage: scripts/test-rest.sh VENV [pytest arguments]
venv=$1
shift
# Tests with servers wait for half of their time, so there is one worker more than cores.
workers=$(($(nproc) + 1))
# All others are quick. To collect them takes each worker ten seconds.
folders="tests/integration tests/conformance"
status=0
sh scripts/run-pytest.sh "$venv" -n "$workers" --dist loadfile --slow \
    -m "(not quick or reference) and not measured" $folders "$@" || status=1
sh scripts/run-pytest.sh "$venv" -n 2 --dist loadfile --slow \
    -m "measured and (not quick or reference)" $folders "$@" || status=1
exit $status
