"""What the server and a confined process say to each other, and how it is framed.

Both directions are MessagePack of the structs below, each with its length in front. The
server reads what a confined process says as untrusted data: typed, bounded, never evaluated.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import msgspec

from exec_server.errors import ExecServerError
from exec_server.sandbox.plan import Glob, Network, Step, View
from exec_server.sandbox.view import ProcMount

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")
_PLAIN: Final = b"p"
_ESCAPED: Final = b"e"
# Longer than any request or answer of a file operation: the wire itself carries 64 MiB.
MAX_MESSAGE: Final = 96 * 1_048_576
# Descriptors that come with one message: the three standard ones.
MAX_DESCRIPTORS: Final = 3


class Order(msgspec.Struct, frozen=True):
    """What a new process shall become: a file worker, or the init of a program to come."""

    role: Literal["worker", "init"]
    view: View | None  # None: files are not limited
    network: Network
    proc: ProcMount
    globs: tuple[Glob, ...] = ()  # of a worker
    terminal: str | None = None  # of an init with an empty root: the path on the host


class Program(msgspec.Struct, frozen=True):
    """What an init shall start, once its view is built, on the descriptors that come with it."""

    argv: list[str]
    arg0: str | None
    cwd: str
    env: dict[str, str]
    terminal: str | None  # its path on the host
    tag: int
    covers: tuple[Step, ...]  # what the view lacks: placeholders


class Report(msgspec.Struct, frozen=True):
    """How an order went: ready, outdated by changes on the disk, or not possible here."""

    state: Literal["ready", "stale", "failed"]
    reason: str = ""


class Disconnected(ExecServerError):
    """The other side has ended."""


def rehearse(sample: msgspec.Struct) -> None:
    """Encode and decode one message of a kind, so that the next one is quicker."""
    msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=type(sample))


def send(link: socket.socket, message: msgspec.Struct, descriptors: list[int]) -> None:
    """Send a message, with descriptors if there are any. Blocks, or raises TimeoutError."""
    try:
        text = _PLAIN + msgspec.msgpack.encode(message, enc_hook=str)
    except UnicodeEncodeError:
        # Names that are no UTF-8 travel as their bytes, each made a character.
        text = _ESCAPED + msgspec.msgpack.encode(_mapped(msgspec.to_builtins(message), _escape))
    send_bytes(link, text, descriptors)


def _escape(text: str) -> str:
    return os.fsencode(text).decode("latin-1")


def _unescape(text: str) -> str:
    return os.fsdecode(text.encode("latin-1"))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def send_bytes(link: socket.socket, text: bytes, descriptors: list[int]) -> None:
    head = _LENGTH.pack(len(text))
    if descriptors:
        socket.send_fds(link, [head], descriptors)
    else:
        text = head + text
    # Not `send`: the filter of confined processes refuses the call behind it.
    view = memoryview(text)
    while view:
        view = view[os.write(link.fileno(), view) :]


def receive(link: socket.socket, kind: type[T]) -> tuple[T, list[int]]:
    """The next message and its descriptors, which the caller closes."""
    text, descriptors = receive_bytes(link)
    try:
        if text[:1] == _PLAIN:
            return msgspec.msgpack.decode(memoryview(text)[1:], type=kind), descriptors
        value = _mapped(msgspec.msgpack.decode(memoryview(text)[1:]), _unescape)
        return msgspec.convert(value, kind), descriptors
    except (msgspec.MsgspecError, UnicodeError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise Disconnected(f"nonsense: {error}") from None


def receive_bytes(link: socket.socket) -> tuple[bytes, list[int]]:
    head, descriptors, flags, _ = socket.recv_fds(link, _LENGTH.size, MAX_DESCRIPTORS)
    try:
        head += _exactly(link, _LENGTH.size - len(head)) if head else b""
        if len(head) != _LENGTH.size or flags & socket.MSG_CTRUNC:
            raise Disconnected("the other side has ended")
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE:
            raise Disconnected("the message is too long")
        return _exactly(link, length), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _exactly(link: socket.socket, size: int) -> bytes:
    pieces = []
    while size:
        piece = os.read(link.fileno(), min(size, 1 << 20))
        if not piece:
            raise Disconnected("the other side has ended")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
