#!/bin/sh
# Runs pytest; on CI, tests that fail are run a second time, alone and one after the other.
# A machine that pauses for seconds can fail a test that is right. A test that needed its second
# try is listed, so that it is noticed; a test that fails twice fails the run.
# With COVERAGE_FILE set the first run is measured.
# usage: scripts/run-pytest.sh VENV [pytest arguments]
python=$1/bin/python
cache=".pytest_cache/$(basename "$1")"
shift
export PYTHONUTF8=1   # the tests read their files in UTF-8, whatever the locale says
"$python" -m ${COVERAGE_FILE:+coverage run -m} pytest -o "cache_dir=$cache" "$@"
status=$?
# 1: some tests failed; other codes are faults of the run itself.
if [ $status -ne 1 ] || [ -z "${CI:-}" ]; then
    exit $status
fi
echo "== the failed tests once more, alone"
"$python" -m pytest -o "cache_dir=$cache" --slow -rA --last-failed --last-failed-no-failures none
