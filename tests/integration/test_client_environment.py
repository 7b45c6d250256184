"""The async client's Environment: transports, sandboxes, HTTP, and how it begins and ends."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import sys
from pathlib import Path
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
from tests.support.client_targets import LOOPS, ClientTarget, Run, bounded, machine, web
from tests.support.sandbox import read_only

import exec_server
from exec_server import (
    Chunk,
    CommandDenied,
    ConnectFailed,
    Environment,
    NotFound,
    RpcError,
    SandboxDenied,
    SessionLost,
    StartupError,
    connect,
    serve,
)
from exec_server.client import http as http_module
from exec_server.client.engine.stdio import StdioDialer
from exec_server.errors import InternalError, InvalidParams, MethodNotFound
from exec_server.protocol import files as wire_files
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import INFO

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


# ---- sandboxes ------------------------------------------------------------------------


@pytest.mark.quick
def test_a_sandboxed_command(there: ClientTarget, tmp_path: Path) -> None:
    script = f"touch {tmp_path}/x"

    async def scene(env: Environment) -> None:
        result = await env.run(["sh", "-c", script], sandbox=read_only(), cwd=tmp_path)
        assert (result.sandbox_denied, bool(result)) == (True, False)
        with pytest.raises(CommandDenied, match="denied by its sandbox") as denied:
            await env.run(["sh", "-c", script], sandbox=read_only(), cwd=tmp_path, check=True)
        assert isinstance(denied.value, SandboxDenied)
        if there.is_ours:
            assert result.sandbox_denial is not None
            assert denied.value.denial == result.sandbox_denial
        assert await env.run(["true"], sandbox=read_only())

    there.play(scene)
    assert not (tmp_path / "x").exists()


def test_a_command_without_network(there: ClientTarget) -> None:
    if not there.is_ours:
        pytest.skip("the reference does not explain denials")
    script = "import socket, sys\ntry: socket.socket()\nexcept OSError: sys.exit('no such host')"
    argv = [sys.executable, "-S", "-c", script]

    async def scene(env: Environment) -> None:
        result = await env.run(argv, sandbox=read_only())
        assert (result.exit_code, result.sandbox_denied) == (1, False)
        assert result.sandbox_denial is not None
        assert (result.sandbox_denial.operation, result.sandbox_denial.text) == (
            "network",
            "no such host",
        )
        with pytest.raises(CommandDenied) as denied:
            await env.run(argv, sandbox=read_only(), check=True)
        assert denied.value.denial == result.sandbox_denial
        # Success is success, but a denial on the way is told.
        result = await env.run(["sh", "-c", "touch /etc/x; true"], sandbox=read_only(), check=True)
        assert not result.sandbox_denied
        assert result.sandbox_denial is not None
        assert result.sandbox_denial.path == "/etc/x"

    there.play(scene)


def test_sandboxed_files(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        files = env.files.sandboxed(read_only())
        await env.files.write(tmp_path / "a", b"1")
        assert await files.read(tmp_path / "a") == b"1"
        with pytest.raises(SandboxDenied, match="Read-only file system"):
            await files.write(tmp_path / "a", b"2")

    there.play(scene)
    assert (tmp_path / "a").read_bytes() == b"1"


# ---- HTTP -----------------------------------------------------------------------------


def test_http(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with web() as url:
            got = await env.http(
                "POST", f"{url}/", headers=[("X-Test", "yes")], body=b"sent", timeout=20
            )
            asked = json.loads(got.text)
            assert (got.status, asked["body"], got.header("X-A")) == (201, "sent", "1")
            assert "x-test: yes" in asked["head"].lower()
            got = await env.http("GET", f"{url}/", headers={"X-Test": "mapped"})
            assert "x-test: mapped" in json.loads(got.text)["head"].lower()
            assert (await env.http("GET", f"{url}/moved")).status == 201
            assert (await env.http("GET", f"{url}/moved", follow_redirects=False)).status == 302
        with pytest.raises(InternalError, match="http/request failed"):
            await env.http("GET", url)
        with pytest.raises(InvalidParams, match="only supports http and https"):
            await env.http("GET", "ftp://127.0.0.1/")

    there.play(scene)


def test_a_body_that_comes_piece_by_piece(there: ClientTarget) -> None:
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


def test_a_body_that_is_too_large(ours: ClientTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "BODY_BYTES", 99_999)

    async def scene(env: Environment) -> None:
        async with web(bytes(100_000)) as url:
            with pytest.raises(InternalError, match="use http_stream"):
                await env.http("GET", f"{url}/body")

    ours.play(scene)


# ---- the layer below ------------------------------------------------------------------


def test_any_method_with_its_structs(there: ClientTarget) -> None:
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
        ({}, "no target: name one"),
        ({"target": "http://127.0.0.1"}, "did you mean ws://127.0.0.1"),
        ({"target": "stdio:"}, "no command after stdio"),
        ({"target": "stdio:'a"}, "cannot parse the command after stdio"),
        ({"registry": "https://registry.example"}, "registry= and environment_id= need each other"),
        ({"target": "ws://192.0.2.1:1", "token": "secret-1"}, "only to wss:// URLs"),
    ],
)
def test_nonsense_is_refused_before_anything_happens(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(StartupError, match=text) as refused:
        connect(**arguments)
    assert "secret-1" not in str(refused.value)


def test_a_server_that_is_just_starting_is_waited_for(tmp_path: Path) -> None:
    url = f"unix:{tmp_path}/s"

    async def command() -> str:
        async with connect(url, wait=60) as env:
            return (await env.run(["echo", "there"])).text

    async def scene() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(command())
            await asyncio.sleep(0.05)
            async with serve(url):
                assert await running == "there\n"
        with pytest.raises(ConnectFailed, match=r"no connection within 0\.2 s: .*check the path"):
            await connect(url, wait=0.2)

    bounded(scene())


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


def test_an_environment_is_used_inside_of_its_block(there: ClientTarget) -> None:
    async def scene() -> None:
        env = there.make()
        for use in (
            lambda: env.run(["true"]),
            lambda: env.call(INFO, None),
            env.processes,
            lambda: env.http("GET", "http://127.0.0.1/"),
        ):
            with pytest.raises(RuntimeError, match="is not connected: await it, or use it"):
                await use()
        for glance in (
            lambda: env.files,
            lambda: env.info,
            lambda: env.capabilities,
            lambda: env.start(["true"]),
            lambda: env.http_stream("GET", "http://127.0.0.1/"),
        ):
            with pytest.raises(RuntimeError, match="is not connected"):
                glance()
        with pytest.raises(RuntimeError, match="the session is not open"):
            await env.session.call(INFO, None)
        async with env:
            with pytest.raises(RuntimeError, match="opened only once"):
                await env.__aenter__()
            assert await env.run(["true"])
            stream = env.http_stream("GET", "http://127.0.0.1/")
            with pytest.raises(RuntimeError, match="the request is not open"):
                await anext(stream)
        with pytest.raises(RuntimeError, match="opened only once"):
            await env.__aenter__()

    bounded(scene())


def test_a_command_as_target() -> None:
    async def scene() -> None:
        words = shlex.join([*server_command("ours"), "--listen", "stdio"])
        async with connect(f"stdio:{words}") as env:
            assert (await env.run(["echo", "x"])).text == "x\n"

    bounded(scene())


def test_a_server_that_goes_ends_everything(there: ClientTarget) -> None:
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
        value = getattr(exec_server, name)
        # An alias of a type has no text of its own.
        assert not (inspect.isclass(value) or inspect.isroutine(value)) or value.__doc__, name
    assert set(exec_server.__all__) <= set(dir(exec_server))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        exec_server.nothing  # noqa: B018
    assert issubclass(MethodNotFound, RpcError)
