"""The same surroundings for the tests in every terminal: variables, signals, modes and limits.

What a person has set, such as the width of a window, a proxy or targets of their own, must not
decide whether a test passes. A test that is about a variable sets it.
"""

from __future__ import annotations

import atexit
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# What the tests themselves are told by variables, and what an interpreter may need to start.
_KEPT_NAMES: Final = frozenset({"CI", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH"})
_KEPT_PREFIXES: Final = (
    "COVERAGE_",
    "EXEC_SERVER_ADAPTER",
    "EXEC_SERVER_BUBBLEWRAP",
    "EXEC_SERVER_CLAUDE",
    "EXEC_SERVER_COMMAND",
    "EXEC_SERVER_DEBIAN_MIRROR",
    "EXEC_SERVER_FLEET_",
    "EXEC_SERVER_FUZZ_",
    "EXEC_SERVER_OLDER_VERSIONS",
    "EXEC_SERVER_REFERENCE",
    "EXEC_SERVER_SOAK",
    "EXEC_SERVER_SPEC",
    "EXEC_SERVER_TEST_",
    "PYTEST_",
)
# Set for all tests. The width is that of `argparse` without a terminal.
_FIXED: Final = {
    "COLUMNS": "80",
    "LANG": "C.UTF-8",
    "LINES": "24",
    "SHELL": "/bin/sh",
    "TERM": "xterm-256color",
    "TZ": "UTC",
}
# Open descriptors of a login on most systems. Tests read it as their own limit, and go beyond less.
_DESCRIPTORS: Final = 1024
# Python ignores them itself.
_IGNORED_BY_PYTHON: Final = {signal.SIGPIPE, signal.SIGXFSZ}


def fixed_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the tests; only the home is missing."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in _KEPT_NAMES or name.startswith(_KEPT_PREFIXES)
    }
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    # The reference and older versions are installed there.
    return kept | _FIXED | {"XDG_CACHE_HOME": cache}


def fix_surroundings() -> None:
    """Set them for this process and its children; its home is a new folder until it ends."""
    sys.stdin = open(os.devnull) if sys.stdin is None else sys.stdin  # noqa: SIM115
    variables = fixed_variables(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()
    os.umask(0o022)
    tempfile.tempdir = None  # found with the former TMPDIR
    home = tempfile.mkdtemp(prefix="exec-server-home-")
    atexit.register(_remove, home, os.getpid())
    os.environ["HOME"] = str(Path(home).resolve())
    _fix_signals()
    _fix_descriptors()


def _remove(home: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        shutil.rmtree(home, ignore_errors=True)


def _fix_signals() -> None:
    """Undo what servers would inherit; nohup, for one, ignores SIGHUP."""
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _fix_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _DESCRIPTORS:
        limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
