"""OPERATIONS: the blocking function of each fs call that runs in a thread or in a sandbox worker.

Handles and watches are not listed because they belong to a connection. The modules of the larger
extensions are imported by the thread that first needs them, or by `load_all`; most servers never
need them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from exec_server.filesystem import operations, tree, walk
from exec_server.protocol import files
from exec_server.protocol.decoding import Call

Operation = Callable[[Any], Any]


class OnDemand:
    """A function of a module of this package, which is imported by the first call."""

    def __init__(self, module: str, name: str) -> None:
        self._module = f"exec_server.filesystem.{module}"
        self._name = name

    def load(self) -> Operation:
        function: Operation = getattr(import_module(self._module), self._name)
        return function

    def __call__(self, params: object) -> object:
        return self.load()(params)


OPERATIONS: Final[dict[Call[Any, Any], Operation]] = {
    files.READ_FILE: operations.read_file,
    files.WRITE_FILE: operations.write_file,
    files.CREATE_DIRECTORY: operations.create_directory,
    files.GET_METADATA: operations.get_metadata,
    files.CANONICALIZE: operations.canonicalize,
    files.READ_DIRECTORY: operations.read_directory,
    files.WALK: walk.walk,
    files.REMOVE: operations.remove,
    files.COPY: tree.copy,
    files.APPEND: OnDemand("changes", "append"),
    files.RENAME: OnDemand("changes", "rename"),
    files.CHMOD: OnDemand("changes", "chmod"),
    files.SYMLINK: OnDemand("changes", "symlink"),
    files.SET_TIMES: OnDemand("changes", "set_times"),
    files.EDIT: OnDemand("changes", "edit"),
    files.APPLY_PATCH: OnDemand("changes", "apply_patch"),
    files.GLOB: OnDemand("search", "glob"),
    files.GREP: OnDemand("search", "grep"),
    files.DISK_USAGE: OnDemand("search", "disk_usage"),
    files.LIST: operations.list_,
    files.CREATE: operations.create,
    files.RESOLVE: operations.resolve,
}


def load_all() -> None:
    """Import the modules of all operations: processes that are forked later share them."""
    for operation in OPERATIONS.values():
        if isinstance(operation, OnDemand):
            operation.load()
