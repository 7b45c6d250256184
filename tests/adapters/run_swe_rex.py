"""SWE-ReX as SWE-agent uses it: a deployment, sessions that keep their state, commands, files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    NoExitCodeError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

from exec_server import Environment
from exec_server.adapters import swe_rex
from exec_server.adapters.swe_rex import ExecServerDeployment, ExecServerRuntime
from exec_server.adapters.target import make_environment
from tests.adapters.coding_task import (
    COUNT_LEFT,
    EDIT,
    FIXED,
    NEVER_ENDS,
    READ,
    RUN_TESTS,
    make_repository,
)

Scene = Callable[[ExecServerRuntime], Awaitable[None]]


def play(server_url: str, scene: Scene) -> None:
    async def with_deployment() -> None:
        deployment = ExecServerDeployment(server_url)
        with pytest.raises(DeploymentNotStartedError):
            _ = deployment.runtime
        await deployment.start()
        try:
            assert await deployment.is_alive()
            async with asyncio.timeout(120):
                await scene(deployment.runtime)
        finally:
            await deployment.stop()
        assert not await deployment.is_alive()

    asyncio.run(with_deployment())


def test_a_coding_task(server_url: str, tmp_path: Path) -> None:
    folder = make_repository(tmp_path)

    async def scene(runtime: ExecServerRuntime) -> None:
        await runtime.create_session(CreateBashSessionRequest())
        with pytest.raises(SessionExistsError):
            await runtime.create_session(CreateBashSessionRequest())

        async def run(command: str) -> str:
            return str((await runtime.run_in_session(BashAction(command=command))).output)

        await run(f"cd {folder}; export WORD='of the session'")
        assert "return a - b" in await run(READ)
        with pytest.raises(NonZeroExitCodeError, match="AssertionError: -1"):
            await run(RUN_TESTS)
        await run(EDIT)
        assert await run(f'{RUN_TESTS}\nprintf "$WORD\\n"') == "all tests pass\nof the session\n"
        content = (await runtime.read_file(ReadFileRequest(path=f"{folder}/app.py"))).content
        assert content == FIXED
        await runtime.close_session(CloseBashSessionRequest())
        with pytest.raises(SessionDoesNotExistError):
            await run("true")

    play(server_url, scene)


def test_terminals_and_interrupts(server_url: str) -> None:
    async def scene(runtime: ExecServerRuntime) -> None:
        await runtime.create_session(CreateBashSessionRequest(session="s"))

        async def run(command: str, **options: Any) -> Any:
            action = BashAction(command=command, session="s", **options)
            return await runtime.run_in_session(action)

        with pytest.raises(BashIncorrectSyntaxError):
            await run("if then")
        silent = await run("(exit 7)", check="silent")
        assert (silent.exit_code, silent.output) == (7, "")
        assert (await run("false", check="ignore")).exit_code is None
        with pytest.raises(CommandTimeoutError):
            await run("echo begun; sleep 600", timeout=1)
        interrupted = await runtime.run_in_session(BashInterruptAction(session="s", timeout=5))
        assert "begun" in interrupted.output
        assert (await run("PS1='> '; echo again")).output == "again\n"
        started = await run("python3 -q", is_interactive_command=True, expect=[">>> "])
        assert started.expect_string == ">>> "
        shown = await run("print(6 * 7)", is_interactive_command=True, expect=[">>> "])
        assert "42" in shown.output
        await run("quit()", is_interactive_quit=True)
        assert (await run("echo back")).output == "back\n"
        long = "x" * 100_000
        assert (await run(f"echo {long}")).output == f"{long}\n"

    play(server_url, scene)


def test_commands_and_files(server_url: str, tmp_path: Path) -> None:
    async def scene(runtime: ExecServerRuntime) -> None:
        text = Command(command="echo a; echo b >&2", shell=True, merge_output_streams=True)
        assert (await runtime.execute(text)).stdout == "a\nb\n"
        words = Command(command=["sh", "-c", "pwd; echo $A; exit 3"], cwd="/", env={"A": "b"})
        done = await runtime.execute(words)
        assert (done.stdout, done.exit_code) == ("/\nb\n", 3)
        with pytest.raises(NonZeroExitCodeError, match="because"):
            await runtime.execute(Command(command=["false"], check=True, error_msg="because"))
        with pytest.raises(CommandTimeoutError):
            await runtime.execute(Command(command=["sleep", "600"], timeout=0.2))
        await runtime.write_file(WriteFileRequest(path=f"{tmp_path}/a/b", content="text"))
        await runtime.upload(
            UploadRequest(source_path=f"{tmp_path}/a", target_path=f"{tmp_path}/c")
        )
        read = await runtime.read_file(ReadFileRequest(path=f"{tmp_path}/c/b"))
        assert read.content == "text"
        with pytest.raises(FileNotFoundError):
            await runtime.read_file(ReadFileRequest(path=f"{tmp_path}/missing"))

    play(server_url, scene)


def test_a_cancelled_command_is_killed(server_url: str) -> None:
    async def scene(runtime: ExecServerRuntime) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await runtime.execute(Command(command=NEVER_ENDS, shell=True))
        left = await runtime.execute(Command(command=COUNT_LEFT, shell=True))
        assert left.stdout == "0\n"

    play(server_url, scene)


def test_a_cancelled_session(server_url: str) -> None:
    """The command goes on in its terminal until it is interrupted, and ends with the session."""

    async def scene(runtime: ExecServerRuntime) -> None:
        await runtime.create_session(CreateBashSessionRequest())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await runtime.run_in_session(BashAction(command=NEVER_ENDS, timeout=600))
        await runtime.run_in_session(BashInterruptAction(timeout=5))
        again = await runtime.run_in_session(BashAction(command="echo again"))
        assert again.output == "again\n"
        await runtime.close_session(CloseBashSessionRequest())
        left = await runtime.execute(Command(command=COUNT_LEFT, shell=True))
        assert left.stdout == "0\n"

    play(server_url, scene)


def test_a_command_that_ignores_all_keys(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swe_rex, "STOP_SECONDS", 0.2)
    stubborn = "sh -c 'trap \"\" INT TSTP; echo begun; sleep 600'"

    async def scene(runtime: ExecServerRuntime) -> None:
        await runtime.create_session(CreateBashSessionRequest())
        begun = BashAction(command=stubborn, is_interactive_command=True, expect=["begun"])
        await runtime.run_in_session(begun)
        with pytest.raises(CommandTimeoutError, match="cannot be interrupted"):
            await runtime.run_in_session(BashInterruptAction(timeout=0.2, n_retry=1))
        await runtime.close_session(CloseBashSessionRequest())
        await runtime.create_session(CreateBashSessionRequest())
        leave = BashAction(command="exec sh -c 'echo begun; sleep 600'", expect=["begun"])
        await runtime.run_in_session(leave)
        with pytest.raises(NoExitCodeError):
            await runtime.run_in_session(BashInterruptAction(timeout=5))

    play(server_url, scene)


def test_calls_at_once_make_one_connection(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(*arguments: Any) -> Environment:
        made.append(make_environment(*arguments))
        return made[-1]

    async def scene() -> None:
        runtime = ExecServerRuntime(server_url)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(runtime.is_alive())
        await runtime.close()

    monkeypatch.setattr(swe_rex, "make_environment", make)
    asyncio.run(scene())
    assert len(made) == 1
