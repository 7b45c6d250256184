"""Files, pipes, terminals and output of commands: bytes from the own machine, and registries."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from tests.fuzz.target import Target, as_text, json_bytes

from exec_server.cli.errors import UsageError
from exec_server.cli.exec.terminal import MAX_TYPED_BYTES, EscapeParser
from exec_server.cli.serve import watchdog
from exec_server.cli.targets import parse_remote_path
from exec_server.client.targets import find_target, load_targets
from exec_server.errors import RegistryError, StartupError, printable
from exec_server.filesystem.syscalls import parse_mounts, slow_mount_points
from exec_server.protocol import process
from exec_server.registry import api, chatgpt_token, sign_in, stdin_credential
from exec_server.registry.http import CompleteResponse
from exec_server.sandbox.policy.denial import find_denial, is_likely_denied
from exec_server.sandbox.runtime import messages as sandbox_messages
from exec_server.sandbox.runtime.messages import BuildRequest, ExecRequest, Status
from exec_server.sandbox.runtime.worker import FileRequest, FileResponse


def _denial(data: bytes) -> None:
    chunks = [process.OutputChunk(1, "stderr", data), process.OutputChunk(2, "stdout", data[::-1])]
    for code in (1, 159):
        is_likely_denied(code, chunks)
        find_denial(code, chunks, lambda *_: None, cwd="/w", is_offline=True)


def _mounts(data: bytes) -> None:
    """A mount point with any name, escaped as the kernel does it."""
    name = b"x" + data.replace(b"\0", b"").replace(b"/", b"_")
    escaped = re.sub(rb"[ \t\n\\]", lambda match: b"\\%03o" % match[0][0], name)
    table = b"24 1 0:22 / /mnt/%b rw shared:1 - fuse x rw\n" % escaped
    assert slow_mount_points(parse_mounts(table)) == (f"/mnt/{os.fsdecode(name)}/",)


def _sandbox_message(data: bytes) -> None:
    """Anything on the control socket of a confined process, for each kind of message."""
    for kind in (BuildRequest, ExecRequest, Status, FileRequest, FileResponse):
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                theirs.setblocking(False)
                with suppress(BlockingIOError):
                    theirs.send(data)
            with suppress(sandbox_messages.Disconnected):
                sandbox_messages.receive(ours, kind)


def _targets_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="exec-server-fuzz-") as config:
        os.environ["XDG_CONFIG_HOME"] = config
        path = Path(config, "exec-server", "targets.toml")
        path.parent.mkdir()
        path.write_bytes(data)
        path.chmod(0o600)
        with suppress(StartupError):
            load_targets()


def _target_argument(data: bytes) -> None:
    os.environ["XDG_CONFIG_HOME"] = "/nonexistent"
    with suppress(StartupError, UsageError):
        parse_remote_path(as_text(data))
    with suppress(StartupError):
        find_target(as_text(data))


def _credential(data: bytes) -> None:
    for form in stdin_credential.FORMS.values():
        with suppress(StartupError):
            form.parse(data, stdin_credential.Expected("env-1"))
    with suppress(ValueError):
        sign_in.parse(data)
    with suppress(ValueError):
        chatgpt_token.account_claims(f"e30.{as_text(data)}.s")


_RESPONSES: Final = (
    api.RegistrationResponse,
    api.DirectRegistrationResponse,
    api.PlainRegistrationResponse,
    api.ConnectionResponse,
    api.ValidationResponse,
)


def _registry_response(data: bytes) -> None:
    for kind in _RESPONSES:
        with suppress(RegistryError):
            api.decode_body(data, kind)
    for status in (400, 401, 799):
        text = api.ErrorResponse(CompleteResponse(status, "", [], data), ["secret"]).text("x")
        assert text.replace("\n", "").replace("\t", "").isprintable()


def _printable(data: bytes) -> None:
    assert printable(as_text(data)).isprintable()
    assert printable(os.fsdecode(data)).isprintable()


def _typed(data: bytes) -> None:
    """Keys that are typed into a terminal: an escape may be cut between two reads."""

    def feed(pieces: Iterable[bytes]) -> list[object]:
        parser = EscapeParser()
        items = [item for piece in pieces for item in parser.feed(piece)]
        return [item for item in items if not isinstance(item, bytes)]

    keys = data[:MAX_TYPED_BYTES]
    assert feed([keys]) == feed(bytes([key]) for key in keys)


def _registrations(data: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, data[:65_536])
    os.close(writer)
    try:
        watchdog.read_registrations(reader)
    finally:
        os.close(reader)


def _length_prefixed(message: msgspec.Struct) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sandbox_messages.send(ours, message, [])
        return theirs.recv(65_536)


TARGETS: Final = (
    Target(
        "denials",
        _denial,
        (b"touch: cannot touch '/etc/x': Read-only file system\n", b"curl: (6) Could not resolve"),
        (b"Permission denied", b"Operation not permitted", b": ", b"'", b"\n", b"sandbox"),
    ),
    Target(
        "mounts",
        _mounts,
        (b"my disk", b"\xff\\u0041"),
        (b" - ", b"\\040", b":", b" ", b"\\777", b"\n", b"\r"),
    ),
    Target(
        "sandbox-messages",
        _sandbox_message,
        (
            _length_prefixed(Status("ready", "")),
            _length_prefixed(FileRequest("fs/readFile", {"path": "file:///"})),
            _length_prefixed(FileResponse(b"{}", 2, -32600, "m")),
        ),
        (b"\x81", b"\xc0", b"\xdf", b"\xd9", b"\xc4"),
    ),
    Target(
        "targets-file",
        _targets_file,
        (
            b'[box]\nurl = "ws://127.0.0.1:7700"\ntoken_env = "T"\n',
            b'[b]\nstdio = ["ssh", "x"]\n[c]\nregistry = "https://x"\nenvironment_id = "e"\n',
        ),
        (
            b"url",
            b"stdio",
            b"registry",
            b"token",
            b"token_file",
            b"ca_file",
            b"=",
            b"[",
            b'"',
            b"~",
        ),
    ),
    Target(
        "target-arguments",
        _target_argument,
        (
            b"ws://127.0.0.1:7700:/etc",
            b"stdio:ssh 'a b':/x",
            b"relay:https://x/y:~/z",
            b"name:p",
            b":/p",
        ),
        (b"ws://", b"wss://", b"stdio:", b"relay:", b":", b"/", b"~", b"'", b'"', b"["),
    ),
    Target("printable", _printable, (b"plain", b"\x1b]0;x\x07", "\u202e\u2028".encode())),
    Target("typed-keys", _typed, (b"\r~.", b"~?x\n~~", b"\x1b[200~~.\x1b[201~"), (b"~", b"\r")),
    Target("cleanup-requests", _registrations, (b"+/a/.git\0-/a/.git\0",), (b"+", b"-", b"\0")),
    Target(
        "executor-credentials",
        _credential,
        (json_bytes({"version": 1, "environment_id": "e", "token": "t", "expires_at": 99}),),
        (b"version", b"token"),
        is_json=True,
    ),
    Target(
        "registry-responses",
        _registry_response,
        (
            json_bytes({"environment_id": "e", "url": "wss://x/", "executor_registration_id": "r"}),
            json_bytes({"error": {"code": "c", "message": "secret\x1b[0m"}}),
            json_bytes({"valid": True}),
        ),
        (b"error", b"message", b"url", b"secret"),
        is_json=True,
    ),
)
