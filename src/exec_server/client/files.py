"""Files: operations on files of the server's machine.

`polyfills` replaces missing methods. Small files travel together on servers with `fsBinary`, unless
there is a sandbox or another user. `transfer/` has trees and archives.
"""

from __future__ import annotations

import builtins
import posixpath
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

import msgspec
import pybase64

from exec_server.client.arguments import (
    AnyPath,
    AnySandbox,
    PathResolver,
    check_bytes,
    checked_count,
    checked_mode,
    content_pairs,
    encoded,
    is_dot,
    local_path,
    native,
    path_list,
    path_text,
    pattern_list,
    sandbox_object,
    seconds_of,
    text_pairs,
    user_text,
)
from exec_server.client.commands import SystemCommands
from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import (
    AlreadyExists,
    FileError,
    LinkLoop,
    NotADirectory,
    NotAllCopied,
    NotFound,
    SandboxDenied,
    already_exists,
    is_a_directory,
    not_found,
    path_error,
)
from exec_server.client.results import (
    ChangedFile,
    DiskUsage,
    Entry,
    FileContent,
    Found,
    GrepCount,
    GrepMatch,
    Progress,
    Stat,
    Transfer,
)
from exec_server.client.transfer import batches
from exec_server.client.transfer.open_file import (
    READ_BYTES,
    FileAppender,
    FileReader,
    FileWriter,
    too_large_error,
)
from exec_server.client.transfer.opening import FileOpener
from exec_server.client.transfer.plan import CopyOptions
from exec_server.client.transfer.text_file import TextFormat, TextReader, TextWriter
from exec_server.client.tree_walk import TreeWalk
from exec_server.errors import InvalidRequest, MalformedAnswer, RpcError, Unsupported
from exec_server.protocol import files as wire
from exec_server.protocol.decoding import Call
from exec_server.protocol.session import Capabilities

if TYPE_CHECKING:
    from exec_server.client.file_watch import FileWatch
    from exec_server.client.transfer.archive import AnyArchive

T = TypeVar("T")
P = TypeVar("P")
R = TypeVar("R")

# File content of one request or answer, well below the limit of a message. Larger files are
# opened and transferred in blocks.
WHOLE_BYTES: Final = 4 * 1_048_576
# Data of one append request.
APPEND_BYTES: Final = WHOLE_BYTES
# The same for servers without open files for writing, where each block takes a command. With base64
# it is three quarters of the largest message.
LARGEST_WHOLE_BYTES: Final = 36 * 1_048_576
# The files of an archive: more than most disks should get by accident, because a small archive can
# stand for any number of zeros.
TAR_BYTES: Final = 16 * 1024**3
# Sizes and times are signed 64-bit integers.
MAX_NUMBER: Final = 2**63 - 1

_NOT_IN_NAMES: Final = re.compile("[/\0]")
_NOT_REMOVED: Final = (
    "the server's directory and those above it are not removed, nor one that is named by . or .."
)
_IS_SAME_FILE: Final = '[ "$1" -ef "$2" ]'


class Files:
    """The files of an environment, as `env.files`.

    Paths are strings or path-like; relative ones start at the server's directory, `~` is the
    home of its user. Methods raise NotFound if a path does not exist, RpcError if the operation
    fails, and SandboxDenied if the sandbox is the reason.
    """

    def __init__(
        self,
        session: ClientSession,
        paths: PathResolver,
        commands: SystemCommands,
        sandbox: AnySandbox | None = None,
        user: str | None = None,
    ) -> None:
        self._session = session
        self._user = user
        self._paths = paths
        self._commands = commands
        self._sandbox = session.features.file_sandbox(sandbox_object(sandbox, paths))

    def __repr__(self) -> str:
        confined = "" if self._sandbox is None else ", sandboxed"
        user = "" if self._user is None else f", as user {self._user}"
        return f"<Files, relative paths start at {self._paths.cwd}{confined}{user}>"

    @property
    def _capabilities(self) -> Capabilities:
        return self._session.features.capabilities  # of the current session

    def sandboxed(self, sandbox: AnySandbox, *, cwd: AnyPath | None = None) -> Files:
        """The same files, with every operation confined; `cwd` is the workspace of a preset."""
        confined = sandbox_object(sandbox, self._paths, cwd)
        return Files(self._session, self._paths, self._commands, confined, self._user)

    def as_user(self, user: str | int) -> Files:
        """The same files with the rights of another user; Unsupported if the server cannot.

        `watch` is not possible then, and `grep` runs the command of this name.
        """
        name = user_text(self._capabilities, user)
        commands = self._commands.as_user(name)
        return Files(self._session, self._paths, commands, self._sandbox, name)

    async def read(self, path: AnyPath, *, limit: int = READ_BYTES) -> bytes:
        """Read a file; raises InvalidRequest if it has more than `limit` bytes."""
        checked_count(limit, "limit")
        metadata = await self.stat(path)
        if metadata.is_directory:
            raise is_a_directory(path_text(path))
        if metadata.size > limit:
            raise too_large_error(path, limit)
        if metadata.size > WHOLE_BYTES:
            async with self.open(path) as file:
                data = await file.read(limit + 1)
        else:
            params = wire.ReadFileParams(self._paths.uri(path))
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
        text = pybase64.b64encode_as_string(data)
        params = wire.CreateParams(self._paths.uri(path), text)
        await self._call(wire.CREATE, params, path, is_retryable=False)

    async def _write(self, path: AnyPath, data: bytes, in_place: bool) -> None:
        streams = self._capabilities.file_write_streaming
        whole_bytes = WHOLE_BYTES if streams else LARGEST_WHOLE_BYTES
        if len(data) > whole_bytes and self._writes_blocks:
            async with self.open(path, "wb", in_place=in_place) as file:
                await file.write(data)
            return
        text = pybase64.b64encode_as_string(data)
        params = wire.WriteFileParams(self._paths.uri(path), text)
        await self._call(wire.WRITE_FILE, params, path)

    @property
    def _writes_blocks(self) -> bool:
        return self._session.features.writes_blocks(is_confined=self._sandbox is not None)

    @overload
    def open(self, path: AnyPath, mode: Literal["rb"] = "rb", *, offset: int = 0) -> FileReader: ...

    @overload
    def open(self, path: AnyPath, mode: Literal["xb"]) -> FileWriter: ...

    @overload
    def open(self, path: AnyPath, mode: Literal["wb"], *, in_place: bool = False) -> FileWriter: ...

    @overload
    def open(self, path: AnyPath, mode: Literal["ab"]) -> FileAppender: ...

    @overload
    def open(
        self,
        path: AnyPath,
        mode: Literal["r", "rt"],
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> TextReader: ...

    @overload
    def open(
        self,
        path: AnyPath,
        mode: Literal["w", "wt", "a", "at", "x", "xt"],
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> TextWriter: ...

    @overload
    def open(
        self,
        path: AnyPath,
        mode: str,
        *,
        offset: int = 0,
        in_place: bool = False,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> Any: ...  # as of the built-in: which file it is depends on the value

    def open(
        self,
        path: AnyPath,
        mode: str = "rb",
        *,
        offset: int = 0,
        in_place: bool = False,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> FileReader | FileWriter | FileAppender | TextReader | TextWriter:
        """A file of any size that `await` or `async with` opens, in a mode of the built-in `open`.

        The modes are `rb`, `wb`, `ab` and `xb`, and those of text: `r`, `w`, `a` and `x`, with
        `encoding` (UTF-8), `errors` and `newline`. Reading starts at `offset`. A new content is
        written beside the file and takes its place at the end of the block, or by `aclose`; after
        an exception in the block the file is unchanged, or a new one (`x`, AlreadyExists) removed.
        With `in_place` the file itself is truncated and written. Appended data is sent at once.
        """
        opener = FileOpener(
            self, self._session, self._paths, self._commands, self._sandbox, self._user
        )
        text = TextFormat(encoding, errors, newline)
        return opener.open(path, mode, text, offset=offset, in_place=in_place)

    async def stat(self, path: AnyPath, *, follow_links: bool = True) -> Stat:
        """The metadata of a path.

        Without `follow_links` a link is not followed, and `created` is known where the file system
        keeps it, unless the path has a link in it. A link has the size of its text, and the time of
        the entry that it leads to. Without `fsList`, a path with a link raises InvalidRequest.
        """
        uri = self._paths.uri(path)
        params = wire.GetMetadataParams(uri, None if follow_links else False)
        try:
            metadata = await self._call(wire.GET_METADATA, params, path)
        except (InvalidRequest, NotADirectory):  # there is a link in it
            if follow_links or not self._capabilities.fs_list:  # only that tells sizes and times
                raise
            return await self._listed(path, uri.native())
        numbers = (metadata.size, abs(metadata.created_at_ms), abs(metadata.modified_at_ms))
        if not all(0 <= number <= MAX_NUMBER for number in numbers):
            raise MalformedAnswer(f"{path_text(path)}: the server sent an impossible size or time")
        return Stat(
            is_directory=metadata.is_directory,
            is_file=metadata.is_file,
            is_symlink=metadata.is_symlink,
            size=metadata.size,
            modified=metadata.modified_at_ms / 1000,
            created=metadata.created_at_ms / 1000 if metadata.created_at_ms else None,
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

    async def list(self, path: AnyPath = ".", *, owners: bool = False) -> list[Entry]:
        """The entries of a directory by name, with their details, and with `owners` whose they are.

        Without `fsList`, the details are unknown and links that lead nowhere are left out.
        """
        uri, base = self._paths.uri(path), self._paths.absolute(path).rstrip("/")
        try:
            detailed = await self._call(wire.LIST, wire.ListParams(uri, owners=owners), path)
            listed = [_detailed_entry(entry, base) for entry in detailed.entries]
        except Unsupported:
            params = wire.ReadDirectoryParams(uri)
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
        depth: int | None = None,
    ) -> AsyncIterator[Entry]:
        """Everything below a directory, each directory before its entries.

        With a `depth` of 1 these are its entries alone, of 2 also those of the directories in it.
        Links are left out, unless `follow_links` is set; then a link to a directory counts as
        a directory. Special files are left out, and so are unreadable entries, whose errors are
        passed to `on_error`.
        """
        walk = TreeWalk(partial(self._call, wire.WALK), self.realpath, follow_links, on_error)
        root = self._paths.uri(path)
        entries = (
            walk.below(root, path_text(path)) if depth is None else walk.one_by_one(root, depth)
        )
        async for entry in entries:
            yield entry

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
        params = wire.CanonicalizeParams(uri)
        try:
            return native((await self._call(wire.CANONICALIZE, params, path)).path)
        except (NotFound, NotADirectory, LinkLoop):
            if strict:
                raise
        resolve = wire.ResolveParams(uri)
        return native((await self._call(wire.RESOLVE, resolve, path)).path)

    async def copy(self, source: AnyPath, target: AnyPath, *, recursive: bool = False) -> None:
        """Copy a file, a link, or with `recursive` a directory, on the server's machine.

        Raises InvalidRequest if both are the same file, which some servers would truncate.
        """
        params = wire.CopyParams(
            self._paths.uri(source, "source"), self._paths.uri(target, "target"), recursive
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
            return bool(await self._commands.run(argv, sandbox=self._sandbox))
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
        params = wire.RemoveParams(uri, recursive, missing_ok)
        await self._call(wire.REMOVE, params, path, is_retryable=missing_ok)

    async def mkdir(self, path: AnyPath, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Create a directory, with `parents` also those above it; AlreadyExists if there is one."""
        params = wire.CreateDirectoryParams(self._paths.uri(path), recursive=parents)
        if parents and not exist_ok and await self.exists(path):
            raise already_exists(path_text(path))
        is_retryable = parents or exist_ok
        try:
            await self._call(wire.CREATE_DIRECTORY, params, path, is_retryable=is_retryable)
        except AlreadyExists:
            if parents or not exist_ok or not (await self.stat(path)).is_directory:
                raise

    async def append(self, path: AnyPath, data: bytes) -> None:
        """Write at the end of a file, which is created if it is missing."""
        check_bytes(data, "encode a text")
        for start in range(0, max(len(data), 1), APPEND_BYTES):
            text = pybase64.b64encode_as_string(data[start : start + APPEND_BYTES])
            params = wire.AppendParams(self._paths.uri(path), text)
            await self._call(wire.APPEND, params, path, is_retryable=False)

    async def rename(self, old: AnyPath, new: AnyPath, *, replace: bool = True) -> None:
        """Rename a file or directory; AlreadyExists if `new` exists and `replace` is false."""
        params = wire.RenameParams(
            self._paths.uri(old, "old"), self._paths.uri(new, "new"), replace
        )
        await self._call(wire.RENAME, params, old, target=new, is_retryable=False)

    async def chmod(self, path: AnyPath, mode: int) -> None:
        """Set the permission bits of a file or directory, like 0o755."""
        params = wire.ChmodParams(self._paths.uri(path), checked_mode(mode))
        await self._call(wire.CHMOD, params, path)

    async def symlink(self, target: AnyPath, path: AnyPath) -> None:
        """Create a symlink, like os.symlink; a relative target starts at the link's directory."""
        params = wire.SymlinkParams(self._paths.uri(path), path_text(target))
        await self._call(wire.SYMLINK, params, path, is_retryable=False)

    async def touch(
        self,
        path: AnyPath,
        *,
        modified: float | datetime | None = None,
        accessed: float | datetime | None = None,
        modified_ns: int | None = None,
    ) -> None:
        """Set the times of a file, in seconds since 1970, or create an empty file.

        A datetime without a time zone is one of this machine. A missing time is the current one.
        `modified_ns` is `modified` in nanoseconds, for an exact time.
        """
        modified, accessed = seconds_of(modified, "modified"), seconds_of(accessed, "accessed")
        if modified_ns is None and modified is not None:
            modified_ns = round(modified * 1000) * 1_000_000
        whole, remainder = (None, 0) if modified_ns is None else divmod(modified_ns, 1_000_000)
        params = wire.SetTimesParams(
            self._paths.uri(path),
            whole,
            None if accessed is None else round(accessed * 1000),
            modified_ns=remainder,
            create=True,
        )
        await self._call(wire.SET_TIMES, params, path)

    async def glob(self, pattern: str, root: AnyPath = ".", *, limit: int = 1000) -> Found[str]:
        """The paths below `root` that match a pattern like `src/**/*.{ts,tsx}`, relative to it.

        At most `limit` of them; `truncated` of the result tells whether there are more.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"pattern must be str, not {type(pattern).__name__}")
        params = wire.GlobParams(
            self._paths.uri(root, "root"), pattern, checked_count(limit, "limit")
        )
        answer = await self._call(wire.GLOB, params, root)
        return Found(answer.paths, truncated=answer.truncated)

    async def edit(
        self,
        path: AnyPath,
        old: str | Iterable[tuple[str, str]],
        new: str | None = None,
        *,
        all: bool = False,  # noqa: A002 - the word of the protocol
    ) -> int:
        """Replace a text that occurs exactly once in a file, or `all` its occurrences.

        `old` may be a list of pairs of texts: all of them are replaced, or none. A text that does
        not occur as it is may differ in line ends, or in blanks at the ends of lines; the file
        keeps its line ends. Returns the number of replacements; raises EditNotFound, or
        EditAmbiguous with `count` and `lines`.
        """
        edits = [wire.TextEdit(*pair, all) for pair in text_pairs(old, new)]
        params = wire.EditParams(self._paths.uri(path), edits)
        return (await self._call(wire.EDIT, params, path, is_retryable=False)).replacements

    async def apply_patch(self, patch: str, root: AnyPath = ".") -> builtins.list[ChangedFile]:
        """Apply a unified diff or a patch of Codex to the files below `root`.

        A patch that does not fit changes nothing, and raises PatchDoesNotApply. The counts of a
        diff may be wrong, and its `@@` bare, if it fits one place alone.
        """
        if not isinstance(patch, str):
            raise TypeError(f"patch must be str, not {type(patch).__name__}")
        params = wire.ApplyPatchParams(self._paths.uri(root, "root"), patch)
        done = await self._call(wire.APPLY_PATCH, params, root, is_retryable=False)
        return [ChangedFile(change.path, change.kind) for change in done.changes]

    async def disk_usage(self, path: AnyPath = ".") -> DiskUsage:
        """The size and free space of the file system that a path is on."""
        params = wire.DiskUsageParams(self._paths.uri(path))
        answer = await self._call(wire.DISK_USAGE, params, path)
        return DiskUsage(answer.total, answer.free, answer.available)

    async def grep(
        self,
        pattern: str,
        root: AnyPath = ".",
        *,
        literal: bool = False,
        ignore_case: bool = False,
        word: bool = False,
        invert: bool = False,
        glob: str | None = None,
        exclude: str | None = ".git",
        before: int = 0,
        after: int = 0,
        context: int = 0,
        limit: int = 1000,
    ) -> Found[GrepMatch]:
        """The lines below `root`, a directory or a file, that match a regular expression.

        `literal` takes the pattern as a plain text, `word` matches whole words, `invert` finds the
        lines that do not match. `glob` and `exclude` are patterns of paths like those of `glob()`;
        without a slash they match names at any depth. `before`, `after` and `context` (both) are
        numbers of lines around a match, at most 20. Binary files and links are skipped, hidden
        files and those in a .gitignore are not. At most `limit` matches are returned; `truncated`
        of the result tells whether there may be more. A search that takes longer than 5 seconds is
        truncated, too.
        """
        params = wire.GrepParams(
            self._paths.uri(root, "root"),
            _searched(pattern, literal=literal, word=word),
            literal=literal and not word,
            ignore_case=ignore_case,
            glob=glob,
            exclude=exclude,
            before=max(checked_count(before, "before"), checked_count(context, "context")),
            after=max(checked_count(after, "after"), context),
            limit=checked_count(limit, "limit"),
            invert=invert,
        )
        answer = await self._search(params, root)
        matches = (
            GrepMatch(
                each.path, each.line, each.column, each.text, tuple(each.before), tuple(each.after)
            )
            for each in answer.matches
        )
        return Found(matches, truncated=answer.truncated)

    async def grep_count(
        self,
        pattern: str,
        root: AnyPath = ".",
        *,
        literal: bool = False,
        ignore_case: bool = False,
        word: bool = False,
        invert: bool = False,
        glob: str | None = None,
        exclude: str | None = ".git",
        limit: int = 1000,
    ) -> Found[GrepCount]:
        """The files in which `grep` finds lines, at most `limit`, and how many; not the lines."""
        params = wire.GrepParams(
            self._paths.uri(root, "root"),
            _searched(pattern, literal=literal, word=word),
            literal=literal and not word,
            ignore_case=ignore_case,
            glob=glob,
            exclude=exclude,
            limit=checked_count(limit, "limit"),
            invert=invert,
            count_only=True,
        )
        answer = await self._search(params, root)
        counts = (GrepCount(each.path, each.count) for each in answer.counts or [])
        return Found(counts, truncated=answer.truncated)

    async def _search(self, params: wire.GrepParams, root: AnyPath) -> wire.GrepResult:
        is_newer = params.invert or params.count_only
        # The extension has no users.
        is_polyfill = self._user is not None or (is_newer and not self._capabilities.fs_grep_counts)
        return await self._call(wire.GREP, params, root, is_polyfill=is_polyfill)

    def watch(self, path: AnyPath = ".", *, recursive: bool = False) -> FileWatch:
        """The changes of a directory's entries, or of a file, for `async with` and `async for`.

        With `recursive` also those of the directories below it, at most 4096. Renaming is a
        deletion and a creation. Links are not followed.
        """
        if not self._capabilities.fs_watch or self._user is not None:
            raise Unsupported("fsWatch", "compare the results of files.walk() at intervals")
        from exec_server.client.file_watch import FileWatch

        return FileWatch(
            self._session,
            self._paths.uri(path),
            path_text(path),
            recursive=recursive,
            sandbox=self._sandbox,
        )

    async def read_many(
        self, paths: Iterable[AnyPath], *, limit: int = READ_BYTES, check: bool = True
    ) -> builtins.list[FileContent]:
        """Read files, each of at most `limit` bytes; the results have the order of the paths.

        Raises the error of the first file that cannot be read. Without `check`, its result has
        the `error`, and the others are read.
        """
        paths = path_list(paths, "paths")
        names = {self._absolute(path): path_text(path) for path in paths}
        contents, errors = await batches.read_many(
            self, self._batch_session(), names, checked_count(limit, "limit"), check=check
        )
        return [
            FileContent(path_text(path), contents[whole], errors.get(whole))
            for path, whole in ((path, self._absolute(path)) for path in paths)
        ]

    async def write_many(
        self,
        files: Mapping[str, bytes] | Iterable[tuple[AnyPath, bytes]],
        *,
        parents: bool = False,
        check: bool = True,
    ) -> Transfer:
        """Write files, with `parents` also missing directories; of equal paths the last one counts.

        If a file cannot be written, the others are. Then NotAllCopied is raised or, without
        `check`, the file is only named in `failed`. RpcError is raised at once if a disk is full.
        """
        names: dict[str, str] = {}
        contents: dict[str, bytes] = {}
        for path, data in content_pairs(files):
            check_bytes(data, f"encode the text of {path_text(path)}")
            names[self._absolute(path)] = path_text(path)
            contents[self._absolute(path)] = data
        done = await batches.write_many(
            self, self._batch_session(), names, contents, parents=parents
        )
        return _checked(done) if check else done

    async def read_tar(
        self, path: AnyPath, *, exclude: Iterable[str] = ()
    ) -> AsyncGenerator[bytes, None]:
        """A directory or file as a tar archive, in pieces; names begin with `./`.

        `exclude` has paths, relative to the directory, that are left out with everything below;
        they are not patterns.
        """
        from exec_server.client.transfer.archive import ArchiveDownload

        skipped = path_list(exclude, "exclude")
        archive = ArchiveDownload(self, self._commands, self._sandbox, skipped)
        async with aclosing(archive.chunks(self._absolute(path))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def write_tar(
        self,
        archive: AnyArchive,
        directory: AnyPath,
        *,
        limit: int = TAR_BYTES,
        progress: Callable[[Progress], None] | None = None,
        check: bool = True,
    ) -> Transfer:
        """Unpack a tar archive into a directory, which is made if it is missing.

        The archive is bytes, a binary file, or an iterable of bytes, async or not, and may be
        compressed. Its files have at most `limit` bytes together. InvalidRequest is raised at the
        first member that leads out of the directory, as a path or link, or is no file, directory
        or link; the members before it stay. If a member cannot be written, the others are, and
        NotAllCopied is raised at the end or, without `check`, the member is named in `failed`.
        """
        from exec_server.client.transfer.archive import ArchiveUpload

        target, session = self._absolute(directory, "directory"), self._batch_session()
        upload = ArchiveUpload(
            self, self._commands, progress, self._sandbox, target, session=session
        )
        done = await upload.unpack(archive, limit)
        return _checked(done) if check else done

    async def upload(
        self,
        local: AnyPath,
        remote: AnyPath,
        *,
        progress: Callable[[Progress], None] | None = None,
        check: bool = True,
        keep_times: bool = False,
        sync: Literal["time", "checksum"] | None = None,
        exclude: Iterable[str] = (),
        exclude_vcs: bool = False,
        gitignore: bool = False,
        delete: bool = False,
        dry_run: bool = False,
    ) -> Transfer:
        """Copy a local file or directory to a path of the server's machine.

        A directory is merged into an existing one, or made, with missing directories above it; the
        directory of a single file must exist. Modes and links are kept if the machine has the usual
        commands for that; `left_out` names those that could not be kept. A large file gets its name
        when it is complete; after a failure the next attempt continues it.

        With `keep_times` modification times are kept, too. `sync` skips files whose copies have
        the same size and time, or the same "checksum"; `resumed_bytes` counts them.

        `exclude` has patterns as in a .gitignore file at the top, for entries that are not copied.
        `exclude_vcs` excludes the directories of version control, such as .git, and `gitignore`
        what the .gitignore files of the tree name. With `sync`, `delete` removes from the copy what
        the source has not, unless it is excluded; if an entry cannot be copied, nothing is removed.
        `dry_run` changes nothing: `planned` of the result says what a copy would do.

        If an entry of a tree cannot be copied, the others are. At the end NotAllCopied is raised
        or, without `check`, the entry is only named in `failed`. Raises RpcError or OSError if
        the top itself cannot be copied, or if a disk is full.
        """
        from exec_server.client.transfer.upload import Upload  # slow to import

        patterns = pattern_list(exclude)
        options = CopyOptions(keep_times, sync, patterns, exclude_vcs, gitignore, delete, dry_run)
        session = self._batch_session()
        upload = Upload(self, self._commands, progress, self._sandbox, options, session=session)
        done = await upload.copy(local_path(local), self._paths.absolute(remote, "remote"))
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
        exclude: Iterable[str] = (),
        exclude_vcs: bool = False,
        gitignore: bool = False,
        delete: bool = False,
        dry_run: bool = False,
    ) -> Transfer:
        """Copy a file or directory of the server's machine to a local path, as `upload` does."""
        from exec_server.client.transfer.download import Download  # slow to import

        patterns = pattern_list(exclude)
        options = CopyOptions(keep_times, sync, patterns, exclude_vcs, gitignore, delete, dry_run)
        session = self._batch_session()
        download = Download(self, self._commands, progress, self._sandbox, options, session=session)
        done = await download.copy(self._paths.absolute(remote, "remote"), local_path(local))
        return _checked(done) if check else done

    def _batch_session(self) -> ClientSession | None:
        """The session, if many files can travel in one request, which no sandbox confines."""
        is_plain = self._sandbox is None and self._user is None
        return self._session if is_plain and self._capabilities.fs_binary else None

    def _absolute(self, path: AnyPath, name: str = "path") -> str:
        return self._paths.absolute(path, name)

    async def _call(
        self,
        call: Call[P, R],
        params: P,
        path: AnyPath,
        *,
        target: AnyPath | None = None,
        is_retryable: bool = True,
        is_polyfill: bool = False,
    ) -> R:
        """Call a method, or with `is_polyfill` its polyfill; errors name the path."""
        if self._sandbox is not None or self._user is not None:
            rights = {"sandbox": self._sandbox, "user": self._user}
            params = msgspec.structs.replace(params, **rights)  # type: ignore[type-var]
        try:
            if is_polyfill:
                return await self._session.call_polyfill(call, params)
            return await self._session.call(call, params, is_retryable=is_retryable)
        except FileError:
            raise  # a polyfill has named the file, or the program that is missing
        except RpcError as error:
            is_confined = self._sandbox is not None
            raise path_error(error, path, is_confined=is_confined, target=target) from None


def _searched(pattern: str, *, literal: bool, word: bool) -> str:
    """The pattern of a search, or that of a whole word."""
    if not isinstance(pattern, str):
        raise TypeError(f"pattern must be str, not {type(pattern).__name__}")
    if not word:
        return pattern
    return rf"(?<!\w)(?:{re.escape(pattern) if literal else pattern})(?!\w)"


def _checked(done: Transfer) -> Transfer:
    if done.failed:
        raise NotAllCopied(done)
    return done


def _detailed_entry(entry: wire.ListedEntry, base: str) -> Entry:
    numbers = (entry.size, abs(entry.modified_at_ms), entry.mode)
    if not all(0 <= number <= MAX_NUMBER for number in numbers):
        raise MalformedAnswer(f"{base}: the server sent an impossible size, time or mode")
    return Entry(
        f"{base}/{entry.file_name}",
        entry.is_directory,
        entry.is_file,
        entry.size,
        entry.modified_at_ms / 1000,
        entry.mode,
        entry.link_target,
        entry.owner,
        entry.group,
    )
