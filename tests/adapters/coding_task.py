"""A coding task in a scratch repository, in steps that every framework's scripted model takes."""

from __future__ import annotations

import os
from pathlib import Path

BROKEN = "def add(a, b):\n    return a - b\n"
FIXED = "def add(a, b):\n    return a + b\n"
TEST = "from app import add\nassert add(2, 3) == 5, add(2, 3)\nprint('all tests pass')\n"

READ = "cat app.py"
# Without bytecode files: the mended program has the size of the broken one, and often its second.
RUN_TESTS = "python3 -B test_app.py"
EDIT = "sed -i 's/a - b/a + b/' app.py"
# A number by which the processes of this run of tests are told from all others of the machine.
NUMBER = str(10_000_000 + os.getpid())
NEVER_ENDS = f"echo begun; sleep {NUMBER} & sleep {NUMBER}"
COUNT_LEFT = f"pgrep -fc 'sleep {NUMBER[:-1]}[{NUMBER[-1]}]'"


def make_repository(folder: Path) -> str:
    """A program with an error, and its test."""
    (folder / "app.py").write_text(BROKEN)
    (folder / "test_app.py").write_text(TEST)
    return str(folder)
