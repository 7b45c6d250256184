#!/bin/sh
# Runs the tests with each interpreter that scripts/interpreters.sh finds, each in a virtual
# environment of its own. Arguments go to pytest. The reference does not depend on the
# interpreter, so it is asked only once.
set -e
markers=""
for python in $(sh scripts/interpreters.sh); do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    venv=".venv-$version"
    echo "== Python $version"
    if [ ! -e "$venv/installed" ] || [ pyproject.toml -nt "$venv/installed" ]; then
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
        touch "$venv/installed"
    fi
    "$venv/bin/python" -m pytest -m "$markers" "$@"
    markers="not reference"
done
