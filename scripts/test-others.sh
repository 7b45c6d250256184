#!/bin/sh
# Runs unit and fuzz tests with each supported interpreter of this machine but one, each in a virtual
# environment of its own. Faults of an interpreter show in the tests that need no other process.
# usage: scripts/test-others.sh INTERPRETER [pytest arguments]
tested=$1
shift
status=0
for python in $(sh scripts/interpreters.sh); do
    [ "$python" != "$tested" ] || continue
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    venv=".venv-$version"
    echo "== Python $version"
    if [ ! -e "$venv/dev-installed" ] || [ pyproject.toml -nt "$venv/dev-installed" ]; then
        sh scripts/setup-venv.sh "$python" "$venv" '.[dev]' || exit 1
        touch "$venv/dev-installed"
    fi
    # Unit tests have a run of their own: some reap every child of their process.
    sh scripts/run-pytest.sh "$venv" -n auto --dist loadfile "$@" tests/unit || status=1
    sh scripts/run-pytest.sh "$venv" -n auto --dist loadfile "$@" tests/fuzz || status=1
done
exit $status
