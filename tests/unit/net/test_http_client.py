"""The HTTP client: bodies piece by piece, and when a connection is used again.

What a whole exchange looks like and how it fails is tested with the registry's client.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest
from tests.support.http_server import Answer as Reply
from tests.support.http_server import HttpServer, answer, hang_up, serving, silence

from exec_server.net import http_client
from exec_server.net.http_client import Client, HttpFailed, StreamedResponse

_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def _run(job: Callable[[HttpServer, Client], Awaitable[None]], *answers: Reply) -> HttpServer:
    async def run() -> HttpServer:
        client = Client()
        try:
            async with serving(*answers) as server:
                await job(server, client)
                return server
        finally:
            await client.close()

    return asyncio.run(run())


async def _all(opened: StreamedResponse) -> bytes:
    pieces = []
    while piece := await opened.read():
        pieces.append(piece)
    return b"".join(pieces)


def test_body_as_it_comes() -> None:
    async def job(server: HttpServer, client: Client) -> None:
        go = asyncio.Event()

        async def slowly(writer: asyncio.StreamWriter) -> None:
            writer.write(_HEAD + b"3\r\none\r\n")
            await go.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

        server.answers[:] = [slowly]
        opened = await client.open("GET", server.url, [])
        assert (opened.status, opened.reason) == (200, "OK")
        assert opened.headers == [("transfer-encoding", "chunked")]
        assert await opened.read() == b"one"
        go.set()
        assert await _all(opened) == b"two"
        assert await opened.read() == b""

    _run(job, b"")


def test_no_more_is_read_ahead_than_allowed() -> None:
    size = 24 * 1_048_576
    stalled = asyncio.Event()

    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        block = bytes(1_048_576)
        for _ in range(0, size, len(block)):
            writer.write(block)
            timer = asyncio.get_running_loop().call_later(0.2, stalled.set)
            await writer.drain()
            timer.cancel()

    async def job(server: HttpServer, client: Client) -> None:
        opened = await client.open("GET", server.url, [])
        await stalled.wait()
        first = await opened.read()
        # What one read of the loop brings comes on top.
        assert 0 < len(first) <= http_client.READ_AHEAD_BYTES + 262_144
        assert len(first) + len(await _all(opened)) == size

    _run(job, flood)


def test_failure_comes_after_what_has_come() -> None:
    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + b"3\r\none\r\n")
        await hang_up(writer)

    async def job(server: HttpServer, client: Client) -> None:
        opened = await client.open("GET", server.url, [])
        assert await opened.read() == b"one"
        for _ in range(2):
            with pytest.raises(HttpFailed) as failed:
                await opened.read()
            assert str(failed.value) == "error decoding response body"
            assert failed.value.args == ("error decoding response body", *failed.value.causes)
        opened.close()

    _run(job, half)


def test_answer_that_has_come_whole_leaves_its_connection() -> None:
    async def job(server: HttpServer, client: Client) -> None:
        for _ in range(2):
            (await client.open("GET", server.url, [])).close()
            opened = await client.open("GET", server.url, [])
            assert await _all(opened) == b"body"
            opened.close()

    assert _run(job, answer(200, b"body")).connections == 1


def test_answer_that_is_given_up_takes_its_connection_with_it() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + b"3\r\none\r\n")
        await silence(writer)

    async def job(server: HttpServer, client: Client) -> None:
        opened = await client.open("GET", server.url, [])
        await opened.read()
        opened.close()
        assert await opened.read() == b""
        await client.open("GET", server.url, [])

    assert _run(job, endless).connections == 2


def test_what_must_not_be_sent_twice_is_not() -> None:
    async def job(server: HttpServer, client: Client) -> None:
        (await client.open("POST", server.url, [])).close()
        with pytest.raises(HttpFailed):
            await client.open("POST", server.url, [])

    server = _run(job, answer(200), hang_up, answer(200))
    assert [request.connection for request in server.requests] == [1, 1]


def test_what_must_not_be_sent_twice_needs_a_fresh_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "FRESH_SECONDS", -1.0)

    async def job(server: HttpServer, client: Client) -> None:
        (await client.open("POST", server.url, [])).close()
        (await client.open("POST", server.url, [])).close()
        (await client.open("GET", server.url, [], repeatable=True)).close()

    server = _run(job, answer(200))
    assert [request.connection for request in server.requests] == [1, 2, 2]


def test_switch_to_another_protocol_has_no_body() -> None:
    async def job(server: HttpServer, client: Client) -> None:
        headers = [("connection", "upgrade"), ("upgrade", "x")]
        opened = await client.open("GET", server.url, headers)
        assert (opened.status, await _all(opened)) == (101, b"")
        (await client.open("GET", server.url, [])).close()

    switch = b"HTTP/1.1 101 Switch\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nabc"
    assert _run(job, switch, answer(200)).connections == 2


@pytest.mark.parametrize(
    ("method", "headers", "body", "length"),
    [
        ("GET", [], b"", None),
        ("GET", [], b"x", "1"),
        ("POST", [], b"", "0"),
        ("PUT", [], b"xy", "2"),
        ("PATCH", [("Content-Length", "2")], b"xy", "2"),
    ],
)
def test_length_of_a_request(
    method: str, headers: list[tuple[str, str]], body: bytes, length: str | None
) -> None:
    async def job(server: HttpServer, client: Client) -> None:
        (await client.open(method, server.url, headers, body)).close()

    [request] = _run(job, answer(200)).requests
    assert (request.header("content-length"), request.body) == (length, body)


def test_wrong_length_of_a_request() -> None:
    async def job(server: HttpServer, client: Client) -> None:
        with pytest.raises(HttpFailed) as failed:
            await client.open("POST", server.url, [("content-length", "1")], b"secret")
        assert failed.value.causes == ("the body length differs from its headers",)

    _run(job, answer(200))


def test_host_of_the_callers_choice_and_target_of_a_tunnel() -> None:
    async def job(server: HttpServer, client: Client) -> None:
        (await client.open("GET", server.url, [("Host", "other")])).close()
        (await client.open("CONNECT", server.url + "/x", [])).close()

    server = _run(job, answer(200))
    first, second = server.requests
    assert first.header("host") == "other"
    assert second.line == f"CONNECT {server.url.removeprefix('http://')} HTTP/1.1"


def test_server_does_not_load_it_before_it_is_needed() -> None:
    code = "import sys, exec_server.cli.serve.run; print('h11' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
