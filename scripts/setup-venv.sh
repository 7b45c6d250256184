#!/bin/sh
# setup-venv.sh PYTHON VENV REQUIREMENT: creates a virtual environment and installs REQUIREMENT
# into it, for example `.` to run the server or `.[dev]` to work on it.
set -eu
python=$1
venv=$2
requirement=$3

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

[ -n "$python" ] || fail \
    "exec-server needs Python 3.11 or newer, and none was found." \
    "Install one (Debian 12 and Ubuntu 24.04: apt-get install python3 python3-venv)," \
    "or name it: make run PYTHON=/path/to/python3.11"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || fail \
    "PYTHON=$python does not run. Name a Python interpreter: make run PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
    "exec-server needs Python 3.11 or newer; $python is Python $version." \
    "Name another one: make run PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail \
    "$python has no venv module." \
    "Install it (Debian and Ubuntu: apt-get install python3-venv or python$version-venv)."

echo "Creating the virtual environment $venv with Python $version"
"$python" -m venv --clear "$venv"
echo "Installing exec-server and its dependencies into $venv"
compile=--compile
case $requirement in
    *dev*) compile=--no-compile ;;   # seven seconds; the modules of the server follow
esac
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$compile" \
    --editable "$requirement"
# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, each start would compile them anew,
# which takes longer than the start itself.
"$venv/bin/python" - <<'PYTHON'
import compileall
import importlib.metadata
import re

compileall.compile_dir("src", quiet=2)
needs = [re.match(r"[\w.-]+", line)[0] for line in importlib.metadata.requires("exec-server")
         if "extra ==" not in line]
for name in [*needs, "typing_extensions", "cffi"]:
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:   # not for this system
        continue
    for file in files:
        if file.suffix == ".py":
            compileall.compile_file(file.locate(), quiet=2)
PYTHON
