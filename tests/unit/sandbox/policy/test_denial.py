"""Denials: the rule of the reference for the boolean, and the explanation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exec_server.protocol.process import ExitedParams, OutputChunk, ProcessId, ReadResult, Stream
from exec_server.protocol.sandbox import Denial
from exec_server.sandbox.policy.denial import (
    SUCCESS_BYTES,
    TEXT_CHARACTERS,
    find_denial,
    is_likely_denied,
)

PHRASES = [
    "operation not permitted",
    "permission denied",
    "read-only file system",
    "seccomp",
    "sandbox",
    "landlock",
    "failed to write file",
]


def said(*parts: tuple[Stream, bytes]) -> list[OutputChunk]:
    return [OutputChunk(seq, stream, data) for seq, (stream, data) in enumerate(parts, 1)]


def stdout(data: bytes) -> list[OutputChunk]:
    return said(("stdout", data))


@pytest.mark.parametrize("phrase", PHRASES)
@pytest.mark.parametrize("stream", ["stdout", "stderr", "pty"])
@pytest.mark.parametrize("spelling", [str, str.upper, str.title])
def test_phrase_in_any_stream_and_spelling(
    phrase: str, stream: Stream, spelling: Callable[[str], str]
) -> None:
    chunks = said((stream, f"x{spelling(phrase)}y".encode()))
    assert is_likely_denied(1, chunks)
    assert is_likely_denied(127, chunks)
    assert not is_likely_denied(0, chunks)


@pytest.mark.parametrize("text", ["", "access denied", "permission  denied", "sand box", "EPERM"])
def test_other_words_are_no_denial(text: str) -> None:
    assert not is_likely_denied(1, stdout(text.encode()))


def test_exit_code_of_a_foreign_call_is_enough() -> None:
    assert is_likely_denied(159, [])
    assert not is_likely_denied(137, [])


# Observed on the reference.
JOINED: list[tuple[bool, list[OutputChunk]]] = [
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
def test_streams_are_joined_as_bytes_in_order_of_arrival(
    denied: bool, chunks: list[OutputChunk]
) -> None:
    assert is_likely_denied(1, chunks) is denied


def model(chunks: list[OutputChunk]) -> bool:
    """The rule in the words of the specification."""
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
    assert is_likely_denied(1, chunks) is model(chunks)


def test_large_output_is_judged_quickly() -> None:
    line = b"   Compiling something v0.1.0 (/home/someone/with/a/path) as always\n"
    half = line * (524_288 // len(line))
    chunks = said(("stdout", half), ("stderr", half))
    started = time.process_time()
    assert not is_likely_denied(1, chunks)
    assert time.process_time() - started < 0.2


# ---- the explanation ------------------------------------------------------------------------


def explain(path: str, operation: Literal["read", "write"]) -> str | None:
    """A policy that reads everything but /ws/secret and writes below /ws but not its .git."""
    if path.startswith("/ws/secret"):
        return "deny /ws/secret"
    if operation == "read":
        return None
    if path.startswith("/ws/.git"):
        return "read /ws/.git"
    return None if path.startswith("/ws/") else "read /"


def told(
    line: str | bytes,
    *,
    code: int = 1,
    is_offline: bool = True,
    stream: Stream = "stderr",
    **more: Any,
) -> Denial | None:
    data = line.encode() if isinstance(line, str) else line
    chunks = said((stream, data))
    return find_denial(code, chunks, explain, cwd="/ws/sub", is_offline=is_offline, **more)


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
    # other runtimes
    ("java.io.FileNotFoundException: /etc/x (Read-only file system)", "/etc/x", "write", "read /"),
    (
        "in `initialize': Read-only file system @ rb_sysopen - /etc/x (Errno::EROFS)",
        "/etc/x",
        "write",
        "read /",
    ),
    (
        "PHP Warning:  fopen(/etc/x): Failed to open stream: Read-only file system in t.php",
        "/etc/x",
        "write",
        "read /",
    ),
    (
        "E: Could not open lock file /var/lib/dpkg/lock - open (30: Read-only file system)",
        "/var/lib/dpkg/lock",
        "write",
        "read /",
    ),
    # mount points
    (
        "mv: cannot move '../.git' to 'x': Device or resource busy",
        "/ws/.git",
        "write",
        "read /ws/.git",
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
    denial = find_denial(1, chunks, explain, cwd="/", is_offline=True)
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
    assert told("all is well") is None
    assert told("all is well", code=0) is None
    assert told("mv: cannot move '/ws/a' to '/ws/b': Device or resource busy") is None


# ---- successful commands --------------------------------------------------------------------


@pytest.mark.parametrize(("line", "path", "operation", "rule"), MESSAGES)
@pytest.mark.parametrize("stream", ["stderr", "pty"])
def test_message_of_a_successful_command_is_explained(
    line: str, path: str, operation: str, rule: str, stream: Stream
) -> None:
    output = f"Building\n{line}\n" + "all is well\n" * 100
    assert told(output, code=0, stream=stream) == told(line)


@pytest.mark.parametrize(
    "line",
    [
        "touch: cannot touch '/ws/other.txt': Permission denied",
        "touch: cannot touch '/ws/other.txt': Read-only file system",
        "cat: /etc/shadow: Permission denied",
        "the sandbox says no to writing '/etc/x'",
        "Read-only file system",
        "warning: updating '/etc/landlock.conf'",
    ],
)
def test_no_success_is_a_denial_without_a_rule(line: str) -> None:
    assert told(line, code=0) is None


def test_the_output_of_a_successful_command_is_no_message() -> None:
    assert told("open /etc/x: read-only file system", code=0, stream="stdout") is None


def test_the_last_errors_of_a_successful_command_are_examined() -> None:
    error = "touch: cannot touch '/etc/x': Read-only file system\n"
    assert told("x" * 5_000_000 + "\n" + error, code=0) is not None
    assert told(error + "x" * SUCCESS_BYTES, code=0) is None


# ---- paths that the policy allows -----------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        # The kernel would report a read-only mount: this is the mode of a directory, and the path
        # may lead into the workspace through a link.
        "touch: cannot touch '/link/to/ws/x': Permission denied",
        "rm: cannot remove '/etc/x': Operation not permitted",
        "cat: /etc/shadow: Permission denied",
        "touch: cannot touch '/ws/x': Read-only file system",
        "a path of the sandbox: cannot write '/etc/x'",
    ],
)
@pytest.mark.parametrize("code", [0, 1])
def test_what_the_policy_does_not_explain_has_no_rule(line: str, code: int) -> None:
    denial = told(line, code=code)
    assert denial is None if code == 0 else denial is not None
    assert denial is None or denial.rule is None


# ---- the network, as the kernel knows it ----------------------------------------------------

NO_NETWORK = "network access is restricted"


@pytest.mark.parametrize(
    "line",
    [
        "curl: (6) Could not resolve host: example.com",
        "fatal: unable to access 'https://example.com/x/': Could not resolve host: example.com",
        "ssh: Could not resolve hostname example.com: Temporary failure in name resolution",
        "npm error code EAI_AGAIN",
        "dial tcp: lookup example.com: no such host",
        "socket: Operation not permitted",
        "<urlopen error [Errno -3] Temporary failure in name resolution>",
    ],
)
@pytest.mark.parametrize("code", [0, 1, 6, 128])
def test_refused_network_is_told_with_its_message(line: str, code: int) -> None:
    output = f"starting\n{line}\nIt has failed.\n"
    expected = Denial(line, None, "network", NO_NETWORK)
    assert told(output, code=code, network_rule=NO_NETWORK) == expected
    assert told(output, code=code, network_rule=NO_NETWORK, stream="pty") == expected


def test_no_text_makes_the_network_refused() -> None:
    line = "curl: (6) Could not resolve host: example.com"
    assert told(line) is None
    assert told(line, code=0) is None


def test_refused_network_needs_no_message() -> None:
    expected = Denial(None, None, "network", NO_NETWORK)
    assert told("", code=0, network_rule=NO_NETWORK) == expected
    assert told("it failed\n", network_rule=NO_NETWORK) == expected
    assert told("the sandbox says no\n", network_rule=NO_NETWORK) == expected


def test_last_of_two_messages_is_taken() -> None:
    file = "touch: cannot touch '/etc/network/x': Read-only file system"
    network = "curl: (6) Could not resolve host: example.com"
    denial = told(f"{network}\n{file}\n", network_rule=NO_NETWORK)
    assert denial == Denial(file, "/etc/network/x", "write", "read /")
    denial = told(f"{file}\n{network}\n", network_rule=NO_NETWORK)
    assert denial == Denial(network, None, "network", NO_NETWORK)


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
    assert (denial is not None) is is_likely_denied(1, said(("stderr", b"".join(parts))))
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
    started = time.process_time()
    told(data, code=0)
    told(data, code=0, network_rule=NO_NETWORK)
    assert time.process_time() - started < 0.1


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
    either = msgspec.structs.replace(denial, candidates=(denial, denial))
    assert msgspec.json.encode(either) == b'%b,"candidates":[%b,%b]}' % (text[:-1], text, text)
    assert msgspec.json.decode(msgspec.json.encode(either), type=Denial) == either
    result = ReadResult(**(read | {"sandbox_denied": True, "sandbox_denial": denial}))
    assert msgspec.json.encode(result).endswith(b',"sandboxDenial":%b}' % text)
