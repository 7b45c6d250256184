#!/bin/sh
# Runs the unit tests. With CI or COVERAGE set, the branches they cover are measured and held
# against the floors of coverage_gate.py; before Python 3.14 that takes twice the time.
# usage: scripts/unit-tests.sh VENV [pytest arguments]
set -e
venv=$1
python=$venv/bin/python
shift
if [ -z "${CI:-}${COVERAGE:-}" ]; then
    exec sh scripts/run-pytest.sh "$venv" -n auto --dist loadfile "$@" tests/unit
fi
COVERAGE_FILE=$PWD/.coverage-unit/data
export COVERAGE_FILE
rm -rf .coverage-unit
mkdir .coverage-unit
sh scripts/run-pytest.sh "$venv" -n auto --dist loadfile "$@" tests/unit
"$python" -m coverage combine --quiet
"$python" -m coverage json --quiet -o .coverage-unit/report.json
"$python" scripts/coverage_gate.py .coverage-unit/report.json
