"""Standard streams that are closed at the start, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Before anything else some descriptors are closed, as a careless parent does.
_PROGRAM = """
import os, sys
closed = [int(word) for word in sys.argv[1].split()]
for number, name in enumerate(("stdin", "stdout", "stderr")):
    if number in closed:
        os.close(number)
        setattr(sys, name, None)
report = os.open(sys.argv[2], os.O_WRONLY)  # gets the first closed number
os.dup2(report, 9)
os.close(report)
from exec_server.host import interpreter
interpreter.open_missing()
print("to stdout")
print("to stderr", file=sys.stderr)
assert interpreter.flush()
for number in range(3):
    text = os.readlink(f"/proc/self/fd/{number}")
    os.write(9, f"{text} {os.get_inheritable(number)}\\n".encode())
os._exit(0)
"""


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 2", "1 2", "0 1 2"])
def test_closed_streams_are_opened_for_this_process_and_its_children(closed: str) -> None:
    reader, writer = os.pipe()
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, closed, f"/proc/self/fd/{writer}"],
        stdin=subprocess.PIPE,
        capture_output=True,
        pass_fds=[writer],
        check=False,
    )
    os.close(writer)
    with open(reader, encoding="ascii") as report:
        lines = report.read().splitlines()
    for number, line in enumerate(lines):
        assert line.endswith(" True")
        assert (line == "/dev/null True") == (str(number) in closed)
    assert len(lines) == 3
    assert ended.stdout == (b"" if "1" in closed else b"to stdout\n")
    assert ended.stderr == (b"" if "2" in closed else b"to stderr\n")


def test_a_full_stdout_is_reported() -> None:
    program = """
import os, sys
from exec_server.host import interpreter
print("text")
os._exit(0 if interpreter.flush() else 7)
"""
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([sys.executable, "-E", "-c", program], stdout=full, check=False)
    assert ended.returncode == 7
