"""Whether a confined command failed because of its confinement, and at which path. Pure.

`is_likely_denied` is the rule of the reference, word for word, because clients act on it: a guess
from the output. `find_denial` names a rule of the policy, never for an allowed path.
"""

from __future__ import annotations

import errno
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Final, Literal

from exec_server.errors import lossy
from exec_server.protocol.process import OutputChunk
from exec_server.protocol.sandbox import Denial

# Errors of the mounts of a view: EROFS for changes, EACCES for masked paths, EBUSY for renaming
# and removing mount points. EPERM is the error of the system call filter.
_ERRORS: Final = {
    "permission denied": errno.EACCES,
    "operation not permitted": errno.EPERM,
    "read-only file system": errno.EROFS,
    "device or resource busy": errno.EBUSY,
    "failed to write file": errno.EROFS,  # of tools that do not print the error itself
}
_error_text = re.compile("|".join(_ERRORS), re.IGNORECASE | re.ASCII).search

# The lines before an error that are examined with it: no known message needs more.
CONTEXT_LINES: Final = 4
# Of a longer line only the part around the phrase is examined; it can hold the longest path.
LINE_BYTES: Final = 8192

_escapes = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
# A word in the quotes of a shell, as GNU tools print names: 'a b', 'it'\''s', 'a'$'\n''b'.
_SHELL_WORD: Final = r"(?<!\w)((?:\$'(?:[^'\\]|\\.)*'|'[^']*'|\\')+)"
_shell_part = re.compile(r"\$'((?:[^'\\]|\\.)*)'|'([^']*)'|\\(')").finditer
# Other pairs of quotes.
_PAIRS: Final = ('""', "`'", "``", "\u2018\u2019", "\u201c\u201d")
_absolute = re.compile(r"(?:(?<=[\s:=(\[])|^)/[^\s:'\"`,;()<>|\[\]]*").finditer
_complaint = re.compile(
    r"(?i)\b(?:can ?not|can't|could ?n[o']t|couldn't|unable to|failed to)\s+\w+\b.*\s(\S+)$"
).search
# Text between colons that is no name: numbers, words of errors, and sentences.
_no_name = re.compile(
    r"\d+|\[.*|.*\s.*|(?i:\w*(?:error|exception|fatal|warning))|E[A-Z]+"
).fullmatch


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


# Lines of output that report an error, the error itself, and the names of files. Pure.
# The texts of these errors in lower case.
ERROR_PHRASES: Final = tuple(text.encode() for text in _ERRORS)
_quoted = re.compile(
    "|".join([_SHELL_WORD, *(f"{first}([^{first}{last}]+){last}" for first, last in _PAIRS)])
).finditer


def find_error(line: str) -> tuple[int, int] | None:
    """The position and the number of the first error in a line; its text is known in English."""
    match = _error_text(line)
    return None if match is None else (match.start(), _ERRORS[match[0].lower()])


def lines_with(data: bytes, phrases: Collection[bytes]) -> Iterator[tuple[str, list[str]]]:
    """The lines with one of the phrases, which are in lower case, and a few lines before each."""
    lowered = data.lower()
    # The next position of each phrase; a phrase without one is not searched for again.
    positions = {phrase: -1 for phrase in phrases if phrase in lowered}
    start = 0
    while positions:
        for phrase, position in list(positions.items()):
            if position < start:
                positions[phrase] = lowered.find(phrase, start)
                if positions[phrase] < 0:
                    del positions[phrase]
        if positions:
            position = min(positions.values())
            yield _line_at(data, position), _lines_before(data, position)
            start = data.find(b"\n", position) % (len(data) + 1)


def last_lines(data: bytes, count: int) -> list[str]:
    """The last lines that are not empty."""
    lines = map(_readable, data[-LINE_BYTES:].split(b"\n"))
    return [line for line in lines if line][-count:]


def _line_at(data: bytes, position: int) -> str:
    start = max(data.rfind(b"\n", 0, position) + 1, position - LINE_BYTES // 2)
    end = data.find(b"\n", position, position + LINE_BYTES // 2)
    return _readable(data[start : end if end >= 0 else position + LINE_BYTES // 2])


def _lines_before(data: bytes, position: int) -> list[str]:
    before = data[max(0, position - LINE_BYTES) : position].split(b"\n")[:-1]
    return [_readable(line) for line in before[-CONTEXT_LINES:]]


def _readable(line: bytes) -> str:
    return _escapes.sub("", line.decode("utf-8", "surrogateescape")).rstrip()


def certain_names(line: str) -> list[str]:
    """Quoted names and absolute paths, without the program that reports the error."""
    matches = list(_absolute(line))
    names = [_unquoted(match) for match in _quoted(line)]
    names += [
        match[0] for match in matches if match.start() or line[match.end() : match.end() + 1] != ":"
    ]
    return list(dict.fromkeys(names)) or [match[0] for match in matches]


def _unquoted(match: re.Match[str]) -> str:
    if match[1] is None:
        name: str = next(filter(None, match.groups()))
        return name
    parts = []
    for part in _shell_part(match[1]):
        if part[1] is None:
            parts.append(part[2] or part[3] or "")
        else:
            escaped = part[1].encode("latin-1", "backslashreplace").decode("unicode_escape")
            octets = escaped.encode("latin-1", "replace")
            parts.append(octets.decode("utf-8", "surrogateescape"))
    return "".join(parts)


def likely_names(before: str) -> list[str]:
    """The relative name before the text of an error, as in `cat: notes.txt: Permission denied`."""
    for part in reversed(before.split(": ")[1:]):
        complaint = _complaint(part)
        name = complaint[1] if complaint else part.strip()
        if name and _no_name(name) is None:
            return [name]
    return []


def names_above(context: list[str]) -> list[str]:
    """Names in the line above the reason, which some tools write in a line of its own."""
    for line in reversed(context):
        if _complaint(line):
            return certain_names(line)
    return []


def is_likely_denied(exit_code: int, chunks: Iterable[OutputChunk]) -> bool:
    """Whether clients are told that the sandbox denied something; a phrase may span streams."""
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


def _text(chunks: list[OutputChunk], stream: str) -> bytes:
    return b"".join([chunk.chunk for chunk in chunks if chunk.stream == stream])


def find_denial(
    exit_code: int,
    chunks: Iterable[OutputChunk],
    explain: Explain,
    *,
    cwd: str,
    is_offline: bool,
    is_network_refused: bool = False,
) -> Denial | None:
    """The denied operation, None if nothing is known to be denied; names are relative to `cwd`.

    The order: a refused network that ends the output, the first path that the policy denies, the
    network without a message, then the first other message of a failed command, without a rule.
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


def _network_denial(chunks: list[OutputChunk]) -> Denial:
    """The denial of a network call, with the line that reports it if the output ends with one."""
    output = _text(chunks, "stderr") or _text(chunks, "pty")
    for line in reversed(last_lines(output, NETWORK_LINES)):
        _, number = find_error(line) or (0, None)
        if number in _CHANGES:
            break
        if number != errno.EACCES and _reports_network(line):
            return Denial(_shortened(line), None, "network", _NO_NETWORK)
    return Denial(None, None, "network", _NO_NETWORK)


def _error_lines(exit_code: int, chunks: list[OutputChunk]) -> Iterator[tuple[str, list[str]]]:
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
