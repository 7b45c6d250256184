"""What the client's methods return: plain values without a connection behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from exec_server.protocol.process import Stream
from exec_server.protocol.sandbox import Denial

Kind = Literal["file", "directory", "link", "other"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a process's output, as the server read it: no line or character is kept whole.

    `lost_before` is how many bytes are missing between the piece before and this one; it is 0
    unless a connection was away for so long that the server had to forget them.
    """

    stream: Stream
    data: bytes
    lost_before: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """A command that has ended, with all that it printed.

    With a terminal everything is in `stdout`. `exit_code` is 128 plus the number of the signal
    that ended it, if one did. `sandbox_denied` is a guess of the server, by the output.
    """

    argv: tuple[str, ...]
    stdout: bytes
    stderr: bytes
    exit_code: int
    duration: float
    sandbox_denied: bool = False
    sandbox_denial: Denial | None = None
    lost_bytes: int = 0

    @property
    def text(self) -> str:
        """`stdout` as text; what is no UTF-8 becomes U+FFFD."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        """`stderr` as text, in the same way."""
        return self.stderr.decode(errors="replace")

    def __bool__(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Stat:
    """What a path is. Of a link it is what it leads to; times are seconds since 1970."""

    is_directory: bool
    is_file: bool
    is_symlink: bool
    size: int
    modified: float
    created: float | None  # None if the server does not know


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in a directory, with the whole path to it; links count as what they lead to."""

    path: str
    is_directory: bool
    is_file: bool

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer is: `path` is the file that got further last.

    `done_bytes` includes `resumed_bytes`, which were there from an earlier attempt.
    """

    path: str
    done_bytes: int
    total_bytes: int
    resumed_bytes: int
    done_files: int
    total_files: int


@dataclass(frozen=True, slots=True)
class NotCopied:
    """Something in a tree that could not be copied, a directory with all that is in it.

    `path` is below the top. `error` names the whole path; it is an OSError for what cannot be
    read or written here, and anything else for the server's machine.
    """

    path: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a transfer has copied, and what it could not.

    In `left_out` is what was copied but could not be kept, a mode or a link, as texts for people.
    """

    files: int
    directories: int
    links: int
    copied_bytes: int
    resumed_bytes: int
    left_out: tuple[str, ...] = ()
    failed: tuple[NotCopied, ...] = ()


@dataclass(frozen=True, slots=True)
class Response:
    """An answer that the server got for us over HTTP; names of headers are in lower case."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        wanted = name.lower()
        return next((value for found, value in self.headers if found.lower() == wanted), None)

    @property
    def text(self) -> str:
        """The body as text; what is no UTF-8 becomes U+FFFD."""
        return self.body.decode(errors="replace")
