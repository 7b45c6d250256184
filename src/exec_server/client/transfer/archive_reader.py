"""ArchiveReader: the members of a tar archive that may be hostile. Blocking, so it runs in threads.

The rules are those of the data filter of Python's tarfile: names lose leading slashes; names and
links that lead out of the directory, links to absolute paths, and devices are refused; modes lose
the bits of set-user-ID, set-group-ID and sticky, and those that let others write. tarfile's own
filter asks the local file system, which is not the one that the members are written to, and
unpacking into a temporary directory first would need the space of the whole archive here.

Nothing is read into memory as a whole: a header is limited, and so is the sum of all contents,
because a few bytes of a compressed or sparse file stand for any number of zeros.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import posixpath
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Final, NamedTuple, Self

from exec_server.client.transfer.batches import BATCH_BYTES, BATCH_FILES, FILE_BYTES
from exec_server.client.transfer.open_file import BLOCK_BYTES
from exec_server.client.transfer.plan import MAX_ENTRIES, Item
from exec_server.errors import ExecServerError, InvalidRequest

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
                found = archive.next()
                headers.allow(None)
                if found is None:
                    return
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep all
                count += 1
                if count > MAX_ENTRIES:
                    raise InvalidRequest(f"the archive has more than {MAX_ENTRIES} members")
                yield self._member(archive, found, checked(found))

    def _member(self, archive: tarfile.TarFile, found: tarfile.TarInfo, item: Item) -> Member:
        if item.kind != "f":
            return Member(item)
        self._bytes += item.size
        if self._bytes > self._limit:
            raise InvalidRequest(f"the files of the archive have more than {self._limit} bytes")
        content = archive.extractfile(found)
        assert content is not None
        if item.size > FILE_BYTES:
            self._large = content
            return Member(item)
        return Member(item, content.read())  # raises ReadError if the archive ends in it


def checked(found: tarfile.TarInfo) -> Item:
    """The item of a member, with the mode that it gets; raises InvalidRequest for a hostile one."""
    if max(len(found.name), len(found.linkname)) > NAME_CHARACTERS:
        raise _refused(found, f"a name has more than {NAME_CHARACTERS} characters")
    path = posixpath.normpath(found.name.lstrip("/"))
    if _leads_out(path):
        raise _refused(found, "it leads out of the directory")
    path = "" if path == "." else path
    if found.issym() or found.islnk():
        target = _link_target(found, path)
        return Item(path, "l" if found.issym() else "h", _file_mode(found), 0, "", target)
    if found.isdir():
        return Item(path, "d", None, 0, "")
    if not found.isreg():
        raise _refused(found, "it is neither file, directory nor link")
    if not path:
        raise _refused(found, "it has no name")
    return Item(path, "f", _file_mode(found), found.size, "")


def _link_target(found: tarfile.TarInfo, path: str) -> str:
    """The target of a symlink as it is, that of a hard link as the path of a member."""
    if not path or not found.linkname:
        raise _refused(found, "it is a link without a name or target")
    if found.linkname.startswith("/"):
        raise _refused(found, f"it is a link to {found.linkname!r}, an absolute path")
    above = posixpath.dirname(path) if found.issym() else ""
    whole = posixpath.normpath(posixpath.join(above, found.linkname))
    if _leads_out(whole):
        text = f"it is a link to {found.linkname!r}, which leads out of the directory"
        raise _refused(found, text)
    return found.linkname if found.issym() else whole


def _leads_out(path: str) -> bool:
    return path == ".." or path.startswith(("../", "/")) or "\0" in path


def _file_mode(found: tarfile.TarInfo) -> int:
    mode = found.mode & 0o755
    if not mode & 0o100:
        mode &= ~0o111
    return mode | 0o600


def _refused(found: tarfile.TarInfo, reason: str) -> InvalidRequest:
    return InvalidRequest(f"member {found.name[:200]!r} of the archive is refused: {reason}")


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
            rest = b""
            if self._decoder.eof:
                rest = (self._decoder.unused_data or self._file.read(_READ_BYTES)).lstrip(b"\0")
                if not rest:
                    return 0
                self._decoder = self._new_decoder()
            elif self._decoder.needs_input:
                rest = self._file.read(_READ_BYTES)
                if not rest:
                    raise EOFError("the compressed data ends early")
            data = self._decoder.decompress(rest, len(buffer))
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
