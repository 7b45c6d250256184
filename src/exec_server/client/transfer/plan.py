"""TreeCopy: the common part of uploads and downloads.

Commands handle modes and symlinks, which file methods do not: a few for a tree, with NUL between
paths on stdin. Errors of entries are recorded, unless the top, a full disk or the session fails.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import posixpath
import time
import uuid
from collections import Counter, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal, Protocol, TypeVar, overload

from exec_server.client.arguments import check_callable, decoded, encoded
from exec_server.client.commands import HELPER_OUTPUT_BYTES, SystemCommands
from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import (
    AlreadyExists,
    NameTooLong,
    NotFound,
    PermissionDenied,
    ReadOnly,
    SandboxDenied,
    command_error,
    error_number,
    path_error,
)
from exec_server.client.results import Entry, NotCopied, Progress, Result, Stat, Transfer
from exec_server.client.transfer.exclusion import VCS_PATTERNS, TreeFilter, ancestors
from exec_server.client.transfer.local_directory import pread
from exec_server.client.transfer.mirror import Extra, Item, depth, plan_of, without_filled
from exec_server.client.transfer.open_file import BLOCK_BYTES, FileReader, FileWriter
from exec_server.errors import ConnectionLost, ExecServerError, RpcError, Unsupported
from exec_server.protocol.sandbox import Sandbox

T = TypeVar("T")

# A larger file is copied in blocks to a temporary name first.
SMALL_BYTES: Final = 2 * 1_048_576
# Files that are copied at a time, and large ones among them, which have several blocks in flight.
FILES_AT_ONCE: Final = 8
LARGE_AT_ONCE: Final = 2
# Entries of a tree: the list of them must fit into memory.
MAX_ENTRIES: Final = 1_000_000
# Servers tell times in milliseconds.
TIME_TOLERANCE: Final = 0.002
# The rate is an average over these seconds, computed from at most this many samples.
RATE_SECONDS: Final = 5.0
RATE_SAMPLES: Final = 64
# Longest file name on Linux.
_NAME_BYTES: Final = 255

SPECIAL: Final = "neither file, directory nor symlink"
CHANGED: Final = "the file was changed while it was copied"
_NOT_READ: Final = "deletions: none, because a part of the source could not be read"
_NOT_COPIED: Final = "deletions: none, because not everything could be copied"

# With a full disk every further file would fail.
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_DIGEST: Final = 'head -c "$2" < "$1" | sha256sum'

# For the removal of a temporary file, or its last step, after a cancellation: both take
# milliseconds, unless the server is unreachable.
CLEAN_UP_SECONDS: Final = 5.0

# The exit codes of a shell whose command cannot be run.
_NO_COMMAND: Final = (126, 127)
_IS_WRITABLE: Final = '[ -w "$1" ]'
_REPLACE: Final = """
links() { ls -ldn "$1" | { read -r mode links rest; echo "$links"; }; }
attributes() { ls -ldn "$1" | { read -r mode links user group rest; echo "$mode $user $group"; }; }
rewrite() { cat < "$1" > "$2" && rm -f "$1" && { [ -z "$3" ] || chmod "$3" "$2"; }; }
if [ -d "$2" ]; then echo "$2: Is a directory" >&2; exit 1; fi
if [ -L "$2" ]; then rewrite "$@"; exit; fi
if [ -e "$2" ]; then
    if [ ! -f "$2" ] || [ "$(links "$2")" != 1 ]; then rewrite "$@"; exit; fi
    cp --attributes-only --preserve=mode,ownership,xattr "$2" "$1" 2> /dev/null ||
        chmod "$(stat -c %a "$2")" "$1" 2> /dev/null
    if [ "$(attributes "$1")" != "$(attributes "$2")" ]; then rewrite "$@"; exit; fi
fi
if [ -n "$3" ]; then chmod "$3" "$1" || exit; fi
mv -fT "$1" "$2" 2> /dev/null || mv -f "$1" "$2" 2> /dev/null || rewrite "$@"
"""

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Future[None]"]


class RemoteFiles(Protocol):
    """The file operations that transfers use; `files.Files` implements them."""

    async def read(self, path: str, *, limit: int) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None: ...

    @overload
    def open(self, path: str, mode: Literal["rb"] = "rb", *, offset: int = 0) -> FileReader: ...

    @overload
    def open(self, path: str, mode: Literal["wb"], *, in_place: bool = False) -> FileWriter: ...

    async def stat(self, path: str) -> Stat: ...

    def walk(
        self,
        path: str,
        *,
        on_error: Callable[[RpcError], None] | None = None,
        depth: int | None = None,
    ) -> AsyncIterator[Entry]: ...

    async def realpath(self, path: str) -> str: ...

    async def rename(self, old: str, new: str, *, replace: bool = True) -> None: ...

    async def touch(self, path: str, *, modified_ns: int | None = None) -> None: ...

    async def copy(self, source: str, target: str) -> None: ...

    async def remove(self, path: str, *, missing_ok: bool = False) -> None: ...

    async def mkdir(self, path: str, *, parents: bool = False, exist_ok: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """`keep_times` sets modification times; `sync` skips files that are equal by this measure.

    `exclude` has patterns; `exclude_vcs` adds those of version control, `gitignore` those of the
    source's ignore files. `delete` removes what the source has not; `dry_run` only tells.
    """

    keep_times: bool = False
    sync: Literal["time", "checksum"] | None = None
    exclude: Iterable[str] = ()
    exclude_vcs: bool = False
    gitignore: bool = False
    delete: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.delete and self.sync is None:
            raise ValueError("delete needs sync='time' or sync='checksum'")
        if self.sync not in (None, "time", "checksum"):
            raise ValueError(f"sync must be 'time' or 'checksum', not {self.sync!r}")

    def tree_filter(self) -> TreeFilter | None:
        """A new filter, None if nothing is excluded; raises InvalidRequest for huge patterns."""
        patterns = [*(VCS_PATTERNS if self.exclude_vcs else ()), *self.exclude]
        is_needed = patterns or self.gitignore
        return TreeFilter(patterns, gitignore=self.gitignore) if is_needed else None


class Rate:
    """Bytes per second over the last `RATE_SECONDS`."""

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, 0)], RATE_SAMPLES)

    def update(self, copied: int, now: float) -> float:
        """Take the number of bytes copied so far; returns the rate."""
        if now - self._samples[-1][0] >= RATE_SECONDS / RATE_SAMPLES:
            self._samples.append((now, copied))
            while len(self._samples) > 2 and self._samples[1][0] < now - RATE_SECONDS:
                self._samples.popleft()
        when, before = self._samples[0]
        return max(0.0, (copied - before) / (now - when)) if now > when else 0.0


class Tally:
    """Counts copied entries and bytes, and reports the progress."""

    def __init__(
        self,
        progress: Callable[[Progress], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_callable(progress, "progress")
        self._progress = progress
        self._clock = clock
        self._rate = Rate(clock())
        self._skipped = 0
        self.total_bytes = 0
        self.total_files = 0
        self._done = 0
        self._resumed = 0
        self._files = 0
        self.left_out: list[str] = []
        self.failed: list[NotCopied] = []
        self.deleted: list[str] = []

    def expect(self, items: Iterable[Item]) -> None:
        """Set the totals to those of all items."""
        for item in items:
            if item.kind == "f":
                self.total_bytes += item.size
                self.total_files += 1

    def advance(self, path: str, count: int) -> None:
        """Add copied bytes; a negative number has to be copied again."""
        self._done += count
        self._report(path)

    def resume(self, path: str, count: int) -> None:
        """Add bytes that an earlier attempt has copied."""
        self._resumed += count
        self._done += count
        self._report(path)

    def skip(self, path: str, count: int) -> None:
        """Add the bytes of a file whose copy is there already."""
        self._skipped += 1
        self.resume(path, count)

    def finish(self, path: str) -> None:
        """Count a complete file."""
        self._files += 1
        self._report(path)

    def _report(self, path: str) -> None:
        if self._progress is not None:
            self._progress(
                Progress(
                    *(path, self._done, self.total_bytes, self._resumed),
                    *(self._files, self.total_files, self._skipped),
                    self._rate.update(self._done - self._resumed, self._clock()),
                )
            )

    def fail(self, path: str, error: Exception) -> None:
        """Record an entry that cannot be copied."""
        error.__context__ = None  # its frames may keep the content of a file alive
        self.failed.append(NotCopied(path, error.with_traceback(None)))

    def result(self, items: Iterable[Item]) -> Transfer:
        """The result; `items` are those that were copied."""
        kinds = Counter(item.kind for item in items)
        return Transfer(
            files=self._files,
            directories=kinds["d"],
            links=kinds["l"],
            copied_bytes=self._done - self._resumed,
            resumed_bytes=self._resumed,
            left_out=tuple(self.left_out),
            failed=tuple(self.failed),
            deleted=tuple(self.deleted),
        )


class TreeCopy:
    """The common part of an upload and a download."""

    def __init__(
        self,
        files: RemoteFiles,
        commands: SystemCommands,
        progress: Callable[[Progress], None] | None,
        sandbox: Sandbox | None,
        options: CopyOptions | None = None,
        *,
        session: ClientSession | None = None,
    ) -> None:
        """With a `session`, many small files travel in one request."""
        self._options = options or CopyOptions()
        is_plain = not self._options.keep_times and self._options.sync is None
        self._session = session if is_plain else None
        self._batch_session = session
        self._filter = self._options.tree_filter()
        if self._filter is not None and (self._options.delete or self._options.dry_run):
            self._filter.excluded = []
        self._files = files
        self._commands = commands
        self._sandbox = sandbox
        self._tally = Tally(progress)
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._failed: set[str] = set()  # paths of items that cannot be copied
        self._finished_modes: set[str] = set()  # paths of files that have their modes

    def _fail(self, path: str, error: Exception) -> None:
        """Record an item that cannot be copied, or raise the error if it ends the copy."""
        if not path or is_final(error):
            raise error from None
        if path not in self._failed:
            self._failed.add(path)
            self._tally.fail(path, error)

    def _end_of_source(self) -> list[str]:
        """The excluded entries of the source; from now on the filter notes those of the target."""
        if self._filter is None or self._filter.excluded is None:
            return []
        excluded, self._filter.excluded = self._filter.excluded, []
        return excluded

    def _may_delete(self, *, is_directory: bool) -> bool:
        """Whether entries of the target are to be deleted: the source must be known completely."""
        if not self._options.delete or not is_directory:
            return False
        if self._tally.failed:
            self._tally.left_out.append(_NOT_READ)
        return not self._tally.failed

    def _kept(self, target: Tally) -> set[str]:
        """Paths of the target that are not deleted: those above excluded and unreadable entries."""
        excluded = (self._filter.excluded if self._filter is not None else None) or ()
        unreadable = {each.path for each in target.failed}
        return unreadable | ancestors((*excluded, *unreadable))

    async def _delete(
        self, items: Iterable[Item], remove: Callable[[Item], Awaitable[None]]
    ) -> None:
        """Delete entries of the target, the deepest ones first."""

        async def delete(item: Item) -> None:
            try:
                await remove(item)
            except (RpcError, SandboxDenied, OSError) as error:
                self._tally.fail(item.path, error)
            else:
                self._tally.deleted.append(item.path)

        for _, level in groupby(items, depth):
            await for_each(list(level), delete)

    async def _delete_others(
        self, items: list[Item], remove: Callable[[Item], Awaitable[None]]
    ) -> None:
        """Delete what is in no way, unless something could not be copied."""
        if items and self._tally.failed:
            self._tally.left_out.append(_NOT_COPIED)
        else:
            await self._delete(items, remove)

    async def _plan(
        self, items: Iterable[Item], extra: Extra, is_unchanged: Callable[[Item], Awaitable[bool]]
    ) -> Transfer:
        """The result of a dry run."""
        items = list(items)
        skipped: set[str] = set()

        async def compare(item: Item) -> None:
            try:
                if await is_unchanged(item):
                    skipped.add(item.path)
            except (RpcError, SandboxDenied, OSError) as error:
                self._fail(item.path, error)

        planned = without_filled(items)
        await for_each((item for item in planned if item.kind in "fd"), compare)
        kinds = Counter(item.kind for item in items)
        files = [item for item in items if item.kind == "f"]
        return Transfer(
            files=len(files),
            directories=kinds["d"],
            links=kinds["l"],
            copied_bytes=sum(item.size for item in files if item.path not in skipped),
            resumed_bytes=sum(item.size for item in files if item.path in skipped),
            left_out=tuple(self._tally.left_out),
            failed=tuple(self._tally.failed),
            planned=plan_of(planned, skipped, extra),
        )

    def _copied(self, item: Item, size: int) -> None:
        """Count a small file that was copied with others."""
        self._tally.advance(item.path, size)
        self._tally.finish(item.path)

    async def _attempt(self, item: Item, work: Awaitable[None], here: str, there: str) -> None:
        """Await the copy of a file between the paths `here` and `there`."""
        try:
            await work
        except (RpcError, SandboxDenied, Unsupported, OSError) as error:
            self._fail(item.path, _with_final_path(error, item, here, there))
        else:
            self._tally.finish(item.path)

    def _not_failed(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items that have not failed so far, nor have the directories above them."""
        return (item for item in items if not self._has_failed(item.path))

    def _has_failed(self, path: str) -> bool:
        if not self._failed:
            return False
        while path:
            if path in self._failed:
                return True
            path = posixpath.dirname(path)
        return False

    async def _is_equal(
        self, item: Item, existing: tuple[int, float] | None, local: str, remote: str
    ) -> bool:
        """Whether the copy that was found, with this size and time, need not be made again."""
        if self._options.sync is None or existing is None or existing[0] != item.size:
            return False
        if self._options.sync == "time":
            return abs(existing[1] - item.time) < TIME_TOLERANCE
        with await asyncio.to_thread(open, local, "rb") as file:
            return await self._has_same_start(remote, file.fileno(), item.size)

    async def _has_same_start(self, path: str, descriptor: int, size: int) -> bool:
        """Whether a remote and a local file have the same first `size` bytes, by their digests."""
        argv = ["/bin/sh", "-c", _DIGEST, "sh", path, str(size)]
        try:
            result = await self._commands.run(argv, sandbox=self._sandbox)
        except (RpcError, UnicodeEncodeError, Unsupported):
            return False
        remote = result.text.split()[0] if result and result.stdout.strip() else ""
        return remote == await asyncio.to_thread(_digest, descriptor, size)


async def for_each(
    items: Iterable[T], work: Callable[[T], Awaitable[None]], at_once: int = FILES_AT_ONCE
) -> None:
    """Apply `work` to all items, `at_once` at a time; the first exception ends it."""
    remaining = iter(items)

    async def work_on_remaining() -> None:
        for item in remaining:
            await work(item)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(work_on_remaining())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def part_path(path: str, item: Item) -> str:
    """The temporary path of an incomplete file; it depends on the version of the content."""
    digest = hashlib.sha256(f"{item.size} {item.modified}".encode()).hexdigest()[:12]
    return temporary_path(path, digest)


def temporary_path(path: str, word: str) -> str:
    """A path beside another one, for its content until that is complete."""
    directory, slash, name = path.rpartition("/")
    max_bytes = _NAME_BYTES - len(f"..{word}.part")
    while len(encoded(name)) > max_bytes:
        name = name[:-1]  # not bytes: a server knows no name that ends inside of a character
    return f"{directory}{slash}.{name}.{word}.part"


def join(top: str, path: str) -> str:
    """The whole path of an item."""
    return f"{top.rstrip('/')}/{path}" if path else top


async def run_xargs(
    commands: SystemCommands,
    argv: Sequence[str],
    paths: Iterable[str],
    sandbox: Sandbox | None,
    *,
    output_limit: int = HELPER_OUTPUT_BYTES,
) -> Result:
    """Run a command with any number of further arguments, through xargs."""
    data = b"".join(encoded(path) + b"\0" for path in paths)
    words = ["xargs", "-0", *argv]
    return await commands.run(
        words, input=data, env={"LC_ALL": "C"}, sandbox=sandbox, output_limit=output_limit
    )


def is_final(error: Exception) -> bool:
    """Whether copying anything else would fail in the same way."""
    number = error.errno if isinstance(error, OSError) else error_number(str(error))
    return number in _DISK_FULL


def _with_final_path(error: Exception, item: Item, here: str, there: str) -> Exception:
    """The error with the final path of the file instead of its temporary one."""
    if isinstance(error, OSError) and not isinstance(error, ExecServerError):
        is_temporary = error.filename in (None, part_path(here, item))
        return OSError(error.errno, error.strerror, here) if is_temporary else error
    part = part_path(there, item)
    for name in (f"{part} to {there}: ", f"{part}: "):
        if isinstance(error, RpcError) and error.message.startswith(name):
            return error.explained(f"{there}: {error.message.removeprefix(name)}")
        if isinstance(error, SandboxDenied) and error.args[0].startswith(name):
            text = f"{there}: {error.args[0].removeprefix(name)}"
            return SandboxDenied(text, error.denial, error.errno or errno.EACCES)
    return error


def _digest(descriptor: int, size: int) -> str:
    digest = hashlib.sha256()
    offset = 0
    while offset < size:
        block = pread(descriptor, min(size - offset, BLOCK_BYTES), offset)
        if not block:
            return "shorter than expected"
        digest.update(block)
        offset += len(block)
    return digest.hexdigest()


class HelperCommand:
    """One run of a command. Its messages and exit code are there when `stdout` has ended.

    A command of another machine, such as find; its output is read as it comes.
    """

    exit_code: int

    def __init__(self, commands: SystemCommands, sandbox: Any, *, error_bytes: int) -> None:
        """`error_bytes` limits the messages that are kept, to within one piece of output."""
        self._commands = commands
        self._sandbox = sandbox
        self._error_bytes = error_bytes
        self.errors = bytearray()

    async def stdout(self, argv: list[str], what: str) -> AsyncGenerator[bytes, None]:
        """Run it; raises ConnectionLost, with the name of the output, if a part was lost."""
        async with self._commands.start(
            argv, env={"LC_ALL": "C"}, sandbox=self._sandbox
        ) as process:
            async for chunk in process:
                if chunk.lost_before:
                    raise ConnectionLost(f"{what} was lost")
                if chunk.stream != "stderr":
                    yield chunk.data
                elif len(self.errors) < self._error_bytes:
                    self.errors += chunk.data
            self.exit_code = await process.wait()


class AtomicReplacement:
    """The temporary file for the new content of one target.

    A new content gets its final name when it is complete, and not before.

    Blocks go to a temporary file beside the target, which a command renames, or copies if the inode
    must stay: a hard link, attributes that another file cannot get, a dangling symlink, a mount
    point.
    """

    def __init__(
        self,
        files: RemoteFiles,
        commands: SystemCommands,
        sandbox: Sandbox | None,
        target: str,
        spawn: Spawn,
        *,
        create: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`spawn` starts a task that outlives the caller's cancellation.

        `create` makes an empty target, and raises AlreadyExists if there is one.
        """
        self._files = files
        self._commands = commands
        self._sandbox = sandbox
        self._target = target
        self._spawn = spawn
        self._create = create
        self._is_created = False
        self._is_new = False
        self._part = ""

    async def begin(self) -> str | None:
        """The path of the temporary file; None if the target has to be written itself.

        That is so for targets that cannot be written at all: the server then says why.
        """
        if self._create is not None:
            await self._create()
            self._is_created = True
        try:
            metadata = await self._files.stat(self._target)
        except NotFound:
            self._is_new = True
        except (RpcError, SandboxDenied):
            return None
        else:
            if not metadata.is_file or not await self._is_writable():
                return None
            if metadata.is_symlink:
                self._target = await self._files.realpath(self._target)
        self._part = temporary_path(self._target, uuid.uuid4().hex[:12])
        return self._part

    async def _is_writable(self) -> bool:
        """Whether the target may be written; renaming would replace a read-only file as well."""
        argv = ["/bin/sh", "-c", _IS_WRITABLE, "sh", self._target]
        try:
            done = await self._commands.run(argv, sandbox=self._sandbox)
        except (RpcError, UnicodeEncodeError):
            return True
        return bool(done) or done.exit_code in _NO_COMMAND

    def may_write_in_place(self, error: ExecServerError) -> bool:
        """Whether the target may be writable although the temporary file cannot be created.

        Not for a full disk: opening the target would truncate it.
        """
        kinds = (PermissionDenied, ReadOnly, NameTooLong, NotFound, SandboxDenied)
        return isinstance(error, kinds)

    async def commit(self) -> None:
        """Put the complete temporary file in place, or remove it; raises RpcError."""
        committing = self._spawn(self._commit())
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            await asyncio.wait([committing], timeout=CLEAN_UP_SECONDS)
            raise

    async def _commit(self) -> None:
        try:
            await replace(
                self._files,
                self._commands,
                self._sandbox,
                (self._part, self._target),
                is_new=self._is_new,
            )
        except BaseException:
            await self.abandon()
            raise

    async def abandon(self) -> None:
        """Remove the temporary file, also if the caller is cancelled meanwhile."""
        paths = [self._part, *([self._target] if self._is_created else [])]
        removing = [self._spawn(self._files.remove(path, missing_ok=True)) for path in paths]
        await asyncio.wait(removing, timeout=CLEAN_UP_SECONDS)


async def replace(
    files: RemoteFiles,
    commands: SystemCommands,
    sandbox: Sandbox | None,
    paths: tuple[str, str],
    *,
    is_new: bool = False,
    mode: int | None = None,
) -> bool:
    """Put a temporary file in the place of a target; `paths` are both of them.

    The target gets `mode`, or keeps its own. Returns whether it has the mode: without commands
    the server copies the content, and then it has not. `is_new` if there was no target.
    """
    part, target = paths
    if is_new and mode is None:
        try:
            await files.rename(part, target, replace=False)
            return True
        except (AlreadyExists, Unsupported):
            pass  # there is a target now, or a dangling symlink
    arguments = (part, target, "" if mode is None else f"{mode:o}")
    try:
        done = await run_xargs(
            commands, ["-n", "3", "sh", "-c", _REPLACE, "sh"], arguments, sandbox
        )
    except (RpcError, Unsupported):
        done = None
    if done:
        return True
    if done is not None and done.exit_code not in _NO_COMMAND:
        text = decoded(done.stderr).strip().rpartition(": ")[2]
        error = command_error(text or "it cannot be replaced")
        raise path_error(error, target, is_confined=sandbox is not None)
    await files.copy(part, target)
    await files.remove(part, missing_ok=True)
    return False
