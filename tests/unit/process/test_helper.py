"""Programs that the server runs for itself: input, output, time, and nothing left behind."""

from __future__ import annotations

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


def _run(
    code: str, data: bytes = b"", seconds: float = 60.0, enough: int = 1 << 30
) -> tuple[bool, bytes]:
    output = bytearray()

    def feed(piece: bytes) -> bool:
        output.extend(piece)
        return len(output) < enough

    words = [sys.executable, "-S", "-c", f"import os, sys\n{code}"]
    return run_helper(words, data, seconds, feed, {"A": "b"}), bytes(output)


def test_input_and_output() -> None:
    data = bytes(300_000)
    code = "sys.stderr.write('x'); sys.stdout.buffer.write(sys.stdin.buffer.read())"
    assert _run(code, data) == (True, data)
    assert _run("print(os.environ['A'], os.getcwd())") == (True, b"b /\n")


def test_input_that_is_not_read() -> None:
    assert _run("os.close(0); print(1)", bytes(300_000)) == (True, b"1\n")


def test_a_program_that_says_enough_is_killed() -> None:
    is_over, output = _run("while True: os.write(1, b'x')", enough=3)
    assert (is_over, len(output) >= 3) == (False, True)


def test_a_program_that_takes_too_long_is_killed() -> None:
    assert _run("import time; time.sleep(600)", seconds=0.0) == (False, b"")


def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError):
        run_helper(["/missing/program"], b"", 1.0, lambda data: True, {})


def test_a_program_that_was_reaped() -> None:
    helper._kill(None)
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    assert helper._open_process(pid) is None


def test_a_program_that_has_ended() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    descriptor = helper._open_process(pid)
    os.waitpid(pid, 0)
    helper._kill(descriptor)
