"""Whether a confined command failed because of its confinement, and at which path. Pure.

`is_likely_denied` is the rule of the reference, word for word, because clients act on it. It
only reads the output of the command, so it is a guess: any command can print "permission
denied". `find_denial` names a rule of the policy: for the network if the kernel has refused it, for
a file if the output has the error that the sandbox causes together with a path that the policy
denies. The exit code does not matter for that, and no rule is named for a path that is allowed.
"""

from __future__ import annotations

import errno
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, Literal

from exec_server.printable import lossy
from exec_server.protocol.process import Chunk
from exec_server.protocol.sandbox import Denial
from exec_server.sandbox.policy.error_lines import (
    ERROR_PHRASES,
    certain_names,
    find_error,
    last_lines,
    likely_names,
    lines_with,
    names_above,
)

# Returns the rule of a policy that denies an operation on a path, None if it is allowed.
Explain = Callable[[str, Literal["read", "write"]], str | None]

# 128 + SIGSYS, the signal of the filter for system calls of another architecture.
_SIGSYS_EXIT: Final = 159
_FOREIGN_CALL: Final = "system calls of another architecture are not allowed"
_NO_NETWORK: Final = "network access is restricted"
# Errors that the sandbox causes for changes only.
_CHANGES: Final = (errno.EROFS, errno.EBUSY)

# The reference compares lower-cased text. Outside of ASCII only the Kelvin sign is lower-cased to
# an ASCII letter, so lower-casing bytes and searching for both spellings finds the same matches;
# bytes that are not UTF-8 never take part in a match.
_PHRASES: Final = (
    b"permission denied",
    b"operation not permitted",
    b"read-only file system",
    b"sandbox",
    b"seccomp",
    b"landlock",
    "landloc\N{KELVIN SIGN}".encode(),
    b"failed to write file",
)

# A command may print thousands of errors; the first lines suffice for an explanation.
CONSIDERED_LINES: Final = 32
# The names examined in a line: no known message needs more.
CONSIDERED_NAMES: Final = 8
# The last lines that may report a failure of the network.
NETWORK_LINES: Final = 8
# Fits into a log line or a status bar.
TEXT_CHARACTERS: Final = 200
# Of a successful command only the last errors are examined: most output of most commands is that
# of successful ones, and the event loop waits meanwhile.
SUCCESS_BYTES: Final = 65_536

_means_writing = re.compile(
    r"(?i)\b(?:creat|writ|remov|delet|unlink|touch|mkdir|rmdir|renam|mov|overwrit|truncat|chmod|"
    r"chown|changing|setting|setattr|lock|symlink|link|mknod|append|temp|output|save|update)"
).search
_means_network = re.compile(r"(?i)\bsocket|\bconnect|\bnetwork|\bbind\b|\blisten").search
# Selects the line for people, once it is known that the network was refused.
_reports_network = re.compile(
    r"(?i)socket|connect|network|resol|unreachable|lookup|getaddrinfo|ENOTFOUND|EAI_AGAIN|\bhost\b"
).search


def is_likely_denied(exit_code: int, chunks: Iterable[Chunk]) -> bool:
    """Whether clients are told that the sandbox denied something to this command.

    Each stream is searched, and all streams as one text in the order of arrival, so a phrase
    may be spread over streams.
    """
    if exit_code == 0:
        return False
    if exit_code == _SIGSYS_EXIT:
        return True
    chunks = list(chunks)
    if _mentions_denial(b"".join([chunk.chunk for chunk in chunks])):
        return True
    streams = {chunk.stream for chunk in chunks}
    return len(streams) > 1 and any(_mentions_denial(_text(chunks, name)) for name in streams)


def _mentions_denial(data: bytes) -> bool:
    lowered = data.lower()
    return any(phrase in lowered for phrase in _PHRASES)


def _text(chunks: list[Chunk], stream: str) -> bytes:
    return b"".join([chunk.chunk for chunk in chunks if chunk.stream == stream])


def find_denial(
    exit_code: int,
    chunks: Iterable[Chunk],
    explain: Explain,
    *,
    cwd: str,
    is_offline: bool,
    is_network_refused: bool = False,
) -> Denial | None:
    """The denied operation, None if nothing is known to be denied; names are relative to `cwd`.

    The refused network is taken if the output ends with a message about it, then the first message
    about a path that the policy denies, then the network without a message. If a failed command
    has only other messages, the first one is taken: its rule is None, and ordinary file permissions
    may be the reason.
    """
    chunks = list(chunks)
    first: Denial | None = None
    explainer = _LineExplainer(explain, cwd, is_offline=is_offline)
    network = _network_denial(chunks) if is_network_refused else None
    if network is not None and network.text is not None:
        return network
    for line, context in islice(_error_lines(exit_code, chunks), CONSIDERED_LINES):
        denial = explainer.explain(line, context)
        if denial.rule is not None:
            return denial
        if first is None and _is_denial_text(line):
            first = denial
    if network is not None:
        return network
    if exit_code == _SIGSYS_EXIT:
        return Denial(first.text if first else None, None, "syscall", _FOREIGN_CALL)
    return first if exit_code != 0 else None


def _is_denial_text(line: str) -> bool:
    """Whether `is_likely_denied` knows the phrase of an error line."""
    return find_error(line) is None or _mentions_denial(line.encode("utf-8", "surrogateescape"))


def _network_denial(chunks: list[Chunk]) -> Denial:
    """The denial of a network call, with the line that reports it if the output ends with one."""
    output = _text(chunks, "stderr") or _text(chunks, "pty")
    for line in reversed(last_lines(output, NETWORK_LINES)):
        _, number = find_error(line) or (0, None)
        if number in _CHANGES:
            break
        if number != errno.EACCES and _reports_network(line):
            return Denial(_shortened(line), None, "network", _NO_NETWORK)
    return Denial(None, None, "network", _NO_NETWORK)


def _error_lines(exit_code: int, chunks: list[Chunk]) -> Iterator[tuple[str, list[str]]]:
    """The lines that may report a denial. The output of a successful command is not among them."""
    if exit_code == 0:
        for stream in ("stderr", "pty"):
            yield from lines_with(_text(chunks, stream)[-SUCCESS_BYTES:], ERROR_PHRASES)
        return
    for stream in ("stderr", "stdout", "pty"):
        yield from lines_with(_text(chunks, stream), {*_PHRASES, *ERROR_PHRASES})


class _LineExplainer:
    """Finds the denial that one line reports."""

    def __init__(self, explain: Explain, cwd: str, *, is_offline: bool) -> None:
        self._explain = explain
        self._cwd = cwd
        self._is_offline = is_offline

    def explain(self, line: str, context: list[str]) -> Denial:
        text = _shortened(line)
        position, number = find_error(line) or (0, None)
        names = [name for name in certain_names(line) if find_error(name) is None]
        if not names and number == errno.EPERM and self._is_about_network(line, context):
            return Denial(text, None, "network", _NO_NETWORK)
        names = names or likely_names(line[:position]) or names_above(context)
        is_writing = number in _CHANGES or _means_writing(line) is not None
        operation: Literal["read", "write"] = "write" if is_writing else "read"
        paths = [
            posixpath.normpath(posixpath.join(self._cwd, name)) for name in names[:CONSIDERED_NAMES]
        ]
        for path in paths if number is not None else ():
            # Where only changes are denied, the kernel does not say EACCES: file modes do.
            rule = self._explain(path, "write" if number in _CHANGES else "read")
            if rule is not None:
                return Denial(text, lossy(path), operation, lossy(rule))
        first = lossy(paths[0]) if paths else None
        return Denial(text, first, "write" if is_writing else None, None)

    def _is_about_network(self, line: str, context: list[str]) -> bool:
        # A traceback has the call above the error.
        return self._is_offline and any(map(_means_network, (line, *context)))


def _shortened(line: str) -> str:
    return lossy(line.strip()[:TEXT_CHARACTERS])
