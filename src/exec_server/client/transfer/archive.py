"""ArchiveUpload unpacks a tar archive on the server's machine, ArchiveDownload makes one there.

ArchiveReader has the rules of tarfile's data filter, which itself asks the local file system: names
and links that lead out, absolute links and devices are refused; modes lose special bits and those
that let others write. Headers and the sum of all contents are limited.
"""

from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import lzma
import os
import posixpath
import tarfile
import tempfile
import threading
import zlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent import futures
from contextlib import aclosing, contextmanager
from typing import IO, Any, Final, NamedTuple, Protocol, Self

from exec_server.client.arguments import decoded
from exec_server.client.commands import HELPER_OUTPUT_BYTES, SystemCommands
from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import SandboxDenied, command_error, path_error
from exec_server.client.results import Progress, Stat, Transfer
from exec_server.client.transfer.batches import (
    BATCH_BYTES,
    BATCH_FILES,
    FILE_BYTES,
    batches_of,
    is_small,
)
from exec_server.client.transfer.batches import write as write_batch
from exec_server.client.transfer.mirror import Item
from exec_server.client.transfer.open_file import BLOCK_BYTES
from exec_server.client.transfer.plan import MAX_ENTRIES, HelperCommand, RemoteFiles, for_each, join
from exec_server.client.transfer.upload import TreeUpload
from exec_server.errors import ExecServerError, InvalidRequest, NotFound, RpcError, Unsupported
from exec_server.protocol.sandbox import Sandbox

# Of the headers of one member: a name and a target of 4096 bytes, and some attributes. tarfile
# reads them into memory.
HEADER_BYTES: Final = 1_048_576

# Of a name, and of the target of a link: more is no path on Linux.
NAME_CHARACTERS: Final = 4096

# Of the decoder of xz, twice what the highest preset takes. The header of an archive names any size
# up to 4 GiB, which the decoder fills with what it has decoded.
XZ_BYTES: Final = 128 * 1_048_576

# tarfile reads so many bytes at a time, and so may have read the beginning of the next content.
_READ_BYTES: Final = 65_536
_MAGIC: Final[dict[bytes, Callable[[IO[bytes]], io.BufferedIOBase]]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lambda file: io.BufferedReader(_XzReader(file), _READ_BYTES),
}
_UNREADABLE: Final = (
    *(tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError),
    RecursionError,  # tarfile calls itself for each header of one member
)

AnyArchive = bytes | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]

_PIECE_BYTES: Final = 262_144

# Of the list of symlinks that a directory has: those of about 50,000.
LINKS_BYTES: Final = 4 * 1_048_576
# Of all names, targets and directories that are kept until the end: 256 for each of the most
# members. A hostile archive of some hundred bytes has far more, in names of a thousand directories.
NAMES_CHARACTERS: Final = 256 * MAX_ENTRIES
# The kernel follows no more links in one path.
MAX_LINKS: Final = 40

_NEEDS_FIND: Final = "it exists, and its links cannot be listed: unpack into a new directory"

# The exit code of a shell without the command.
_NO_COMMAND: Final = 127


class Member(NamedTuple):
    """An entry of an archive; the kind of a hard link is `h`, and its target is a member."""

    item: Item
    data: bytes | None = None  # of a small file; None for a large one, whose blocks follow


class ArchiveReader:
    """The members of an archive, in groups; any method raises InvalidRequest."""

    def __init__(self, source: io.RawIOBase, limit: int) -> None:
        """`limit` is the sum of the sizes of all files."""
        self._source = source
        self._limit = limit
        self._bytes = 0
        self._members = self._iterate()
        self._large: IO[bytes] | None = None
        self._failure: InvalidRequest | None = None

    def next_group(self) -> list[Member]:
        """The next members; empty at the end. Only the last of them may be a large file."""
        group: list[Member] = []
        size = 0
        while len(group) < BATCH_FILES and size < BATCH_BYTES:
            with _reading():
                member = next(self._members, None)
            if member is None:
                break
            group.append(member)
            if member.data is None and member.item.kind == "f":
                break
            size += len(member.data or b"")
        return group

    def next_block(self) -> bytes:
        """The next block of the large file; empty at its end. An error is raised again."""
        assert self._large is not None
        if self._failure is not None:
            raise self._failure
        try:
            with _reading():
                return self._large.read(BLOCK_BYTES)
        except InvalidRequest as error:
            self._failure = error
            raise

    def skip_large(self) -> None:
        """Leave out the rest of the large file."""
        while self.next_block():
            pass

    def _iterate(self) -> Iterator[Member]:
        headers = _Headers(_decompressed(self._source))
        count = 0
        with tarfile.open(
            fileobj=headers, mode="r|", bufsize=_READ_BYTES, tarinfo=_StrictInfo
        ) as archive:
            while True:
                headers.allow(HEADER_BYTES)
                member = archive.next()
                headers.allow(None)
                if member is None:
                    return
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep all
                count += 1
                if count > MAX_ENTRIES:
                    raise InvalidRequest(f"the archive has more than {MAX_ENTRIES} members")
                yield self._member(archive, member, checked_member(member))

    def _member(self, archive: tarfile.TarFile, entry: tarfile.TarInfo, item: Item) -> Member:
        if item.kind != "f":
            return Member(item)
        self._bytes += item.size
        if self._bytes > self._limit:
            raise InvalidRequest(f"the files of the archive have more than {self._limit} bytes")
        content = archive.extractfile(entry)
        assert content is not None
        if item.size > FILE_BYTES:
            self._large = content
            return Member(item)
        return Member(item, content.read())  # raises ReadError if the archive ends in it


def checked_member(member: tarfile.TarInfo) -> Item:
    """The item of a member, with the mode that it gets; raises InvalidRequest for a hostile one."""
    if max(len(member.name), len(member.linkname)) > NAME_CHARACTERS:
        raise _refused(member, f"a name has more than {NAME_CHARACTERS} characters")
    path = posixpath.normpath(member.name.lstrip("/"))
    if _leads_out(path):
        raise _refused(member, "it leads out of the directory")
    path = "" if path == "." else path
    if member.issym() or member.islnk():
        target = _link_target(member, path)
        return Item(path, "l" if member.issym() else "h", _file_mode(member), 0, "", target)
    if member.isdir():
        return Item(path, "d", None, 0, "")
    if not member.isreg():
        raise _refused(member, "it is neither file, directory nor link")
    if not path:
        raise _refused(member, "it has no name")
    return Item(path, "f", _file_mode(member), member.size, "")


def _link_target(member: tarfile.TarInfo, path: str) -> str:
    """The target of a symlink as it is, that of a hard link as the path of a member."""
    if not path or not member.linkname:
        raise _refused(member, "it is a link without a name or target")
    if member.linkname.startswith("/"):
        raise _refused(member, f"it is a link to {member.linkname!r}, an absolute path")
    above = posixpath.dirname(path) if member.issym() else ""
    whole = posixpath.normpath(posixpath.join(above, member.linkname))
    if _leads_out(whole):
        text = f"it is a link to {member.linkname!r}, which leads out of the directory"
        raise _refused(member, text)
    return member.linkname if member.issym() else whole


def _leads_out(path: str) -> bool:
    return path == ".." or path.startswith(("../", "/")) or "\0" in path


def _file_mode(member: tarfile.TarInfo) -> int:
    mode = member.mode & 0o755
    if not mode & 0o100:
        mode &= ~0o111
    return mode | 0o600


def _refused(member: tarfile.TarInfo, reason: str) -> InvalidRequest:
    return InvalidRequest(f"member {member.name[:200]!r} of the archive is refused: {reason}")


@contextmanager
def _reading() -> Iterator[None]:
    """Raise InvalidRequest for an archive that cannot be read."""
    try:
        yield
    except ExecServerError:
        raise  # of the other machine that the archive comes from; some are an OSError too
    except _UNREADABLE as error:
        raise InvalidRequest(f"the archive cannot be read: {error}") from None


class _XzReader(io.RawIOBase):
    """The content of an xz file, as LZMAFile reads it, but with a limit of memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = self._new_decoder()

    def _new_decoder(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = b""
        while not data:
            packed = b""
            if self._decoder.eof:
                packed = (self._decoder.unused_data or self._file.read(_READ_BYTES)).lstrip(b"\0")
                if not packed:
                    return 0
                self._decoder = self._new_decoder()
            elif self._decoder.needs_input:
                packed = self._file.read(_READ_BYTES)
                if not packed:
                    raise EOFError("the compressed data ends early")
            data = self._decoder.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _StrictInfo(tarfile.TarInfo):
    """Raises ReadError for a damaged header, which tarfile takes for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from None


class _Headers(io.RawIOBase):
    """Limits how many bytes tarfile reads for the headers of one member."""

    def __init__(self, inner: io.BufferedIOBase) -> None:
        self._inner = inner
        self._left: int | None = HEADER_BYTES  # an archive that is opened reads the first one

    def allow(self, count: int | None) -> None:
        """Allow so many further bytes; None is any number."""
        self._left = count

    def read(self, size: int = -1) -> bytes:
        if self._left is not None:
            self._left -= size
            if self._left < -2 * _READ_BYTES:
                raise InvalidRequest(f"a header of the archive has more than {HEADER_BYTES} bytes")
        return self._inner.read(size)


def _decompressed(source: io.RawIOBase) -> io.BufferedIOBase:
    """The archive itself, if it is compressed by gzip, bzip2 or xz."""
    buffered = io.BufferedReader(source, _READ_BYTES)
    start = buffered.peek(max(map(len, _MAGIC)))
    for magic, opened in _MAGIC.items():
        if start.startswith(magic):
            return opened(buffered)
    return buffered


class ArchiveSource(io.RawIOBase):
    """A stream for one thread over any archive; `end` cancels a read of an async iterable."""

    def __init__(self, archive: AnyArchive) -> None:
        super().__init__()
        self._next = self._pieces(archive)
        self._piece = memoryview(b"")
        self._lock = threading.Lock()  # guards the two below
        self._waiting: futures.Future[bytes] | None = None
        self._is_ended = False

    def _pieces(self, archive: AnyArchive) -> Callable[[], bytes]:
        """A function that returns the next piece, and an empty one at the end."""
        if isinstance(archive, bytes | bytearray | memoryview):
            whole = iter([bytes(archive)])
            return lambda: next(whole, b"")
        if isinstance(archive, AsyncIterable):
            loop = asyncio.get_running_loop()
            pieces = aiter(archive)
            return lambda: self._wait_for(pieces, loop)
        if callable(read := getattr(archive, "read", None)):
            return lambda: _checked(read(_PIECE_BYTES))
        if isinstance(archive, Iterable) and not isinstance(archive, str):
            checked = (_checked(piece) for piece in archive)
            return lambda: next((piece for piece in checked if piece), b"")
        kind = type(archive).__name__
        raise TypeError(f"an archive must be bytes, a binary file or an iterable, not {kind}")

    def _wait_for(self, pieces: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> bytes:
        with self._lock:
            if self._is_ended:
                raise ValueError("the reader was closed")
            waiting = self._waiting = asyncio.run_coroutine_threadsafe(_next_of(pieces), loop)
        return waiting.result()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if not self._piece:
            self._piece = memoryview(self._next())
        count = min(len(buffer), len(self._piece))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def end(self) -> None:
        """End a read that waits for an async iterable, and all later ones."""
        with self._lock:
            self._is_ended = True
            if self._waiting is not None:
                self._waiting.cancel()


def _checked(piece: object) -> bytes:
    if not isinstance(piece, bytes | bytearray | memoryview):
        raise TypeError(f"an archive consists of bytes, not {type(piece).__name__}")
    return bytes(piece)


async def _next_of(pieces: AsyncIterator[bytes]) -> bytes:
    async for piece in pieces:
        if piece:
            return _checked(piece)
    return b""


class ArchiveUpload(TreeUpload):
    """One archive to unpack into the directory `target`.

    A hostile archive changes nothing outside: ArchiveReader refuses members that lead out, symlinks
    come last and may not lead out through others, and nothing is written through a link.
    """

    def __init__(
        self,
        files: RemoteFiles,
        commands: SystemCommands,
        progress: Callable[[Progress], None] | None,
        sandbox: Sandbox | None,
        target: str,
        *,
        session: ClientSession | None = None,
    ) -> None:
        super().__init__(files, commands, progress, sandbox, session=session)
        self._target = target
        self._present_links: frozenset[str] = frozenset()  # that the directory has already
        self._seen: set[str] = set()  # the paths of files
        self._made: set[str] = set()  # the paths of directories
        self._symlinks: dict[str, Item] = {}
        self._without_mode: list[Item] = []
        self._names_left = NAMES_CHARACTERS

    async def unpack(self, archive: AnyArchive, limit: int) -> Transfer:
        """Write all members; raises InvalidRequest at the first one that is refused."""
        target = self._target
        source = ArchiveSource(archive)
        try:
            self._present_links = await self._links_of(target)
            await self._make({""})
            reader = ArchiveReader(source, limit)
            while group := await asyncio.to_thread(reader.next_group):
                await self._write_group(reader, group)
        finally:
            source.end()
        self._check_symlinks()
        links = list(self._not_failed(self._symlinks.values()))
        await self._link(links, target)
        await self._set_modes(list(self._not_failed(self._without_mode)), target)
        directories = [Item(path, "d", None, 0, "") for path in self._made]
        return self._tally.result([*self._not_failed(directories), *links])

    async def _links_of(self, target: str) -> frozenset[str]:
        """The symlinks below a directory that exists, relative to it."""
        try:
            await self._files.stat(target)
        except NotFound:
            return frozenset()
        top = f"{target.rstrip('/')}/"
        argv = ["find", top, "-type", "l", "-print0"]
        try:
            done = await self._commands.run(argv, sandbox=self._sandbox, output_limit=LINKS_BYTES)
        except (RpcError, Unsupported, UnicodeEncodeError):
            raise InvalidRequest(f"{target}: {_NEEDS_FIND}") from None
        if not done or done.lost_bytes:
            reason = done.error_text.strip().partition("\n")[0] or "it has too many links"
            raise InvalidRequest(f"{target}: {_NEEDS_FIND} ({reason})")
        return frozenset(decoded(path)[len(top) :] for path in done.stdout.split(b"\0") if path)

    async def _write_group(self, reader: ArchiveReader, group: list[Member]) -> None:
        for member in group:
            self._take(member.item)
        self._tally.expect(member.item for member in group)
        members = list({each.item.path: each for each in group}.values())  # the last of each name
        await self._make({posixpath.dirname(each.item.path) for each in members})
        await self._make({each.item.path for each in members if each.item.kind == "d"})
        for member in members:
            await self._make_room(member.item)
        await self._write_small([each for each in members if each.data is not None])
        last = group[-1]
        if last.item.kind == "f" and last.data is None:
            await self._write_large(reader, last.item)
        for member in members:
            if member.item.kind == "h":
                await self._copy(member.item)

    async def _make_room(self, item: Item) -> None:
        """Remove a symlink that a member replaces."""
        if item.path in self._present_links and not self._has_failed(item.path):
            try:
                await self._files.remove(join(self._target, item.path), missing_ok=True)
            except (RpcError, SandboxDenied) as error:
                self._fail(item.path, error)

    def _take(self, item: Item) -> None:
        """Note a member, unless it would be written through a symlink: then it is refused."""
        self._count_names(item.path, item.target)
        names = item.path.split("/")
        for depth in range(1, len(names) + (item.kind == "d")):
            above = "/".join(names[:depth])
            if above in self._symlinks or above in self._present_links:
                raise InvalidRequest(
                    f"member {item.path!r} of the archive is refused: {above!r} is a symlink"
                )
        if item.kind == "h" and item.target not in self._seen:
            raise InvalidRequest(
                f"member {item.path!r} of the archive is refused: it is a hard link to "
                f"{item.target!r}, which is no file of the archive before it"
            )
        self._seen.discard(item.path)
        self._symlinks.pop(item.path, None)
        if item.kind in "fh":
            self._seen.add(item.path)
        elif item.kind == "l":
            self._symlinks[item.path] = item

    def _check_symlinks(self) -> None:
        """Refuse a symlink that leads out of the directory through other symlinks."""
        targets = {path: item.target for path, item in self._symlinks.items()}
        for path in targets:
            if leads_out(path, targets, self._present_links):
                raise InvalidRequest(
                    f"member {path!r} of the archive is refused: "
                    "it leads out of the directory through another symlink"
                )

    def _count_names(self, *names: str) -> None:
        self._names_left -= sum(map(len, names))
        if self._names_left < 0:
            raise InvalidRequest(
                f"the names of the archive have more than {NAMES_CHARACTERS} characters"
            )

    async def _make(self, paths: set[str]) -> None:
        """Make directories that were not made so far."""
        new = {path for path in paths - self._made if not self._has_failed(path)}
        inner = {posixpath.dirname(path) for path in new if path}

        async def make(path: str) -> None:
            await self._make_directories(path, self._target)

        await for_each(sorted(new - inner), make)
        while new:
            self._count_names(*new)
            self._made |= new
            new = {posixpath.dirname(path) for path in new} - self._made

    async def _write_small(self, members: list[Member]) -> None:
        members = [each for each in members if not self._has_failed(each.item.path)]
        written: set[str] = set()
        if self._session is not None and len(members) > 1:
            contents = {each.item.path: each.data for each in members}
            items = [each.item for each in members if is_small(each.item)]
            for batch in batches_of(items, self._target):
                data = [contents[item.path] for item in batch.items]
                for position in await write_batch(self._session, batch, data):
                    item = batch.items[position]
                    written.add(item.path)
                    self._copied(item, item.size)

        async def write(member: Member) -> None:
            there = join(self._target, member.item.path)
            await self._attempt(member.item, self._write_one(member, there), there, there)

        await for_each((each for each in members if each.item.path not in written), write)

    async def _write_one(self, member: Member, there: str) -> None:
        assert member.data is not None
        await self._files.write(there, member.data)
        self._tally.advance(member.item.path, len(member.data))
        self._without_mode.append(member.item)

    async def _write_large(self, reader: ArchiveReader, item: Item) -> None:
        there = join(self._target, item.path)
        if not self._has_failed(item.path):
            await self._attempt(item, self._write_blocks(reader, item, there), there, there)
        await asyncio.to_thread(reader.skip_large)  # raises the error of the archive, if it has one

    async def _write_blocks(self, reader: ArchiveReader, item: Item, there: str) -> None:
        async with self._files.open(there, "wb") as writer:
            while block := await asyncio.to_thread(reader.next_block):
                await writer.write(block)
                self._tally.advance(item.path, len(block))
        self._without_mode.append(item)

    async def _copy(self, item: Item) -> None:
        """Copy the file that a hard link stands for."""
        if self._has_failed(item.path):
            return
        here, there = join(self._target, item.target), join(self._target, item.path)
        try:
            await self._files.copy(here, there)
        except (RpcError, SandboxDenied) as error:
            self._fail(item.path, error)
        else:
            self._tally.finish(item.path)
            self._without_mode.append(item._replace(kind="f"))


def leads_out(path: str, targets: Mapping[str, str], unknown: Container[str]) -> bool:
    """Whether a symlink leads out of the directory, or upwards from one with an unknown target.

    `targets` has the symlinks, relative to the directory. A loop leads nowhere.
    """
    position: list[str] = []
    is_unknown = False
    links = 0
    pending = path.split("/")[::-1]
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
        if name == "..":
            if is_unknown or not position:
                return True
            position.pop()
            continue
        position.append(name)
        reached = "/".join(position)
        if reached in targets:
            links += 1
            if links > MAX_LINKS:
                return False
            position.pop()
            pending += targets[reached].split("/")[::-1]
        elif reached in unknown:
            is_unknown = True
    return False


class ArchivedFiles(Protocol):
    """The file operations that an archive needs; `files.Files` implements them."""

    async def stat(self, path: str) -> Stat: ...

    async def download(self, remote: str, local: str) -> Transfer: ...


class ArchiveDownload:
    """One directory or file to archive; iterate over `chunks` once."""

    def __init__(
        self, files: ArchivedFiles, commands: SystemCommands, sandbox: Any, exclude: Sequence[str]
    ) -> None:
        """Paths in `exclude` are relative to the directory."""
        self._files = files
        self._commands = commands
        self._sandbox = sandbox
        self._exclude = [path.strip("/").removeprefix("./") for path in exclude]

    async def chunks(self, path: str) -> AsyncGenerator[bytes, None]:
        """The archive in pieces; names are relative to the directory and begin with `./`."""
        metadata = await self._files.stat(path)  # raises NotFound, the clearest error
        directory, name = (path, "") if metadata.is_directory else posixpath.split(path)
        skipped = [f"--exclude=./{_escaped(each)}" for each in self._exclude]
        argv = ["tar", "-C", directory or "/", *skipped, "-cf", "-", f"./{name}" if name else "."]
        has_begun = False
        try:
            async with aclosing(self._run(argv, path)) as output:
                async for chunk in output:
                    has_begun = True
                    yield chunk
        except (NotFound, Unsupported):
            if has_begun:
                raise
            async with aclosing(self._archive_here(path, name)) as blocks:
                async for block in blocks:
                    yield block

    async def _run(self, argv: list[str], path: str) -> AsyncGenerator[bytes, None]:
        """The output of tar; NotFound if there is no such command."""
        tar = HelperCommand(self._commands, self._sandbox, error_bytes=HELPER_OUTPUT_BYTES)
        async with aclosing(tar.stdout(argv, f"{path}: a part of the archive")) as output:
            async for data in output:
                yield data
        code = tar.exit_code
        if code == _NO_COMMAND:
            raise NotFound("tar")
        if code:
            line = decoded(bytes(tar.errors)).strip().partition("\n")[0].removeprefix("tar: ")
            name, _, _ = line.partition(": ")
            text = line.rpartition(": ")[2] or f"tar has failed with exit code {code}"
            at = posixpath.join(path, name[2:]) if name.startswith("./") else path
            raise path_error(command_error(text), at, is_confined=self._sandbox is not None)

    async def _archive_here(self, path: str, name: str) -> AsyncGenerator[bytes, None]:
        with tempfile.TemporaryDirectory(prefix="exec-server-") as folder:
            copy, archive = os.path.join(folder, "copy"), os.path.join(folder, "archive")
            await self._files.download(path, copy)
            await asyncio.to_thread(self._write_archive, copy, archive, f"./{name}")
            with await asyncio.to_thread(open, archive, "rb") as file:
                while block := await asyncio.to_thread(file.read, BLOCK_BYTES):
                    yield block

    def _write_archive(self, copy: str, archive: str, name: str) -> None:
        skipped = {posixpath.normpath(each) for each in self._exclude}

        def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if posixpath.normpath(member.name) in skipped else member

        with tarfile.open(archive, "w") as file:
            file.add(copy, name.rstrip("/"), filter=keep)


def _escaped(path: str) -> str:
    """A path as a pattern of tar that matches this path alone."""
    return "".join(f"\\{letter}" if letter in "*?[\\" else letter for letter in path)
