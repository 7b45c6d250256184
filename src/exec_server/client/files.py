"""Files: operations on files of the server's machine."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Literal, TypeVar, overload

import pybase64

from exec_server.client.engine.start_params import AnySandbox, sandbox_object, user_text
from exec_server.client.exceptions import NotAllCopied, SandboxDenied
from exec_server.client.file_changes import check_bytes
from exec_server.client.file_errors import (
    AlreadyExists,
    LinkLoop,
    NotADirectory,
    NotFound,
    already_exists,
    is_a_directory,
    not_found,
)
from exec_server.client.many_files import ManyFiles
from exec_server.client.paths import AnyPath, encoded, is_dot, native, path_text
from exec_server.client.process import Process
from exec_server.client.results import Entry, Progress, Result, Stat, Transfer
from exec_server.client.transfer.open_file import (
    READ_BYTES,
    FileReader,
    FileWriter,
    too_large_error,
)
from exec_server.client.transfer.plan import HELPER_OUTPUT_BYTES, Commands, CopyOptions
from exec_server.errors import (
    InternalError,
    InvalidRequest,
    MalformedAnswer,
    RpcError,
    Unsupported,
)
from exec_server.protocol import file_entries as entries
from exec_server.protocol import files as wire
from exec_server.protocol.paths import PathUri

P = TypeVar("P")
R = TypeVar("R")

# File content of one request or answer, well below the limit of a message. Larger files are
# opened and transferred in blocks.
WHOLE_BYTES: Final = 4 * 1_048_576
# The same for servers without open files for writing, where each block takes a command. With base64
# it is three quarters of the largest message.
LARGEST_WHOLE_BYTES: Final = 36 * 1_048_576
# Limits of one walk request: at most some seconds of work for the server.
WALK_DEPTH: Final = 64
WALK_DIRECTORIES: Final = 10_000
WALK_ENTRIES: Final = 50_000

# Directories that a walk remembers, if it needs a request for each.
MAX_DIRECTORIES: Final = 1_000_000
# Of an URI: a path of 4096 bytes, each of them escaped.
MAX_URI: Final = 3 * 4096 + 64
# Sizes and times are signed 64-bit integers.
MAX_NUMBER: Final = 2**63 - 1

_NOT_IN_NAMES: Final = re.compile("[/\0]")
# A hard link is made only if its name does not exist, even as a symlink. The errors of dd have the
# texts of the C library, those of the shell have not.
_CREATE: Final = (
    'new=$1.$$.part; dd of="$new" status=none && ln -T -- "$new" "$1"; code=$?; '
    'rm -f -- "$new"; exit $code'
)
_NOT_REMOVED: Final = (
    "the server's directory and those above it are not removed, nor one that is named by . or .."
)
_IS_SAME_FILE: Final = '[ "$1" -ef "$2" ]'


class Files(ManyFiles):
    """The files of an environment, as `env.files`.

    Paths are strings or path-like; relative ones start at the server's directory, `~` is the
    home of its user. Methods raise NotFound if a path does not exist, RpcError if the operation
    fails, and SandboxDenied if the sandbox is the reason.
    """

    def sandboxed(self, sandbox: AnySandbox, *, cwd: AnyPath | None = None) -> Files:
        """The same files, with every operation confined; `cwd` is the workspace of a preset."""
        confined = sandbox_object(sandbox, self._paths, cwd)
        return Files(self._session, self._paths, self._commands, confined, self._user)

    def as_user(self, user: str | int) -> Files:
        """The same files with the rights of another user; Unsupported if the server cannot.

        `watch` is not possible then, and `grep` runs the command of this name.
        """
        name = user_text(self._capabilities, user)
        commands = _CommandsAs(self._commands, name)
        return Files(self._session, self._paths, commands, self._sandbox, name)

    # ---- whole files ------------------------------------------------------------------

    async def read(self, path: AnyPath, *, limit: int = READ_BYTES) -> bytes:
        """Read a file; raises InvalidRequest if it has more than `limit` bytes."""
        found = await self.stat(path)
        if found.is_directory:
            raise is_a_directory(path_text(path))
        if found.size > limit:
            raise too_large_error(path, limit)
        if found.size > WHOLE_BYTES:
            async with self.open(path) as file:
                data = await file.read(limit + 1)
        else:
            params = wire.ReadFileParams(self._paths.uri(path), sandbox=self._sandbox)
            data = (await self._call(wire.READ_FILE, params, path)).data_base64
        if len(data) > limit:
            raise too_large_error(path, limit)
        return data

    async def read_text(
        self, path: AnyPath, encoding: str = "utf-8", errors: str = "strict"
    ) -> str:
        """Read a text file; line ends stay as they are."""
        return (await self.read(path)).decode(encoding, errors)

    async def write_text(
        self,
        path: AnyPath,
        text: str,
        encoding: str = "utf-8",
        errors: str = "strict",
        *,
        parents: bool = False,
    ) -> None:
        """Write a text file; line ends stay as they are. See `write`."""
        if not isinstance(text, str):
            raise TypeError(f"text must be str, not {type(text).__name__}: use write() for bytes")
        await self.write(path, text.encode(encoding, errors), parents=parents)

    async def write(
        self,
        path: AnyPath,
        data: bytes,
        *,
        parents: bool = False,
        in_place: bool = False,
        exclusive: bool = False,
    ) -> None:
        """Write a file, creating it if needed, and with `parents` missing directories too.

        Large data is put in place when it is complete; see `open`. If the file must be a new one,
        `exclusive`, and exists, AlreadyExists is raised.
        """
        check_bytes(data, "use write_text() for text")
        try:
            if exclusive:
                await self._create(path, data[:WHOLE_BYTES])
                if len(data) <= WHOLE_BYTES:
                    return
            await self._write(path, data, in_place or exclusive)
        except NotFound:
            if not parents:
                raise
            directory = self._absolute(path).rpartition("/")[0]
            await self.mkdir(directory or "/", parents=True, exist_ok=True)
            await self.write(path, data, in_place=in_place, exclusive=exclusive)

    async def _create(self, path: AnyPath, data: bytes) -> None:
        """Create a file that must not exist."""
        if not self._capabilities.fs_create:
            await self._run(["/bin/sh", "-c", _CREATE, "sh", self._absolute(path)], path, data)
            return
        text = pybase64.b64encode_as_string(data)
        params = entries.CreateParams(self._paths.uri(path), text, self._sandbox)
        await self._call(entries.CREATE, params, path, is_retryable=False)

    async def _write(self, path: AnyPath, data: bytes, in_place: bool) -> None:
        if len(data) > self._whole_bytes and self._writes_blocks:
            async with self.open(path, "wb", in_place=in_place) as file:
                await file.write(data)
            return
        text = pybase64.b64encode_as_string(data)
        params = wire.WriteFileParams(self._paths.uri(path), text, sandbox=self._sandbox)
        await self._call(wire.WRITE_FILE, params, path)

    @property
    def _whole_bytes(self) -> int:
        streams = self._capabilities.file_write_streaming
        return WHOLE_BYTES if streams else LARGEST_WHOLE_BYTES

    @property
    def _writes_blocks(self) -> bool:
        return self._session.features.writes_blocks(is_confined=self._sandbox is not None)

    @overload
    def open(self, path: AnyPath, mode: Literal["rb"] = "rb", *, offset: int = 0) -> FileReader: ...

    @overload
    def open(self, path: AnyPath, mode: Literal["wb"], *, in_place: bool = False) -> FileWriter: ...

    def open(
        self, path: AnyPath, mode: str = "rb", *, offset: int = 0, in_place: bool = False
    ) -> FileReader | FileWriter:
        """A file of any size that `await` or `async with` opens, to read (`rb`) or replace (`wb`).

        Reading starts at `offset`. A new content is written beside the file and takes its place
        at the end of the block, or by `aclose`; after an exception in the block the file is
        unchanged. With `in_place` the file itself is truncated and written.
        """
        uri = self._paths.uri(path)
        if mode == "rb":
            params = wire.OpenParams(wire.HandleId(""), uri, "read", self._sandbox, user=self._user)
            return FileReader(self._session, params, path_text(path), offset)
        if mode != "wb":
            raise ValueError(f"mode must be 'rb' or 'wb', not {mode!r}")
        if not self._writes_blocks:
            raise Unsupported("fileWriteStreaming", "write the whole file with files.write()")
        params = wire.OpenParams(wire.HandleId(""), uri, "replace", self._sandbox, user=self._user)
        placement = None
        if not in_place:
            target = self._paths.absolute(path)
            spawn = self._session.spawn
            from exec_server.client.transfer.placement import Placement

            placement = Placement(self, self._commands, self._sandbox, target, spawn)
        return FileWriter(self._session, params, path_text(path), placement)

    # ---- metadata and directories -----------------------------------------------------

    async def stat(self, path: AnyPath, *, follow_links: bool = True) -> Stat:
        """The metadata of a path.

        Without `follow_links` a link is not followed, and `created` is known where the file system
        keeps it, unless the path has a link in it. A link has the size of its text, and the time of
        the entry that it leads to. Without `fsList`, a path with a link raises InvalidRequest.
        """
        uri = self._paths.uri(path)
        params = wire.GetMetadataParams(uri, None if follow_links else False, self._sandbox)
        try:
            found = await self._call(wire.GET_METADATA, params, path)
        except (InvalidRequest, NotADirectory):  # there is a link in it
            if follow_links or not self._capabilities.fs_list:
                raise
            return await self._listed(path, uri.native())
        numbers = (found.size, abs(found.created_at_ms), abs(found.modified_at_ms))
        if not all(0 <= number <= MAX_NUMBER for number in numbers):
            raise MalformedAnswer(f"{path_text(path)}: the server sent an impossible size or time")
        return Stat(
            is_directory=found.is_directory,
            is_file=found.is_file,
            is_symlink=found.is_symlink,
            size=found.size,
            modified=found.modified_at_ms / 1000,
            created=found.created_at_ms / 1000 if found.created_at_ms else None,
        )

    async def _listed(self, path: AnyPath, whole: str) -> Stat:
        """The metadata of a path by the entry of its directory."""
        directory, name = posixpath.split(whole)
        for entry in await self.list(directory):
            if entry.name == name and entry.size is not None and entry.modified is not None:
                if entry.link_target is None:
                    kind = (entry.is_directory, entry.is_file, False)
                    return Stat(*kind, entry.size, entry.modified, None)
                size = len(encoded(entry.link_target))
                return Stat(False, False, True, size, entry.modified, None)
        raise not_found(path_text(path))

    async def exists(self, path: AnyPath) -> bool:
        """Whether a path exists; False for a link that leads nowhere."""
        try:
            await self.stat(path)
        except (NotFound, NotADirectory, LinkLoop):
            return False
        return True

    async def list(self, path: AnyPath = ".") -> list[Entry]:
        """The entries of a directory by name, with their details.

        Without `fsList`, the details are unknown and links that lead nowhere are left out.
        """
        uri, base = self._paths.uri(path), self._paths.absolute(path).rstrip("/")
        if self._capabilities.fs_list:
            found = await self._call(entries.LIST, entries.ListParams(uri, self._sandbox), path)
            listed = [_listed_entry(entry, base) for entry in found.entries]
        else:
            params = wire.ReadDirectoryParams(uri, sandbox=self._sandbox)
            plain = await self._call(wire.READ_DIRECTORY, params, path)
            listed = [
                Entry(f"{base}/{entry.file_name}", entry.is_directory, entry.is_file)
                for entry in plain.entries
            ]
        for entry in listed:
            name = entry.path[len(base) + 1 :]
            if name in ("", ".", "..") or _NOT_IN_NAMES.search(name):
                raise MalformedAnswer(f"{path_text(path)}: the server lists an entry {name!r}")
        return sorted(listed, key=lambda entry: entry.path)

    async def walk(
        self,
        path: AnyPath = ".",
        *,
        follow_links: bool = False,
        on_error: Callable[[RpcError], None] | None = None,
    ) -> AsyncIterator[Entry]:
        """Everything below a directory, each directory before its entries.

        Links are left out, unless `follow_links` is set; then a link to a directory counts as
        a directory. Special files are left out, and so are unreadable entries, whose errors are
        passed to `on_error`.
        """
        root = self._paths.uri(path)
        options = wire.WalkOptions(WALK_DEPTH, WALK_DIRECTORIES, WALK_ENTRIES, follow_links)
        found = await self._walk(wire.WalkParams(root, options, self._sandbox), path_text(path))
        if found.truncated:  # it has more entries than one answer
            async for entry in self._walk_one_by_one(root, follow_links, on_error):
                yield entry
            return
        _report(on_error, found.errors)
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
        """Walk with one request for each directory."""
        options = wire.WalkOptions(0, 1, WALK_ENTRIES, follow_links)
        seen = set()
        unvisited = [root.uri]
        while unvisited:
            uri = unvisited.pop()
            if follow_links:  # links may form a cycle
                canonical = await self.realpath(uri)
                if canonical in seen:
                    continue
                seen.add(canonical)
            params = wire.WalkParams(PathUri.from_text(uri), options, self._sandbox)
            found = await self._walk(params, native(uri))
            _report(on_error, found.errors)
            for each in found.entries:
                yield _entry(each)
            below = [each.path for each in found.entries if each.kind == "directory"]
            unvisited += reversed(below)
            if len(unvisited) + len(seen) > MAX_DIRECTORIES:
                text = f"more than {MAX_DIRECTORIES} directories: walk those in it one by one"
                raise InvalidRequest(f"{native(root.uri)}: {text}")

    async def _walk(self, params: wire.WalkParams, path: str) -> wire.WalkResult:
        """Walk once; the answer has paths below the root alone."""
        found = await self._call(wire.WALK, params, path)
        prefix = params.path.uri.rstrip("/") + "/"
        for entry in found.entries:
            if not entry.path.startswith(prefix) or len(entry.path) > MAX_URI:
                text = f"the server lists {entry.path[:100]!r}"
                raise MalformedAnswer(f"{path}: {text}, which is not below it")
        return found

    async def realpath(self, path: AnyPath, *, strict: bool = True) -> str:
        """The path with all links resolved; unless `strict`, it need not exist.

        Of a link, `..` is the directory above its target.
        """
        text = self._absolute(path)
        if ".." in text.split("/"):  # URIs have none: they would be removed as text
            before, _, after = f"{text}/".partition("/../")
            real = await self.realpath(before or "/", strict=strict)
            return await self.realpath(f"{posixpath.dirname(real)}/{after}", strict=strict)
        uri = self._paths.uri(path)
        params = wire.CanonicalizeParams(uri, sandbox=self._sandbox)
        try:
            return native((await self._call(wire.CANONICALIZE, params, path)).path)
        except (NotFound, NotADirectory, LinkLoop):
            if strict:
                raise
        if self._capabilities.fs_resolve:
            resolve = entries.ResolveParams(uri, self._sandbox)
            return native((await self._call(entries.RESOLVE, resolve, path)).path)
        argv = ["realpath", "-mz", "--", self._absolute(path)]
        return os.fsdecode((await self._run(argv, path)).stdout.rstrip(b"\0"))

    # ---- changes ----------------------------------------------------------------------

    async def copy(self, source: AnyPath, target: AnyPath, *, recursive: bool = False) -> None:
        """Copy a file, a link, or with `recursive` a directory, on the server's machine.

        Raises InvalidRequest if both are the same file, which some servers would truncate.
        """
        params = wire.CopyParams(
            self._paths.uri(source, "source"),
            self._paths.uri(target, "target"),
            recursive,
            sandbox=self._sandbox,
        )
        if await self._are_same(source, target):
            names = f"{path_text(source)} to {path_text(target)}"
            raise InvalidRequest(f"{names}: they are the same file")
        await self._call(wire.COPY, params, source, target=target, is_retryable=False)

    async def _are_same(self, source: AnyPath, target: AnyPath) -> bool:
        """Whether two paths lead to one file; False if unknown, so that the server decides."""
        try:
            if await self.realpath(target) == await self.realpath(source):
                return True
            stats = [await self.stat(source), await self.stat(target)]
            # Hard links of one file have these in common, and hardly any other files do.
            first, second = [(stat.size, stat.modified, stat.created) for stat in stats]
            if stats[0].is_directory or first != second:
                return False
            paths = (self._paths.absolute(source), self._paths.absolute(target))
            argv = ["/bin/sh", "-c", _IS_SAME_FILE, "sh", *paths]
            return bool(
                await self._commands.run(
                    argv, cwd="/", sandbox=self._sandbox, output_limit=HELPER_OUTPUT_BYTES
                )
            )
        except (RpcError, SandboxDenied, UnicodeEncodeError, Unsupported):
            return False

    async def remove(
        self, path: AnyPath, *, recursive: bool = False, missing_ok: bool = False
    ) -> None:
        """Remove a file, a link, an empty directory, or with `recursive` any directory.

        A directory is removed by its name: `.` and `..` are refused, as `rm` does, and so are the
        paths of the server's directory and of those above it.
        """
        uri = self._paths.uri(path)
        if is_dot(path) or self._paths.is_above_cwd(path):
            raise InvalidRequest(f"{path_text(path)}: {_NOT_REMOVED}")
        params = wire.RemoveParams(uri, recursive, missing_ok, sandbox=self._sandbox)
        await self._call(wire.REMOVE, params, path, is_retryable=missing_ok)

    async def mkdir(self, path: AnyPath, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Create a directory, with `parents` also those above it; AlreadyExists if there is one."""
        uri = self._paths.uri(path)
        if parents:
            if not exist_ok and await self.exists(path):
                raise already_exists(path_text(path))
            params = wire.CreateDirectoryParams(uri, recursive=True, sandbox=self._sandbox)
            await self._call(wire.CREATE_DIRECTORY, params, path)
            return
        params = wire.CreateDirectoryParams(uri, recursive=False, sandbox=self._sandbox)
        try:
            await self._call(wire.CREATE_DIRECTORY, params, path, is_retryable=exist_ok)
        except AlreadyExists:
            if not exist_ok or not (await self.stat(path)).is_directory:
                raise

    # ---- transfers --------------------------------------------------------------------

    async def upload(
        self,
        local: AnyPath,
        remote: AnyPath,
        *,
        progress: Callable[[Progress], None] | None = None,
        check: bool = True,
        keep_times: bool = False,
        sync: Literal["time", "checksum"] | None = None,
    ) -> Transfer:
        """Copy a local file or directory to a path of the server's machine.

        A directory is merged into an existing one, or made, with missing directories above it; the
        directory of a single file must exist. Modes and links are kept if the machine has the usual
        commands for that; `left_out` names those that could not be kept. A large file gets its name
        when it is complete; after a failure the next attempt continues it.

        With `keep_times` modification times are kept, too. `sync` skips files whose copies have
        the same size and time, or the same "checksum"; `resumed_bytes` counts them.

        If an entry of a tree cannot be copied, the others are. At the end NotAllCopied is raised
        or, without `check`, the entry is only named in `failed`. Raises RpcError or OSError if
        the top itself cannot be copied, or if a disk is full.
        """
        from exec_server.client.transfer.upload import Upload  # slow to import

        upload = Upload(
            self,
            self._commands,
            progress,
            self._sandbox,
            CopyOptions(keep_times, sync),
            session=self._batch_session(),
        )
        done = await upload.copy(_local_path(local), self._paths.absolute(remote, "remote"))
        return _checked(done) if check else done

    async def download(
        self,
        remote: AnyPath,
        local: AnyPath,
        *,
        progress: Callable[[Progress], None] | None = None,
        check: bool = True,
        keep_times: bool = False,
        sync: Literal["time", "checksum"] | None = None,
    ) -> Transfer:
        """Copy a file or directory of the server's machine to a local path, as `upload` does."""
        from exec_server.client.transfer.download import Download  # slow to import

        download = Download(
            self,
            self._commands,
            progress,
            self._sandbox,
            CopyOptions(keep_times, sync),
            session=self._batch_session(),
        )
        done = await download.copy(self._paths.absolute(remote, "remote"), _local_path(local))
        return _checked(done) if check else done


class _CommandsAs:
    """Runs commands as another user."""

    def __init__(self, commands: Commands, user: str | None) -> None:
        self._commands = commands
        self._user = user

    def run(self, *args: Any, **kwargs: Any) -> Awaitable[Result]:
        return self._commands.run(*args, user=self._user, **kwargs)

    def start(self, *args: Any, **kwargs: Any) -> Process:
        return self._commands.start(*args, user=self._user, **kwargs)


def _local_path(path: AnyPath) -> str:
    """A path of this machine as text; raises TypeError if it is none."""
    try:
        return os.fsdecode(path)
    except TypeError:
        kind = type(path).__name__
        raise TypeError(f"a path must be str, bytes or os.PathLike, not {kind}") from None


def _checked(done: Transfer) -> Transfer:
    if done.failed:
        raise NotAllCopied(done)
    return done


def _listed_entry(found: entries.ListedEntry, base: str) -> Entry:
    numbers = (found.size, abs(found.modified_at_ms), found.mode)
    if not all(0 <= number <= MAX_NUMBER for number in numbers):
        raise MalformedAnswer(f"{base}: the server sent an impossible size, time or mode")
    return Entry(
        f"{base}/{found.file_name}",
        found.is_directory,
        found.is_file,
        found.size,
        found.modified_at_ms / 1000,
        found.mode,
        found.link_target,
    )


def _entry(found: wire.WalkEntry) -> Entry:
    return Entry(native(found.path), found.kind == "directory", found.kind == "file")


def _report(on_error: Callable[[RpcError], None] | None, errors: list[wire.WalkError]) -> None:
    if on_error is not None:
        for error in errors:
            on_error(InternalError(f"{native(error.path)}: {error.message}"))
