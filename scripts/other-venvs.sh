#!/bin/sh
# Makes a virtual environment with each supported interpreter of this machine but one, unless it is
# there, and prints their names: .venv-3.11 and so on.
# usage: scripts/other-venvs.sh INTERPRETER
set -e
for python in $(sh scripts/interpreters.sh); do
    [ "$python" != "$1" ] || continue
    venv=.venv-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ ! -e "$venv/dev-installed" ] || [ pyproject.toml -nt "$venv/dev-installed" ]; then
        sh scripts/setup-venv.sh "$python" "$venv" '.[dev]' >&2
        touch "$venv/dev-installed"
    fi
    echo "$venv"
done
