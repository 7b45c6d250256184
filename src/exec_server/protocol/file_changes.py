"""fs/* extensions: structs and calls of changes and searches that the reference does not have."""

from __future__ import annotations

from typing import ClassVar, Literal

from exec_server.protocol.decoding import I64, U32, Params, Result, Usize
from exec_server.protocol.files import Done
from exec_server.protocol.method import Call
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Confinable, Sandbox

ChangeKind = Literal["added", "modified", "deleted"]


class AppendParams(Confinable, frozen=True):
    """`data_base64` stays text, which a worker gets as it is."""

    wire_name: ClassVar[str] = "FsAppendParams"
    path: PathUri
    data_base64: str
    sandbox: Sandbox | None = None


class AppendResult(Result, frozen=True):
    size: int  # of the file afterwards


class RenameParams(Confinable, frozen=True):
    """`replace`: an existing file, or an empty directory, may be replaced."""

    wire_name: ClassVar[str] = "FsRenameParams"
    source_path: PathUri
    destination_path: PathUri
    replace: bool = True
    sandbox: Sandbox | None = None


class ChmodParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "FsChmodParams"
    path: PathUri
    mode: U32
    sandbox: Sandbox | None = None


class SymlinkParams(Confinable, frozen=True):
    """`target` is the text of the link, absolute or relative to its directory."""

    wire_name: ClassVar[str] = "FsSymlinkParams"
    path: PathUri
    target: str
    sandbox: Sandbox | None = None


class SetTimesParams(Confinable, frozen=True):
    """Milliseconds since 1970; a missing time is the current one. `create`: an empty file.

    `modified_ns` is the rest of the modification time, below a millisecond.
    """

    wire_name: ClassVar[str] = "FsSetTimesParams"
    path: PathUri
    modified_at_ms: I64 | None = None
    accessed_at_ms: I64 | None = None
    modified_ns: U32 = 0
    create: bool = False
    sandbox: Sandbox | None = None


class TextEdit(Params, frozen=True):
    wire_name: ClassVar[str] = "FsTextEdit"
    old_text: str
    new_text: str
    all: bool = False


class EditParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "FsEditParams"
    path: PathUri
    edits: list[TextEdit]
    sandbox: Sandbox | None = None


class EditResult(Result, frozen=True):
    replacements: int


class ApplyPatchParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "FsApplyPatchParams"
    path: PathUri  # the root of the paths in the patch
    patch: str
    sandbox: Sandbox | None = None


class ChangedFile(Result, frozen=True):
    path: str  # below the root
    kind: ChangeKind


class ApplyPatchResult(Result, frozen=True):
    changes: list[ChangedFile]


class GlobParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "FsGlobParams"
    path: PathUri  # the directory that is searched
    pattern: str
    limit: Usize = 1000
    sandbox: Sandbox | None = None


class GlobResult(Result, frozen=True):
    """Paths relative to the directory, in order; `truncated` if some are left out."""

    paths: list[str]
    truncated: bool


class GrepParams(Confinable, frozen=True):
    """`path` is a file or a directory; `glob` and `exclude` are patterns of paths below it."""

    wire_name: ClassVar[str] = "FsGrepParams"
    path: PathUri
    pattern: str
    literal: bool = False
    ignore_case: bool = False
    glob: str | None = None
    exclude: str | None = None
    before: Usize = 0
    after: Usize = 0
    limit: Usize = 1000
    sandbox: Sandbox | None = None


class GrepMatch(Result, frozen=True):
    """A matching line with the lines around it; `line` and `column` are counted from 1."""

    path: str  # relative to the directory; the name of a file that is searched itself
    line: int
    column: int
    text: str
    before: list[str]
    after: list[str]


class GrepResult(Result, frozen=True):
    """Matches in the order of paths and lines; `truncated` if there may be more."""

    matches: list[GrepMatch]
    truncated: bool


class DiskUsageParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "FsDiskUsageParams"
    path: PathUri
    sandbox: Sandbox | None = None


class DiskUsageResult(Result, frozen=True):
    """Bytes of the file system; `available` excludes the blocks that are reserved for root."""

    total: int
    free: int
    available: int


APPEND = Call("fs/append", AppendParams, AppendResult)
RENAME = Call("fs/rename", RenameParams, Done)
CHMOD = Call("fs/chmod", ChmodParams, Done)
SYMLINK = Call("fs/symlink", SymlinkParams, Done)
SET_TIMES = Call("fs/setTimes", SetTimesParams, Done)
EDIT = Call("fs/edit", EditParams, EditResult)
APPLY_PATCH = Call("fs/applyPatch", ApplyPatchParams, ApplyPatchResult)
GLOB = Call("fs/glob", GlobParams, GlobResult)
GREP = Call("fs/grep", GrepParams, GrepResult)
DISK_USAGE = Call("fs/diskUsage", DiskUsageParams, DiskUsageResult)
