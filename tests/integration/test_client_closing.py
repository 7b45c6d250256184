"""Closing ends everything at once: children that have left the group and hold no pipe, too."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cli import run_client, start_client
from tests.support.client import scaled, start_server
from tests.support.client_targets import ClientTarget, Proxy, bounded, machine
from tests.support.server_internals import eventually

from exec_server import Environment, Timeout, connect, sync

# Children that a command leaves: in its group, with a session of its own, of a parent that is gone.
_LEAVE = """
sleep 1001 > log 2>&1 & echo $! >> pids
nohup sleep 1002 > log 2>&1 & echo $! >> pids
setsid sleep 1003 > log 2>&1 & echo $! >> pids
(setsid sh -c 'echo $$ >> pids; exec sleep 1004' < /dev/null > log 2>&1 &)
while [ $(wc -l < pids) -lt 4 ]; do sleep 0.01; done
"""


@pytest.fixture(params=["websocket", "stdio", "relay"])
def ours(request: pytest.FixtureRequest) -> Iterator[ClientTarget]:
    with machine("ours", request.param) as target:
        yield target


def left_running(folder: Path) -> list[str]:
    """The children whose pids the file has, and that have not ended."""
    return [pid for pid in pids_of(folder) if _state(pid) not in ("", "Z")]


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def stop(pid: int) -> None:
    """Stop a process; it has stopped on return."""
    os.kill(pid, signal.SIGSTOP)
    eventually("it has stopped", lambda: _state(str(pid)) == "T")


def test_the_end_of_a_block_ends_what_its_commands_have_left(
    ours: ClientTarget, tmp_path: Path
) -> None:
    async def scene(env: Environment) -> None:
        await env.shell(_LEAVE, cwd=tmp_path)
        assert len(left_running(tmp_path)) == 4

    ours.play(scene)
    assert left_running(tmp_path) == []


def test_processes_that_were_forgotten_long_ago(tmp_path: Path) -> None:
    async def scene(url: str) -> None:
        env = await connect(url)
        await env.shell(_LEAVE, cwd=tmp_path)
        while await env.processes():
            await asyncio.sleep(0.01)
        assert len(left_running(tmp_path)) == 4
        await env.aclose()

    with start_server("ours", "--process-retention", "0.05") as server:
        bounded(scene(server.url))
        assert left_running(tmp_path) == []


def test_a_detached_process_and_other_sessions_go_on(tmp_path: Path) -> None:
    async def scene(url: str) -> None:
        async with connect(url) as other:
            process = await other.start(["sleep", "60"])
            async with connect(url) as env:
                await env.shell(_LEAVE, cwd=tmp_path)
                await env.start(["sleep", "60"], detach=True, name="stays")
            assert left_running(tmp_path) == []
            [detached] = await other.detached_processes()
            assert (detached.name, detached.running) == ("stays", True)
            assert process.exit_code is None
            assert [each.running for each in await other.processes()] == [True]

    with start_server("ours") as server:
        bounded(scene(server.url))


def test_without_async(tmp_path: Path) -> None:
    with start_server("ours") as server:
        with sync.connect(server.url) as env:
            env.shell(_LEAVE, cwd=tmp_path)
            assert len(left_running(tmp_path)) == 4
        assert left_running(tmp_path) == []


def test_a_program_that_forgets_to_close(tmp_path: Path) -> None:
    program = (
        "import sys; from exec_server import sync\n"
        "env = sync.connect(sys.argv[1]); env.shell(sys.argv[2], cwd=sys.argv[3])"
    )
    with start_server("ours") as server:
        words = [sys.executable, "-c", program, server.url, _LEAVE, str(tmp_path)]
        subprocess.run(words, check=True, timeout=scaled(30))
        assert left_running(tmp_path) == []


_SYNC = """
import sys
from exec_server import sync
with sync.connect(sys.argv[1]) as env:
    env.shell(sys.argv[2], cwd=sys.argv[3])
    print("ready", flush=True)
    env.run(["sleep", "60"])
"""
_ASYNC = """
import asyncio, sys
from exec_server import connect
async def main():
    async with connect(sys.argv[1]) as env:
        await env.shell(sys.argv[2], cwd=sys.argv[3])
        print("ready", flush=True)
        await env.run(["sleep", "60"])
asyncio.run(main())
"""


@pytest.mark.parametrize("program", [_SYNC, _ASYNC], ids=["sync", "async"])
def test_the_end_of_a_program_by_control_c(program: str, tmp_path: Path) -> None:
    with start_server("ours") as server:
        words = [sys.executable, "-c", program, server.url, _LEAVE, str(tmp_path)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
            try:
                assert started.stdout is not None
                assert started.stdout.readline() == b"ready\n"
                assert len(left_running(tmp_path)) == 4
                started.send_signal(signal.SIGINT)
                started.communicate(timeout=scaled(20))
            finally:
                started.kill()
        assert left_running(tmp_path) == []


def test_commands_end_what_they_have_left(tmp_path: Path) -> None:
    with start_server("ours") as server:
        words = ("exec", "--cwd", str(tmp_path), server.url)
        assert run_client(*words, "sh", "-c", _LEAVE).returncode == 0
        assert left_running(tmp_path) == []
        (tmp_path / "pids").unlink()
        waiting = f"{_LEAVE} echo ready; trap '' INT; sleep 60"
        with start_client(*words, "sh", "-c", waiting) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"ready\n"
            assert len(left_running(tmp_path)) == 4
            client.send_signal(signal.SIGINT)
            time.sleep(0.05)  # two signals in the same moment are one
            client.send_signal(signal.SIGINT)
            client.wait(scaled(10))
        assert left_running(tmp_path) == []


def test_a_client_that_is_lost_is_waited_for(tmp_path: Path) -> None:
    async def scene(url: str) -> None:
        async with Proxy(url).running() as proxy:
            env = await connect(proxy.url)
            await env.shell(_LEAVE, cwd=tmp_path)
            async with asyncio.timeout(scaled(10)):
                proxy.target = "ws://127.0.0.1:1"
                proxy.cut()
                while env.session.is_connected:
                    await asyncio.sleep(0.01)
            await env.aclose()
        assert len(left_running(tmp_path)) == 4

    with start_server("ours", "--session-retention", "1") as server:
        bounded(scene(server.url))
        eventually("the session has expired", lambda: not left_running(tmp_path))


@pytest.mark.parametrize("kind", ["ours", "reference"])
def test_a_server_that_does_not_answer_delays_closing_by_a_second(
    kind: str, tmp_path: Path
) -> None:
    async def scene(url: str, pid: int) -> None:
        env = await connect(url)
        process = await env.start(["sleep", "60"])
        writer = await env.files.open(tmp_path / "f", "wb")  # has a temporary file to remove
        await writer.write(b"data")
        await env.start(["sleep", "60"])
        loop = asyncio.get_running_loop()
        stop(pid)
        try:
            began = loop.time()
            await process.aclose()
            assert loop.time() - began < scaled(1.0) + 0.5
            began = loop.time()
            await env.aclose()
            assert loop.time() - began < scaled(1.0) + 0.5
        finally:
            os.kill(pid, signal.SIGCONT)

    with start_server(kind) as server:
        bounded(scene(server.url, server.process.pid))


def test_a_program_that_does_not_answer_is_killed_after_a_second() -> None:
    async def scene() -> None:
        env = await Environment.local()
        pid = int((await env.shell("echo $PPID")).text)
        stop(pid)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await env.aclose()
        assert loop.time() - began < scaled(1.0) + 0.7
        assert _state(str(pid)) == ""

    bounded(scene())


def test_the_reference_ends_what_runs(tmp_path: Path) -> None:
    """It kills the groups of commands that run; what others have left stays until it ends."""

    async def scene(env: Environment) -> None:
        await env.start(["sh", "-c", f"{_LEAVE} sleep 1005"], cwd=tmp_path)
        async with asyncio.timeout(scaled(10)):
            while len(pids_of(tmp_path)) < 4:
                await asyncio.sleep(0.01)

    with machine("reference") as target:
        target.play(scene)
        in_group = pids_of(tmp_path)[:2]
        eventually("its group is dead", lambda: not {*in_group} & {*left_running(tmp_path)})
    for pid in left_running(tmp_path):
        os.kill(int(pid), signal.SIGKILL)


def pids_of(folder: Path) -> list[str]:
    try:
        return (folder / "pids").read_text().split()
    except FileNotFoundError:
        return []


def test_a_timeout_of_a_shell_session_with_a_server_that_is_away() -> None:
    """The command is never sent, and the shell keeps its state."""

    async def scene(url: str) -> None:
        loop = asyncio.get_running_loop()
        async with (
            Proxy(url).running() as proxy,
            connect(proxy.url) as env,
            env.shell_session() as shell,
        ):
            await shell.run("NAME=value")
            proxy.is_open = False
            proxy.cut()
            while env.session.is_connected:
                await asyncio.sleep(0.01)
            began = loop.time()
            with pytest.raises(Timeout, match="was not sent") as unsent:
                await shell.run("NAME=other; sleep 60", timeout=0.2)
            assert loop.time() - began < scaled(0.2) + 0.5
            assert not unsent.value.was_sent
            proxy.is_open = True
            assert (await shell.run("echo $NAME")).text == "value\n"

    with start_server("ours") as server:
        bounded(scene(server.url))


def test_a_timeout_with_a_server_that_is_away() -> None:
    """A command that was sent is waited for a second longer than one that was not."""

    async def scene(url: str, pid: int) -> None:
        loop = asyncio.get_running_loop()
        async with Proxy(url).running() as proxy, connect(proxy.url) as env:
            stop(pid)
            began = loop.time()
            with pytest.raises(Timeout) as unanswered:
                await env.run(["sleep", "60"], timeout=0.2)
            assert 1.1 < loop.time() - began < scaled(1.2) + 0.5
            assert unanswered.value.was_sent
            proxy.is_open = False
            proxy.cut()
            while env.session.is_connected:
                await asyncio.sleep(0.01)
            began = loop.time()
            with pytest.raises(Timeout) as unsent:
                await env.run(["sleep", "60"], timeout=0.2)
            assert loop.time() - began < scaled(0.2) + 0.5
            assert not unsent.value.was_sent

    with start_server("ours") as server:
        try:
            bounded(scene(server.url, server.process.pid))
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
