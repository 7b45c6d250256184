"""Files: everything about files on the server's machine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from typing import Final, Literal, TypeVar, overload

import pybase64

from exec_server.client.download import Download
from exec_server.client.failures import NotAllCopied, SandboxDenied
from exec_server.client.launch import AnySandbox, sandbox_object
from exec_server.client.open_file import FileReader, FileWriter
from exec_server.client.places import AnyPath, Places, explained, native
from exec_server.client.results import Entry, Progress, Stat, Transfer
from exec_server.client.traffic import Traffic
from exec_server.client.transfer import Commands
from exec_server.client.upload import Upload
from exec_server.errors import (
    InternalError,
    InvalidRequest,
    NotFound,
    RpcError,
    Unsupported,
)
from exec_server.protocol import files as wire
from exec_server.protocol.method import Call
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import Capabilities

P = TypeVar("P")
R = TypeVar("R")

# Of one request and one answer, so that no message comes near its limit. What is larger goes
# through an open file.
WHOLE_BYTES: Final = 4 * 1_048_576
# A page of a walk: some seconds of work for a server at most.
WALK_DEPTH: Final = 64
WALK_DIRECTORIES: Final = 10_000
WALK_ENTRIES: Final = 50_000

# Errors that say that a path leads nowhere: ENOTDIR, ELOOP.
_NOWHERE: Final = ("(os error 20)", "(os error 40)")
_SAME: Final = '[ "$1" -ef "$2" ]'


class Files:
    """The files of an environment, as `env.files`.

    Paths are strings or path-like; relative ones begin where the server runs, `~` is the home of
    its user. Where nothing else is said NotFound is raised if something does not exist, RpcError
    if the server cannot do it, and SandboxDenied if its sandbox is the reason.
    """

    def __init__(
        self,
        traffic: Traffic,
        places: Places,
        capabilities: Capabilities,
        commands: Commands,
        sandbox: AnySandbox | None = None,
    ) -> None:
        self._traffic = traffic
        self._places = places
        self._capabilities = capabilities
        self._commands = commands
        self._sandbox = sandbox_object(sandbox, places)

    def sandboxed(self, sandbox: AnySandbox) -> Files:
        """The same files, with every operation confined to what this sandbox allows."""
        return Files(self._traffic, self._places, self._capabilities, self._commands, sandbox)

    # ---- whole files ------------------------------------------------------------------

    async def read(self, path: AnyPath) -> bytes:
        """The content of a file."""
        if (await self.stat(path)).size > WHOLE_BYTES:
            async with self.open(path) as file:
                return await file.read()
        params = wire.ReadFileParams(self._places.uri(path), sandbox=self._sandbox)
        return (await self._call(wire.READ_FILE, params, path)).data_base64

    async def write(self, path: AnyPath, data: bytes) -> None:
        """Make this the content of a file, which need not exist; its directory must."""
        if len(data) > WHOLE_BYTES and self._capabilities.file_write_streaming:
            async with self.open(path, "wb") as file:
                await file.write(data)
            return
        text = pybase64.b64encode_as_string(data)
        params = wire.WriteFileParams(self._places.uri(path), text, sandbox=self._sandbox)
        await self._call(wire.WRITE_FILE, params, path)

    @overload
    def open(self, path: AnyPath, mode: Literal["rb"] = "rb", *, offset: int = 0) -> FileReader: ...

    @overload
    def open(self, path: AnyPath, mode: Literal["wb"]) -> FileWriter: ...

    def open(self, path: AnyPath, mode: str = "rb", *, offset: int = 0) -> FileReader | FileWriter:
        """A file of any size for `async with`, to be read (`rb`) or written anew (`wb`).

        Reading begins at `offset`.
        """
        uri = self._places.uri(path)
        if mode == "rb":
            params = wire.OpenParams(wire.HandleId(""), uri, "read", self._sandbox)
            return FileReader(self._traffic, params, os.fspath(path), offset)
        if mode != "wb":
            raise ValueError(f"the mode of a file is 'rb' or 'wb', not {mode!r}")
        if not self._capabilities.file_write_streaming:
            raise Unsupported("fileWriteStreaming", "write the file at once, with files.write()")
        params = wire.OpenParams(wire.HandleId(""), uri, "replace", self._sandbox)
        return FileWriter(self._traffic, params, os.fspath(path))

    # ---- what there is ----------------------------------------------------------------

    async def stat(self, path: AnyPath) -> Stat:
        """What is at this path."""
        params = wire.GetMetadataParams(self._places.uri(path), sandbox=self._sandbox)
        found = await self._call(wire.GET_METADATA, params, path)
        return Stat(
            is_directory=found.is_directory,
            is_file=found.is_file,
            is_symlink=found.is_symlink,
            size=found.size,
            modified=found.modified_at_ms / 1000,
            created=found.created_at_ms / 1000 if found.created_at_ms else None,
        )

    async def exists(self, path: AnyPath) -> bool:
        """Whether there is something at this path, not counting links that lead nowhere."""
        try:
            await self.stat(path)
        except NotFound:
            return False
        except InternalError as error:
            if error.message.endswith(_NOWHERE):
                return False
            raise
        return True

    async def list(self, path: AnyPath = ".") -> list[Entry]:
        """What is in a directory, by name; without links that lead nowhere."""
        params = wire.ReadDirectoryParams(self._places.uri(path), sandbox=self._sandbox)
        found = await self._call(wire.READ_DIRECTORY, params, path)
        base = self._places.absolute(path).rstrip("/")
        entries = (
            Entry(f"{base}/{entry.file_name}", entry.is_directory, entry.is_file)
            for entry in found.entries
        )
        return sorted(entries, key=lambda entry: entry.path)

    async def walk(
        self,
        path: AnyPath = ".",
        *,
        follow_links: bool = False,
        on_error: Callable[[RpcError], None] | None = None,
    ) -> AsyncIterator[Entry]:
        """Everything below a directory, directories before what is in them.

        Without `follow_links` there are no links; with it, those that lead to directories count
        as such. Special files are left out, and what cannot be read, of which `on_error` is told.
        """
        root = self._places.uri(path)
        options = wire.WalkOptions(WALK_DEPTH, WALK_DIRECTORIES, WALK_ENTRIES, follow_links)
        found = await self._call(wire.WALK, wire.WalkParams(root, options, self._sandbox), path)
        if found.truncated:  # too large for one answer
            async for entry in self._walk_one_by_one(root, follow_links, on_error):
                yield entry
            return
        _tell(on_error, found.errors)
        deepest = []
        for each in found.entries:
            entry = _entry(each)
            if entry.is_directory and each.path.count("/") - root.uri.count("/") > WALK_DEPTH:
                deepest.append(entry.path)
            yield entry
        for directory in deepest:
            async for entry in self.walk(directory, follow_links=follow_links, on_error=on_error):
                yield entry

    async def _walk_one_by_one(
        self, root: PathUri, follow_links: bool, on_error: Callable[[RpcError], None] | None
    ) -> AsyncIterator[Entry]:
        """The same, with a request for each directory."""
        options = wire.WalkOptions(0, 1, WALK_ENTRIES, follow_links)
        seen = set()
        waiting = [root.uri]
        while waiting:
            uri = waiting.pop()
            if follow_links:  # which may lead round in circles
                canonical = await self.realpath(uri)
                if canonical in seen:
                    continue
                seen.add(canonical)
            params = wire.WalkParams(PathUri.from_wire(uri), options, self._sandbox)
            found = await self._call(wire.WALK, params, native(uri))
            _tell(on_error, found.errors)
            for each in found.entries:
                yield _entry(each)
            below = [each.path for each in found.entries if each.kind == "directory"]
            waiting += reversed(below)

    async def realpath(self, path: AnyPath) -> str:
        """The path with all links resolved; it must exist."""
        params = wire.CanonicalizeParams(self._places.uri(path), sandbox=self._sandbox)
        return native((await self._call(wire.CANONICALIZE, params, path)).path)

    # ---- changing what there is -------------------------------------------------------

    async def copy(self, source: AnyPath, target: AnyPath, *, recursive: bool = False) -> None:
        """Copy a file, a link, or with `recursive` a directory, on the server's machine.

        Raises InvalidRequest if both are the same, which some servers would empty.
        """
        if await self._are_same(source, target):
            raise InvalidRequest(f"{source} to {target}: they are the same file")
        params = wire.CopyParams(
            self._places.uri(source), self._places.uri(target), recursive, sandbox=self._sandbox
        )
        await self._call(wire.COPY, params, f"{source} to {target}", is_retryable=False)

    async def _are_same(self, source: AnyPath, target: AnyPath) -> bool:
        """Whether two paths lead to one file; what cannot be found out is for the server to say."""
        try:
            if await self.realpath(target) == await self.realpath(source):
                return True
            ours, theirs = await self.stat(source), await self.stat(target)
            # Two names of one file have all of this in common, and hardly any others do.
            looks = [(found.size, found.modified, found.created) for found in (ours, theirs)]
            if ours.is_directory or looks[0] != looks[1]:
                return False
            paths = (self._places.absolute(source), self._places.absolute(target))
            words = ["/bin/sh", "-c", _SAME, "sh", *paths]
            return bool(await self._commands.run(words, cwd="/", sandbox=self._sandbox))
        except (RpcError, SandboxDenied, UnicodeEncodeError):
            return False

    async def remove(
        self, path: AnyPath, *, recursive: bool = False, missing_ok: bool = False
    ) -> None:
        """Remove a file, a link, an empty directory, or with `recursive` any directory."""
        params = wire.RemoveParams(
            self._places.uri(path), recursive, missing_ok, sandbox=self._sandbox
        )
        await self._call(wire.REMOVE, params, path, is_retryable=missing_ok)

    async def mkdir(self, path: AnyPath, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a directory, with `parents` those above it too; RpcError if it is there already."""
        uri = self._places.uri(path)
        if parents:
            if not exist_ok and await self.exists(path):
                raise InternalError(f"{path}: File exists (os error 17)")
            params = wire.CreateDirectoryParams(uri, recursive=True, sandbox=self._sandbox)
            await self._call(wire.CREATE_DIRECTORY, params, path)
            return
        params = wire.CreateDirectoryParams(uri, recursive=False, sandbox=self._sandbox)
        try:
            await self._call(wire.CREATE_DIRECTORY, params, path, is_retryable=exist_ok)
        except InternalError:
            if not exist_ok or not (await self.stat(path)).is_directory:
                raise

    # ---- between the machines ---------------------------------------------------------

    async def upload(
        self,
        local: str | os.PathLike[str],
        remote: AnyPath,
        *,
        progress: Callable[[Progress], None] | None = None,
        check: bool = True,
    ) -> Transfer:
        """Copy a local file or directory to this path of the server's machine.

        A directory is merged into one that is there. Modes and links are kept where the machine
        has the usual commands for that; what could not be is in `left_out`. A large file appears
        under its name when it is complete; if that fails, the next attempt goes on where this
        one ended.

        What cannot be copied does not keep the rest of a tree from it. At last it is raised as
        NotAllCopied or, without `check`, only named in `failed`. Raises RpcError or OSError if
        that is the top itself, or if a disk is full.
        """
        upload = Upload(self, self._commands, progress, self._sandbox)
        done = await upload.copy(os.fspath(local), self._places.absolute(remote))
        return _checked(done) if check else done

    async def download(
        self,
        remote: AnyPath,
        local: str | os.PathLike[str],
        *,
        progress: Callable[[Progress], None] | None = None,
        check: bool = True,
    ) -> Transfer:
        """The same in the other direction."""
        download = Download(self, self._commands, progress, self._sandbox)
        done = await download.copy(self._places.absolute(remote), os.fspath(local))
        return _checked(done) if check else done

    # ---- calls ------------------------------------------------------------------------

    async def _call(
        self, call: Call[P, R], params: P, path: AnyPath, *, is_retryable: bool = True
    ) -> R:
        try:
            return await self._traffic.call(call, params, is_retryable=is_retryable)
        except RpcError as error:
            raise explained(error, path, is_confined=self._sandbox is not None) from None


def _checked(done: Transfer) -> Transfer:
    if done.failed:
        raise NotAllCopied(done)
    return done


def _entry(found: wire.WalkEntry) -> Entry:
    return Entry(native(found.path), found.kind == "directory", found.kind == "file")


def _tell(on_error: Callable[[RpcError], None] | None, errors: list[wire.WalkError]) -> None:
    if on_error is not None:
        for error in errors:
            on_error(InternalError(f"{native(error.path)}: {error.message}"))
