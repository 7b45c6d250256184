"""Return values of the client: plain data without a connection."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Final, Literal, Self, TypeVar

import msgspec

from exec_server.protocol.process import Stream
from exec_server.protocol.sandbox import Denial

T = TypeVar("T")

Kind = Literal["file", "directory", "link", "other"]


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a process's output as the server read it; it may end inside a line or character.

    `lost_before` is the number of bytes missing before this piece; it is 0 unless the connection
    was lost for so long that the server discarded output. After several losses in a row it may
    include bytes missing after this piece; the sum over all pieces is exact.
    """

    stream: Stream
    data: bytes
    lost_before: int = 0


class Line(str):
    """A line of a process's output without its end; `stream` tells where it was printed."""

    stream: Stream

    def __new__(cls, text: str, stream: Stream) -> Self:
        line = super().__new__(cls, text)
        line.stream = stream
        return line


class Result(msgspec.Struct, frozen=True):
    """A command that has ended, with its output.

    With a terminal all output is in `stdout`. `exit_code` is 128 plus the signal number if a
    signal ended the command. `sandbox_denied` is the server's guess from the output of a failed
    command. `sandbox_denial` is more reliable, and known for successful commands too. `lost_bytes`
    counts all missing output, `lost_stdout` and `lost_stderr` that beyond the `output_limit`. It is
    missing after `kept_head` bytes of each stream, or at its end (None).
    """

    argv: tuple[str, ...]
    stdout: bytes
    stderr: bytes
    exit_code: int
    duration: float
    sandbox_denied: bool = False
    sandbox_denial: Denial | None = None
    lost_bytes: int = 0
    lost_stdout: int = 0
    lost_stderr: int = 0
    kept_head: int | None = None

    @property
    def returncode(self) -> int:
        """Another name of `exit_code`: 128 + N after signal N, not -N as in subprocess."""
        return self.exit_code

    @property
    def text(self) -> str:
        """`stdout` as text; invalid UTF-8 becomes U+FFFD."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        """`stderr` as text; invalid UTF-8 becomes U+FFFD."""
        return self.stderr.decode(errors="replace")

    def head_and_tail(self, limit: int) -> str:
        """The output as text, `stdout` before `stderr`; of long output the beginning and the end.

        At most `limit` bytes are kept, and a line in the middle tells how many are left out, as do
        lines where an `output_limit` has left out some before. A model reads this, or a person.
        """
        if limit < 0:
            raise ValueError(f"limit must not be negative: {limit}")
        gap = b"\n" if self.stdout and self.stderr and not self.stdout.endswith(b"\n") else b""
        output = b"".join((self.stdout, gap, self.stderr))
        head, tail = _ends(output, limit)
        begin, end = len(head), len(output) - len(tail)
        # Bytes that a lost connection has cost are missing at unknown places.
        left_out = end - begin + self.lost_bytes - self.lost_stdout - self.lost_stderr
        notes = []
        for start, size, lost in (
            (0, len(self.stdout), self.lost_stdout),
            (len(output) - len(self.stderr), len(self.stderr), self.lost_stderr),
        ):
            place = start + (size if self.kept_head is None else min(self.kept_head, size))
            if begin <= place <= end:
                left_out += lost
            elif lost:
                notes.append((place, place, lost))
        if left_out:
            notes.append((begin, end, left_out))
        return _with_notes(output, sorted(notes))

    def __bool__(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0

    def __repr__(self) -> str:
        """Short, however long the command and its output are."""
        denied = ", sandbox_denied=True" if self.sandbox_denied else ""
        lost = f", lost_bytes={self.lost_bytes}" if self.lost_bytes else ""
        return (
            f"Result(argv={_shortened(repr(self.argv))}, exit_code={self.exit_code}, "
            f"stdout={_sample(self.stdout)}, stderr={_sample(self.stderr)}, "
            f"duration={self.duration:.3f}{denied}{lost})"
        )


class ShellResult(Result, frozen=True):
    """A command of a ShellSession that has ended; `argv` is that of the same `Environment.shell`.

    `shell_ended` if the shell has ended too, by an `exit` or because the command could not be
    interrupted: the next command gets a new one, without variables, functions and directory.
    """

    shell_ended: bool = False

    def __repr__(self) -> str:
        ended = ", shell_ended=True" if self.shell_ended else ""
        return f"Shell{super().__repr__()[:-1]}{ended})"


# Characters of one member in the representation of a result.
_REPR_CHARACTERS: Final = 120


def _shortened(text: str) -> str:
    return text if len(text) <= _REPR_CHARACTERS else f"{text[:_REPR_CHARACTERS]}…"


def _sample(data: bytes) -> str:
    if len(data) <= _REPR_CHARACTERS:
        return repr(data)
    half = _REPR_CHARACTERS // 2
    return f"{data[:half]!r}…{data[-half:]!r} ({len(data)} bytes)"


def _with_notes(output: bytes, notes: list[tuple[int, int, int]]) -> str:
    """The output as text, with a line in the place of each range; it tells a number of bytes."""
    texts = []
    at = 0
    for begin, end, left_out in notes:
        text = output[at:begin].decode(errors="replace").removesuffix("\n")
        texts += [text.removeprefix("\n") if at else text, f"[… {left_out} bytes left out …]"]
        at = end
    text = output[at:].decode(errors="replace")
    texts.append(text.removeprefix("\n") if notes else text)
    return "\n".join(text for text in texts if text)


def _ends(data: bytes, limit: int) -> tuple[bytes, bytes]:
    """The beginning and the end of UTF-8 text, together of at most `limit` bytes."""
    if len(data) <= limit:
        return data, b""
    head_end = (limit + 1) // 2
    tail_begin = len(data) - limit // 2
    # Bytes 10xxxxxx continue a character, of at most four bytes.
    for _ in range(3):
        if head_end and data[head_end] & 0xC0 == 0x80:
            head_end -= 1
        if tail_begin < len(data) and data[tail_begin] & 0xC0 == 0x80:
            tail_begin += 1
    return data[:head_end], data[tail_begin:]


class ConnectionStatus(msgspec.Struct, frozen=True):
    """What the connection to a server does; see Environment.status.

    `lost` means that the session is lost, `closed` that the environment was closed, or not opened.
    """

    state: Literal["connected", "reconnecting", "lost", "closed"]
    since: datetime.datetime  # aware; by the clock of this machine
    reason: str | None = None  # of the loss, or of the last attempt
    attempt: int = 0  # to get the connection back; 0 unless it is reconnecting
    gives_up_at: datetime.datetime | None = None  # while it is reconnecting


class Screen(msgspec.Struct, frozen=True):
    """What a person would see on a terminal; `str()` is its text without empty lines at the end.

    `lines` are all rows without trailing blanks. `cursor` is a row and a column from 0, `size` the
    number of both. `is_complete` unless output from before was not there any more: then parts that
    the program has not drawn anew may be missing.
    """

    lines: tuple[str, ...]
    cursor: tuple[int, int]
    size: tuple[int, int]
    title: str = ""
    is_complete: bool = True

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip("\n")

    def __str__(self) -> str:
        return self.text


class RunProgress(msgspec.Struct, frozen=True):
    """One of several commands has ended: the `done`th of `total`; `index` is its place in the list.

    `outcome` is its result, or the exception that it has raised.
    """

    done: int
    total: int
    index: int
    outcome: Result | Exception

    @property
    def result(self) -> Result:
        """The result; raises the exception of a command that has none."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    @property
    def error(self) -> Exception | None:
        """The exception, such as Timeout or ProgramNotFound."""
        return self.outcome if isinstance(self.outcome, Exception) else None


class Stat(msgspec.Struct, frozen=True):
    """Metadata of a path, for a symlink that of its target; times are seconds since 1970."""

    is_directory: bool
    is_file: bool
    is_symlink: bool
    size: int
    modified: float
    created: float | None  # None if unknown


class Entry(msgspec.Struct, frozen=True):
    """An entry of a directory with its whole path; a symlink counts as its target.

    `size`, `modified` (seconds since 1970) and `mode` are None if unknown; `list` knows them, and
    the `link_target` of a symlink, if the server has `fsList`. A symlink that leads nowhere is
    neither a directory nor a file. `owner` and `group` are names, of a symlink itself, or numbers
    that have none; `list(owners=True)` asks for them.
    """

    path: str
    is_directory: bool
    is_file: bool
    size: int | None = None
    modified: float | None = None
    mode: int | None = None
    link_target: str | None = None
    owner: str | None = None
    group: str | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_symlink(self) -> bool:
        return self.link_target is not None


class ChangedFile(msgspec.Struct, frozen=True):
    """A file that a patch has changed; `path` is relative to the root of the patch."""

    path: str
    kind: Literal["added", "modified", "deleted"]


class DiskUsage(msgspec.Struct, frozen=True):
    """Bytes of a file system; `available` excludes the blocks that are reserved for root."""

    total: int
    free: int
    available: int


class FileChange(msgspec.Struct, frozen=True):
    """A change below a watched directory; `path` is relative to it.

    An `overflow` has no path: there were more changes than could be kept, or the connection was
    lost for a time, so the files have to be looked at.
    """

    path: str
    kind: Literal["created", "modified", "deleted", "overflow"]


class GrepMatch(msgspec.Struct, frozen=True):
    """A line that matches, with the lines around it; `line` and `column` are counted from 1.

    `path` is relative to the root of the search; it is the name of a root that is a file. Lines
    are cut after 1000 characters.
    """

    path: str
    line: int
    column: int
    text: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class GrepCount(msgspec.Struct, frozen=True):
    """A file with lines that match, and their number; `path` is as in `GrepMatch`."""

    path: str
    count: int


class Found(list[T]):
    """The results of a search; `truncated` if there are more than its limit."""

    def __init__(self, items: Iterable[T], *, truncated: bool = False) -> None:
        super().__init__(items)
        self.truncated = truncated


class Progress(msgspec.Struct, frozen=True):
    """The progress of a transfer; `path` is the file that advanced last.

    `done_bytes` includes `resumed_bytes`, which an earlier attempt had copied, and `done_files` the
    `skipped_files`, whose copies were there. `bytes_per_second` is the rate of the last seconds.
    """

    path: str
    done_bytes: int
    total_bytes: int
    resumed_bytes: int
    done_files: int
    total_files: int
    skipped_files: int = 0
    bytes_per_second: float = 0.0


class FileContent(msgspec.Struct, frozen=True):
    """A file that was read with others; `data` is empty if there is an `error`."""

    path: str
    data: bytes
    error: Exception | None = None


class NotCopied(msgspec.Struct, frozen=True):
    """An entry of a tree that could not be copied, a directory with everything in it.

    `path` is relative to the top. `error` names the whole path; it is an OSError for this machine
    and any other exception for the server's machine.
    """

    path: str
    error: Exception


class Planned(msgspec.Struct, frozen=True):
    """What a copy would do with an entry; `size` has the bytes of a file.

    `path` is relative to the top. What an excluded directory contains is not named, and a directory
    that is copied only if it is empty.
    """

    action: Literal["copy", "skip", "exclude", "delete"]
    path: str
    size: int = 0


class Transfer(msgspec.Struct, frozen=True):
    """The result of a transfer: counts, and the entries that could not be copied.

    `left_out` describes modes and symlinks that could not be kept, as messages. `deleted` has the
    paths that `delete` has removed. `planned` is what a dry run would have done, by path; then the
    counts are those of a copy.
    """

    files: int
    directories: int
    links: int
    copied_bytes: int
    resumed_bytes: int
    left_out: tuple[str, ...] = ()
    failed: tuple[NotCopied, ...] = ()
    deleted: tuple[str, ...] = ()
    planned: tuple[Planned, ...] = ()


class Response(msgspec.Struct, frozen=True):
    """An HTTP response that the server received; header names are in lower case."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""

    def header(self, name: str) -> str | None:
        """The value of the first header with this name."""
        wanted = name.lower()
        return next((value for each, value in self.headers if each.lower() == wanted), None)

    @property
    def text(self) -> str:
        """The body as text; invalid UTF-8 becomes U+FFFD."""
        return self.body.decode(errors="replace")
