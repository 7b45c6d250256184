#!/bin/sh
# Runs unit tests with each supported interpreter of this machine but one, each in a virtual
# environment of its own, and the fuzz tests too with the oldest. Faults of an interpreter show in the
# tests that need no other process; those of the versions in between show in the unit tests. All of
# them run in surroundings that no test may depend on.
# usage: scripts/test-others.sh INTERPRETER [pytest arguments]
venvs=$(sh scripts/other-venvs.sh "$1") || exit 1
shift
# All random examples have been tried with the first interpreter.
unset EXEC_SERVER_TEST_EXAMPLES
status=0
for venv in $venvs; do
    echo "== Python ${venv#.venv-}"
    # Unit tests have a run of their own: some reap every child of their process.
    # The checks of texts and structure do not depend on the interpreter.
    sh scripts/hostile.sh sh scripts/run-pytest.sh "$venv" -n auto --dist loadfile "$@" tests/unit \
        --ignore tests/unit/test_architecture.py --ignore tests/unit/test_prose.py || status=1
    [ "$venv" != "${venvs%%
*}" ] || sh scripts/hostile.sh sh scripts/run-pytest.sh "$venv" -n auto \
        --dist loadfile "$@" tests/fuzz || status=1
done
exit $status
