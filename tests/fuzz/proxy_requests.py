"""Bytes that a process may send to its proxy: requests with framing that parsers disagree about."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.fuzz.mutation import mutate

_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE")
_ODD_METHODS = ("TRACE", "get", "CONNECT", "G\tT", "")
_HOST = "a.test"
_ODD_HOSTS = ("a.test:81", "A.Test.", "bad.test", "a.test,bad.test", "a.test:080", "a.test:", "")
_TARGETS = ("http://{}/p", "http://{}/p", "/p", "http://{}", "http://{}?q", "http://{}/early")
_ODD_TARGETS = (
    *("*", "//bad.test/x", "http://bad.test/", "https://{}/", "http://{}@bad.test/"),
    *("http://bad.test@{}/", "http://{}#@bad.test/", "http://{}\\@bad.test/", "/\xe9", "http:{}"),
    *("http://{}/p HTTP/1.1\r\nX: ", "http://{}:80/", "/..;/%00", "http://{}/\t"),
)
_ODD_VERSIONS = ("HTTP/1.0", "HTTP/1.0", "HTTP/1.2", "HTTP/2.0", "http/1.1", "HTTP/1.1 ", "")
_ODD_ENDS = ("\n", "\n", "\r", "\r\r\n", "\n\r", "\r\n ", "\x0b\r\n")
_HIDDEN = "DELETE /hidden HTTP/1.1\r\nHost: bad.test\r\n\r\n"
_OPTIONS = (
    *("close", "keep-alive", "content-length", "transfer-encoding", "host", "te", "upgrade"),
    *("x-a", "CONTENT-LENGTH", "trailer", "content-length\x0b", "expect", "", '"content-length"'),
)
_OTHERS = (
    *("Expect: 100-continue", "TE: trailers", "Trailer: Content-Length", "Upgrade: h2c"),
    *("Upgrade: websocket", "Keep-Alive: timeout=9", "Proxy-Connection: keep-alive", "X-A: 1"),
    *("HTTP2-Settings: AAMAAABkAAQAAP__", "Proxy-Authorization: Basic eA==", "Content-Type: x"),
    *("X-Forwarded-Host: bad.test", "Accept: */*", "X: ", "Max-Forwards: 0"),
)
_ODD_LENGTH_NAMES = ("content_length", "Content-Length ", " Content-Length", "content-LENGTH")
_ODD_LENGTHS = ("0{}", "+{}", "{}, {}", " {}", "{}\t", "0x{:x}", "-{}", "{}_0", "{},")
_ODD_CODING_NAMES = ("Transfer_Encoding", "transfer-encoding\t", "TRANSFER-encoding")
_ODD_CODINGS = (
    *("Chunked", "chunked, chunked", "identity, chunked", "x, chunked", '"chunked"', "chunked;q=1"),
    *("\tchunked", "chunked\x0b", "chunked,", "xchunked", "identity", ""),
)
_ODD_SIZES = ("{:X}", "0{:x}", "{:x};a=b", "{:x} ", "{:x};\n", "+{:x}", "0x{:x}", "{:x}\r")
_TRAILERS = ("X: y\r\n", "Content-Length: 9\r\n", "Host: bad.test\r\n", "Transfer-Encoding: x\r\n")
# How often a part of a request is one that parsers disagree about. More often, and hardly any
# request would get through the proxy.
_ODD = 0.07
_WORDS = (
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b"\0", b"\x0b", b"\x85", b":", b",", b";", b"0\r\n\r\n"),
    *(
        b"Connection: content-length\r\n",
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ),
    *(b"HTTP/1.1", b"Host: bad.test\r\n", _HIDDEN.encode(), b"0", b"_", b"+", b"\r\n ", b"\xff"),
)


def random_requests(random: Random) -> bytes:
    """One to three requests, each with a body in some framing; often a byte is changed."""
    text = "".join(_request(random) for _ in range(random.choice((1, 1, 2, 3))))
    data = text.encode("latin-1")
    return mutate(data, random, [data], _WORDS) if random.random() < 0.3 else data


def _mostly(random: Random, usual: Sequence[str], odd: Sequence[str]) -> str:
    return random.choice(odd if random.random() < _ODD else usual)


def _request(random: Random) -> str:
    host = _mostly(random, (_HOST,), _ODD_HOSTS)
    target = _mostly(random, _TARGETS, _ODD_TARGETS).format(host)
    method = _mostly(random, _METHODS, _ODD_METHODS)
    framing, body = _framing(random)
    headers = [f"Host: {_mostly(random, (host,), _ODD_HOSTS)}", *framing]
    if random.random() < 0.3:
        named = ", ".join(random.choices(_OPTIONS, k=random.randint(1, 2)))
        headers.append(f"Connection: {named}")
    headers += random.choices(_OTHERS, k=random.choice((0, 0, 1, 2)))
    headers.append(_mostly(random, ("",), ("no colon", ": y", "Host", "X: y\r\n folded")))
    if random.random() < 0.1:
        headers.append(f"X-B: {chr(random.randrange(256))}y")
    random.shuffle(headers)
    first = f"{method} {target} {_mostly(random, ('HTTP/1.1',), _ODD_VERSIONS)}"
    lines = [first, *filter(None, headers), ""]
    is_odd = random.random() < 0.2
    return "".join(line + _end(random, is_odd=is_odd) for line in lines) + body


def _end(random: Random, *, is_odd: bool) -> str:
    return _mostly(random, ("\r\n",), _ODD_ENDS) if is_odd else "\r\n"


def _framing(random: Random) -> tuple[list[str], str]:
    """Headers about the body, and a body that mostly agrees with them."""
    body = random.choice(("", "abc", _HIDDEN, f"0\r\n\r\n{_HIDDEN}", "x" * 300))
    kind = random.random()
    if kind < 0.3:
        return [], body if random.random() < _ODD else ""
    if kind < 0.65:
        return _length(random, body), body
    name = _mostly(random, ("Transfer-Encoding",), _ODD_CODING_NAMES)
    headers = [f"{name}: {_mostly(random, ('chunked',), _ODD_CODINGS)}"]
    if random.random() < _ODD:
        headers += _length(random, body)
    return headers, _chunked(random, body)


def _length(random: Random, body: str) -> list[str]:
    length = len(body) + (random.choice((-1, 1, 5)) if random.random() < _ODD else 0)
    name = _mostly(random, ("Content-Length",), _ODD_LENGTH_NAMES)
    headers = [f"{name}: {_mostly(random, ('{}',), _ODD_LENGTHS).format(length, length)}"]
    if random.random() < _ODD:
        headers.append(f"Content-Length: {random.choice((length, 0, 3))}")
    return headers


def _chunked(random: Random, body: str) -> str:
    parts, text = [], body
    while text:
        size = random.randint(1, len(text))
        shown = _mostly(random, ("{:x}", "{:x};a=b", "0{:X}"), _ODD_SIZES).format(size)
        end = _end(random, is_odd=True)
        parts.append(f"{shown}{end}{text[:size]}\r\n")
        text = text[size:]
    trailer = random.choice(_TRAILERS) if random.random() < 0.2 else ""
    return "".join(parts) + f"0\r\n{trailer}\r\n"
