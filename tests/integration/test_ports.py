"""Forwarded ports: real sockets, a real server, over a WebSocket and through a relay."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import socket
import struct
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.support.client import Message, Server, start_server
from tests.support.client_targets import LOOPS, ClientTarget, Proxy, Run, bounded, machine, web
from tests.support.server_internals import eventually

from exec_server import Environment, PortError, RpcError, connect, sync
from exec_server.net.port_stream import WINDOW_BYTES, PortStream
from exec_server.protocol.port import PROBE, ProbeParams
from exec_server.server.port_table import MAX_STREAMS

MEBIBYTE = 1_048_576
End = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module", params=["websocket", "relay"])
def target(request: pytest.FixtureRequest) -> Iterator[ClientTarget]:
    with machine("ours", request.param) as running:
        yield running


@contextlib.asynccontextmanager
async def program(serve: Serve) -> AsyncIterator[int]:
    """A program that listens; its connections are reset in the end."""
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the end of a test, or of its connection
        finally:
            if task.cancelling():
                writer.transport.abort()
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # for the transports to be closed


@contextlib.asynccontextmanager
async def dialled(port: int) -> AsyncIterator[End]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Neither read nor write; the reader has its default limit."""
    await asyncio.get_running_loop().create_future()


async def exchange(port: int, data: bytes) -> bytes:
    """Send the data, half-close, and read to the end."""
    async with dialled(port) as (reader, writer), asyncio.TaskGroup() as tasks:
        tasks.create_task(send(writer, data))
        return await reader.read()


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()


async def accepts(env: Environment, port: int, host: str | None = None) -> bool:
    """Whether a port of the server's machine accepts connections."""
    return (await env.call(PROBE, ProbeParams(port, host))).accepts


# ---- bytes ----------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("run", LOOPS)
def test_a_page_is_fetched_through_a_forwarded_port(target: ClientTarget, run: Run) -> None:
    async def scene(env: Environment) -> None:
        async with web(b"x" * 3 * MEBIBYTE) as url:
            async with env.forward_port(int(url.rpartition(":")[2])) as local:
                assert local.url == f"http://127.0.0.1:{local.port}"
                request = f"GET /page HTTP/1.1\r\nhost: {local.url}\r\n\r\n".encode()
                async with dialled(local.port) as (reader, writer):
                    writer.write(request)
                    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 201 Created")
            assert body == b"x" * 3 * MEBIBYTE

    target.play(scene, run)


@pytest.mark.parametrize("run", LOOPS)
def test_a_port_is_forwarded_in_reverse(target: ClientTarget, run: Run) -> None:
    async def scene(env: Environment) -> None:
        async with program(echo) as port, env.reverse_port(port) as remote:
            assert await exchange(remote.port, b"hello") == b"hello"
            command = "import socket; s = socket.create_connection(('127.0.0.1', %d)); "
            command += "s.sendall(b'from there'); s.shutdown(1); print(s.recv(99).decode())"
            result = await env.run([sys.executable, "-S", "-c", command % remote.port])
            assert (result.text, result.exit_code) == ("from there\n", 0)

    target.play(scene, run)


def test_a_hundred_connections_at_a_time(target: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with program(echo) as port, env.forward_port(port) as local:
            data = {number: os.urandom(1000) * (number + 1) for number in range(100)}
            async with asyncio.TaskGroup() as tasks:
                results = {
                    number: tasks.create_task(exchange(local.port, each))
                    for number, each in data.items()
                }
            assert {number: task.result() for number, task in results.items()} == data

    target.play(scene)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_50_megabytes_in_both_directions_with_a_slow_reader(
    target: ClientTarget, direction: str
) -> None:
    """The reader stops between its reads until the writer is blocked."""
    size = 50_000_000
    block = os.urandom(MEBIBYTE)
    sent = [block[: min(MEBIBYTE, size - start)] for start in range(0, size, MEBIBYTE)]
    expected = hashlib.sha256(b"".join(sent)).hexdigest()

    async def pour(writer: asyncio.StreamWriter) -> None:
        for each in sent:
            writer.write(each)
            await writer.drain()
        writer.write_eof()

    async def drink(reader: asyncio.StreamReader) -> str:
        digest = hashlib.sha256()
        count = 0
        while data := await reader.read(200_000):
            digest.update(data)
            before, count = count, count + len(data)
            if before // (4 * MEBIBYTE) != count // (4 * MEBIBYTE):
                for _ in range(200):  # others have their turns: buffers and windows fill up
                    await asyncio.sleep(0)
        return digest.hexdigest()

    async def scene(env: Environment) -> None:
        received: list[str] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pour(writer))
                received.append(await drink(reader))

        async with program(serve) as port:
            forwarded = env.forward_port(port) if direction == "forward" else env.reverse_port(port)
            async with forwarded as local, dialled(local.port) as (reader, writer):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(pour(writer))
                    back = tasks.create_task(drink(reader))
                assert back.result() == expected
                await _until(lambda: bool(received))
            assert received == [expected]

    bounded(_within(target, scene), patience=6)


async def _within(target: ClientTarget, scene: Callable[[Environment], Awaitable[None]]) -> None:
    async with target.make() as env:
        await scene(env)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_stream_that_is_not_read_stops_nothing_else(target: ClientTarget, direction: str) -> None:
    async def scene(env: Environment) -> None:
        async with program(silence) as deaf, program(flood) as loud, program(echo) as port:
            ports = env.forward_port if direction == "forward" else env.reverse_port
            streams = env._ports._streams
            async with (
                ports(deaf) as to_deaf,
                ports(loud) as to_loud,
                ports(port) as local,
                dialled(to_deaf.port) as (_, writer),
                dialled(to_loud.port) as (unread, _),
            ):
                writer.write(bytes(64 * MEBIBYTE))  # most of it stays in this program
                await unread.readexactly(1)
                await _until(lambda: any(_is_blocked(each) for each, _ in streams.values()))
                # Kernels buffer some megabytes, the programs between them a window each.
                assert writer.transport.get_write_buffer_size() > 40 * MEBIBYTE
                for _ in range(3):
                    assert await exchange(local.port, bytes(MEBIBYTE)) == bytes(MEBIBYTE)
                output = await env.run(["head", "-c", "3000000", "/dev/zero"])
                assert len(output.stdout) == 3_000_000

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(bytes(65_536))
            await writer.drain()

    target.play(scene)


def _is_blocked(stream: PortStream) -> bool:
    """Whether the other end has given no credit, or has none."""
    return stream._credit == 0 or stream._window == 0


# ---- ends -----------------------------------------------------------------------------


def test_each_direction_ends_on_its_own(target: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        released = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"first")
            writer.write_eof()
            await released.wait()
            received.append(await reader.read())
            writer.close()

        received: list[bytes] = []
        async with (
            program(serve) as port,
            env.forward_port(port) as local,
            dialled(local.port) as (reader, writer),
        ):
            assert await reader.read() == b"first"
            writer.write(b"second")
            writer.write_eof()
            released.set()
            await _until(lambda: received == [b"second"])

    target.play(scene)


def test_a_refused_connection_is_reset(target: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        port = _unused_port()
        assert not await accepts(env, port)
        async with env.forward_port(port) as local, dialled(local.port) as (reader, _):
            with pytest.raises(ConnectionResetError):
                await reader.read()
        async with env.reverse_port(port) as remote, dialled(remote.port) as (reader, _):
            with pytest.raises(ConnectionResetError):
                await reader.read()
        async with program(echo) as port, env.forward_port(port) as local:
            assert await accepts(env, port)
            assert await accepts(env, port, "127.0.0.1")
            assert await exchange(local.port, b"still works") == b"still works"

    target.play(scene)


def test_a_reset_passes_through(target: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        ended: list[str] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                if await reader.readexactly(1) == b"r":
                    _reset(writer)
                else:
                    await reader.read()
            except ConnectionResetError:
                ended.append("reset")

        async with program(serve) as port, env.forward_port(port) as local:
            async with dialled(local.port) as (reader, writer):
                writer.write(b"r")
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            async with dialled(local.port) as (reader, writer):
                writer.write(b"w")
                await writer.drain()
                _reset(writer)
                await _until(lambda: ended == ["reset"])

    target.play(scene)


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_more_streams_than_allowed_are_reset(server: Server) -> None:
    async def scene() -> None:
        async with (
            connect(server.url) as env,
            program(echo) as port,
            env.forward_port(port) as local,
            contextlib.AsyncExitStack() as stack,
        ):
            for _ in range(MAX_STREAMS):
                reader, writer = await stack.enter_async_context(dialled(local.port))
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
            reader, _ = await stack.enter_async_context(dialled(local.port))
            with pytest.raises(ConnectionResetError):
                await reader.read()

    bounded(scene())


# ---- the end of a connection ----------------------------------------------------------


def _sockets_of(server: Server) -> set[str]:
    """The TCP sockets of a server."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    found = []
    for each in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(each))
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {f"socket:[{line.split()[9]}]" for line in table} & set(found)


def test_nothing_is_left_of_a_client_that_is_gone(server: Server) -> None:
    ended = []

    async def scene() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"x")
            try:
                await reader.read()
            except ConnectionResetError:
                ended.append("reset")

        async with (
            program(serve) as port,
            Proxy(server.url).running() as proxy,
            connect(proxy.url) as env,
            contextlib.AsyncExitStack() as stack,
        ):
            local = await stack.enter_async_context(env.forward_port(port))
            remote = await stack.enter_async_context(env.reverse_port(port))
            for each in (local.port, remote.port) * 5:
                reader, _ = await stack.enter_async_context(dialled(each))
                await reader.readexactly(1)
            proxy.is_open = False
            proxy.cut()
            await _until(lambda: len(ended) == 10)
            await _until(lambda: not _accepts(remote.port))
            await env.session.close()

    before = _sockets_of(server)
    bounded(scene())
    eventually("its sockets are closed", lambda: _sockets_of(server) <= before)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_ports_work_again_after_reconnecting(server: Server) -> None:
    async def scene() -> None:
        async with (
            Proxy(server.url).running() as proxy,
            connect(proxy.url) as env,
            program(echo) as port,
            env.forward_port(port) as local,
            env.reverse_port(port) as remote,
        ):
            for each in (local.port, remote.port):
                async with dialled(each) as (reader, writer):
                    writer.write(b"x")
                    await reader.readexactly(1)
                    proxy.cut()
                    with pytest.raises(ConnectionResetError):
                        await reader.read()
                await env.run(["true"])  # the session is resumed
                await _until(lambda: _accepts(remote.port))
                assert await exchange(local.port, b"again") == b"again"
                assert await exchange(remote.port, b"again") == b"again"

    bounded(scene())


def test_a_probe_of_a_local_port_in_use(server: Server) -> None:
    async def scene() -> None:
        async with connect(server.url) as env, program(echo) as port:
            with pytest.raises(
                PortError, match=r"cannot listen on port .*Address in use"
            ) as caught:
                await env.reverse_port(port, remote_port=port).__aenter__()
            assert caught.value.errno == errno.EADDRINUSE
            with pytest.raises(OSError, match="in use"):
                await env.forward_port(port, local_port=port).__aenter__()

    bounded(scene())


# ---- hosts and sandboxes --------------------------------------------------------------


def test_other_hosts_are_refused_unless_the_server_allows_them(server: Server) -> None:
    # The address of this machine that is not loopback, without sending a packet.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as dummy:
        try:
            dummy.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        host = dummy.getsockname()[0]

    async def probe(url: str) -> None:
        async with connect(url) as env:
            await accepts(env, 1, host)

    with pytest.raises(RpcError, match=r"--allow-port-hosts"):
        bounded(probe(server.url))

    async def forward() -> None:
        async with connect(server.url) as env, env.forward_port(1, host=host):
            pass

    with pytest.raises(RpcError, match=r"--allow-port-hosts"):
        bounded(forward())
    with start_server("ours", "--allow-port-hosts") as open_server:
        bounded(probe(open_server.url))


def test_a_sandbox_without_network_does_not_reach_a_reverse_port(server: Server) -> None:
    async def scene() -> None:
        async with (
            connect(server.url) as env,
            program(echo) as port,
            env.reverse_port(port) as remote,
        ):
            code = f"import socket; socket.create_connection(('127.0.0.1', {remote.port}))"
            words = [sys.executable, "-S", "-c", code]
            assert (await env.run(words)).exit_code == 0
            confined = await env.run(words, sandbox="read-only")
            assert confined.exit_code != 0
            assert confined.error_text.splitlines()[-1].partition(":")[0] in (
                "PermissionError",
                "ConnectionRefusedError",
                "OSError",
            )

    bounded(scene())


# ---- without async --------------------------------------------------------------------


def test_ports_without_async(server: Server) -> None:
    code = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=0, bind='127.0.0.1')"
    words = [sys.executable, "-u", "-c", code]
    with sync.connect(server.url) as env, env.start(words, cwd="/usr") as process:
        line = b""
        while b"port " not in line:
            line += process.read_some()[0].data
        port = int(line.partition(b"port ")[2].split()[0])
        with env.forward_port(port) as local, urllib.request.urlopen(local.url) as page:
            assert b"Directory listing" in page.read()
            assert (local.remote_port, local.host) == (port, None)
        with env.reverse_port(local.port, remote_port=0) as remote:
            assert remote.url == f"http://127.0.0.1:{remote.port}"
            assert remote.local_port == local.port


def test_the_window_bounds_a_stream(server: Server) -> None:
    """A client that gives no credit gets no more than its window."""
    with server.connect() as client, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        params = {"streamId": "s", "port": port, "window": 10}
        assert client.call("port/open", params) == {"window": WINDOW_BYTES}
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(bytes(100))
            for chunk in ("AAAAAAAAAAAAAA==", "AA=="):  # ten bytes, one byte
                expected = {"streamId": "s", "chunk": chunk}
                client.wait_for(partial(_has_params, expected))
                client.call("port/credit", {"streamId": "s", "bytes": 1})


def _has_params(expected: object, notice: Message) -> bool:
    return bool(notice["params"] == expected)
