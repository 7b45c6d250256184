"""Denials: the reference's rule for the boolean, and what people are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exec_server.protocol.process import Chunk, ExitedParams, ProcessId, ReadResult, Stream
from exec_server.protocol.sandbox import Denial
from exec_server.sandbox.denial import TEXT_CHARACTERS, find, judge

PHRASES = [
    "operation not permitted",
    "permission denied",
    "read-only file system",
    "seccomp",
    "sandbox",
    "landlock",
    "failed to write file",
]


def said(*parts: tuple[Stream, bytes]) -> list[Chunk]:
    return [Chunk(seq, stream, data) for seq, (stream, data) in enumerate(parts, 1)]


def stdout(data: bytes) -> list[Chunk]:
    return said(("stdout", data))


@pytest.mark.parametrize("phrase", PHRASES)
@pytest.mark.parametrize("stream", ["stdout", "stderr", "pty"])
@pytest.mark.parametrize("spelling", [str, str.upper, str.title])
def test_phrase_in_any_stream_and_spelling(
    phrase: str, stream: Stream, spelling: Callable[[str], str]
) -> None:
    chunks = said((stream, f"x{spelling(phrase)}y".encode()))
    assert judge(1, chunks)
    assert judge(127, chunks)
    assert not judge(0, chunks)


@pytest.mark.parametrize("text", ["", "access denied", "permission  denied", "sand box", "EPERM"])
def test_other_words_are_no_denial(text: str) -> None:
    assert not judge(1, stdout(text.encode()))


def test_exit_code_of_a_foreign_call_is_enough() -> None:
    assert judge(159, [])
    assert not judge(137, [])


# Observed on the reference.
JOINED: list[tuple[bool, list[Chunk]]] = [
    (True, said(("stdout", b"permission "), ("stderr", b"denied"))),
    (True, said(("stderr", b"permission "), ("stdout", b"denied"))),
    (False, said(("stderr", b"denied"), ("stdout", b"permission "))),
    (True, said(("stdout", b"per"), ("stderr", b"xx"), ("stdout", b"mission denied"))),
    (True, stdout("landloc\N{KELVIN SIGN}".encode())),
    (True, said(("stdout", b"landloc\xe2\x84"), ("stderr", b"\xaa"))),
    (True, stdout(b"\xe2sandbox")),
    (True, stdout(b"\xf0\x9f\x98sandbox")),
    (False, stdout("\N{LATIN SMALL LETTER LONG S}andbox".encode())),
    (False, stdout("perm\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}ssion denied".encode())),
    (False, stdout(b"sand\0box")),
    (False, stdout(b"sand\nbox")),
]


@pytest.mark.parametrize(("denied", "chunks"), JOINED)
def test_streams_are_joined_as_bytes_in_order_of_arrival(denied: bool, chunks: list[Chunk]) -> None:
    assert judge(1, chunks) is denied


def model(chunks: list[Chunk]) -> bool:
    """The rule as the specification words it."""
    texts = [b"".join(chunk.chunk for chunk in chunks)]
    texts += [b"".join(c.chunk for c in chunks if c.stream == s) for s in ("stdout", "stderr")]
    lowered = [text.decode("utf-8", "replace").lower() for text in texts]
    return any(phrase in text for phrase in PHRASES for text in lowered)


PIECES = st.sampled_from(
    [
        b"per",
        b"mission ",
        b"DENIED",
        b"sand",
        b"box",
        b"landloc",
        b"k",
        b"\xe2\x84\xaa",
        b"\xe2",
        b"\xaa",
        b"\xc5\xbf",
        b"\xc4\xb0",
        b"\xff",
        b"read-",
        b"only file ",
        b"System",
        b"\x00",
    ]
)


@given(st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), PIECES), max_size=8))
def test_judgement_is_that_of_the_lower_cased_text(parts: list[tuple[Stream, bytes]]) -> None:
    chunks = said(*parts)
    assert judge(1, chunks) is model(chunks)


def test_large_output_is_judged_quickly() -> None:
    line = b"   Compiling something v0.1.0 (/home/someone/with/a/path) as always\n"
    half = line * (524_288 // len(line))
    chunks = said(("stdout", half), ("stderr", half))
    started = time.process_time()
    assert not judge(1, chunks)
    assert time.process_time() - started < 0.2


# ---- what people are told -------------------------------------------------------------------


def explain(path: str, operation: Literal["read", "write"]) -> str | None:
    """A policy that reads everything but /ws/secret and writes below /ws but not its .git."""
    if path.startswith("/ws/secret"):
        return "deny /ws/secret"
    if operation == "read":
        return None
    if path.startswith("/ws/.git"):
        return "read /ws/.git"
    return None if path.startswith("/ws/") else "read /"


def told(line: str | bytes, *, code: int = 1, is_offline: bool = True) -> Denial | None:
    data = line.encode() if isinstance(line, str) else line
    chunks = said(("stderr", data))
    return find(code, chunks, explain, cwd="/ws/sub", is_offline=is_offline)


MESSAGES = [
    # dash, bash, and other shells
    ("/bin/sh: 1: cannot create /etc/x: Read-only file system", "/etc/x", "write", "read /"),
    (
        "sh: 1: cannot create ../.git/config: Read-only file system",
        "/ws/.git/config",
        "write",
        "read /ws/.git",
    ),
    ("/bin/bash: line 1: /etc/x: Read-only file system", "/etc/x", "write", "read /"),
    ("bash: ../secret/key: Permission denied", "/ws/secret/key", "read", "deny /ws/secret"),
    ("zsh: permission denied: /ws/secret/key", "/ws/secret/key", "read", "deny /ws/secret"),
    # coreutils and relatives
    ("touch: cannot touch '/etc/a b': Read-only file system", "/etc/a b", "write", "read /"),
    (
        "mkdir: cannot create directory \u2018/usr/x\u2019: Read-only file system",
        "/usr/x",
        "write",
        "read /",
    ),
    ("cat: ../secret: Permission denied", "/ws/secret", "read", "deny /ws/secret"),
    (
        "rm: cannot remove '../.git/HEAD': Read-only file system",
        "/ws/.git/HEAD",
        "write",
        "read /ws/.git",
    ),
    ("mv: cannot move '../a' to '/srv/b': Read-only file system", "/srv/b", "write", "read /"),
    ("tar: ../../etc/y: Cannot open: Read-only file system", "/etc/y", "write", "read /"),
    (
        "sed: couldn't open temporary file /etc/sedXY: Read-only file system",
        "/etc/sedXY",
        "write",
        "read /",
    ),
    # git
    (
        "fatal: Unable to create '/ws/.git/index.lock': Read-only file system",
        "/ws/.git/index.lock",
        "write",
        "read /ws/.git",
    ),
    (
        "error: could not lock config file /ws/.git/config: Read-only file system",
        "/ws/.git/config",
        "write",
        "read /ws/.git",
    ),
    (
        'error: open("../secret/key"): Permission denied',
        "/ws/secret/key",
        "read",
        "deny /ws/secret",
    ),
    # python, node, go, rust
    (
        "PermissionError: [Errno 13] Permission denied: '/ws/secret/key'",
        "/ws/secret/key",
        "read",
        "deny /ws/secret",
    ),
    ("OSError: [Errno 30] Read-only file system: '/etc/x'", "/etc/x", "write", "read /"),
    ("OSError: [Errno 30] Read-only file system: '/ws/a' -> '/etc/x'", "/etc/x", "write", "read /"),
    ("Error: EROFS: read-only file system, open '/etc/x'", "/etc/x", "write", "read /"),
    (
        "Error: EACCES: permission denied, open '/ws/secret'",
        "/ws/secret",
        "read",
        "deny /ws/secret",
    ),
    ("open /etc/x: read-only file system", "/etc/x", "write", "read /"),
    (
        "error: failed to create directory `/usr/target`\n\nCaused by:\n"
        "  Read-only file system (os error 30)",
        "/usr/target",
        "write",
        "read /",
    ),
    # linkers
    (
        "/usr/bin/ld: cannot open output file /usr/a.out: Read-only file system",
        "/usr/a.out",
        "write",
        "read /",
    ),
    # colours
    (
        "\x1b[1m\x1b[31merror\x1b[0m: open \x1b[1m/etc/x\x1b[0m: Read-only file system",
        "/etc/x",
        "write",
        "read /",
    ),
]


@pytest.mark.parametrize(("line", "path", "operation", "rule"), MESSAGES)
def test_message_is_explained(line: str, path: str, operation: str, rule: str) -> None:
    denial = told(line)
    assert denial is not None
    assert (denial.path, denial.operation, denial.rule) == (path, operation, rule)
    assert denial.text is not None
    assert "\x1b" not in denial.text


def test_first_message_that_a_rule_explains_is_taken() -> None:
    lines = "touch: cannot touch '/ws/odd': Permission denied\nsh: 1: cannot create /etc/x: "
    expected = "sh: 1: cannot create /etc/x: Read-only file system"
    assert told(lines + "Read-only file system\n") == Denial(expected, "/etc/x", "write", "read /")


def test_stderr_is_asked_before_stdout() -> None:
    chunks = said(
        ("stdout", b"open /etc/out: read-only file system\n"),
        ("stderr", b"open /etc/err: read-only file system\n"),
    )
    denial = find(1, chunks, explain, cwd="/", is_offline=True)
    assert denial is not None
    assert denial.path == "/etc/err"


def test_without_a_rule_the_message_remains() -> None:
    line = "cat: /ws/other.txt: Permission denied"
    assert told(line) == Denial(line, "/ws/other.txt", None, None)
    line = "touch: cannot touch '/ws/other.txt': Permission denied"
    assert told(line) == Denial(line, "/ws/other.txt", "write", None)
    assert told("the sandbox says no") == Denial("the sandbox says no", None, None, None)


@pytest.mark.parametrize(
    "text",
    [
        "ping: socket: Operation not permitted",
        'Traceback (most recent call last):\n  File "/usr/lib/python3/socket.py", line 233, in '
        "__init__\n    _socket.socket.__init__(self, family, type, proto, fileno)\n"
        "PermissionError: [Errno 1] Operation not permitted",
        "connect to 127.0.0.1: Operation not permitted",
    ],
)
def test_network_is_recognised(text: str) -> None:
    last = text.splitlines()[-1]
    assert told(text) == Denial(last, None, "network", "network access is restricted")
    online = told(text, is_offline=False)
    assert online is not None
    assert (online.operation, online.rule) == (None, None)


def test_foreign_call_is_recognised() -> None:
    rule = "system calls of another architecture are not allowed"
    assert told("", code=159) == Denial(None, None, "syscall", rule)
    assert told("seccomp!", code=159) == Denial("seccomp!", None, "syscall", rule)


def test_nothing_is_found_where_nothing_was_denied() -> None:
    assert told("open /etc/x: read-only file system", code=0) is None
    assert told("all is well") is None


def test_words_spread_over_streams_are_a_denial_without_a_line() -> None:
    chunks = said(("stdout", b"permission "), ("stderr", b"denied"))
    expected = Denial(None, None, None, None)
    assert find(1, chunks, explain, cwd="/", is_offline=True) == expected


def test_long_line_is_cut() -> None:
    denial = told("x" * 5000 + ": '/etc/x': Read-only file system" + "y" * 5000)
    assert denial is not None
    assert denial.text is not None
    assert len(denial.text) == TEXT_CHARACTERS
    assert denial.path == "/etc/x"


def test_name_that_is_no_utf8_can_be_sent() -> None:
    denial = told(b"cat: '/ws/secret/\xff': Permission denied")
    assert denial is not None
    assert denial.path == "/ws/secret/\N{REPLACEMENT CHARACTER}"
    assert msgspec.json.encode(denial)


FRAGMENTS = st.sampled_from(
    [
        b"permission denied",
        b"Read-only file system",
        b": ",
        b"'",
        b'"',
        b"`",
        b"/",
        b"/etc/x",
        b"\n",
        b"cannot create ",
        b"\xff",
        b"\x1b[",
        b"\x1b]",
        b"\xe2\x80\x98",
        b"\xe2\x80\x9c",
        b"landloc\xe2\x84\xaa",
        b"\x00",
        b" ",
        b"socket",
        b"operation not permitted",
        b"\r\n",
        b"..",
    ]
)


@given(st.lists(st.one_of(FRAGMENTS, st.binary(max_size=4)), max_size=12))
@example([b"permission denied: '", b"\xed\xa0\x80'"])
def test_any_output_gives_what_can_be_sent(parts: list[bytes]) -> None:
    denial = told(b"".join(parts))
    assert (denial is not None) is judge(1, said(("stderr", b"".join(parts))))
    assert msgspec.json.encode(denial)


@pytest.mark.parametrize(
    "piece",
    ["\x1b]", "“", "‘", "'", "`", "/", "cannot ", "permission denied", "a: ", "\n"],  # noqa: RUF001
)
def test_hostile_output_does_not_take_long(piece: str) -> None:
    data = piece.encode() * (1_000_000 // len(piece.encode())) + b"permission denied \n"
    started = time.process_time()
    assert told(data) is not None
    assert time.process_time() - started < 0.5


# ---- on the wire ----------------------------------------------------------------------------


def test_denial_is_only_written_where_there_is_one() -> None:
    exited = ExitedParams(ProcessId("p"), 3, 1, True)
    assert msgspec.json.encode(exited) == (
        b'{"processId":"p","seq":3,"exitCode":1,"sandboxDenied":true}'
    )
    read: dict[str, Any] = {
        "chunks": [],
        "next_seq": 3,
        "exited": False,
        "exit_code": None,
        "closed": False,
        "failure": None,
        "sandbox_denied": False,
    }
    assert msgspec.json.encode(ReadResult(**read)) == (
        b'{"chunks":[],"nextSeq":3,"exited":false,"exitCode":null,"closed":false,'
        b'"failure":null,"sandboxDenied":false}'
    )
    denial = Denial("x: /y: Permission denied", "/y", "read", None)
    text = b'{"text":"x: /y: Permission denied","path":"/y","operation":"read","rule":null}'
    exited = msgspec.structs.replace(exited, sandbox_denial=denial)
    assert msgspec.json.encode(exited).endswith(b',"sandboxDenial":%b}' % text)
    result = ReadResult(**(read | {"sandbox_denied": True, "sandbox_denial": denial}))
    assert msgspec.json.encode(result).endswith(b',"sandboxDenial":%b}' % text)
