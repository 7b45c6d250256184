#!/bin/sh
# Runs every test that `make test` leaves out, with the interpreter of a virtual environment: first
# those that may share the machine, then those that measure it, one after the other.
# usage: scripts/test-rest.sh VENV [pytest arguments]
venv=$1
shift
# Tests with servers wait for more than half of their time, so there is one worker more than cores.
workers=$(($(nproc) + 1))
status=0
sh scripts/run-pytest.sh "$venv" -n "$workers" --dist loadfile --slow \
    -m "(not quick or reference) and not alone" "$@" || status=1
sh scripts/run-pytest.sh "$venv" --slow -m "alone and (not quick or reference)" "$@" || status=1
exit $status
