"""ClientSession with a program on its standard streams: its end, its stderr, its environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from typing import Any

import pytest
from tests.support.client import (
    KINDS,
    descendants,
    server_command,
    server_environment,
    start_server,
    survivors,
)
from tests.support.client_targets import LOOPS, Recorder, Run, bounded, exercise, outcome, ready

from exec_server import sync
from exec_server.client.engine import stdio
from exec_server.client.engine.dialers import WebSocketDialer
from exec_server.client.engine.session import ClientSession, Dialer
from exec_server.client.engine.stdio import StdioDialer
from exec_server.errors import ConnectFailed, SessionLost
from exec_server.protocol import process
from exec_server.protocol.process import ProcessId

# Answers `initialize`, then neither answers nor goes.
DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.readline()
print('{"id":1,"result":{"sessionId":"s","environmentInfo":{"shell":{"name":"","path":""}}}}')
sys.stdout.flush()
while True: time.sleep(100)
"""


def stdio_dialer(kind: str, **options: Any) -> StdioDialer:
    argv = [*server_command(kind), "--listen", "stdio"]
    return StdioDialer(argv, server_environment(kind), **options)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", LOOPS)
def test_a_session_with_a_program(kind: str, run: Run) -> None:
    before = descendants(os.getpid())
    bounded(exercise(stdio_dialer(kind)), run)
    started = {p: s for p, s in descendants(os.getpid()).items() if p not in before}
    assert not survivors(started)


@pytest.mark.parametrize("run", LOOPS)
def test_a_program_that_dies_takes_the_session_with_it(run: Run) -> None:
    async def scene() -> None:
        async with ClientSession(stdio_dialer("ours")) as session, asyncio.TaskGroup() as tasks:
            await Recorder(session, tasks).start("/bin/sleep", "1000")
            poll = process.ReadParams(ProcessId("p"), 0, None, 60_000)
            call = session.call(process.READ, poll, is_retryable=True)
            waiting = tasks.create_task(outcome(call))
            await ready(session)
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            assert isinstance(await waiting, SessionLost)
            with pytest.raises(SessionLost):
                await ready(session)

    bounded(scene(), run)


@pytest.mark.parametrize("run", LOOPS)
def test_a_program_that_does_not_go_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "TERMINATE_SECONDS", 0.1)
    family: dict[int, str] = {}

    async def scene() -> None:
        # With a child that would keep the pipes open.
        command = (
            f"trap '' TERM; sleep 1000 & exec {shlex.quote(sys.executable)} -c {shlex.quote(DEAF)}"
        )
        async with ClientSession(StdioDialer(["/bin/sh", "-c", command])) as session:
            assert session.session_id == "s"
            family.update(descendants(os.getpid()))
            assert len(family) >= 2

    before = descendants(os.getpid())
    bounded(scene(), run)
    assert not survivors({p: s for p, s in family.items() if p not in before})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", LOOPS)
def test_reading_can_be_held(kind: str, run: Run) -> None:
    async def scene(dialer: Dialer) -> None:
        async with ClientSession(dialer) as session, asyncio.TaskGroup() as tasks:
            recorder = Recorder(session, tasks)
            held = asyncio.Event()

            def hold() -> None:
                assert not held.is_set()
                session.pause_reading()
                held.set()

            recorder.on_output = hold
            await recorder.start("/bin/sh", "-c", "seq 1 100000")
            await held.wait()
            for _ in range(10):
                recorder.on_output = lambda: pytest.fail("output while held")
                await asyncio.sleep(0)
            recorder.on_output = lambda: None
            session.resume_reading()
            await recorder.complete.wait()
            assert recorder.output == b"".join(b"%d\n" % n for n in range(1, 100_001))
            session.pause_reading()  # closing does not need to be let

    with start_server(kind) as server:
        bounded(scene(WebSocketDialer(server.url)), run)
    bounded(scene(stdio_dialer(kind)), run)


@pytest.mark.parametrize("run", LOOPS)
def test_a_program_that_is_cancelled_is_gone(run: Run) -> None:
    async def scene() -> None:
        connected = asyncio.Event()

        async def use() -> None:
            async with ClientSession(stdio_dialer("ours")):
                connected.set()
                await asyncio.Event().wait()

        async with asyncio.TaskGroup() as tasks:
            user = tasks.create_task(use())
            await connected.wait()
            user.cancel()

    before = descendants(os.getpid())
    bounded(scene(), run)
    left = {p: s for p, s in descendants(os.getpid()).items() if p not in before}
    assert not survivors(left)


@pytest.mark.parametrize("run", LOOPS)
def test_what_a_program_says_on_stderr(run: Run) -> None:
    lines: list[str] = []
    long = "x" * (stdio.STDERR_BYTES + 10)
    words = [*server_command("ours"), "--listen", "stdio"]
    script = f'printf "one\\ntwo\\n{long}\\nrest" >&2; exec "$@"'
    argv = ["/bin/sh", "-c", script, "sh", *words]
    bounded(exercise(StdioDialer(argv, server_environment("ours"), on_stderr=lines.append)), run)
    assert lines[:4] == ["one", "two", long[: stdio.STDERR_BYTES], "x" * 10]
    assert lines[4].startswith("rest")


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ConnectFailed, match=r"cannot start /none: No such file or directory"):
        bounded(exercise(StdioDialer(["/none"])))


def test_a_program_that_speaks_another_language() -> None:
    with pytest.raises(ConnectFailed, match="connection ended during initialize: malformed"):
        bounded(exercise(StdioDialer(["/bin/echo", "hello"])))


# Knows no method at all.
STRANGER = """
import json, sys
for line in sys.stdin:
    error = {"code": -32601, "message": "Unhandled method"}
    print(json.dumps({"jsonrpc": "2.0", "id": json.loads(line)["id"], "error": error}), flush=True)
"""
# Says and asks something before it answers.
CHATTY = """
import json, sys
greeting = json.loads(sys.stdin.readline())
print(json.dumps({"method": "some/news", "params": {}}), flush=True)
print(json.dumps({"id": 1, "method": "some/question", "params": {}}), flush=True)
assert json.loads(sys.stdin.readline())["error"]["code"] == -32601
info = {"shell": {"name": "", "path": ""}}
answer = {"sessionId": "s", "environmentInfo": info}
print(json.dumps({"id": greeting["id"], "result": answer}), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize(
    "argv", [["cat"], ["tee", "/dev/null"], [sys.executable, "-c", STRANGER]], ids=lambda a: a[0]
)
def test_a_program_that_only_seems_to_speak_the_protocol(argv: list[str], run: Run) -> None:
    with pytest.raises(ConnectFailed, match="does not speak the protocol of an exec-server"):
        bounded(exercise(StdioDialer(argv)), run)


def test_a_server_may_speak_before_it_answers() -> None:
    async def scene() -> None:
        async with ClientSession(StdioDialer([sys.executable, "-c", CHATTY])) as session:
            assert session.session_id == "s"

    bounded(scene())


def test_a_program_inherits_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXEC_SERVER_API_KEY", "secret-1")
    monkeypatch.setenv("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", "secret-2")
    monkeypatch.setenv("EXEC_SERVER_TEST_CANARY", "canary")
    lines: list[str] = []
    dialer = StdioDialer(["/bin/sh", "-c", "env >&2"], on_stderr=lines.append)
    with pytest.raises(ConnectFailed):
        bounded(exercise(dialer))
    assert "EXEC_SERVER_TEST_CANARY=canary" in lines
    assert not [line for line in lines if "secret-" in line]


@pytest.mark.parametrize("run", LOOPS)
def test_a_program_may_end_before_it_is_greeted(run: Run) -> None:
    """Its pipes are found closed in the middle of opening the link, or a moment later."""

    async def scene() -> None:
        for _ in range(60):
            with pytest.raises(ConnectFailed, match="connection ended during initialize"):
                async with ClientSession(StdioDialer(["true"])):
                    raise AssertionError("it cannot be connected")

    bounded(scene(), run)


@pytest.mark.quick
def test_the_last_lines_of_a_program_explain_why_it_does_not_serve() -> None:
    script = f"seq {stdio.KEPT_LINES} >&2; echo >&2; printf '%0400d' 0 >&2; exit 3"
    with pytest.raises(ConnectFailed) as failed, sync.connect(f"stdio:sh -c {shlex.quote(script)}"):
        pass
    last = "0" * stdio.KEPT_CHARACTERS
    lines = (*map(str, range(2, stdio.KEPT_LINES + 1)), last)
    assert failed.value.stderr_lines == lines
    assert str(failed.value).endswith(f"\n  {stdio.KEPT_LINES}\n  {last}")
    with pytest.raises(ConnectFailed, match="--nope"):
        sync.Environment.local("--nope")
