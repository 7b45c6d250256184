"""A confined process that performs file operations for one policy; both ends of its socket.

It runs the functions of the server's threads, and returns opened files as descriptors. The server
checks before each request that the view is current, and treats the response as untrusted.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from typing import Any, Final

import msgspec

from exec_server.errors import InternalError, RpcError
from exec_server.filesystem import handles, operations
from exec_server.filesystem.operations import OPERATIONS, load_all
from exec_server.filesystem.safe_write import GUARD
from exec_server.protocol import decoding, files
from exec_server.protocol.decoding import Call
from exec_server.protocol.paths import PathUri
from exec_server.sandbox.policy import access
from exec_server.sandbox.policy.access import components, contains
from exec_server.sandbox.policy.layout import access_errno, writable_paths
from exec_server.sandbox.policy.model import Glob, View
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.messages import ControlSocket

_CALLS: Final[dict[str, Call[Any, Any]]] = {call.name: call for call in (*OPERATIONS, files.OPEN)}
_PATHS: Final = ("path", "source_path", "destination_path")
_SELF: Final = ("self", "thread-self")
# Error codes that a worker may respond with; any other counts as a defect.
_CODES: Final = frozenset({-32600, -32602, -32603, -32004})


class FileRequest(msgspec.Struct, frozen=True):
    method: str
    params: dict[str, Any]


class FileResponse(msgspec.Struct, frozen=True):
    """The result as JSON text, or a descriptor beside the message, or an error."""

    result: bytes = b""
    errno: int = 0
    code: int = 0
    message: str = ""
    data: Any = None  # of the error
    defect: str = ""  # see messages.defect_text; the worker has ended


def warm_up() -> None:
    """Import all operations, and build the codecs of all messages and parameters."""
    load_all()
    messages.warm_up(FileRequest("", {"path": "file:///"}))
    messages.warm_up(FileResponse())
    for call in _CALLS.values():
        assert call.params is not None
        with suppress(RpcError):
            decoding.decode(call.params, {"path": "file:///", "handleId": "", "dataBase64": ""})
    msgspec.json.encode(operations.get_metadata(files.GetMetadataParams(PathUri.from_wire("/"))))


def install_checks(view: View, denied: tuple[Glob, ...]) -> None:
    """Install the checks that no mount can make: missing names, globs, replaced paths."""
    for missing in view.missing:
        GUARD.forbid_name(missing.device, missing.inode, missing.name)
    try:
        os.stat("/proc/self/fd")
    except (FileNotFoundError, NotADirectoryError):
        return  # without a procfs the worker cannot find out paths: only the mounts protect

    writable = writable_paths(view)

    def check(path: str, writing: bool) -> int:
        if _is_process(path) or access.denies(denied, path, writable):
            return errno.EACCES
        return access_errno(view, path, writing=writing)

    def check_tree(path: str) -> int:
        # A rename would move files out of, or into, the reach of a glob. Any directory that shares
        # a path with the root of one is refused: looking for matching files would be a race.
        is_affected = any(contains(path, glob.root) or contains(glob.root, path) for glob in denied)
        return errno.EBUSY if is_affected else 0

    GUARD.add_path_check(check)
    GUARD.add_tree_check(check_tree)


def _is_process(path: str) -> bool:
    """Whether a path is in the /proc directory of a process, which can only be this worker.

    Its memory holds requests of other clients with the same policy, and code that makes the
    checks above. A worker of root may open it.
    """
    names = components(path)[:2]
    return len(names) == 2 and names[0] == "proc" and (names[1].isdigit() or names[1] in _SELF)


def serve(control: socket.socket) -> None:
    """Perform requests until the server closes the socket; a defect ends the worker."""
    while True:
        try:
            request, _ = messages.receive(control, FileRequest)
        except messages.Disconnected:
            return
        opened: list[int] = []
        try:
            response = _perform(request, opened)
        except OSError as error:
            response = FileResponse(errno=error.errno or 5)
        except RpcError as error:
            response = FileResponse(code=error.code, message=error.message, data=error.data)
        except Exception:
            messages.send(control, FileResponse(defect=messages.defect_text()), [])
            raise
        messages.send(control, response, opened)
        messages.close_all(opened)


def _perform(request: FileRequest, opened: list[int]) -> FileResponse:
    call = _CALLS[request.method]
    assert call.params is not None
    params = decoding.decode(call.params, request.params)
    for name in _PATHS:
        path = getattr(params, name, None)
        if path is not None:
            GUARD.check_named(path.native())
    if call is files.READ_FILE:
        opened.append(operations.open_for_read(params)[0])
        return FileResponse()
    if call is files.OPEN:
        opened.append(handles.open_file(params))
        return FileResponse()
    return FileResponse(result=msgspec.json.encode(OPERATIONS[call](params)))


class Worker:
    """The server's end of one worker, used by one thread at a time."""

    def __init__(self, control: ControlSocket) -> None:
        self.is_broken = False
        self._control = control

    def has_ended(self) -> bool:
        """Whether the idle worker is gone."""
        return messages.has_ended(self._control)

    def perform(self, call: Call[Any, Any], params: msgspec.Struct) -> Any:
        """Perform an operation in the worker; raises its error here. Blocking."""
        response, descriptors = self._exchange(call, params)
        try:
            self._check_count(call, descriptors, 0)
            _raise_if_failed(response)
            try:
                return msgspec.json.decode(response.result, type=call.result)
            except msgspec.MsgspecError:
                raise self._mark_broken("invalid response") from None
        finally:
            messages.close_all(descriptors)

    def open(self, call: Call[Any, Any], params: msgspec.Struct) -> int:
        """Open a regular file in the worker; returns its descriptor. Blocking."""
        response, descriptors = self._exchange(call, params)
        try:
            _raise_if_failed(response)
            self._check_count(call, descriptors, 1)
            if not stat.S_ISREG(os.fstat(descriptors[0]).st_mode):
                raise self._mark_broken("the descriptor is not a regular file")
            return descriptors.pop()
        finally:
            messages.close_all(descriptors)

    def _exchange(
        self, call: Call[Any, Any], params: msgspec.Struct
    ) -> tuple[FileResponse, list[int]]:
        fields = msgspec.to_builtins(params, enc_hook=str)
        fields.pop("sandbox", None)
        try:
            messages.send(self._control, FileRequest(call.name, fields), [])
            response, descriptors = messages.receive(self._control, FileResponse)
        except (OSError, messages.Disconnected) as error:
            raise self._mark_broken(str(error)) from error
        if response.defect:
            messages.close_all(descriptors)
            messages.log_defect(response.defect)
            raise self._mark_broken("the log of the server has the reason")
        return response, descriptors

    def _check_count(self, call: Call[Any, Any], descriptors: list[int], count: int) -> None:
        if len(descriptors) != count:
            raise self._mark_broken(f"{len(descriptors)} descriptors for {call.name}")

    def _mark_broken(self, reason: str) -> InternalError:
        self.is_broken = True
        return InternalError(f"the sandboxed file operation failed: {reason}")

    def close(self) -> None:
        """End the worker, after its current operation.

        A stopped worker is resumed, so that it ends. The socket itself is closed with this object:
        a thread may still be reading from it.
        """
        self._control.resume_child()
        with suppress(OSError):  # the worker has ended
            self._control.shutdown(socket.SHUT_RDWR)


def _raise_if_failed(response: FileResponse) -> None:
    if response.errno:
        raise OSError(response.errno, os.strerror(response.errno))
    if response.code:
        if response.code not in _CODES:
            raise InternalError("the sandboxed file operation failed")
        error = RpcError(response.message)
        error.code, error.data = response.code, response.data
        raise error
