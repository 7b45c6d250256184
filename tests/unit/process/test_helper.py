"""Programs that the server runs for itself: output, time, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import pytest

from exec_server.process import helper, tags
from exec_server.process.helper import run_helper


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, known = os.listdir("/proc/self/fd"), list(tags._helper_tags)
    yield
    assert os.listdir("/proc/self/fd") == before
    assert list(tags._helper_tags) == known
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _run(code: str, seconds: float = 60.0, enough: int = 1 << 30) -> bytes:
    output = bytearray()

    def feed(piece: bytes) -> None:
        output.extend(piece)
        if len(output) >= enough:
            raise EOFError

    words = [sys.executable, "-S", "-c", f"import os, sys\n{code}"]
    with contextlib.suppress(EOFError):
        run_helper(words, seconds, feed, {"A": "b"})
    return bytes(output)


def test_output() -> None:
    assert _run("sys.stderr.write('x'); sys.stdout.buffer.write(bytes(300_000))") == bytes(300_000)
    assert _run("print(os.environ['A'], os.getcwd(), sys.stdin.read())") == b"b / \n"


def test_a_program_that_says_enough_is_killed() -> None:
    assert len(_run("while True: os.write(1, b'x')", enough=3)) >= 3


def test_a_program_that_takes_too_long_is_killed() -> None:
    assert _run("import time; time.sleep(600)", seconds=0.0) == b""


def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError):
        run_helper(["/missing/program"], 1.0, lambda data: None, {})


def test_a_program_that_was_reaped_before() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    with helper._killed_at_end(pid):
        pass


def test_a_program_that_was_reaped_meanwhile() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    with helper._killed_at_end(pid):
        os.waitpid(pid, 0)
