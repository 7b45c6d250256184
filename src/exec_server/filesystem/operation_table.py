"""OPERATIONS: the blocking function of each fs call that runs in a thread or in a sandbox worker.

Handles and watches are not listed because they belong to a connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from exec_server.filesystem import changes, grep, operations, search, tree
from exec_server.protocol import file_changes, files
from exec_server.protocol.method import Call

Operation = Callable[[Any], Any]

OPERATIONS: Final[dict[Call[Any, Any], Operation]] = {
    files.READ_FILE: operations.read_file,
    files.WRITE_FILE: operations.write_file,
    files.CREATE_DIRECTORY: operations.create_directory,
    files.GET_METADATA: operations.get_metadata,
    files.CANONICALIZE: operations.canonicalize,
    files.READ_DIRECTORY: operations.read_directory,
    files.WALK: tree.walk,
    files.REMOVE: operations.remove,
    files.COPY: tree.copy,
    file_changes.APPEND: changes.append,
    file_changes.RENAME: changes.rename,
    file_changes.CHMOD: changes.chmod,
    file_changes.SYMLINK: changes.symlink,
    file_changes.SET_TIMES: changes.set_times,
    file_changes.EDIT: changes.edit,
    file_changes.APPLY_PATCH: changes.apply_patch,
    file_changes.GLOB: search.glob,
    file_changes.GREP: grep.grep,
    file_changes.DISK_USAGE: search.disk_usage,
}
