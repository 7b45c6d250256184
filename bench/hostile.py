"""Hostile messages of a given size, by the kind of work that they make for a server.

Each is the bytes that one client sends after its handshake: frames with a zero mask, as in
`bench.client`. The shapes are those that are expensive for some JSON or WebSocket decoder, and
those that are rejected only after all of them is decoded.
"""

import json
import struct
from collections.abc import Callable

from bench.client import frame

TEXT, BINARY, CONTINUATION = 1, 2, 0
_PING = 9

# A message of a given size.
Build = Callable[[int], bytes]


def _fill(unit: bytes, size: int, joiner: bytes = b",") -> bytes:
    """Repetitions of a unit, up to a size."""
    return joiner.join([unit] * max(1, size // (len(unit) + len(joiner))))


def _named(size: int, value: bytes = b"0", prefix: str = "k") -> bytes:
    """Members with names of their own, up to a size."""
    each = len(prefix) + 9 + len(value)
    return b",".join(b'"%b%06d":%b' % (prefix.encode(), n, value) for n in range(size // each))


def request(params: bytes, method: str = "fs/getMetadata", request_id: bytes = b"7") -> bytes:
    """The text of a request with the text of its params."""
    return b'{"id":%b,"method":"%b","params":%b}' % (request_id, method.encode(), params)


# ---- JSON ------------------------------------------------------------------------------


def _params(unit: bytes, first: bytes = b"[", last: bytes = b"]", joiner: bytes = b",") -> Build:
    return lambda size: frame(request(first + _fill(unit, size - 80, joiner) + last))


def _deep(size: int) -> bytes:
    half = (size - 80) // 2
    return frame(request(b"[" * half + b"]" * half))


def _limit_of_depth(size: int) -> bytes:
    return frame(request(b"[" + _fill(b"[" * 100 + b"]" * 100, size - 80) + b"]"))


def _objects_in_objects(size: int) -> bytes:
    half = (size - 80) // 6
    return frame(request(b'{"a":' * half + b"0" + b"}" * half))


def _members(value: bytes, prefix: str = "k", last: bytes = b"}") -> Build:
    return lambda size: frame(request(b"{" + _named(size - 80, value, prefix) + last))


def _string(unit: bytes, last: bytes = b"") -> Build:
    return lambda size: frame(request(b'{"path":"' + _fill(unit, size - 80, b"") + last + b'"}'))


def _digits(size: int) -> bytes:
    return frame(request(b"[" + b"9" * (size - 80) + b"]"))


def _fraction(size: int) -> bytes:
    return frame(request(b"[0." + b"9" * (size - 80) + b"]"))


def _spaces(size: int) -> bytes:
    return frame(request(b" " * (size - 80) + b"[]"))


def _invalid_utf8(opcode: int) -> Build:
    def build(size: int) -> bytes:
        body = request(b'["' + _fill(b"\xc3\xa4", size - 90, b"") + b'\xff"]')
        return frame(body, opcode)

    return build


JSON: dict[str, Build] = {
    "numbers": _params(b"1"),
    "numbers of 3 digits, at the limit": _params(b"111"),
    "strings": _params(b'""'),
    "strings of 4, at the limit": _params(b'"a"'),
    "nulls": _params(b"null"),
    "floats": _params(b"0.1"),
    "long floats": _params(b"0." + b"7" * 400),
    "exponents": _params(b"1e9999"),
    "empty arrays": _params(b"[]"),
    "empty objects": _params(b"{}"),
    "objects": _params(b'{"a":1}'),
    "arrays at the limit of depth": _limit_of_depth,
    "arrays beyond the limit of depth": _deep,
    "objects beyond the limit of depth": _objects_in_objects,
    "members": _members(b"0"),
    "members without a value": _members(b"0", last=b',"a"}'),
    "members with a duplicate": _members(b"0", last=b',"k000001":0}'),
    "members, all duplicates": _params(b'"a":0', b"{", b"}"),
    "members, escaped": _members(b"0", prefix="\\u0041"),
    "members of objects with duplicates": _params(b'{"a":0,"a":0}'),
    "one integer": _digits,
    "one fraction": _fraction,
    "integers of 4,000 digits": _params(b"9" * 4000),
    "escapes": _string(b"\\u0041"),
    "escapes of quotes": _string(b'\\"'),
    "escapes of backslashes": _string(b"\\\\"),
    "escapes of control characters": _string(b"\\u0000"),
    "pairs of escapes": _string(b"\\ud83d\\ude00"),
    "half a pair of escapes": _string(b"\\u0041", b"\\ud83d"),
    "control characters": _string(b"a", b"\n"),
    "characters of two bytes": _string(b"\xc3\xa4"),
    "invalid UTF-8 in a text message": _invalid_utf8(TEXT),
    "invalid UTF-8 in a binary message": _invalid_utf8(BINARY),
    "white space": _spaces,
    "line ends": lambda size: frame(b"\n" * (size - 80) + request(b"[")),
    "numbers and a comma": _params(b"1", last=b",]"),
    "numbers and no end": _params(b"1", last=b""),
    "numbers and a wrong bracket": _params(b"1", last=b"}"),
    "numbers and NaN": _params(b"1", last=b",NaN]"),
    "strings and NaN": _params(b'"aaa"', last=b",NaN]"),
    "strings and a wrong literal": _params(b'"aaa"', last=b",nulL]"),
    "strings and more text": _params(b'"aaa"', last=b"]}}"),
    "members and no end": _members(b"0", last=b""),
    "arrays and no end": _params(b"[]", last=b""),
    "quotes": lambda size: frame(b'"' * size),
    "backslashes": lambda size: frame(b'"' + b"\\" * size),
    "brackets": lambda size: frame(b"[" * size),
    "commas": lambda size: frame(b"[" + b"," * size),
}


# ---- the envelope ----------------------------------------------------------------------


def _envelope(before: bytes, unit: bytes, after: bytes) -> Build:
    return lambda size: frame(before + _fill(unit, size - 80, b"") + after)


ENVELOPES: dict[str, Build] = {
    "an unknown method": _envelope(b'{"id":1,"method":"', b"x", b'"}'),
    "an unknown method, escaped": _envelope(b'{"id":1,"method":"', b"\\u0001", b'"}'),
    "an unknown notification": _envelope(b'{"method":"', b"\\u0001", b'"}'),
    "an id": _envelope(b'{"method":"environment/status","id":"', b"\\u0001", b'"}'),
    "an id of the wrong type": _envelope(b'{"method":"x","id":[', b'"a",', b"0]}"),
    "a method of the wrong type": _envelope(b'{"id":1,"method":["', b"\\u0001", b'"]}'),
    "a trace of the wrong type": _envelope(b'{"id":1,"method":"x","trace":"', b"\\u0001", b'"}'),
    "an error of the wrong type": _envelope(b'{"id":1,"error":"', b"\\u0001", b'"}'),
    "a code of the wrong type": _envelope(b'{"id":1,"error":{"code":"', b"\\u0301", b'"}}'),
    "a batch": lambda size: frame(b"[" + _fill(request(b"null"), size - 80) + b"]"),
    "unknown members": lambda size: frame(b'{"id":1,"method":"x",' + _named(size - 80) + b"}"),
}


# ---- params ----------------------------------------------------------------------------

_MANAGED = (
    b'{"windowsSandboxLevel":"disabled","permissions":{"type":"managed","network":"restricted",'
    b'"file_system":{"type":"restricted","entries":[%b]}}}'
)
_START = (
    b'{"processId":"p","argv":["true"],"cwd":"file:///","env":{},"tty":false,"pipeStdin":false,'
)


def _method(name: str, before: bytes, unit: bytes, after: bytes, joiner: bytes = b",") -> Build:
    return lambda size: frame(request(before + _fill(unit, size - 600, joiner) + after, name))


def _path(unit: bytes, before: bytes = b"file:///") -> Build:
    return _method("fs/getMetadata", b'{"path":"' + before, unit, b'"}', b"")


def _start(before: bytes, unit: bytes, after: bytes) -> Build:
    return _method("process/start", _START + b'"arg0":null,' + before, unit, after + b"}")


def _sandbox(entry: bytes) -> Build:
    before, after = _MANAGED.split(b"%b")
    return _start(b'"sandbox":' + before, entry, after)


def _environment(size: int) -> bytes:
    params = _START.replace(b'"env":{}', b'"env":{%b}' % _named(size - 600, b'""'))
    return frame(request(params + b'"arg0":null}', "process/start"))


def _policy(member: bytes, unit: bytes) -> Build:
    members = {b"exclude": b"[]", b"include_only": b"[]", b"set": b"{}"}
    del members[member]
    rest = b"".join(b'"%b":%b,' % item for item in members.items())
    rest = rest.replace(b"include_only", b"includeOnly")
    name = member.replace(b"include_only", b"includeOnly")
    before = b'"envPolicy":{"inherit":"all","ignoreDefaultExcludes":true,' + rest
    return _start(before + b'"%b":[' % name, unit, b"]}")


PARAMS: dict[str, Build] = {
    "a path of short names": _path(b"a/"),
    "a path of dots": _path(b"../"),
    "a path of slashes": _path(b"/"),
    "a path of escapes": _path(b"%2e"),
    "a path of spaces": _path(b" "),
    "a path of quotes": _path(b"\\u0022"),
    "a path of characters of two bytes": _path(b"\xc3\xa4"),
    "a native path of spaces": _path(b" ", b"/"),
    "a native path of characters of two bytes": _path(b"\xc3\xa4", b"/"),
    "a native path of short names": _path(b"a/", b"/"),
    "a path with a long host": _path(b"a", b"file://"),
    "a path with a host of labels": _path(b"a.", b"file://"),
    "a path with a host of escapes": _path(b"%41", b"file://"),
    "a path with a host of digits": _path(b"1.", b"file://"),
    "a path with a Unicode host": _path(b"\xc3\xa4", b"file://"),
    "a path with a Punycode host": _path(b"xn--a.", b"file://"),
    "a path with an IPv6 host": _path(b"1:", b"file://["),
    "a path with another scheme": _path(b"a", b""),
    "a path with an opaque name": _path(b"YQ", b"file:///%00/bad/path/"),
    "a path of the wrong type": _method("fs/getMetadata", b'{"path":[', b'"a"', b"]}"),
    "a flag of the wrong type": _method(
        "fs/getMetadata", b'{"path":"/","followSymlinks":"', b"\\u0301", b'"}', b""
    ),
    "unknown params": lambda size: frame(request(b'{"path":"/",' + _named(size - 600) + b"}")),
    "an array of params": _method("fs/getMetadata", b"[", b'"/"', b"]"),
    "base64": _method(
        "fs/writeBlock", b'{"handleId":"h","offset":0,"chunk":"', b"AAAA", b'"}', b""
    ),
    "invalid base64": _method(
        "fs/writeBlock", b'{"handleId":"h","offset":0,"chunk":"', b"AAAA", b'*AA"}', b""
    ),
    "base64 of the wrong type": _method(
        "fs/writeBlock", b'{"handleId":"h","offset":0,"chunk":[', b'"AAAA"', b"]}"
    ),
    "a file": _method("fs/writeFile", b'{"path":"/nowhere/x","dataBase64":"', b"AAAA", b'"}', b""),
    "a handle": _method("fs/close", b'{"handleId":"', b"\\u0301", b'"}', b""),
    "watched paths": _method("fs/watchMissing", b'{"watchId":1,"missing":[', b'"/a b"', b"]}"),
    "a watched path of the wrong type": _method(
        "fs/watchMissing", b'{"watchId":1,"missing":[', b'"/a b"', b",0]}"
    ),
    "a process id": _method("process/terminate", b'{"processId":"', b"\\u0301", b'"}', b""),
    "a signal": _method("process/signal", b'{"processId":"p","signal":"', b"\\u0301", b'"}', b""),
    "a size": _method("process/resize", b'{"processId":"p","rows":1,"columns":[', b"1", b"]}"),
    "arguments": _method(
        "process/start", _START.replace(b'["true"]', b'["/nowhere"') + b'"arg0":null}', b"", b""
    ),
    "environment variables": _environment,
    "patterns of variables": _policy(b"exclude", b'"*a?"'),
    "one pattern of variables": lambda size: _policy(b"exclude", b'"' + b"*a" * 30000 + b'"')(
        min(size, 100_000)
    ),
    "patterns to include": _policy(b"include_only", b'"*a?"'),
    "a sandbox of paths": _sandbox(
        b'{"path":{"type":"path","path":"file:///a/b"},"access":"write"}'
    ),
    "a sandbox of special paths": _sandbox(
        b'{"path":{"type":"special","value":{"kind":"minimal"}},"access":"read"}'
    ),
    "a sandbox of patterns": _sandbox(
        b'{"path":{"type":"glob_pattern","pattern":"/a/**/*.b"},"access":"deny"}'
    ),
    "a sandbox with a wrong entry": _start(
        b'"sandbox":' + _MANAGED.split(b"%b")[0],
        b'{"path":{"type":"path","path":"file:///a b"},"access":"write"}',
        b',{"path":{"type":"path","path":"file:///a"},"access":"x"}' + _MANAGED.split(b"%b")[1],
    ),
    "HTTP headers": _method(
        "http/request",
        b'{"method":"GET","url":"ftp://x","requestId":"r","headers":[',
        b'{"name":"a","value":"b"}',
        b"]}",
    ),
    "a URL": _method(
        "http/request", b'{"method":"GET","requestId":"r","url":"http://a/', b"\xc3\xa4", b'"}', b""
    ),
    "a URL with a long host": _method(
        "http/request", b'{"method":"GET","requestId":"r","url":"http://', b"a.", b'"}', b""
    ),
    "a UUID": _start(b'"metadata":{"threadId":"' + b"0" * 8, b"0-", b'"}'),
}


# ---- WebSocket frames ------------------------------------------------------------------


def fragment(payload: bytes, opcode: int = CONTINUATION) -> bytes:
    """A frame that more fragments follow."""
    head = frame(payload, opcode)
    return bytes((head[0] & 0x7F,)) + head[1:]


def _fragments(payload: bytes, count: int) -> Build:
    """As many fragments as fit into a message, or the count; they are never finished."""

    def build(size: int) -> bytes:
        number = min(count, size // len(payload) if payload else count)
        return fragment(b" ", TEXT) + fragment(payload) * number + frame(b"{}", CONTINUATION)

    return build


def _many(each: bytes) -> Build:
    return lambda size: each * (size // len(each))


def _announced(size: int) -> bytes:
    return struct.pack("!BBQ", 0x81, 0xFF, size) + bytes(4) + b" " * size


FRAMES: dict[str, Build] = {
    "fragments without a byte": _fragments(b"", 1_000_000),
    "fragments of one byte": _fragments(b" ", 1_000_000),
    "fragments of 100 bytes": _fragments(b" " * 100, 1_000_000),
    "fragments of 64 KiB": _fragments(b" " * 65_536, 1_000_000),
    "one frame": _announced,
    "pings": _many(frame(b"", _PING)),
    "pings of 125 bytes": _many(frame(b"p" * 125, _PING)),
    "messages of two bytes": _many(frame(b"{}")),
    "empty messages": _many(frame(b"")),
    "requests": _many(frame(b'{"id":1,"method":"environment/status"}')),
    "unknown requests": _many(frame(b'{"id":1,"method":"x"}')),
    "messages of 60 KiB": lambda size: (
        frame(request(b"[" + _fill(b"1", 61_000) + b"]")) * (size // 61_000)
    ),
    "malformed messages of 60 KiB": lambda size: (
        frame(request(b"[" + _fill(b"1", 61_000) + b",]")) * (size // 61_000)
    ),
    "malformed messages of 4 KiB": lambda size: (
        frame(request(b"[" + _fill(b"1", 4000) + b",]")) * (size // 4000)
    ),
}

KINDS: dict[str, dict[str, Build]] = {
    "JSON": JSON,
    "envelope": ENVELOPES,
    "params": PARAMS,
    "frames": FRAMES,
}


def check() -> None:
    """Fail unless the texts that should be valid JSON are."""
    for name in ("arguments", "environment variables", "a sandbox of paths", "HTTP headers"):
        text = PARAMS[name](2000)
        json.loads(text[text.index(b"{") :])
