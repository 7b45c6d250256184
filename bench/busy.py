"""Keeps one processor core busy, as another program of the machine would."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def core_busy() -> Iterator[None]:
    """Runs a program that never waits while the block lasts."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()
