"""Requests through the proxy to three origins: what arrives is what was decided about."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from random import Random

import h11
import pytest
from tests.fuzz.proxy_differential import MODES, Differential
from tests.fuzz.proxy_requests import random_requests

from exec_server.proxy import http_messages as messages
from exec_server.proxy.http_messages import Head, RequestTarget

_HIDDEN = b"DELETE /hidden HTTP/1.1\r\nHost: bad.test\r\n\r\n"
_START = b"GET http://a.test/p HTTP/1.1\r\nHost: a.test\r\n"
_LENGTH = b"Content-Length: %d\r\n" % len(_HIDDEN)
_CHUNKS = b"%x;x=y\r\n%b\r\n0\r\nContent-Length: 9\r\n\r\n" % (len(_HIDDEN), _HIDDEN)
# Their host is one that both the rules and an intercepted tunnel allow.
_ATTACKS = {
    "an unread body": _START + _LENGTH + b"\r\n" + _HIDDEN,
    "a dropped length": _START + _LENGTH + b"Connection: content-length\r\n\r\n" + _HIDDEN,
    "a dropped coding": (
        _START + b"Transfer-Encoding: chunked\r\nConnection: transfer-encoding\r\n\r\n" + _CHUNKS
    ),
    "a dropped host": _START + b"Connection: host\r\n\r\n",
    "chunks": _START + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNKS,
    "two lengths": _START + _LENGTH + b"Content-Length: 0\r\n\r\n" + _HIDDEN,
    "a length with an underscore": _START + b"Content_Length: 0\r\n" + _LENGTH + b"\r\n" + _HIDDEN,
    "a length in octal": _START + b"Content-Length: 0%d\r\n\r\n" % len(_HIDDEN) + _HIDDEN,
    "lines of other parsers": _START + b"X: a\x1eContent-Length: 9\r\n\r\n" + _HIDDEN,
    "a body that ends early": _START + b"Content-Length: 99\r\n\r\n" + _HIDDEN,
    "an early answer": _START.replace(b"/p", b"/early") + _LENGTH + b"\r\n" + _HIDDEN * 2,
    "an upgrade": _START + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + _HIDDEN,
    "a whole server": _START.replace(b"GET http://a.test/p", b"OPTIONS *") + b"\r\n",
}


@pytest.fixture(scope="module")
def differential() -> Iterator[Differential]:
    with closing(Differential()) as made:
        yield made


@pytest.mark.skipif(shutil.which("node") is None, reason="node is missing: two parsers only")
def test_three_parsers(differential: Differential) -> None:
    assert [origin.name for origin in differential.origins] == ["h11", "http.server", "node"]


@pytest.mark.parametrize("name", _ATTACKS)
def test_attacks(differential: Differential, name: str) -> None:
    for number in range(len(MODES)):
        assert differential.check(bytes([number]) + _ATTACKS[name]) is None


def test_random_requests(differential: Differential) -> None:
    random = Random(22)
    before = differential.arrived
    for _ in range(60):
        data = random.randbytes(1) + random_requests(random)
        assert differential.check(data) is None, data
    # A selection that the proxy refuses would say nothing about origins.
    assert differential.arrived - before > 30


def _forward_without_length(request: h11.Request, target: RequestTarget, *, absolute: bool) -> Head:
    """A head as a proxy writes it that drops each header that Connection names."""
    path = b"http://a.test" + target.path if absolute else target.path
    headers = [(b"Host", b"a.test"), (b"Connection", b"close")]
    return Head(b"%b %b HTTP/1.1" % (request.method, path), headers)


def test_a_smuggled_request_is_a_finding(
    differential: Differential, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "check_framing", lambda request: None)
    monkeypatch.setattr(messages, "forwarded_request", _forward_without_length)
    for number in range(len(MODES)):
        found = differential.check(bytes([number]) + _ATTACKS["a dropped length"])
        assert found is not None
        assert "bytes after the request" in found
