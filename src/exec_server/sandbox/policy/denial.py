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
from typing import Final, Literal, NamedTuple

import msgspec

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
_error_texts = re.compile("|".join(_ERRORS), re.IGNORECASE | re.ASCII).finditer

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
# The place in a program that reports the error: no name of this error.
_program_place = re.compile(r"\b(?:at|in|File) \"?[^\s\"]+\"?,? (?:on )?line \d+").sub
# Text between colons that is no name: numbers, words of errors, and sentences.
_no_name = re.compile(
    r"\d+|\[.*|.*\s.*|(?i:\w*(?:error|exception|fatal|warning))|E[A-Z]+"
).fullmatch


# Returns the rule of a policy that denies an operation on a path, None if it is allowed.
Explain = Callable[[str, Literal["read", "write"]], str | None]

# 128 + SIGSYS, the signal of the filter for system calls of another architecture.
_SIGSYS_EXIT: Final = 159
_FOREIGN_CALL: Final = "system calls of another architecture are not allowed"
NO_NETWORK: Final = "network access is restricted"
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
# The directories that a command line enters: `cd` of a shell, `-C` of make, git and tar.
ENTERED_DIRECTORIES: Final = 4
# Of a longer command line only the beginning is searched for them.
COMMAND_CHARACTERS: Final = 4096
# Of a successful command only the last errors are examined: most output of most commands is that
# of successful ones, and the event loop waits meanwhile.
SUCCESS_BYTES: Final = 65_536

_Operation = Literal["read", "write"]
# What an operation does to each of two names; None: it does not touch the file.
_Roles = tuple[_Operation | None, _Operation | None]

_enters = re.compile(
    r"(?:^|[\s;&|(])(?:cd|pushd|-C|--directory)[\s=]+(?:--\s+)?['\"]?([^\s'\";&|()$~-][^\s'\";&|()]*)"
).finditer
_means_writing = re.compile(
    r"(?i)\b(?:creat|writ|remov|delet|unlink|touch|mkdir|rmdir|renam|mov|overwrit|truncat|chmod|"
    r"chown|changing|setting|setattr|lock|symlink|link|mknod|append|temp|output|save|update)"
).search
# Two names of one operation, where a NUL stands for each; with what it does to the first and the
# second one. An unknown operation changes the second one for certain (the target of a rename, a
# link or a copy), so that is the likeliest.
_pair = re.compile(r"\0['\"]?(?: to |,? | ?(?:->|=>) ?)['\"]?\0").search
_PAIRS_OF_NAMES: Final[tuple[tuple[re.Pattern[str], _Roles], ...]] = (
    (re.compile(r"(?i)\bcreat\w* (?:hard|symbolic) link|\bsymlink \0 ->.*fail"), ("write", None)),
    (re.compile(r"(?i)symlink|\blink"), (None, "write")),
    (re.compile(r"(?i)\bcop(?:y|ie)"), ("read", "write")),
    (re.compile(r"(?i)renam|\bmov"), ("write", "write")),
)
_means_network = re.compile(r"(?i)\bsocket|\bconnect|\bnetwork|\bbind\b|\blisten").search
# Calls in a traceback, and the members of an error that Node prints: they report nothing.
_is_frame = re.compile(
    r"\s+(?:at |from \S+:\d+:in |\.\.\. \d+ more)|\s+\w+: (?:'.*'|-?\d+),?$|[\s^~{}()\[\],]+$"
    r"|node:\S+:\d+$|Node\.js v\d|Emitted 'error' event"
).match
_is_python_frame = re.compile(r'[\s|]*File ".*", line \d+').match
# The progress that curl prints before an error, in the same line.
_progress = re.compile(r"^[-\d\s.:%kMG]+(?=[a-z]+: \(\d+\) )").sub
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
    """The position and the number of the last error in a line; its text is known in English."""
    matches = list(_error_texts(line))
    return (matches[-1].start(), _ERRORS[matches[-1][0].lower()]) if matches else None


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


def last_messages(data: bytes, count: int) -> list[str]:
    """The last lines that are not empty, without the calls of tracebacks."""
    lines = map(_readable, data[-LINE_BYTES:].split(b"\n"))
    return list(_messages(line for line in lines if line))[-count:]


def _messages(lines: Iterable[str]) -> Iterator[str]:
    frame: int | None = None  # the indentation of the call above, if its code may follow
    for line in lines:
        indentation = len(line) - len(line.lstrip(" |"))
        if frame is not None and indentation > frame:
            continue
        frame = indentation if _is_python_frame(line) else None
        if frame is None and not _is_frame(line):
            yield line


def _line_at(data: bytes, position: int) -> str:
    half = LINE_BYTES // 2
    first = max(0, position - half)
    # A carriage return begins the line of a terminal again: what stood there was progress.
    start = max(data.rfind(end, first, position) + 1 for end in (b"\n", b"\r"))
    ends = [data.find(end, position, position + half) for end in (b"\n", b"\r")]
    end = min((end for end in ends if end >= 0), default=position + half)
    return _readable(data[max(start, first) : end])


def _lines_before(data: bytes, position: int) -> list[str]:
    before = data[max(0, position - LINE_BYTES) : position].split(b"\n")[:-1]
    return [_readable(line) for line in before[-CONTEXT_LINES:]]


def _readable(line: bytes) -> str:
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    return _escapes.sub("", shown.decode("utf-8", "surrogateescape")).rstrip()


class NamesInLine(NamedTuple):
    """The names in a line, in order, and the line with a NUL in the place of each."""

    names: list[str]
    words: str

    @property
    def roles(self) -> _Roles | None:
        """What an operation on the two names of a pair does to each; None if it is unknown."""
        for pattern, roles in _PAIRS_OF_NAMES:
            if pattern.search(self.words):
                return roles
        return None

    @property
    def is_pair(self) -> bool:
        """Whether these are two names of one operation."""
        return len(self.names) == 2 and _pair(self.words) is not None


def find_names(line: str) -> NamesInLine:
    """Quoted names and absolute paths, without the program that reports the error."""
    line = _program_place("", line)
    found = [(*match.span(), _unquoted(match)) for match in _quoted(line)]
    ends = [end for _, end, _ in found]
    paths = [match for match in _absolute(line) if match.end() not in ends]
    program = next((match for match in paths if line[match.end() :][:1] == ":"), None)
    if program is not None and program.start() == 0 and (found or len(paths) > 1):
        paths.remove(program)
    found += [(*match.span(), match[0]) for match in paths]
    names: dict[str, None] = {}
    words, last = "", 0
    for start, end, name in sorted(found):
        if "://" not in name and find_error(name) is None:
            words += line[last:start] + "\0"
            names[name], last = None, max(last, end)
    return NamesInLine(list(names), words + line[last:])


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
        complaint = _complaint(part.rstrip())
        name = complaint[1] if complaint else part.strip()
        if name and _no_name(name) is None:
            return [name]
    return []


def names_above(context: list[str]) -> list[str]:
    """Names in the line above the reason, which some tools write in a line of its own."""
    for line in reversed(context):
        if _complaint(line):
            return find_names(line).names
    return []


def entered_directories(argv: Iterable[str], cwd: str) -> tuple[str, ...]:
    """The directories that a command line enters, by its words; the last ones."""
    text = "\n".join(argv)[:COMMAND_CHARACTERS]
    paths: list[str] = []
    for match in _enters(text):
        cwd = posixpath.normpath(posixpath.join(cwd, match[1]))
        paths.append(cwd)
    return tuple(dict.fromkeys(paths[-ENTERED_DIRECTORIES:]))


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
    network_rule: str | None = None,
    entered: tuple[str, ...] = (),
) -> Denial | None:
    """The denied operation, None if nothing is known to be denied; names are relative to `cwd`.

    `network_rule` is what has refused the network, None if it is not known to be refused. Names are
    also tried in the directories that the command has `entered`.
    The order: a refused network that ends the output, the first path that the policy denies, the
    network without a message, then the first other message of a failed command, without a rule.
    A path and a network without a message are candidates, unless the output ends with the path.
    """
    chunks = list(chunks)
    first: Denial | None = None
    explainer = _LineExplainer(explain, (*entered[::-1], cwd), is_offline=is_offline)
    network, ends_with_file = None, False
    if network_rule is not None:
        network, ends_with_file = _network_denial(chunks, explainer, lossy(network_rule))
        if network.text is not None:
            return network
    for line, context in islice(_error_lines(exit_code, chunks), CONSIDERED_LINES):
        denial = explainer.explain(line, context)
        if denial.rule is not None:
            if network is None or denial.operation == "network" or ends_with_file:
                return denial
            return _either(denial, network)
        if first is None and _is_denial_text(line):
            first = denial
    if network is not None:
        if first is not None and ends_with_file and exit_code != 0:
            return _either(first, network)
        return network
    if exit_code == _SIGSYS_EXIT:
        return Denial(first.text if first else None, None, "syscall", _FOREIGN_CALL)
    return first if exit_code != 0 else None


def _either(*denials: Denial) -> Denial:
    """The first of several denials, with all of them as candidates."""
    candidates = [each for denial in denials for each in denial.candidates or (denial,)]
    return msgspec.structs.replace(candidates[0], candidates=tuple(candidates))


def _is_denial_text(line: str) -> bool:
    """Whether `is_likely_denied` knows the phrase of an error line."""
    return find_error(line) is None or _mentions_denial(line.encode("utf-8", "surrogateescape"))


def _network_denial(
    chunks: list[OutputChunk], explainer: _LineExplainer, rule: str
) -> tuple[Denial, bool]:
    """The denial of a network call, with the line that reports it if the output ends with one.

    Also whether it ends with the denial of a file instead.
    """
    output = _text(chunks, "stderr") or _text(chunks, "pty")
    for line in reversed(last_messages(output, NETWORK_LINES)):
        error = find_error(line)
        number = None if error is None else error[1]
        if number in _CHANGES or explainer.denies_path(line):
            return Denial(None, None, "network", rule), True
        is_call = number == errno.EPERM and not find_names(line).names
        if number != errno.EACCES and (is_call or _reports_network(line)):
            return Denial(_shortened(_progress("", line)), None, "network", rule), False
    return Denial(None, None, "network", rule), False


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

    def __init__(self, explain: Explain, directories: tuple[str, ...], *, is_offline: bool) -> None:
        self._explain = explain
        self._directories = directories  # the likeliest first
        self._is_offline = is_offline

    def explain(self, line: str, context: list[str]) -> Denial:
        text = _shortened(line)
        position, number = find_error(line) or (0, None)
        found = find_names(line)
        if not found.names and number == errno.EPERM and self._is_about_network(line, context):
            return Denial(text, None, "network", NO_NETWORK)
        names = found.names or likely_names(line[:position]) or names_above(context)
        accesses = self._accesses(line, number, found._replace(names=names))
        denied = self._denied(text, number, accesses, is_pair=found.is_pair)
        if denied:
            return denied[0] if len(denied) == 1 else _either(*denied)
        if number == errno.EPERM and self._is_about_network(found.words, []):
            return Denial(text, None, "network", NO_NETWORK)
        is_changing = number in _CHANGES or _means_writing(line) is not None
        first = None
        for name, path, _ in accesses[:1]:
            # A relative name that the policy allows here is one of another directory; a refused
            # system call has no path.
            is_certain = name.startswith("/") or number not in (*_CHANGES, errno.EPERM)
            first = lossy(path) if is_certain else None
        return Denial(text, first, "write" if is_changing else None, None)

    def denies_path(self, line: str) -> bool:
        """Whether a line reports the denial of a path that the policy denies."""
        denial = self.explain(line, [])
        return denial.rule is not None and denial.path is not None

    def _accesses(
        self, line: str, number: int | None, found: NamesInLine
    ) -> list[tuple[str, str, _Operation]]:
        """The names, their paths and the operations on them, the likeliest first."""
        is_changing = number in _CHANGES or _means_writing(line) is not None
        operation: _Operation = "write" if is_changing else "read"
        names, roles = found.names[:CONSIDERED_NAMES], None
        if found.is_pair:
            roles = found.roles
            names = names if roles else names[::-1]
        operations = roles or (operation,) * len(names)
        return [
            (name, path, each)
            for name, each in zip(names, operations, strict=True)
            if each is not None and (each == "write" or number not in _CHANGES)
            for path in self._paths(name)
        ]

    def _paths(self, name: str) -> list[str]:
        if name.startswith("/"):
            return [posixpath.normpath(name)]
        return [posixpath.normpath(posixpath.join(each, name)) for each in self._directories]

    def _denied(
        self,
        text: str,
        number: int | None,
        accesses: list[tuple[str, str, _Operation]],
        *,
        is_pair: bool,
    ) -> list[Denial]:
        """The accesses that the policy denies."""
        denied: list[tuple[str, Denial]] = []
        for name, path, operation in accesses if number is not None else ():
            # Where only changes are denied, the kernel does not say EACCES: file modes do.
            rule = self._explain(path, "write" if number in _CHANGES else "read")
            if rule is not None:
                denied.append((name, Denial(text, lossy(path), operation, lossy(rule))))
        # A word in quotes may be no name; an absolute path is one.
        absolute = [] if is_pair else [each for name, each in denied if name.startswith("/")]
        return absolute or [each for _, each in denied]

    def _is_about_network(self, line: str, context: list[str]) -> bool:
        # A traceback has the call above the error.
        return self._is_offline and any(map(_means_network, (line, *context)))


def _shortened(line: str) -> str:
    return lossy(line.strip()[:TEXT_CHARACTERS])
