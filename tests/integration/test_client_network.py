"""A program that decides about the hosts of its processes, and one that does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Literal

import pytest
from tests.support.client import Server
from tests.support.network import PATH, WebOrigin, network_proxy, web_origin

import exec_server
import exec_server.sync
from exec_server import NetworkRequest
from exec_server.client.environment import OnNetworkRequest
from exec_server.protocol.decoding import decode
from exec_server.protocol.process import READ, START, ReadParams, StartParams


@pytest.fixture(scope="module")
def origin() -> Iterator[WebOrigin]:
    with web_origin() as running:
        yield running


def _fetch(server: Server, url: str, decide: OnNetworkRequest | None) -> bytes:
    """The output of a command whose rules list nothing."""
    params = {
        "processId": "p",
        "argv": ["/usr/bin/curl", "-s", "-m", "9", "--noproxy", "", url],
        "cwd": "/",
        "env": {"PATH": PATH},
        "tty": False,
        "networkProxy": network_proxy(allowLocalBinding=True, timeout=60_000),
    }

    async def fetch() -> bytes:
        async with exec_server.connect(server.url, on_network_request=decide) as env:
            start = decode(StartParams, params)
            await env.call(START, start)
            output, after = b"", 0
            while True:
                poll = ReadParams(start.process_id, after, None, 10_000)
                read = await env.call(READ, poll, is_retryable=True)
                output += b"".join(chunk.chunk for chunk in read.chunks)
                after = read.next_seq - 1
                if read.closed:
                    return output

    return asyncio.run(fetch())


def test_program_decides(server: Server, origin: WebOrigin) -> None:
    asked: list[NetworkRequest] = []

    async def decide(request: NetworkRequest) -> bool:
        asked.append(request)
        return request.port == origin.port

    assert _fetch(server, origin.url, decide) == b"origin"
    assert asked == [NetworkRequest("p", "http", "127.0.0.1", origin.port)]


def test_failing_function_denies(server: Server, origin: WebOrigin) -> None:
    def decide(request: NetworkRequest) -> bool:
        raise RuntimeError("no idea")

    assert b'"reason":"not_allowed"' in _fetch(server, origin.url, decide)


def test_without_a_function_the_program_never_hangs(server: Server, origin: WebOrigin) -> None:
    output = _fetch(server, origin.url, None)
    assert b'"reason":"the client allows no further hosts"' in output


@pytest.mark.parametrize("sandbox", [None, "read-only"])
def test_rules_of_a_run(
    server: Server, origin: WebOrigin, sandbox: Literal["read-only"] | None
) -> None:
    rules = {
        "proxy": {"domains": {"127.0.0.1": "allow"}, "reviewDomains": ["127.0.0.1"]},
        "policyDecisionTimeoutMs": 60_000,
    }
    asked: list[str] = []

    def decide(request: NetworkRequest) -> bool | str:
        asked.append(request.host)
        return len(asked) == 1 or "once is enough"

    with exec_server.sync.connect(server.url, on_network_request=decide) as env:
        words = ["/usr/bin/curl", "-s", "-m", "9", origin.url]
        assert env.run(words, network_proxy=rules, sandbox=sandbox).text == "origin"
        assert "once is enough" in env.run(words, network_proxy=rules, sandbox=sandbox).text
        direct = env.run([*words, "-x", ""], network_proxy=rules, sandbox=sandbox)
    assert bool(direct) is (sandbox is None)  # a boundary only in a sandbox
    assert asked == ["127.0.0.1"] * 2
