"""An environment with a server that is the test: commands that run to their end."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import Any, cast

import pytest
from tests.support.memory_session import (
    GREETING,
    MemoryDialer,
    Message,
    Scene,
    in_environment,
    outcome,
    play,
    turns,
)

from exec_server.client import commands as run_module
from exec_server.client.commands import Command, OutputLimit
from exec_server.client.engine import flow_control as queue_module
from exec_server.client.environment import Environment
from exec_server.client.exceptions import CommandDenied, CommandFailed, Timeout
from exec_server.client.results import Result
from exec_server.errors import (
    ConnectFailed,
    InvalidParams,
    ProgramNotFound,
    RpcError,
    SessionLost,
    Unsupported,
)


async def accepted(scene: Scene) -> Message:
    """The params of the next start, which the server accepts."""
    request = await scene.stream.next("process/start")
    scene.process_id = request["params"]["processId"]
    scene.accept(request)
    params: Message = request["params"]
    return params


async def killed(scene: Scene) -> None:
    request = await scene.stream.next("process/terminate")
    assert request["params"] == {"processId": scene.process_id}
    scene.stream.answer(request, {"running": True})


@in_environment
async def test_directories_are_plain_paths(scene: Scene) -> None:
    assert (scene.env.cwd, scene.env.home, scene.env.temp_dir) == ("/home", None, "/tmp")
    assert scene.env.info.cwd == "file:///home"


@in_environment
async def test_arguments_of_another_type_are_refused_before_anything_is_done(scene: Scene) -> None:
    env: Any = scene.env
    process: Any = await scene.started()
    for work, text in (
        (env.run(["a"], env=["A=1"]), "env must be a mapping"),
        (env.run(["a"], on_output=3), "on_output must be callable, not int"),
        (env.run(["a"], user=True), "user must be a name or a number, not bool"),
        (env.python(b"1"), "code must be str, not bytes"),
        (env.wait_for_port("3998"), "port must be an int, not str"),
        (env.wait_for_port(3998, "1"), "timeout must be a number of seconds, not str"),
        (env.http("GET", "http://h", body="x"), "body must be bytes, not str"),
        (env.http("GET", "http://h", timeout="1"), "timeout must be a number"),
        (env.files.touch("f", modified="now"), "modified must be a number of seconds or a date"),
        (env.files.edit("f", ("ab", "cd")), "or a list of pairs"),
        (env.files.edit("f", "a", b"b"), "or a list of pairs"),
        (env.run(Command(["a"])), "not Command; run_many and run_each take Command objects"),
        (process.write(3), "data must be bytes or str, not int"),
        (env.run(["a"], on_output=1), "on_output must be callable, not int"),
        (env.run_many([["a"]], progress=1), "progress must be callable, not int"),
        (env.run_many([["a"]], concurrency="2"), "concurrency must be an int, not str"),
        (env.files.upload(__file__, "f", progress=1), "progress must be callable, not int"),
        (env.files.download("f", "f", progress=1), "progress must be callable, not int"),
        (process.wait("3"), "timeout must be a number of seconds, not str"),
        (process.read_until(b"x", "3"), "timeout must be a number of seconds, not str"),
        (process.collect("1"), "seconds must be a number of seconds, not str"),
        (process.terminate("5"), "grace must be a number of seconds, not str"),
    ):
        with pytest.raises(TypeError, match=text):
            await work
    for name in ("A=B", ""):
        with pytest.raises(ValueError, match="a name is not empty and has no ="):
            await env.run(["a"], env={name: "x"})
    for work, text in (
        (process.wait(-1), "timeout must be at least 0 seconds, not -1"),
        (process.terminate(-1), "grace must be at least 0 seconds, not -1"),
        (process.read_until(b"x", -1), "timeout must be at least 0 seconds, not -1"),
        (process.wait_for_output(b"x", math.nan), "timeout must be at least 0 seconds, not nan"),
        (process.collect(math.nan), "seconds must be at least 0 seconds, not nan"),
        (env.wait_for_port(80, -1), "timeout must be at least 0 seconds, not -1"),
        (env.http("GET", "http://a/", timeout=-1), "timeout must be at least 0 seconds, not -1"),
    ):
        with pytest.raises(ValueError, match=text):
            await work
    with pytest.raises(InvalidParams, match=r"^argv has 250001 words, more than 250000:"):
        await env.run(["a"] * 250_001)
    for work, text in (
        (env.files.read("f", limit=-1), "limit must not be negative: -1"),
        (env.files.read_many(["f"], limit=-1), "limit must not be negative: -1"),
        (env.files.glob("*", limit=-1), "limit must not be negative: -1"),
        (env.files.grep("x", context=-1), "context must not be negative: -1"),
        (env.files.grep("x", after=-1), "after must not be negative: -1"),
        (anext(aiter(env.files.walk(depth=-1))), "depth must not be negative: -1"),
    ):
        with pytest.raises(ValueError, match=text):
            await work
    with pytest.raises(TypeError, match="depth must be a whole number, not str"):
        await anext(aiter(env.files.walk(depth=cast(int, "1"))))
    with pytest.raises(ValueError, match="offset must not be negative: -1"):
        env.files.open("f", offset=-1)
    for work, text in (
        (env.run(["a", "b\0"]), r"argv\[1\] cannot contain a null character"),
        (env.run(["a"], env={"A": "\0"}), r"env\['A'\] cannot contain a null character"),
        (env.run(["a"], env={"A\0": ""}), "in env cannot contain a null character"),
    ):
        with pytest.raises(InvalidParams, match=text):
            await work
    text = "^unknown signal 'NOPE': use a name such as TERM, INT or USR1$"
    with pytest.raises(InvalidParams, match=text):
        await process.signal("NOPE")
    assert scene.stream.is_quiet


@in_environment
async def test_a_result_has_all_output(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(scene.env.run(["a", "b"]))
        await accepted(scene)
        scene.output(1, b"one ")
        scene.say("output", 2, stream="stderr", chunk=base64.b64encode(b"err").decode())
        scene.exited(3, 7)
        scene.output(4, b"two")
        await turns()
        assert not run.done()
        scene.say("closed", 5)
    result = run.result()
    assert result == Result(("a", "b"), b"one two", b"err", 7, result.duration)
    assert scene.stream.is_quiet


@in_environment
async def test_output_beyond_the_limit_is_counted(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(scene.env.run(["a"], output_limit=5))
        await accepted(scene)
        for seq in range(1, 4):
            scene.output(seq, b"xyz")
        scene.exited(4)
        scene.say("closed", 5)
    assert (run.result().stdout, run.result().lost_bytes) == (b"xyzxy", 4)
    with pytest.raises(InvalidParams, match="output_limit must not be negative"):
        await scene.env.run(["a"], output_limit=-1)
    wrong: list[tuple[Any, str]] = [
        (1e6, "^output_limit must be an int, not float$"),
        ("5", "^output_limit must be an int, not str$"),
        (OutputLimit(tail=cast(Any, 1e3)), "^tail of output_limit must be an int, not float$"),
    ]
    for limit, text in wrong:
        with pytest.raises(TypeError, match=text):
            await scene.env.run(["a"], output_limit=limit)
    assert scene.stream.is_quiet


@in_environment
async def test_much_output_does_not_stop_the_reading(scene: Scene) -> None:
    """Collected output passes no queue, so a run is never paused or skipped."""
    chunk = bytes(queue_module.FULL_BYTES)
    count = queue_module.OVERFLOW_BYTES // len(chunk) + 1
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(scene.env.run(["a"]))
        await accepted(scene)
        for seq in range(1, count + 1):
            scene.output(seq, chunk)
            assert scene.stream.receiving
        scene.exited(count + 1)
        scene.say("closed", count + 2)
    assert (len(run.result().stdout), run.result().lost_bytes) == (count * len(chunk), 0)


@in_environment
async def test_input_is_written_and_closed(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(scene.env.run(["a"], input=b"data"))
        assert (await accepted(scene))["pipeStdin"]
        write = await scene.stream.next("process/write")
        assert write["params"]["chunk"] == base64.b64encode(b"data").decode()
        scene.stream.answer(write, {"status": "accepted"})
        scene.stream.answer(await scene.stream.next("process/closeStdin"), {})
        scene.exited(1)
        scene.say("closed", 2)
    assert run.result()


@in_environment
async def test_a_command_need_not_read_its_input(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(scene.env.run(["a"], input=b"data"))
        await accepted(scene)
        scene.stream.answer(await scene.stream.next("process/write"), {"status": "stdinClosed"})
        await turns()
        scene.exited(1)
        scene.say("closed", 2)
    assert run.result()


def test_a_server_that_cannot_close_stdin_gets_a_shell() -> None:
    async def run(scene: Scene) -> None:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(scene.env.run(["a"], input=b"data"))
            assert (await accepted(scene))["argv"][3:] == ["sh", "4", "a"]
            scene.stream.answer(await scene.stream.next("process/write"), {"status": "accepted"})
            await turns()
            assert scene.stream.is_quiet
            scene.exited(1)
            scene.say("closed", 2)
        assert run.result().argv == ("a",)

    in_environment(run, GREETING)()


@in_environment
async def test_a_timeout_kills_and_has_the_output(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(outcome(scene.env.run(["a"], timeout=0.01)))
        await accepted(scene)
        scene.output(1, b"before")
        await killed(scene)
        scene.output(2, b" after")
        scene.exited(3, 137)
        scene.say("closed", 4)
    error = run.result()
    assert isinstance(error, Timeout)
    assert (error.result.stdout, error.result.exit_code) == (b"before after", 137)


@in_environment
async def test_a_server_that_reports_no_signals_is_told_apart(scene: Scene) -> None:
    """Servers before 0.140 report -1 for every signal; the client knows of its own kill."""
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(outcome(scene.env.run(["a"], timeout=0.01)))
        await accepted(scene)
        await killed(scene)
        scene.exited(1, -1)
        scene.say("closed", 2)
    error = run.result()
    assert isinstance(error, Timeout)
    assert error.result.exit_code == 137


@in_environment
async def test_a_timeout_is_not_negative(scene: Scene) -> None:
    for seconds in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout must be at least 0 seconds, not"):
            await scene.env.run(["a"], timeout=seconds)
    assert scene.stream.is_quiet


def test_a_killed_command_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "KILL_SECONDS", 0.01)

    @in_environment
    async def test(scene: Scene) -> None:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(outcome(scene.env.run(["a"], timeout=0.01)))
            await accepted(scene)
            await killed(scene)
        error = run.result()
        assert isinstance(error, Timeout)
        assert error.result.exit_code == 137

    test()


@in_environment
async def test_a_cancelled_run_is_killed(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(scene.env.run(["a"]))
        await accepted(scene)
        await turns()
        run.cancel()
        await killed(scene)
        assert not run.done()
        scene.exited(1, 137)
        scene.say("closed", 2)
    assert run.cancelled()


@pytest.mark.parametrize(("is_denied", "kind"), [(False, CommandFailed), (True, CommandDenied)])
def test_a_checked_failure_is_raised(is_denied: bool, kind: type[CommandFailed]) -> None:
    @in_environment
    async def test(scene: Scene) -> None:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(outcome(scene.env.run(["a"], check=True)))
            await accepted(scene)
            scene.say("exited", 1, exitCode=2, sandboxDenied=is_denied)
            scene.say("closed", 2)
        assert type(run.result()) is kind
        assert run.result().result.exit_code == 2

    test()


_DIRECTORY = {
    "isDirectory": True,
    "isFile": False,
    "isSymlink": False,
    "size": 0,
    "createdAtMs": 0,
    "modifiedAtMs": 0,
}


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (-32603, "No such file or directory (os error 2)", ProgramNotFound),
        (-32603, "Permission denied (os error 13)", RpcError),
        (-32600, "not now", RpcError),
    ],
)
def test_an_error_of_the_start_names_the_command(
    code: int, message: str, kind: type[RpcError]
) -> None:
    @in_environment
    async def test(scene: Scene) -> None:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(outcome(scene.env.run(["a"], cwd="/b")))
            request = await scene.stream.next("process/start")
            scene.stream.refuse(request, code, message, {"more": 1})
            if kind is ProgramNotFound:
                # The program is missing if the directory is not.
                scene.stream.answer(await scene.stream.next("fs/getMetadata"), _DIRECTORY)
        error: Any = run.result()
        assert isinstance(error, kind)
        assert isinstance(error, ProgramNotFound) == (kind is ProgramNotFound)
        text = f"cannot start a in /b: {message}"
        assert (str(error), error.code, error.data) == (text, code, {"more": 1})
        assert scene.stream.is_quiet

    test()


def test_leaving_kills_all_processes() -> None:
    async def run() -> None:
        dialer = MemoryDialer()
        async with asyncio.TaskGroup() as tasks:
            env = await Environment(dialer).__aenter__()
            stream = await dialer.stream()
            await stream.past_handshake()
            scene = Scene(env, dialer, stream)
            process = await scene.started()
            waiting = tasks.create_task(outcome(process.wait()))
            await turns()
            leaving = tasks.create_task(env.__aexit__(None, None, None))
            await killed(scene)
            await leaving
        error = waiting.result()
        assert isinstance(error, SessionLost)
        assert str(error) == "the environment was closed"
        with pytest.raises(SessionLost, match="the environment was closed"):
            await env.start(["a"]).__aenter__()

    play(run())


def test_a_server_that_cannot_list_processes() -> None:
    async def processes(scene: Scene) -> None:
        with pytest.raises(Unsupported, match="processList: keep the processes"):
            await scene.env.processes()

    in_environment(processes, GREETING)()


@in_environment
async def test_a_failed_reconnection_has_the_address_and_a_hint(scene: Scene) -> None:
    scene.env._address = "ws://127.0.0.1:7"
    refused = ConnectFailed("Connection refused (os error 111)", 403)  # which is final
    scene.dialer.failures = [refused, refused]
    scene.stream.lose()
    with pytest.raises(ConnectFailed, match=r"cannot connect to ws://127\.0\.0\.1:7: .*; pass the"):
        await scene.env.reconnect()


@in_environment
async def test_environments_and_processes_describe_themselves(scene: Scene) -> None:
    scene.env._address = "ws://h:1"
    assert repr(scene.env) == "<Environment ws://h:1, open>"
    new = scene.env.start(["p", "x" * 100])
    assert repr(new).startswith("<Process ['p', 'xxxx")
    assert repr(new).endswith("'], not started>")
    assert len(repr(new)) < 100
    process = await scene.started()
    assert repr(process) == "<Process ['p'], running>"
    scene.exited(1, 3)
    assert repr(process) == "<Process ['p'], exited with code 3>"


@in_environment
async def test_other_handles_describe_themselves_without_secrets(scene: Scene) -> None:
    env = scene.env
    request = env.http_stream("GET", "https://me:secret@h:1/path?key=secret#secret")
    assert repr(request) == "<HttpStream GET https://h:1/path, not open>"
    request.status = 200
    assert repr(request) == "<HttpStream GET https://h:1/path, status 200, not open>"
    assert repr(env.http_stream("PUT", "odd")) == "<HttpStream PUT odd, not open>"
    port = env.forward_port(80, local_port=8080)
    assert (
        repr(port)
        == "<PortForward from local port 8080 to port 80 of the server's machine, not open>"
    )
    port = env.forward_port(80, host="db")
    port.port = 9
    assert repr(port) == "<PortForward from local port 9 to port 80 of db, not open>"
    reverse = env.reverse_port(3000, remote_port=3001)
    assert repr(reverse) == (
        "<ReversePort from port 3001 of the server's machine to local port 3000, not open>"
    )
    assert repr(env.files.open("a")) == "<FileReader a, not open>"
    assert repr(env.files) == "<Files, relative paths start at /home>"
    confined = env.files.sandboxed("read-only")
    assert repr(confined) == "<Files, relative paths start at /home, sandboxed>"


@in_environment
async def test_processes_describe_their_end(scene: Scene) -> None:
    process = await scene.started()
    process.on_failed(SessionLost("gone"))
    assert repr(process) == "<Process ['p'], lost>"
