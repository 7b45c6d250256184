"""The async client: commands, processes, HTTP, and how all of it ends; ours and the reference."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import exec_server
from clients import LOOPS, Machine, Run, bounded, machine, web
from exec_server import (
    Chunk,
    CommandDenied,
    CommandFailed,
    ConnectFailed,
    Environment,
    NotFound,
    Process,
    Result,
    RpcError,
    SandboxDenied,
    SessionLost,
    StartupError,
    StdinClosed,
    Timeout,
    Unsupported,
    connect,
    serve,
)
from exec_server.client import http as http_module
from exec_server.client import process as process_module
from exec_server.client.program import StdioDialer
from exec_server.errors import InternalError, InvalidParams, MethodNotFound
from exec_server.protocol import files as wire_files
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import INFO
from inside import eventually
from relaying import KINDS
from wire import descendants, server_command, server_environment, start_server, survivors, uri

READ_ONLY = {
    "permissions": {
        "type": "managed",
        "file_system": {
            "type": "restricted",
            "entries": [{"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}],
        },
        "network": "restricted",
    },
    "windowsSandboxLevel": "disabled",
}


@pytest.fixture(scope="module", params=KINDS)
def there(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with machine(request.param) as running:
        yield running


@pytest.fixture(scope="module")
def ours() -> Iterator[Machine]:
    with machine("ours") as running:
        yield running


async def collect(process: Process) -> dict[str, bytes]:
    output: dict[str, list[bytes]] = {}
    async for chunk in process:
        output.setdefault(chunk.stream, []).append(chunk.data)
    return {stream: b"".join(parts) for stream, parts in output.items()}


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def is_running(word: str) -> bool:
    """Whether there is a process with this word in its command line."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in entry.read_bytes().split(b"\0"):
                return True
        except OSError:
            pass
    return False


# ---- every transport ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["websocket", "stdio", "relay"])
@pytest.mark.parametrize("run", LOOPS)
def test_a_little_of_everything(kind: str, transport: str, run: Run, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        assert env.info.platform_os == "linux"
        assert env.capabilities.file_write_streaming
        result = await env.run(["sh", "-c", "cat; echo oops >&2; exit 3"], input=b"in\n")
        assert (result.stdout, result.stderr, result.exit_code) == (b"in\n", b"oops\n", 3)
        async with env.start(["cat"], stdin=True) as process:
            await process.write(b"hello")
            assert await anext(process) == Chunk("stdout", b"hello")
        data = os.urandom(3_000_000)
        await env.files.write(tmp_path / "file", data)
        assert await env.files.read(tmp_path / "file") == data

    with machine(kind, transport) as there:
        there.play(scene, run)


# ---- run ------------------------------------------------------------------------------


def test_a_result_is_a_plain_value(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        result = await env.run(["sh", "-c", "printf 'a\\377'; printf b >&2"])
        expected = Result(("sh", "-c", "printf 'a\\377'; printf b >&2"), b"a\xff", b"b", 0, 0.0)
        assert (result.argv, result.stdout, result.stderr) == (
            expected.argv,
            expected.stdout,
            expected.stderr,
        )
        assert (result.text, result.error_text) == ("a\ufffd", "b")
        assert 0 < result.duration < 10
        assert result
        assert not await env.run(["false"])

    there.play(scene)


def test_where_and_with_what_it_runs(there: Machine, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        shown = ["sh", "-c", 'pwd; echo $A; test -n "$HOME"']
        result = await env.run(shown, cwd=tmp_path, env={"A": "b c"})
        assert (result.text, result.exit_code) == (f"{tmp_path}\nb c\n", 0)
        bare = await env.run(["/usr/bin/env"], env={"A": "b"}, clean_env=True)
        assert bare.text == "A=b\n"
        default = await env.run(["pwd"])
        assert env.info.cwd == uri(default.text.strip())
        assert (await env.run(["cat"])).stdout == b""  # its stdin is empty

    there.play(scene)


@pytest.mark.parametrize("size", [1, 70_000, 5_000_000])
def test_input_arrives_whole_and_ends(there: Machine, size: int) -> None:
    data = os.urandom(size)

    async def scene(env: Environment) -> None:
        assert (await env.run(["cat"], input=data)).stdout == data

    there.play(scene)


def test_input_that_nobody_reads_holds_up_nothing(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(env.run(["sleep", "0.3"], input=bytes(20_000_000)))
            assert (await env.run(["echo", "meanwhile"])).text == "meanwhile\n"
            assert not slow.done()
        assert slow.result()
        assert await env.run(["true"], input=bytes(3_000_000))

    there.play(scene)


def test_input_of_a_terminal(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        result = await env.run(
            ["sh", "-c", "stty -echo; read a; echo got $a"], input=b"x\n", tty=True
        )
        assert b"got x\r\n" in result.stdout
        assert result.stderr == b""

    there.play(scene)


def test_a_check_raises_with_the_result(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        with pytest.raises(CommandFailed, match=r"^sh ended with exit code 7$") as failed:
            await env.run(["sh", "-c", "echo out; exit 7"], check=True)
        assert (failed.value.result.stdout, failed.value.result.exit_code) == (b"out\n", 7)
        assert (await env.run(["true"], check=True)).exit_code == 0

    there.play(scene)


def test_what_cannot_be_started_says_which(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        with pytest.raises(RpcError, match=r"^cannot start no-such-program: No such file"):
            await env.run(["no-such-program"])
        with pytest.raises(InvalidParams, match="argv must not be empty"):
            await env.run([])
        with pytest.raises(TypeError, match="a list of words"):
            await env.run("ls -l")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(env.run(["true"]))

    there.play(scene)


def test_a_timeout_carries_the_output_and_kills(there: Machine) -> None:
    word = f"31{os.getpid()}"

    async def scene(env: Environment) -> None:
        with pytest.raises(Timeout, match=r"sh did not end within 0.5 s and was killed") as late:
            await env.run(["sh", "-c", f"echo begun; sleep {word}"], timeout=0.5)
        assert isinstance(late.value, TimeoutError)
        assert late.value.result.stdout == b"begun\n"
        assert late.value.result.exit_code == 137
        assert 0.5 <= late.value.result.duration < 10
        eventually("the command is gone", lambda: not is_running(word))
        assert await env.run(["true"], timeout=30)

    there.play(scene)


def test_a_cancelled_run_is_killed(there: Machine) -> None:
    word = f"32{os.getpid()}"

    async def scene(env: Environment) -> None:
        task = asyncio.get_running_loop().create_task(env.run(["sleep", word]))
        while not is_running(word):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_running(word)

    there.play(scene)


def test_output_beyond_the_limit_is_counted(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        result = await env.run(["sh", "-c", "head -c 100000 /dev/zero"], output_limit=70_000)
        assert (len(result.stdout), result.lost_bytes) == (70_000, 30_000)

    there.play(scene)


def test_much_output_of_many_commands(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        async with asyncio.TaskGroup() as tasks:
            runs = [
                tasks.create_task(env.run(["sh", "-c", f"seq {number} 300000; seq 3 >&2"]))
                for number in range(4)
            ]
        for number, run in enumerate(runs):
            lines = run.result().text.splitlines()
            assert lines == [str(each) for each in range(number, 300_001)]
            assert run.result().error_text == "1\n2\n3\n"

    there.play(scene)


# ---- start ----------------------------------------------------------------------------


def test_a_process_as_it_runs(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        script = 'echo ready; while read a; do echo "<$a>"; echo e >&2; done'
        async with env.start(["sh", "-c", script], stdin=True) as process:
            assert await anext(process) == Chunk("stdout", b"ready\n")
            assert (process.exit_code, len(process.id)) == (None, 32)
            for word in (b"one\n", b"t", b"wo\n"):
                await process.write(word)
            seen: dict[str, bytes] = {"stdout": b"", "stderr": b""}
            while seen != {"stdout": b"<one>\n<two>\n", "stderr": b"e\ne\n"}:
                chunk = await anext(process)
                seen[chunk.stream] += chunk.data
            await process.interrupt()
            assert await process.wait() == 130
            assert await collect(process) == {}
        with pytest.raises(StdinClosed, match="the process has ended"):
            await process.write(b"late")

    there.play(scene)


def test_leaving_kills_with_all_descendants(there: Machine) -> None:
    word = f"33{os.getpid()}"

    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", f"sleep {word} & sleep {word}"]):
            while not is_running(word):
                await asyncio.sleep(0.01)
        eventually("they are gone", lambda: not is_running(word))
        with pytest.raises(ZeroDivisionError):
            async with env.start(["sleep", word]):
                raise ZeroDivisionError
        eventually("it is gone", lambda: not is_running(word))

    there.play(scene)


def test_leaving_the_environment_kills_what_is_left(there: Machine) -> None:
    word = f"34{os.getpid()}"

    async def scene(env: Environment) -> None:
        await env.start(["sleep", word]).__aenter__()  # and nobody leaves it
        while not is_running(word):
            await asyncio.sleep(0.01)

    there.play(scene)
    eventually("it is gone", lambda: not is_running(word))


def test_no_input_without_asking_for_it(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sleep", "100"]) as process:
            with pytest.raises(StdinClosed, match="use start"):
                await process.write(b"x")

    there.play(scene)


def test_the_end_of_input(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sort"], stdin=True) as process:
            await process.write(b"b\na\n")
            if not env.capabilities.process_close_stdin:
                with pytest.raises(Unsupported, match=r"processCloseStdin: .*use run\(input="):
                    await process.close_stdin()
                return
            await process.close_stdin()
            assert await collect(process) == {"stdout": b"a\nb\n"}
            assert await process.wait() == 0
            with pytest.raises(StdinClosed):
                await process.write(b"c\n")

    there.play(scene)


def test_a_terminal(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        words = ["sh", "-c", "stty size; echo $TERM; cat"]
        async with env.start(words, tty=True, size=(33, 99)) as process:
            output = b""
            while b"\n" not in output or b"xterm" not in output:
                output += (await anext(process)).data
            assert output == b"33 99\r\nxterm-256color\r\n"
            await process.write(b"typed\n")
            await process.close_stdin()  # Ctrl-D
            assert (await collect(process))["pty"].replace(b"^D\b\b", b"") == b"typed\r\n" * 2
            assert await process.wait() == 0

    there.play(scene)


def test_another_size(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done"
        async with env.start(["sh", "-c", script], tty=True) as process:
            await anext(process)
            if not env.capabilities.process_resize:
                with pytest.raises(Unsupported, match="processResize"):
                    await process.resize(44, 55)
                return
            await process.resize(44, 55)
            assert (await collect(process))["pty"] == b"44 55\r\n"

    there.play(scene)


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("SIGKILL", 137), ("term", 143)])
def test_signals_by_name(there: Machine, name: str, code: int) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sleep", "100"]) as process:
            if name == "term" and not env.capabilities.process_signals:
                with pytest.raises(Unsupported, match="SIGTERM cannot be sent, only INT and KILL"):
                    await process.signal(name)
                return
            await process.signal(name)
            assert await process.wait() == code

    there.play(scene)


def test_what_runs(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        if not env.capabilities.process_list:
            with pytest.raises(Unsupported, match="processList"):
                await env.processes()
            return
        async with env.start(["sleep", "100"]) as process:
            [listed] = await env.processes()
            assert (listed.process_id, listed.argv, listed.running) == (
                process.id,
                ["sleep", "100"],
                True,
            )

    there.play(scene)


# ---- nobody reads ---------------------------------------------------------------------


def test_a_process_that_nobody_reads_is_slowed_down(there: Machine) -> None:
    """Its output waits, in no more room than there may be, and all of it is there later."""
    total = 40_000_000

    async def scene(env: Environment) -> None:
        script = f"yes 0123456 | head -c {total}"
        async with env.start(["sh", "-c", script]) as process:
            first = await anext(process)
            while process._weight < process_module.FULL_BYTES:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # what comes now would be too much
            assert process._weight < 2 * process_module.FULL_BYTES
            assert process.exit_code is None
            rest = (await collect(process))["stdout"]
            assert first.data + rest == b"0123456\n" * (total // 8)
            assert process.lost_bytes == 0

    there.play(scene)


def test_calls_are_answered_while_output_waits(there: Machine) -> None:
    """Whoever takes output and makes calls in between must not wait for themselves."""

    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", "yes 0123456 | head -c 4000000"]) as process:
            output = []
            async for chunk in process:
                output.append(chunk.data)
                if len(output) < 25:
                    assert await env.files.exists("/")
                    assert await env.run(["true"])
            assert b"".join(output) == b"0123456\n" * 500_000
            assert process.lost_bytes == 0

    there.play(scene)


def test_waiting_without_reading_ends(there: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for some output; then the process goes on, and what is lost is declared."""
    monkeypatch.setattr(process_module, "BURSTING_BYTES", 3_000_000)
    total = 30_000_000

    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", f"yes 0123456 | head -c {total}; exit 5"]) as process:
            assert await process.wait() == 5
            chunks = [chunk async for chunk in process]
        output = b"".join(chunk.data for chunk in chunks)
        gaps = [chunk.lost_before for chunk in chunks if chunk.lost_before]
        assert len(output) < 6_000_000
        assert gaps == [process.lost_bytes]
        if there.is_ours:
            assert len(output) + process.lost_bytes == total
        else:  # it does not say; each lost chunk has at least a byte
            assert process.lost_bytes >= (total - len(output)) / 8192

    there.play(scene)


# ---- sandboxes ------------------------------------------------------------------------


def test_a_sandboxed_command(there: Machine, tmp_path: Path) -> None:
    script = f"touch {tmp_path}/x"

    async def scene(env: Environment) -> None:
        result = await env.run(["sh", "-c", script], sandbox=READ_ONLY, cwd=tmp_path)
        assert (result.sandbox_denied, bool(result)) == (True, False)
        with pytest.raises(CommandDenied, match="denied by its sandbox") as denied:
            await env.run(["sh", "-c", script], sandbox=READ_ONLY, cwd=tmp_path, check=True)
        assert isinstance(denied.value, SandboxDenied)
        if there.is_ours:
            assert result.sandbox_denial is not None
            assert denied.value.denial == result.sandbox_denial
        assert await env.run(["true"], sandbox=READ_ONLY)

    there.play(scene)
    assert not (tmp_path / "x").exists()


def test_sandboxed_files(there: Machine, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        files = env.files.sandboxed(READ_ONLY)
        await env.files.write(tmp_path / "a", b"1")
        assert await files.read(tmp_path / "a") == b"1"
        with pytest.raises(SandboxDenied, match="Read-only file system"):
            await files.write(tmp_path / "a", b"2")

    there.play(scene)
    assert (tmp_path / "a").read_bytes() == b"1"


# ---- HTTP -----------------------------------------------------------------------------


def test_http(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        async with web() as url:
            got = await env.http(
                "POST", f"{url}/", headers=[("X-Test", "yes")], body=b"sent", timeout=20
            )
            asked = json.loads(got.text)
            assert (got.status, asked["body"], got.header("X-A")) == (201, "sent", "1")
            assert "x-test: yes" in asked["head"].lower()
            assert (await env.http("GET", f"{url}/moved")).status == 201
            assert (await env.http("GET", f"{url}/moved", follow_redirects=False)).status == 302
        with pytest.raises(InternalError, match="http/request failed"):
            await env.http("GET", url)
        with pytest.raises(InvalidParams, match="only supports http and https"):
            await env.http("GET", "ftp://127.0.0.1/")

    there.play(scene)


def test_a_body_that_comes_piece_by_piece(there: Machine) -> None:
    body = os.urandom(20_000_000)

    async def scene(env: Environment) -> None:
        async with web(body) as url:
            async with env.http_stream("GET", f"{url}/body") as response:
                assert (response.status, response.header("x-a")) == (201, "1")
                received = b"".join([piece async for piece in response])
            assert received == body
            async with env.http_stream("GET", f"{url}/body") as response:
                await anext(response)  # and no more
            assert await env.run(["true"])

    there.play(scene)


def test_a_body_that_is_too_large(ours: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "BODY_BYTES", 99_999)

    async def scene(env: Environment) -> None:
        async with web(bytes(100_000)) as url:
            with pytest.raises(InternalError, match="use http_stream"):
                await env.http("GET", f"{url}/body")

    ours.play(scene)


# ---- the layer below ------------------------------------------------------------------


def test_any_method_with_its_structs(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        assert (await env.call(INFO, None)).shell == env.info.shell
        params = wire_files.GetMetadataParams(PathUri.from_wire("/"))
        assert (await env.call(wire_files.GET_METADATA, params, is_retryable=True)).is_directory
        heard: list[Any] = []

        class Listener:
            def on_notice(self, notice: Any, params: Any) -> None:
                heard.append(notice.name)

            def on_disconnected(self) -> None: ...
            def on_resumed(self) -> None: ...
            def on_lost(self, error: SessionLost) -> None: ...

        unsubscribe = env.session.subscribe(Listener())
        await env.run(["true"])
        unsubscribe()
        assert heard == ["process/exited", "process/closed"]

    there.play(scene)


# ---- how it begins and ends -----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "where to"),
        ({"target": "http://127.0.0.1"}, "invalid exec-server URL"),
        ({"target": "stdio:"}, "no program"),
        ({"target": "stdio:'a"}, "cannot be taken apart"),
        ({"registry": "https://registry.example"}, "needs environment_id and token"),
        ({"target": "ws://192.0.2.1:1", "token": "secret-1"}, "only to wss:// URLs"),
    ],
)
def test_nonsense_is_refused_before_anything_happens(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(StartupError, match=text) as refused:
        connect(**arguments)
    assert "secret-1" not in str(refused.value)


def test_nobody_is_there() -> None:
    with start_server("ours") as server:
        url = server.url

    async def scene() -> None:
        with pytest.raises(ConnectFailed, match="Connection refused"):
            async with connect(url):
                raise AssertionError
        with pytest.raises(ConnectFailed, match="no-such-program"):
            async with connect("stdio:no-such-program"):
                raise AssertionError

    bounded(scene())


def test_a_command_as_target() -> None:
    async def scene() -> None:
        words = shlex.join([*server_command("ours"), "--listen", "stdio"])
        async with connect(f"stdio:{words}") as env:
            assert (await env.run(["echo", "x"])).text == "x\n"

    bounded(scene())


def test_a_server_that_goes_ends_everything(there: Machine) -> None:
    """Without a server to come back to, whoever waits learns that it is over."""

    async def scene() -> None:
        words = [*server_command(there.kind), "--listen", "stdio"]
        dialer = StdioDialer(words, server_environment(there.kind))
        async with Environment(dialer) as env, env.start(["sleep", "100"]) as process:
            dialer._programs[0].kill()
            with pytest.raises(SessionLost):
                await anext(process)
            with pytest.raises(SessionLost):
                await process.wait()
        with pytest.raises(SessionLost):
            await env.run(["true"])

    bounded(scene())


@pytest.mark.parametrize("run", LOOPS)
def test_a_server_for_a_program(run: Run) -> None:
    async def scene() -> None:
        async with serve(token="correct-horse-battery-staple") as server:
            async with connect(server.url, token="correct-horse-battery-staple") as env:
                result = await env.run(["sh", "-c", "echo x; kill -9 $$"])
                assert (result.text, result.exit_code) == ("x\n", 137)
            with pytest.raises(ConnectFailed) as refused:
                async with connect(server.url):
                    raise AssertionError
            assert refused.value.status == 401
            family = {**descendants(server.pid), server.pid: descendants(os.getpid())[server.pid]}
        assert survivors(family) == []
        with pytest.raises(StartupError, match="did not start"):
            async with serve("ws://nonsense"):
                raise AssertionError

    bounded(scene(), run)


@pytest.mark.parametrize("run", LOOPS)
def test_this_machine_without_a_socket(run: Run) -> None:
    async def scene() -> None:
        async with Environment.local(env={**os.environ, "A": "b"}) as env:
            assert (await env.run(["sh", "-c", "echo $A"])).text == "b\n"
            with pytest.raises(NotFound, match=r"^/none: No such file or directory"):
                await env.files.read("/none")

    bounded(scene(), run)


def test_every_public_name_is_there() -> None:
    for name in exec_server.__all__:
        assert getattr(exec_server, name).__doc__, name
    assert set(exec_server.__all__) <= set(dir(exec_server))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        exec_server.nothing  # noqa: B018
    assert issubclass(MethodNotFound, RpcError)
