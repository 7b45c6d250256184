#!/bin/sh
# Runs the tests with each interpreter that scripts/interpreters.sh finds, each in a virtual
# environment of its own. Arguments go to pytest. The oldest and the newest run everything, those
# between them what needs no other process: what an interpreter breaks shows at the ends or there.
# The reference does not depend on the interpreter, so it is asked only once.
set -e
interpreters=$(sh scripts/interpreters.sh)
newest=$(echo "$interpreters" | tail -n 1)
markers=""
tests="tests"
for python in $interpreters; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    venv=".venv-$version"
    echo "== Python $version"
    if [ ! -e "$venv/installed" ] || [ pyproject.toml -nt "$venv/installed" ]; then
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
        touch "$venv/installed"
    fi
    [ "$python" != "$newest" ] || tests="tests"
    # shellcheck disable=SC2086  # two directories
    "$venv/bin/python" -m pytest -m "$markers" $tests "$@"
    markers="not reference"
    tests="tests/unit tests/fuzz"
done
