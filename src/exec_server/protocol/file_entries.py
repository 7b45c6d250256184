"""fs/* extensions: entries of directories with all details, new files, and paths to be."""

from __future__ import annotations

from typing import ClassVar

from exec_server.protocol.decoding import Result
from exec_server.protocol.files import CanonicalizeResult, Done
from exec_server.protocol.method import Call
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Confinable, Sandbox


class ListParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "FsListParams"
    path: PathUri
    sandbox: Sandbox | None = None


class ListedEntry(Result, frozen=True, omit_defaults=True):
    """An entry; type, size, time and mode are those of the target of a link.

    A link that leads nowhere is neither a directory nor a file and has its own size, time and mode.
    """

    file_name: str
    is_directory: bool
    is_file: bool
    size: int
    modified_at_ms: int
    mode: int  # the permission bits
    link_target: str | None = None  # the text of a link


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
