"""fs/watch, fs/unwatch and fs/changed: structs, calls and the notification."""

from __future__ import annotations

from typing import ClassVar, Literal

from exec_server.protocol.decoding import U64, Params, Result
from exec_server.protocol.files import Done
from exec_server.protocol.method import Call, Notice
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Confinable, Sandbox

ChangeKind = Literal["created", "modified", "deleted"]


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
    kind: ChangeKind


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
