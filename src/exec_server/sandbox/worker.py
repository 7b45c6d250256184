"""A confined process that performs file operations for one policy; both ends of its socket.

The worker runs the same functions as the server's threads do without a sandbox. What it
opens for reading or replacing it hands back as a descriptor, so that content is read and
written by the server, at the server's speed; everything else it does itself.

The server checks before each request that the view is still true (see `freshness`), and
takes the answer for what a hostile process might say.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from typing import Any, Final

import msgspec

from exec_server.core import files as operations
from exec_server.core import guard, handles
from exec_server.errors import InternalError, RpcError
from exec_server.protocol import files, wire
from exec_server.protocol.method import Call
from exec_server.protocol.paths import PathUri
from exec_server.sandbox import globs, orders
from exec_server.sandbox.layout import refusal
from exec_server.sandbox.plan import Glob, View

_CALLS: Final[dict[str, Call[Any, Any]]] = {
    call.name: call for call in (*operations.OPERATIONS, files.OPEN)
}
_PATHS: Final = ("path", "source_path", "destination_path")
# Codes a worker may answer with; any other is taken for a defect.
_CODES: Final = frozenset({-32600, -32602, -32603, -32004})


class Request(msgspec.Struct, frozen=True):
    method: str
    params: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    """The result as JSON text, or a descriptor beside the message; or what went wrong."""

    result: bytes = b""
    errno: int = 0
    code: int = 0
    message: str = ""


# ---- inside ---------------------------------------------------------------------------


def rehearse() -> None:
    """Have the codecs study all that they will meet."""
    orders.rehearse(Request("", {"path": "file:///"}))
    orders.rehearse(Answer())
    for call in _CALLS.values():
        assert call.params is not None
        with suppress(RpcError):
            wire.decode(call.params, {"path": "file:///", "handleId": "", "dataBase64": ""})
    msgspec.json.encode(operations.get_metadata(files.GetMetadataParams(PathUri.from_wire("/"))))


def prepare(view: View, denied: tuple[Glob, ...]) -> None:
    """Arm the checks that no mount can make: names kept missing, patterns, replaced paths."""
    for missing in view.missing:
        guard.keep_missing(missing.device, missing.inode, missing.name)
    if not os.path.isdir("/proc/self/fd"):
        return  # without a private procfs the worker cannot know paths: mounts have to do

    def judge(path: str, writing: bool) -> int:
        if any(globs.matches(glob, path) for glob in denied):
            return errno.EACCES
        return refusal(view, path, writing=writing)

    guard.judge_by(judge)


def serve(control: socket.socket) -> None:
    """Answer requests until the server closes the socket."""
    while True:
        try:
            request, _ = orders.receive(control, Request)
        except orders.Disconnected:
            return
        opened: list[int] = []
        try:
            answer = _perform(request, opened)
        except OSError as error:
            answer = Answer(errno=error.errno or 5)
        except RpcError as error:
            answer = Answer(code=error.code, message=error.message)
        orders.send(control, answer, opened)
        for descriptor in opened:
            os.close(descriptor)


def _perform(request: Request, opened: list[int]) -> Answer:
    call = _CALLS[request.method]
    assert call.params is not None
    params = wire.decode(call.params, request.params)
    for name in _PATHS:
        path = getattr(params, name, None)
        if path is not None:
            guard.check_named(path.native())
    if call is files.READ_FILE:
        opened.append(operations.open_for_read(params)[0])
        return Answer()
    if call is files.OPEN:
        opened.append(handles.open_file(params))
        return Answer()
    return Answer(result=msgspec.json.encode(operations.OPERATIONS[call](params)))


# ---- the server's end -----------------------------------------------------------------


class Worker:
    """One worker, used by one thread at a time."""

    def __init__(self, control: socket.socket) -> None:
        self.is_broken = False
        self._control = control

    def perform(self, call: Call[Any, Any], params: msgspec.Struct) -> Any:
        """Have an operation performed; raises what it raised. Blocking."""
        answer, descriptors = self._exchange(call, params)
        try:
            self._expect(call, descriptors, 0)
            _raise_if_failed(answer)
            try:
                return msgspec.json.decode(answer.result, type=call.result)
            except msgspec.MsgspecError:
                raise self._break("an answer makes no sense") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def open(self, call: Call[Any, Any], params: msgspec.Struct) -> int:
        """Have a regular file opened; returns its descriptor. Blocking."""
        answer, descriptors = self._exchange(call, params)
        try:
            _raise_if_failed(answer)
            self._expect(call, descriptors, 1)
            if not stat.S_ISREG(os.fstat(descriptors[0]).st_mode):
                raise self._break("a descriptor is not of a file")
            return descriptors.pop()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _exchange(self, call: Call[Any, Any], params: msgspec.Struct) -> tuple[Answer, list[int]]:
        fields = msgspec.to_builtins(params, enc_hook=_as_text)
        fields.pop("sandbox", None)
        try:
            orders.send(self._control, Request(call.name, fields), [])
            return orders.receive(self._control, Answer)
        except (OSError, orders.Disconnected) as error:
            raise self._break(str(error)) from error

    def _expect(self, call: Call[Any, Any], descriptors: list[int], count: int) -> None:
        if len(descriptors) != count:
            raise self._break(f"{len(descriptors)} descriptors for {call.name}")

    def _break(self, reason: str) -> InternalError:
        self.is_broken = True
        return InternalError(f"the sandboxed file operation failed: {reason}")

    def close(self) -> None:
        """End the worker; one in the middle of an operation ends after it.

        The socket itself is closed with this object: a thread may still be reading from it.
        """
        try:
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already


def _as_text(value: object) -> str:
    return str(getattr(value, "uri", value))


def _raise_if_failed(answer: Answer) -> None:
    if answer.errno:
        raise OSError(answer.errno, os.strerror(answer.errno))
    if answer.code:
        if answer.code not in _CODES:
            raise InternalError("the sandboxed file operation failed")
        error = RpcError(answer.message)
        error.code = answer.code
        raise error
