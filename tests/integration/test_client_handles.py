"""Environments and processes with a life of their own, and the ways to end a process."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.client import scaled
from tests.support.client_targets import ClientTarget, bounded
from tests.support.server_internals import eventually, is_running

from exec_server import Environment, Process, SessionLost, serve, sync

# It says that it is ready, and ignores SIGTERM.
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
POLITE = "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.mark.quick
def test_handles_without_blocks(there: ClientTarget) -> None:
    """Opened by one task, used and closed by others."""
    word = f"35{os.getpid()}"

    async def scene() -> None:
        async with asyncio.TaskGroup() as tasks:
            env = await tasks.create_task(_opened(there.make()))
        async with asyncio.TaskGroup() as tasks:
            process = await tasks.create_task(_started(env, word))
            other = await env.start(["sleep", word])
        async with asyncio.TaskGroup() as tasks:
            assert await tasks.create_task(env.run(["true"]))
            tasks.create_task(process.aclose())
        assert process.exit_code == process.returncode == 137
        assert other.exit_code is None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(env.aclose())
        with pytest.raises(SessionLost):
            await env.run(["true"])
        await other.aclose()
        await env.aclose()

    bounded(scene())
    eventually("they are gone", lambda: not is_running(word))


async def _opened(env: Environment) -> Environment:
    return await env


async def _started(env: Environment, word: str) -> Process:
    return await env.start(["sleep", word])


def test_a_task_that_connects_may_be_cancelled_later(there: ClientTarget) -> None:
    """Its end, and the cancellation of its later work, leave the environment alone."""

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Environment] = loop.create_future()

        async def connect_and_wait() -> None:
            opened.set_result(await there.make())
            await asyncio.Event().wait()

        connecting = loop.create_task(connect_and_wait())
        env = await opened
        connecting.cancel()
        await asyncio.wait([connecting])
        assert await env.run(["true"])
        await env.aclose()

    bounded(scene())


@pytest.mark.parametrize("runner", ["asyncio.run(main())", "loop.run_until_complete(main())"])
def test_a_program_that_forgets_leaves_nothing_running(there: ClientTarget, runner: str) -> None:
    word = f"37{os.getpid()}"
    program = (
        "import asyncio, sys\n"
        "from exec_server import connect\n"
        "async def main():\n"
        "    global env\n"
        "    env = await connect(sys.argv[1])\n"
        "    process = await env.start(['sleep', sys.argv[2]])\n"
        "    print(process.exit_code)\n"
        "loop = asyncio.new_event_loop()\n"
        f"{runner}\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, there.url, word],
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(20),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "None\n", "")
    assert not is_running(word)


def test_a_server_without_a_block() -> None:
    async def scene() -> None:
        server = await serve()
        assert is_alive(server.pid)
        await server.aclose()
        assert not is_alive(server.pid)

    bounded(scene())
    running = sync.serve()
    assert is_alive(running.pid)
    running.close()
    assert not is_alive(running.pid)


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_without_async(there: ClientTarget) -> None:
    env = sync.connect(there.url)
    process = env.start(["sh", "-c", "echo ready; exec sleep 1000"])
    assert next(iter(process)).data == b"ready\n"
    with pytest.raises(TimeoutError, match=r"sh has not exited after 0\.01 s"):
        process.wait(timeout=0.01)
    process.kill()
    assert process.wait() == process.returncode == 137
    process.close()
    process.close()
    with env.start(["sleep", "1000"]) as second:
        env.close()  # before the process
    second.close()
    with pytest.raises(SessionLost):
        second.wait()


# ---- the end of a process -------------------------------------------------------------


def test_a_process_is_asked_to_end_and_then_killed(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        has_signals = env.capabilities.process_signals
        async with env.start(["sh", "-c", POLITE]) as process:
            assert (await anext(process)).data == b"ready\n"
            await process.terminate(grace=scaled(20))
            assert process.exit_code == (3 if has_signals else 137)
            rest = b"".join([chunk.data async for chunk in process if chunk.stream == "stdout"])
            assert rest == (b"bye\n" if has_signals else b"")
            await process.terminate()  # it is over
        async with env.start(["sh", "-c", STUBBORN]) as process:
            assert (await anext(process)).data == b"ready\n"
            began = time.monotonic()
            await process.terminate(grace=0.2)
            assert await process.wait() == 137
            assert not has_signals or time.monotonic() - began >= 0.2

    there.play(scene)


def test_what_a_terminated_process_leaves_is_killed(there: ClientTarget) -> None:
    """A descendant that ignores the signal, after the grace."""
    word = f"38{os.getpid()}"

    async def scene(env: Environment) -> None:
        child = f"trap '' TERM; sleep {word} & wait"
        process = await env.start(["sh", "-c", f"({child}) & echo ready; exec sleep 1000"])
        assert (await anext(process)).data == b"ready\n"
        eventually("the child runs", lambda: is_running(word))
        await process.terminate(grace=0.1)
        await process.wait()
        eventually("the child is gone", lambda: not is_running(word))

    there.play(scene)


def test_a_wait_may_be_given_up(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", "read line; exit 5"], stdin=True) as process:
            with pytest.raises(TimeoutError, match=r"^sh has not exited after 0\.01 s$"):
                await process.wait(timeout=0.01)
            assert process.returncode is None
            await process.write(b"\n")
            assert await process.wait(timeout=scaled(20)) == 5

    there.play(scene)


def test_the_id_of_a_process(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", "echo $$; cat"], stdin=True) as process:
            said = int((await anext(process)).data)
            if there.is_ours:
                assert process.pid == said
                (listed,) = [each for each in await env.processes() if each.running]
                assert listed.pid == said
            else:
                assert process.pid is None
        if there.is_ours:
            async with env.start(["cat"], stdin=True, sandbox="read-only") as process:
                assert process.pid is not None
                assert is_alive(process.pid)

    there.play(scene)


def test_files_without_blocks(there: ClientTarget, tmp_path: Path) -> None:
    path = tmp_path / "f"

    async def scene(env: Environment) -> None:
        writer = env.files.open(path, "wb")
        with pytest.raises(RuntimeError, match="is not open"):
            await writer.write(b"x")
        with pytest.raises(RuntimeError, match="is not open"):
            await writer.flush()
        assert await writer is writer
        await writer.write(b"data")
        await writer.aclose()
        assert path.read_bytes() == b"data"
        reader = env.files.open(path)
        with pytest.raises(RuntimeError, match="is not open"):
            await reader.read()
        with pytest.raises(RuntimeError, match="is not open"):
            await anext(reader)
        with pytest.raises(RuntimeError, match="is not open"):
            await reader.is_changed()
        with pytest.raises(RuntimeError, match="is not open"):
            assert reader.size
        await reader
        assert await reader.read() == b"data"
        await reader.aclose()

    there.play(scene)


def test_files_without_blocks_and_async(there: ClientTarget, tmp_path: Path) -> None:
    path = tmp_path / "f"
    with sync.connect(there.url) as env:
        writer = env.files.open(path, "wb")
        writer.write(b"data")
        writer.close()
        writer.close()
        assert path.read_bytes() == b"data"
        with pytest.raises(KeyError), env.files.open(path, "wb") as writer:
            raise KeyError
        env.files.open(path, "wb")._abandon()
        assert path.read_bytes() == b"data"
        reader = env.files.open(path)
        assert reader.read() == b"data"
        reader.close()
        lines, appender = env.files.open(path, "r"), env.files.open(path, "ab")
        shell = env.shell_session()
        for handle in (lines, appender, shell):
            handle.close()
        for use in (
            reader.read,
            lines.readline,
            lambda: appender.write(b"x"),
            lambda: shell.run("true"),
        ):
            with pytest.raises(RuntimeError, match="is not open: it was closed"):
                use()


def test_wrong_arguments_are_named(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        with pytest.raises(NotADirectoryError) as caught:
            await env.run(["true"], cwd="/etc/passwd")
        assert (caught.value.errno, caught.value.filename) == (errno.ENOTDIR, "/etc/passwd")
        with pytest.raises(NotADirectoryError) as caught:
            await env.run(["/etc/passwd/x"])
        assert caught.value.filename == "/etc/passwd/x"
        for work in (env.run(["true"], timeout=cast(Any, "5")), env.shell(cast(Any, ["ls"]))):
            with pytest.raises(TypeError, match="must be"):
                await work
        with pytest.raises(TypeError, match="stdin must be a bool"):
            env.start(["cat"], stdin=cast(Any, b"x"))
        with pytest.raises(TypeError, match="needs tty"):
            env.start(["cat"], size=(1, 1))
        async with env.start(["cat"], stdin=True) as process:
            await process.write("grün\n")
            assert await anext(process.lines()) == "grün"
        for change in (env.files.rename, env.files.copy):
            with pytest.raises(FileNotFoundError) as missing:
                await change(tmp_path / "a", tmp_path / "b")
            names = (missing.value.filename, missing.value.filename2)
            assert names == (f"{tmp_path}/a", f"{tmp_path}/b")

    there.play(scene)
