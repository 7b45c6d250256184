"""`exec-server exec` by its shortcut and as a whole: the same output, exit codes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.cli import client_environment, next_line, wait_gone
from tests.support.client import DEFAULT_TIMEOUT, scaled, start_server
from tests.support.client_targets import ClientTarget
from tests.support.server_internals import eventually

# Quick: to the end without an event loop. Handed over: begun so. Whole: not begun so.
QUICK, HANDED_OVER, WHOLE = "quick", "handed over", "whole"


class Case(NamedTuple):
    """One command line, and the way that it takes if its shortcut is open."""

    name: str
    way: str
    words: list[str]  # URL stands for the server
    stdin: bytes | None = None
    act: Callable[[subprocess.Popen[bytes]], None] = lambda process: None


class Seen(NamedTuple):
    """What a caller sees of a command, and whether it needed an event loop."""

    code: int
    stdout: bytes
    stderr: bytes
    has_loop: bool


def _read_late(process: subprocess.Popen[bytes]) -> None:
    """Read nothing before the process has a thread that waits for its reader."""
    tasks = f"/proc/{process.pid}/task"
    eventually("a thread writes", lambda: len(os.listdir(tasks)) > 1)


def _signal(*numbers: int) -> Callable[[subprocess.Popen[bytes]], None]:
    def act(process: subprocess.Popen[bytes]) -> None:
        for number in numbers:
            next_line(process)
            process.send_signal(number)

    return act


def _close_stdout(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    next_line(process)
    process.stdout.close()
    process.stdout = None


SHELL = ["URL", "--", "sh", "-c"]
LARGE = "head -c 9000000 /dev/zero; echo all written >&2; exit 4"
TRAP = (
    "trap 'echo got; exit 9' {}; echo ready; while :; do sleep 1000 > /dev/null 2>&1 & wait; done"
)
CASES = [
    Case("nothing", QUICK, ["URL", "true"]),
    Case("no stdin", QUICK, ["-n", "URL", "cat"], b"unread"),
    Case("both streams", QUICK, [*SHELL, "echo out; echo err >&2; exit 3"]),
    Case("a signal ends it", QUICK, [*SHELL, "kill -9 $$"]),
    Case("code above 255", QUICK, [*SHELL, "exit 300"]),
    Case("output in the background", QUICK, [*SHELL, "(sleep 0.2; echo late) & echo first"]),
    Case("all bytes", QUICK, ["URL", "cat"], bytes(range(256)) * 1500),
    Case("stdin is not read", QUICK, ["URL", "true"], b"x" * 500_000),
    Case("stdin is closed by it", QUICK, [*SHELL, "exec <&-; echo on"], b"x" * 300_000),
    Case("directory", QUICK, ["--cwd", "/usr", "URL", "pwd"]),
    Case("variables", QUICK, ["--env", "A=b c", "--env", "HOME", *SHELL, "echo $A $HOME"]),
    Case("words", QUICK, ["URL", "printf", "<%s>", "", "żółć", "\n", "--"]),
    Case("much output", QUICK, [*SHELL, "head -c 3000000 /dev/zero | tr '\\0' x"]),
    Case("no program", WHOLE, ["URL", "no-such-program"]),
    Case("one word", WHOLE, ["URL", "echo a | cat"]),
    Case("no directory", WHOLE, ["--cwd", "/nonexistent", "URL", "true"]),
    Case("not executable", WHOLE, ["URL", "/etc/passwd"]),
    Case("no server", WHOLE, ["unix:/nonexistent", "true"]),
    Case("relative directory", WHOLE, ["--cwd", ".", *SHELL, "echo on"]),
    Case("wrong variable", WHOLE, ["--env", "=x", "URL", "true"]),
    Case("not UTF-8", WHOLE, ["URL", "echo", os.fsdecode(b"\xff")]),
    Case("sandbox", WHOLE, ["--sandbox", "read-only", *SHELL, "echo x > /etc/x"]),
    Case("timeout", WHOLE, ["--timeout", "0.3", "URL", "sleep", "1000"]),
    Case("slow reader", HANDED_OVER, [*SHELL, LARGE], act=_read_late),
    Case("stdout is closed", HANDED_OVER, [*SHELL, "echo one; exec yes"], act=_close_stdout),
    Case("TERM", HANDED_OVER, [*SHELL, TRAP.format("TERM")], b"", _signal(signal.SIGTERM)),
    Case("INT", HANDED_OVER, [*SHELL, TRAP.format("INT")], None, _signal(signal.SIGINT)),
    Case("USR1", HANDED_OVER, [*SHELL, TRAP.format("USR1")], None, _signal(signal.SIGUSR1)),
    Case("QUIT ends it", HANDED_OVER, [*SHELL, "echo a; exec sleep 1000"], None, _signal(3)),
]


def _run(path: str, case: Case, url: str, folder: Path) -> Seen:
    taken = folder / path
    words = [url if word == "URL" else word for word in case.words]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.exec_paths", path, "exec", *words],
        env=client_environment(None, {"EXEC_PATH_TAKEN": str(taken)}),
        stdin=subprocess.DEVNULL if case.stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        case.act(process)
        stdout, stderr = process.communicate(case.stdin, timeout=scaled(3 * DEFAULT_TIMEOUT))
    finally:
        process.kill()
        process.wait()
    return Seen(process.returncode, stdout or b"", stderr, taken.exists())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_ways_look_the_same(case: Case, ours: ClientTarget, tmp_path: Path) -> None:
    quick = _run("quick", case, ours.url, tmp_path)
    whole = _run("whole", case, ours.url, tmp_path)
    assert whole.has_loop
    assert quick == whole._replace(has_loop=case.way != QUICK)


@pytest.mark.parametrize("path", ["quick", "whole"])
def test_background_children_end_with_the_command(
    path: str, ours: ClientTarget, tmp_path: Path
) -> None:
    script = "setsid sleep 1000 < /dev/null > /dev/null 2>&1 & echo $!; exit 3"
    seen = _run(path, Case("setsid", QUICK, [*SHELL, script]), ours.url, tmp_path)
    assert seen.code == 3
    wait_gone(int(seen.stdout))


def test_unix_sockets_and_names_take_the_shortcut(tmp_path: Path) -> None:
    """See `tests/unit/cli/commands/test_quick_request.py` for the targets."""
    path = tmp_path / "socket"
    with start_server("ours", "--listen", f"unix:{path}"):
        case = Case("unix", QUICK, ["URL", "echo", "on"])
        assert _run("quick", case, f"unix:{path}", tmp_path) == Seen(0, b"on\n", b"", False)
