"""Listing: the tree that a server describes, parsed from the output of `find`. Pure.

Nothing in the description is trusted. It is parsed while it is received, so that the first wrong
field ends the download, and kept in its own bytes, which take a third of the memory of objects.

Theory of operation. Each entry has six fields, each terminated by NUL. The top comes first, with
an empty path. `find` lists a directory before its entries, and these before anything else; so the
directories that are open at an entry form a stack, and the parent of the entry must be in it. An
entry below a file or a symlink, and an entry outside of the tree, have no parent there.
"""

from __future__ import annotations

import os
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

from exec_server.client.transfer.plan import MAX_ENTRIES, Item
from exec_server.errors import InvalidRequest, MalformedAnswer

# The argument of -printf: kind, mode, size, time, path and symlink target.
FIND_FORMAT: Final = "%y\\0%m\\0%s\\0%T@\\0%P\\0%l\\0"
# The bytes of a listing: those of about 700,000 files. They stay in memory during a download.
LISTING_BYTES: Final = 64 * 1_048_576
# Of one entry: the path and the target of a symlink have up to 4096 bytes each on Linux.
ENTRY_BYTES: Final = 16_384

_FIELDS: Final = 6
# A time has at most 18 digits of seconds: more do not fit into the 64 bits of the system's calls.
_ENTRY: Final = re.compile(
    rb"([a-zA-Z?])\0([0-7]{0,6})\0(\d{1,19})\0(-?\d{1,18}(?:\.\d{1,20})?)\0([^\0]*)\0([^\0]*)\0",
)
_MAX_SIZE: Final = 2**63 - 1
_PERMISSIONS: Final = 0o777
# Separators of this platform beside the slash: a server has them in names.
_SEPARATORS: Final = tuple({os.sep, os.altsep or os.sep} - {"/"})


class Listing:
    """The entries of a tree in the order of `find`; iterating gives Items."""

    def __init__(self, source: str) -> None:
        """`source` is the path of the top, for error texts."""
        self._source = source
        self._data = bytearray()
        self._starts = array("Q")
        self._kinds = bytearray()  # of the entries in `_starts`, so that a kind is found quickly
        self._parsed = 0
        self._open_directories: list[str] = []
        # Hashes of the paths as they are, and without regard to case and Unicode form. Python's
        # hashes are salted, so no server can make two of them equal.
        self._hashes = array("q")
        self._folded_hashes = array("q")
        self._ambiguous: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was received, not even a part of an entry."""
        return not self._data

    def __iter__(self) -> Iterator[Item]:
        return (self._item(start) for start in self._starts)

    @property
    def kinds(self) -> str:
        """The letters of the kinds that occur, each once."""
        return bytes(sorted(set(self._kinds))).decode()

    def of_kind(self, kinds: str, *, deepest_first: bool = False) -> Iterator[Item]:
        """The entries of these kinds; a directory comes before its entries, or after them."""
        wanted = kinds.encode()
        pairs: Iterable[tuple[int, int]] = zip(self._starts, self._kinds, strict=True)
        if deepest_first:
            pairs = zip(reversed(self._starts), reversed(self._kinds), strict=True)
        return (self._item(start) for start, kind in pairs if kind in wanted)

    def is_ambiguous(self, path: str) -> bool:
        """Whether another path differs in case or Unicode form only: here it may be the same."""
        return bool(self._ambiguous) and hash(_folded(path)) in self._ambiguous

    # ---- parsing ----------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Take a part of the output; raises MalformedAnswer, InvalidRequest for a huge tree."""
        self._data += data
        if len(self._data) > LISTING_BYTES:
            raise InvalidRequest(f"{self._source}: {_too_many(len(self))}")
        while (match := _ENTRY.match(self._data, self._parsed)) is not None:
            self._take(_item(match), match.start())
            self._parsed = match.end()
        rest = len(self._data) - self._parsed
        if rest > ENTRY_BYTES or self._data.count(b"\0", self._parsed) >= _FIELDS:
            raise self._malformed(self._data[self._parsed : self._parsed + 64])

    def add(self, items: Iterable[Item]) -> None:
        """Take items that were not listed by `find`, but are in its order."""
        for item in items:
            mode = "" if item.mode is None else f"{item.mode:o}"
            fields = (item.kind, mode, str(item.size), item.modified, item.path, item.target)
            self.feed("".join(f"{field}\0" for field in fields).encode(errors="surrogateescape"))

    def finish(self) -> None:
        """Check the end of the output, and that no path occurs twice."""
        if self._parsed < len(self._data) or not self._starts:
            raise self._malformed(self._data[self._parsed : self._parsed + 64])
        if repeated := _repeated(self._hashes):
            path = next(item.path for item in self if hash(item.path) in repeated)
            raise self._refused(path, "it occurs twice")
        self._ambiguous = _repeated(self._folded_hashes)
        self._hashes = self._folded_hashes = array("q")
        self._open_directories = []

    def _take(self, item: Item, start: int) -> None:
        if len(self._starts) >= MAX_ENTRIES:
            raise InvalidRequest(f"{self._source}: {_too_many(MAX_ENTRIES)}")
        if not item.path:
            if self._starts:
                raise self._refused(item.path, "the top occurs twice")
        else:
            self._check_path(item.path)
        if item.kind == "l" and not item.target:
            raise self._refused(item.path, "a symlink without a target")
        if item.size > _MAX_SIZE:
            raise self._refused(item.path, "an impossible size")
        if item.kind == "d":
            self._open_directories.append(item.path)
        self._starts.append(start)
        self._kinds += item.kind.encode()
        self._hashes.append(hash(item.path))
        self._folded_hashes.append(hash(_folded(item.path)))

    def _check_path(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        if (
            name in ("", ".", "..")
            or path.startswith("/")
            or any(each in name for each in _SEPARATORS)
        ):
            raise self._refused(path, "it is not a name")
        stack = self._open_directories
        while stack and stack[-1] != parent:
            stack.pop()
        if not stack:
            raise self._refused(path, "it is outside of the tree")

    def _item(self, start: int) -> Item:
        match = _ENTRY.match(self._data, start)
        assert match is not None
        return _item(match)

    def _malformed(self, found: bytes | bytearray) -> MalformedAnswer:
        return MalformedAnswer(
            f"{self._source}: the list of files is malformed at {bytes(found)!r}"
        )

    def _refused(self, path: str, reason: str) -> MalformedAnswer:
        return MalformedAnswer(f"{self._source}: the server lists {path!r}: {reason}")


def _item(match: re.Match[bytes]) -> Item:
    kind, mode, size, modified, path, target = match.groups()
    return Item(
        path.decode("utf-8", "surrogateescape"),
        kind.decode(),
        int(mode, 8) & _PERMISSIONS if mode else None,
        int(size),
        modified.decode(),
        target.decode("utf-8", "surrogateescape") if target else "",
    )


def _folded(path: str) -> str:
    """A path as file systems compare it that ignore case or Unicode forms."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", path).casefold()


def _repeated(hashes: array[int]) -> frozenset[int]:
    ordered = sorted(hashes)
    return frozenset(one for one, other in pairwise(ordered) if one == other)


def _too_many(count: int) -> str:
    return f"more than {count} entries: copy the directories in it one by one"
