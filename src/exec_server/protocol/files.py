"""fs/*: structs, calls and notifications, those of the reference first, then extensions.

A flag of type `bool | None` is true if it is absent or null, as in the reference.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NewType

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import (
    I64,
    U16,
    U32,
    U64,
    Base64,
    Call,
    EmptyResult,
    Notice,
    Params,
    Prepare,
    Result,
    Usize,
)
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Confinable, Sandbox

HandleId = NewType("HandleId", str)
EntryKind = Literal["directory", "file"]
ChangeKind = Literal["added", "modified", "deleted"]
WatchEventKind = Literal["created", "modified", "deleted"]


Done = EmptyResult


class ReadFileParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "WireFsReadFileParams"
    omissible: ClassVar[tuple[str, ...]] = ("follow_symlinks",)
    path: PathUri
    follow_symlinks: bool | None = None
    sandbox: Sandbox | None = None


class ReadFileResult(Result, frozen=True):
    data_base64: bytes


class WriteFileParams(Confinable, frozen=True):
    """`data_base64` stays text: its errors have their own code and text."""

    wire_name: ClassVar[str] = "WireFsWriteFileParams"
    omissible: ClassVar[tuple[str, ...]] = ("follow_symlinks",)
    path: PathUri
    data_base64: str
    follow_symlinks: bool | None = None
    sandbox: Sandbox | None = None


class OpenParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "WireFsOpenParams"
    handle_id: HandleId
    path: PathUri
    mode: Literal["read", "replace"] = "read"
    sandbox: Sandbox | None = None


class OpenResult(Result, frozen=True):
    handle_id: HandleId


class ReadBlockParams(Params, frozen=True):
    wire_name: ClassVar[str] = "FsReadBlockParams"
    handle_id: HandleId
    offset: U64
    len: Usize


class ReadBlockResult(Result, frozen=True):
    chunk: bytes
    eof: bool


class WriteBlockParams(Params, frozen=True):
    wire_name: ClassVar[str] = "FsWriteBlockParams"
    handle_id: HandleId
    offset: U64
    chunk: Base64


class CloseParams(Params, frozen=True):
    wire_name: ClassVar[str] = "FsCloseParams"
    handle_id: HandleId


class CreateDirectoryParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "WireFsCreateDirectoryParams"
    omissible: ClassVar[tuple[str, ...]] = ("follow_symlinks",)
    path: PathUri
    recursive: bool | None = None
    follow_symlinks: bool | None = None
    sandbox: Sandbox | None = None


class GetMetadataParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "WireFsGetMetadataParams"
    omissible: ClassVar[tuple[str, ...]] = ("follow_symlinks",)
    path: PathUri
    follow_symlinks: bool | None = None
    sandbox: Sandbox | None = None


class GetMetadataResult(Result, frozen=True):
    is_directory: bool
    is_file: bool
    # Servers send all members; older ones send fewer, which a client has to understand.
    is_symlink: bool = False
    size: int = 0
    created_at_ms: int = 0
    modified_at_ms: int = 0


class CanonicalizeParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "WireFsCanonicalizeParams"
    path: PathUri
    sandbox: Sandbox | None = None


class CanonicalizeResult(Result, frozen=True):
    path: str


class ReadDirectoryParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "WireFsReadDirectoryParams"
    path: PathUri
    sandbox: Sandbox | None = None


class DirectoryEntry(Result, frozen=True):
    file_name: str
    is_directory: bool
    is_file: bool


class ReadDirectoryResult(Result, frozen=True):
    entries: list[DirectoryEntry]


class WalkOptions(Params, frozen=True):
    wire_name: ClassVar[str] = "WalkOptions"
    max_depth: Usize
    max_directories: Usize
    max_entries: Usize
    follow_directory_symlinks: bool
    prune_hidden_directories: bool = False


class WalkParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "WireFsWalkParams"
    path: PathUri
    options: WalkOptions
    sandbox: Sandbox | None = None


class WalkEntry(Result, frozen=True):
    path: str
    kind: EntryKind


class WalkError(Result, frozen=True):
    path: str
    message: str


class WalkResult(Result, frozen=True):
    entries: list[WalkEntry]
    errors: list[WalkError]
    truncated: bool


class RemoveParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "WireFsRemoveParams"
    omissible: ClassVar[tuple[str, ...]] = ("follow_symlinks",)
    path: PathUri
    recursive: bool | None = None
    force: bool | None = None
    follow_symlinks: bool | None = None
    sandbox: Sandbox | None = None


class CopyParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "WireFsCopyParams"
    source_path: PathUri
    destination_path: PathUri
    recursive: bool
    sandbox: Sandbox | None = None


class WatchMissingParams(Params, frozen=True):
    wire_name: ClassVar[str] = "FsWatchMissingParams"
    watch_id: U64
    missing: list[PathUri]
    present: PathUri | None = None


class WatchMissingResult(Result, frozen=True):
    watching: bool


class MissingChangedParams(Params, frozen=True):
    wire_name: ClassVar[str] = "FsMissingChangedNotification"
    watch_id: U64


READ_FILE = Call("fs/readFile", ReadFileParams, ReadFileResult)
WRITE_FILE = Call("fs/writeFile", WriteFileParams, Done)
OPEN = Call("fs/open", OpenParams, OpenResult)
READ_BLOCK = Call("fs/readBlock", ReadBlockParams, ReadBlockResult)
WRITE_BLOCK = Call("fs/writeBlock", WriteBlockParams, Done)
CLOSE = Call("fs/close", CloseParams, Done)
CREATE_DIRECTORY = Call("fs/createDirectory", CreateDirectoryParams, Done)
GET_METADATA = Call("fs/getMetadata", GetMetadataParams, GetMetadataResult)
CANONICALIZE = Call("fs/canonicalize", CanonicalizeParams, CanonicalizeResult)
READ_DIRECTORY = Call("fs/readDirectory", ReadDirectoryParams, ReadDirectoryResult)
WALK = Call("fs/walk", WalkParams, WalkResult)
REMOVE = Call("fs/remove", RemoveParams, Done)
COPY = Call("fs/copy", CopyParams, Done)
WATCH_MISSING = Call("fs/watchMissing", WatchMissingParams, WatchMissingResult)
MISSING_CHANGED = Notice("fs/missingChanged", MissingChangedParams)


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
    """`path` is a file or a directory; `glob` and `exclude` are patterns of paths below it.

    `invert` finds the lines that do not match. With `count_only` the result has counts alone.
    """

    wire_name: ClassVar[str] = "FsGrepParams"
    named_only: ClassVar[tuple[str, ...]] = (*Confinable.named_only, "invert", "count_only")
    path: PathUri
    pattern: str
    literal: bool = False
    ignore_case: bool = False
    glob: str | None = None
    exclude: str | None = None
    before: Usize = 0
    after: Usize = 0
    limit: Usize = 1000
    invert: bool = False
    count_only: bool = False
    sandbox: Sandbox | None = None


class GrepMatch(Result, frozen=True):
    """A matching line with the lines around it; `line` and `column` are counted from 1."""

    path: str  # relative to the directory; the name of a file that is searched itself
    line: int
    column: int
    text: str
    before: list[str]
    after: list[str]


class GrepCount(Result, frozen=True):
    """A file and the number of its lines that were found, at least one."""

    path: str
    count: int


class GrepResult(Result, frozen=True, omit_defaults=True):
    """Matches in the order of paths and lines; `truncated` if there may be more."""

    matches: list[GrepMatch]
    truncated: bool
    counts: list[GrepCount] | None = None


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


class ListParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "FsListParams"
    named_only: ClassVar[tuple[str, ...]] = (*Confinable.named_only, "owners")
    path: PathUri
    owners: bool = False
    sandbox: Sandbox | None = None


class ListedEntry(Result, frozen=True, omit_defaults=True):
    """An entry with the details of a link's target, or of the link itself if it leads nowhere."""

    file_name: str
    is_directory: bool
    is_file: bool
    size: int
    modified_at_ms: int
    mode: int  # the permission bits
    link_target: str | None = None  # the text of a link
    # Names, or numbers without a name, if they were asked for; of a link itself.
    owner: str | None = None
    group: str | None = None


class ListResult(Result, frozen=True):
    entries: list[ListedEntry]


class CreateParams(Confinable, frozen=True):
    """`data_base64` stays text, which a worker gets as it is."""

    wire_name: ClassVar[str] = "FsCreateParams"
    path: PathUri
    data_base64: str
    sandbox: Sandbox | None = None


class ResolveParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "FsResolveParams"
    path: PathUri
    sandbox: Sandbox | None = None


LIST = Call("fs/list", ListParams, ListResult)
CREATE = Call("fs/create", CreateParams, Done)
RESOLVE = Call("fs/resolve", ResolveParams, CanonicalizeResult)


class WatchParams(Confinable, frozen=True):
    """`path` is a file or a directory; `recursive` includes the directories below it."""

    wire_name: ClassVar[str] = "FsWatchParams"
    watch_id: U64
    path: PathUri
    recursive: bool = False
    sandbox: Sandbox | None = None


class UnwatchParams(Params, frozen=True):
    wire_name: ClassVar[str] = "FsUnwatchParams"
    watch_id: U64


class Change(Result, frozen=True):
    """`path` is relative to the directory; it is the name of a file that is watched itself."""

    path: str
    kind: WatchEventKind


class ChangedParams(Params, frozen=True):
    """`overflow`: some changes are missing. `closed`: the watch has ended, perhaps by an error."""

    wire_name: ClassVar[str] = "FsChangedNotification"
    watch_id: U64
    changes: list[Change]
    overflow: bool
    closed: bool
    error: str | None = None


WATCH = Call("fs/watch", WatchParams, Done)
UNWATCH = Call("fs/unwatch", UnwatchParams, Done)
CHANGED = Notice("fs/changed", ChangedParams)


# fs/* extensions whose file contents travel as the data of binary messages.
class ReadBinaryResult(Result, frozen=True):
    """The data is the block."""

    eof: bool


class WriteBinaryParams(Params, frozen=True):
    """The data is the block."""

    wire_name: ClassVar[str] = "FsWriteBinaryParams"
    handle_id: HandleId
    offset: U64


def _without_limits(params: dict[str, Any], _server_cwd: str | None) -> dict[str, Any]:
    """Refuse members that other methods enforce, instead of ignoring them."""
    for member in ("sandbox", "sandboxPolicy", "user"):
        if params.get(member) is not None:
            raise InvalidParams(
                f"a request for many files takes no `{member}`: send one for each file"
            )
    return params


class ReadFilesParams(Params, frozen=True):
    prepare: ClassVar[Prepare] = staticmethod(_without_limits)
    wire_name: ClassVar[str] = "FsReadFilesParams"
    paths: list[PathUri]


class ReadFilesResult(Result, frozen=True):
    """The data is the contents one after another; the size is null for a file that was not read."""

    sizes: list[int | None]


class NewFile(Params, frozen=True):
    wire_name: ClassVar[str] = "FsNewFile"
    omissible: ClassVar[tuple[str, ...]] = ("mode",)
    path: PathUri
    size: U64
    mode: U16 | None = None  # the permission bits to set


class WriteFilesParams(Params, frozen=True):
    """The data is the contents one after another."""

    prepare: ClassVar[Prepare] = staticmethod(_without_limits)
    wire_name: ClassVar[str] = "FsWriteFilesParams"
    files: list[NewFile]


class WriteFilesResult(Result, frozen=True):
    """The positions of files that were not written."""

    failed: list[int]


READ_BINARY = Call("fs/readBinary", ReadBlockParams, ReadBinaryResult)
WRITE_BINARY = Call("fs/writeBinary", WriteBinaryParams, Done)
READ_FILES = Call("fs/readFiles", ReadFilesParams, ReadFilesResult)
WRITE_FILES = Call("fs/writeFiles", WriteFilesParams, WriteFilesResult)


# The params of all operations that a sandbox may limit.
ConfinableParams = (
    ReadFileParams
    | WriteFileParams
    | OpenParams
    | CreateDirectoryParams
    | GetMetadataParams
    | CanonicalizeParams
    | ReadDirectoryParams
    | WalkParams
    | RemoveParams
    | CopyParams
    | AppendParams
    | RenameParams
    | ChmodParams
    | SymlinkParams
    | SetTimesParams
    | EditParams
    | ApplyPatchParams
    | GlobParams
    | GrepParams
    | DiskUsageParams
    | ListParams
    | CreateParams
    | ResolveParams
    | WatchParams
)
