"""FileChanges: the methods of `Files` that use extensions of the server.

For a server without an extension, a command on its machine does the same (`mv`, `chmod`, `ln`,
`touch`, `cat`, `stat`), or the client itself: it reads the text, changes it and writes it back.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec
import pybase64

from exec_server.client.engine.session import ClientSession
from exec_server.client.engine.start_params import AnySandbox, sandbox_object
from exec_server.client.file_errors import command_error
from exec_server.client.paths import AnyPath, PathResolver, path_error, path_text
from exec_server.client.results import ChangedFile, DiskUsage, Found, Result
from exec_server.client.transfer.plan import HELPER_OUTPUT_BYTES, Commands
from exec_server.errors import InvalidParams, MalformedAnswer, NotFound, RpcError, Unsupported
from exec_server.protocol import file_changes as wire
from exec_server.protocol.method import Call
from exec_server.protocol.session import Capabilities

if TYPE_CHECKING:
    from exec_server.patching.edits import Edit
    from exec_server.patching.patch import FileChange

P = TypeVar("P")
R = TypeVar("R")

# Data of one append request, well below the limit of a message.
APPEND_BYTES: Final = 4 * 1_048_576

_APPEND: Final = 'cat >> "$1"'
_OCTAL: Final = re.compile("[0-7]{1,5}")


class TextFiles(Protocol):
    """The whole-file operations that edits need on servers without the extensions."""

    async def read(self, path: AnyPath) -> bytes: ...

    async def write(self, path: AnyPath, data: bytes, *, parents: bool = False) -> None: ...

    async def remove(self, path: AnyPath) -> None: ...

    async def chmod(self, path: AnyPath, mode: int) -> None: ...


class FileChanges:
    """Changes and searches of files; the base of `Files`."""

    def __init__(
        self,
        session: ClientSession,
        paths: PathResolver,
        commands: Commands,
        sandbox: AnySandbox | None = None,
        user: str | None = None,
    ) -> None:
        self._session = session
        self._user = user
        self._paths = paths
        self._commands = commands
        self._sandbox = session.features.file_sandbox(sandbox_object(sandbox, paths))

    @property
    def _capabilities(self) -> Capabilities:
        return self._session.features.capabilities  # of the current session

    async def append(self, path: AnyPath, data: bytes) -> None:
        """Write at the end of a file, which is created if it is missing."""
        check_bytes(data, "encode a text")
        if not self._capabilities.fs_append:
            await self._run(["/bin/sh", "-c", _APPEND, "sh", self._absolute(path)], path, data)
            return
        for start in range(0, max(len(data), 1), APPEND_BYTES):
            text = pybase64.b64encode_as_string(data[start : start + APPEND_BYTES])
            params = wire.AppendParams(self._paths.uri(path), text, self._sandbox)
            await self._call(wire.APPEND, params, path, is_retryable=False)

    async def rename(self, old: AnyPath, new: AnyPath, *, replace: bool = True) -> None:
        """Rename a file or directory; AlreadyExists if `new` exists and `replace` is false."""
        if not self._capabilities.fs_rename:
            if not replace:
                raise Unsupported(
                    "fsRename", "rename with replace=True, after a look at the target"
                )
            argv = ["mv", "-fT", "--", self._absolute(old, "old"), self._absolute(new, "new")]
            await self._run(argv, old, target=new)
            return
        params = wire.RenameParams(
            self._paths.uri(old, "old"), self._paths.uri(new, "new"), replace, self._sandbox
        )
        await self._call(wire.RENAME, params, old, target=new, is_retryable=False)

    async def chmod(self, path: AnyPath, mode: int) -> None:
        """Set the permission bits of a file or directory, like 0o755."""
        if not isinstance(mode, int):
            raise TypeError(f"mode must be an int like 0o755, not {type(mode).__name__}")
        if not self._capabilities.fs_chmod:
            await self._run(["chmod", f"{mode:o}", "--", self._absolute(path)], path)
            return
        params = wire.ChmodParams(self._paths.uri(path), mode, self._sandbox)
        await self._call(wire.CHMOD, params, path)

    async def symlink(self, target: AnyPath, path: AnyPath) -> None:
        """Create a symlink, like os.symlink; a relative target starts at the link's directory."""
        text = path_text(target)
        if not self._capabilities.fs_symlink:
            await self._run(["ln", "-sT", "--", text, self._absolute(path)], path)
            return
        params = wire.SymlinkParams(self._paths.uri(path), text, self._sandbox)
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
        modified, accessed = _seconds_of(modified, "modified"), _seconds_of(accessed, "accessed")
        if modified_ns is None and modified is not None:
            modified_ns = round(modified * 1000) * 1_000_000
        if not self._capabilities.fs_set_times:
            stamp = None if modified_ns is None else _seconds(modified_ns)
            other = None if accessed is None else f"{accessed:.3f}"
            for flag, time in (("-m", stamp), ("-a", other)):
                when = [] if time is None else ["-d", f"@{time}"]
                await self._run(["touch", flag, *when, "--", self._absolute(path)], path)
            return
        whole, rest = (None, 0) if modified_ns is None else divmod(modified_ns, 1_000_000)
        params = wire.SetTimesParams(
            self._paths.uri(path),
            whole,
            None if accessed is None else round(accessed * 1000),
            modified_ns=rest,
            create=True,
            sandbox=self._sandbox,
        )
        await self._call(wire.SET_TIMES, params, path)

    async def glob(self, pattern: str, root: AnyPath = ".", *, limit: int = 1000) -> Found[str]:
        """The paths below `root` that match a pattern like `src/**/*.{ts,tsx}`, relative to it.

        At most `limit` of them; `truncated` of the result tells whether there are more.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"pattern must be str, not {type(pattern).__name__}")
        if not self._capabilities.fs_glob:
            raise Unsupported("fsGlob", "walk the tree with files.walk() and match its paths")
        params = wire.GlobParams(self._paths.uri(root, "root"), pattern, limit, self._sandbox)
        found = await self._call(wire.GLOB, params, root)
        return Found(found.paths, truncated=found.truncated)

    async def edit(
        self,
        path: AnyPath,
        old: str | Iterable[tuple[str, str]],
        new: str | None = None,
        *,
        all: bool = False,  # noqa: A002 - the word of the protocol
    ) -> int:
        """Replace a text that occurs exactly once in a file, or `all` its occurrences.

        `old` may be a list of pairs of texts: all of them are replaced, or none. Returns the
        number of replacements; raises RpcError with the reason if a text does not fit.
        """
        edits = _edits(old, new, all)
        if not self._capabilities.fs_edit:
            return await self._edit_here(path, edits)
        texts = [wire.TextEdit(edit.old, edit.new, edit.all) for edit in edits]
        params = wire.EditParams(self._paths.uri(path), texts, self._sandbox)
        return (await self._call(wire.EDIT, params, path, is_retryable=False)).replacements

    async def apply_patch(self, patch: str, root: AnyPath = ".") -> list[ChangedFile]:
        """Apply a unified diff or a patch of Codex to the files below `root`.

        A patch that does not fit changes nothing. Raises RpcError with the reason.
        """
        if not isinstance(patch, str):
            raise TypeError(f"patch must be str, not {type(patch).__name__}")
        if not self._capabilities.fs_apply_patch:
            return await self._patch_here(patch, root)
        params = wire.ApplyPatchParams(self._paths.uri(root, "root"), patch, self._sandbox)
        done = await self._call(wire.APPLY_PATCH, params, root, is_retryable=False)
        return [ChangedFile(change.path, change.kind) for change in done.changes]

    async def disk_usage(self, path: AnyPath = ".") -> DiskUsage:
        """The size and free space of the file system that a path is on."""
        if not self._capabilities.fs_disk_usage:
            argv = ["stat", "-f", "-c", "%S %b %f %a", "--", self._absolute(path)]
            words = (await self._run(argv, path)).text.split()
            if len(words) != 4 or not all(word.isdecimal() and len(word) < 20 for word in words):
                raise MalformedAnswer(f"{path_text(path)}: stat printed {' '.join(words)[:100]!r}")
            size, *blocks = map(int, words)
            total, free, available = (size * count for count in blocks)
            return DiskUsage(total, free, available)
        params = wire.DiskUsageParams(self._paths.uri(path), self._sandbox)
        found = await self._call(wire.DISK_USAGE, params, path)
        return DiskUsage(found.total, found.free, found.available)

    # ---- without extensions -----------------------------------------------------------

    async def _edit_here(self, path: AnyPath, edits: Sequence[Edit]) -> int:
        from exec_server.patching.edits import apply_edits  # slow to import, and seldom needed

        files = self._text_files()
        old = (await files.read(path)).decode("utf-8", "surrogateescape")
        try:
            new, replaced = apply_edits(old, edits)
        except RpcError as error:
            raise error.explained(f"{path_text(path)}: {error.message}") from None
        await files.write(path, new.encode("utf-8", "surrogateescape"))
        return replaced

    async def _patch_here(self, patch: str, root: AnyPath) -> list[ChangedFile]:
        from exec_server.patching.patch import parse_patch, plan  # slow to import

        files = self._text_files()
        base = self._absolute(root, "root").rstrip("/") or "/"
        parsed = parse_patch(patch)
        named = [path for file in parsed for path in (file.path, file.new_path) if path]
        contents: dict[str, bytes] = {}
        for path in dict.fromkeys(f"{base.rstrip('/')}/{name}" for name in named):
            try:
                contents[path] = await files.read(path)
            except NotFound:
                pass
        changes = plan(parsed, base, contents.get)
        modes = [await self._kept_mode(change) for change in changes]
        for change, mode in zip(changes, modes, strict=True):
            await _make_change(files, change, mode)
        return [_changed_file(change, base) for change in changes]

    async def _kept_mode(self, change: FileChange) -> int | None:
        """The permission bits of a changed file, if it is to get any."""
        if change.mode is not None or change.renamed_from is None:
            return change.mode
        argv = ["stat", "-L", "-c", "%a", "--", change.renamed_from]
        word = (await self._run(argv, change.renamed_from)).text.strip()
        if not _OCTAL.fullmatch(word):
            raise MalformedAnswer(f"{change.renamed_from}: stat printed {word[:100]!r}")
        return int(word, 8) & 0o777

    def _text_files(self) -> TextFiles:
        return self  # type: ignore[return-value]  # `Files` implements it

    async def _run(
        self, argv: list[str], path: AnyPath, data: bytes = b"", target: AnyPath | None = None
    ) -> Result:
        """Run a command in place of an extension; a failure becomes the error of the path."""
        env = {"LC_ALL": "C"}
        done = await self._commands.run(
            argv,
            cwd="/",
            env=env,
            input=data or None,
            sandbox=self._sandbox,
            output_limit=HELPER_OUTPUT_BYTES,
        )
        if done.exit_code:
            text = done.error_text.strip().rpartition(": ")[2] or shlex.join(argv[:1])
            is_confined = self._sandbox is not None
            error = command_error(text)
            raise path_error(error, path, is_confined=is_confined, target=target)
        return done

    # ---- calls ------------------------------------------------------------------------

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
    ) -> R:
        if self._user is not None:
            params = msgspec.structs.replace(params, user=self._user)  # type: ignore[type-var]
        try:
            return await self._session.call(call, params, is_retryable=is_retryable)
        except RpcError as error:
            is_confined = self._sandbox is not None
            raise path_error(error, path, is_confined=is_confined, target=target) from None


def check_bytes(data: object, advice: str) -> None:
    """Raise TypeError for data that cannot be the content of a file."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data must be bytes, not {type(data).__name__}: {advice}")


def _edits(old: str | Iterable[tuple[str, str]], new: str | None, all_: bool) -> list[Edit]:
    from exec_server.patching.edits import Edit

    if isinstance(old, str):
        if new is None:
            raise TypeError("edit() needs the new text")
        return [Edit(*_checked_pair((old, new)), all_)]
    if new is not None:
        raise TypeError("edit() takes pairs of old and new texts, or one old and one new text")
    edits = [Edit(*_checked_pair(pair), all_) for pair in old]
    if not edits:
        raise InvalidParams("edit() needs at least one edit")
    return edits


def _checked_pair(pair: object) -> tuple[str, str]:
    match pair:
        case (str(old), str(new)):
            return old, new
    # Without the values, which are contents of files.
    raise TypeError('edit() takes an old and a new text, or a list of pairs: [("old", "new")]')


async def _make_change(files: TextFiles, change: FileChange, mode: int | None) -> None:
    if change.new is None:
        await files.remove(change.path)
        return
    await files.write(change.path, change.new, parents=change.old is None)
    if mode is not None:
        await files.chmod(change.path, mode)


def _changed_file(change: FileChange, base: str) -> ChangedFile:
    path = change.path.removeprefix(f"{base.rstrip('/')}/")
    if change.old is None:
        return ChangedFile(path, "added")
    return ChangedFile(path, "deleted" if change.new is None else "modified")


def _seconds_of(time: float | datetime | None, name: str) -> float | None:
    """A time in seconds since 1970; raises TypeError if it is none."""
    if isinstance(time, datetime):
        return time.timestamp()
    if time is not None and not isinstance(time, int | float):
        kind = type(time).__name__
        raise TypeError(f"{name} must be a number of seconds or a datetime, not {kind}")
    return time


def _seconds(nanoseconds: int) -> str:
    """A time as a decimal number of seconds."""
    sign, size = "-" if nanoseconds < 0 else "", abs(nanoseconds)
    return f"{sign}{size // 1_000_000_000}.{size % 1_000_000_000:09}"
