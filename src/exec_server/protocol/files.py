"""fs/*: structs, calls and the notification.

A flag of type `bool | None` is true if it is absent or null, as in the reference.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NewType

from exec_server.protocol.decoding import U64, Base64, Params, Result, Usize
from exec_server.protocol.method import Call, Notice
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Confinable, Sandbox

HandleId = NewType("HandleId", str)
EntryKind = Literal["directory", "file"]


class Done(Result, frozen=True):
    """The result `{}`."""


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
