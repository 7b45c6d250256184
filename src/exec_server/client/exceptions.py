"""Exceptions about files, commands, sandboxes, ports and transfers, with their results."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

import msgspec

from exec_server import errors
from exec_server.client.arguments import AnyPath, path_text
from exec_server.client.results import Result, ShellResult, Transfer
from exec_server.errors import ExecServerError, RpcError, printable
from exec_server.protocol.sandbox import Denial

_IS_A_DIRECTORY: Final = errors.InternalError("Is a directory (os error 21)")
_NOT_FOUND: Final = errors.NotFound("No such file or directory (os error 2)")
_ALREADY_EXISTS: Final = errors.InternalError("File exists (os error 17)")
# Refusals that name methods and members of the protocol, in the words of the client.
_IS_DIRECTORY: Final = "it is a directory: pass recursive=True"
_REFUSALS: Final = {
    "fs/copy requires recursive: true when sourcePath is a directory": _IS_DIRECTORY,
    "fs/copy only supports regular files, directories, and symlinks": (
        "only files, directories and links can be copied"
    ),
    "fs/copy cannot copy a directory to itself or one of its descendants": (
        "a directory cannot be copied to itself or to a place below it"
    ),
}
# The ends of texts about what is no regular file, which servers send without a number.
_NOT_A_FILE: Final = ("is not a file", "is not a regular file")
_NUMBER: Final = re.compile(r" ?\(os error (\d{1,4})\)$")

# Of the end of stderr in the text of an exception: enough for the message of a compiler or of a
# traceback, and not for a log.
STDERR_LINES: Final = 10
STDERR_CHARACTERS: Final = 1000

# Errors of the operating system that a sandbox causes: EPERM, EACCES, EROFS.
_DENIALS: Final = ("(os error 1)", "(os error 13)", "(os error 30)")


# Numbers of Linux, the system of servers, where other systems have other ones. Pure.
class _Error(NamedTuple):
    name: str
    text: str  # of strerror in glibc


# The errors of file operations, and of listening. Below 35 the numbers are the same everywhere,
# except for 11.
ERRORS: Final = {
    1: _Error("EPERM", "Operation not permitted"),
    2: _Error("ENOENT", "No such file or directory"),
    11: _Error("EAGAIN", "Resource temporarily unavailable"),
    13: _Error("EACCES", "Permission denied"),
    16: _Error("EBUSY", "Device or resource busy"),
    17: _Error("EEXIST", "File exists"),
    18: _Error("EXDEV", "Invalid cross-device link"),
    20: _Error("ENOTDIR", "Not a directory"),
    21: _Error("EISDIR", "Is a directory"),
    22: _Error("EINVAL", "Invalid argument"),
    27: _Error("EFBIG", "File too large"),
    28: _Error("ENOSPC", "No space left on device"),
    30: _Error("EROFS", "Read-only file system"),
    36: _Error("ENAMETOOLONG", "File name too long"),
    38: _Error("ENOSYS", "Function not implemented"),
    39: _Error("ENOTEMPTY", "Directory not empty"),
    40: _Error("ELOOP", "Too many levels of symbolic links"),
    75: _Error("EOVERFLOW", "Value too large for defined data type"),
    95: _Error("EOPNOTSUPP", "Operation not supported"),
    98: _Error("EADDRINUSE", "Address already in use"),
    99: _Error("EADDRNOTAVAIL", "Cannot assign requested address"),
    110: _Error("ETIMEDOUT", "Connection timed out"),
    116: _Error("ESTALE", "Stale file handle"),
    122: _Error("EDQUOT", "Disk quota exceeded"),
}

# The signals with the numbers of x86-64 and ARM, which nearly all machines have.
SIGNALS: Final = dict(
    enumerate(
        (
            *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1"),
            *("SEGV", "USR2", "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP"),
            *("TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR"),
            "SYS",
        ),
        start=1,
    )
)


def local_number(number: int) -> int:
    """The number that this system has for an error of Linux; the same one if it has none."""
    error = ERRORS.get(number)
    return number if error is None else getattr(errno, error.name, number)


def number_of_text(text: str) -> int | None:
    """The number of an error of Linux by its text in the C locale."""
    return next((number for number, error in ERRORS.items() if error.text == text), None)


# Servers end their texts with the number of the operating system: `(os error 13)`.
class FileError(RpcError, OSError):
    """A file operation failed; `strerror` is the text of the server's machine."""

    filename: str
    filename2: str | None

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @classmethod
    def from_rpc(
        cls, error: RpcError, number: int | None, path: str, target: str | None = None
    ) -> Self:
        """The error of an operation on `path`, or from it to `target`."""
        result = cls(f"{_names(path, target)}: {error.message}")
        result.code = error.code
        result.data = error.data
        result.errno = number
        result.strerror = _NUMBER.sub("", error.message).strip()
        result.filename = path
        result.filename2 = target
        return result

    def explained(self, message: str) -> Self:
        error = super().explained(message)
        error.errno, error.strerror = self.errno, self.strerror
        error.filename, error.filename2 = self.filename, self.filename2
        return error

    def __str__(self) -> str:
        return printable(self.message, keep="\n")

    def __reduce__(self) -> tuple[Callable[..., FileError], tuple[object, ...]]:
        names = (self.filename, self.filename2)
        members = (self.code, self.data, self.errno, self.strerror, *names)
        return _restored, (type(self), self.message, members)


def _restored(kind: type[FileError], message: str, members: tuple[Any, ...]) -> FileError:
    """The copy of a pickled error."""
    error = kind(message)
    error.code, error.data, error.errno, error.strerror, error.filename, error.filename2 = members
    return error


def _names(path: str, target: str | None) -> str:
    return path if target is None else f"{path} to {target}"


class NotFound(errors.NotFound, FileError, FileNotFoundError):
    """A file or directory does not exist."""


class ProgramNotFound(errors.ProgramNotFound, NotFound):
    """A command cannot be started: its program does not exist."""


class WorkingDirectoryNotFound(errors.InternalError, NotFound):
    """A command cannot be started: its directory does not exist."""


class PermissionDenied(FileError, PermissionError):
    """The server's user may not do this."""


class AlreadyExists(FileError, FileExistsError):
    """There is an entry with this name."""


class NotADirectory(FileError, NotADirectoryError):
    """A directory is needed, and the path leads to something else."""


class IsADirectory(FileError, IsADirectoryError):
    """A file is needed, and the path leads to a directory."""


class NotAFile(errors.InvalidRequest, FileError):
    """A regular file is needed, and the path leads to a FIFO, a socket or a device."""


class NotEmpty(FileError):
    """A directory with entries cannot be removed or replaced."""


class NoSpace(FileError):
    """The disk is full, or the quota of the user is used up."""


class ReadOnly(FileError):
    """The file system is read-only."""


class NameTooLong(FileError):
    """A name or a path is too long for the file system."""


class LinkLoop(FileError):
    """Too many symbolic links, or links in a loop."""


class CrossDevice(FileError):
    """An entry cannot be renamed to another file system."""


class Busy(FileError):
    """The file or directory is in use, for example as a mount point."""


_KINDS: Final[dict[int, type[FileError]]] = {
    errno.ENOENT: NotFound,
    errno.EPERM: PermissionDenied,
    errno.EACCES: PermissionDenied,
    errno.EEXIST: AlreadyExists,
    errno.ENOTDIR: NotADirectory,
    errno.EISDIR: IsADirectory,
    errno.ENOTEMPTY: NotEmpty,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EROFS: ReadOnly,
    errno.ENAMETOOLONG: NameTooLong,
    errno.ELOOP: LinkLoop,
    errno.EXDEV: CrossDevice,
    errno.EBUSY: Busy,
}


def error_number(message: str) -> int | None:
    """The number of the error in a server's text, as this system counts."""
    match = _NUMBER.search(message)
    return None if match is None else local_number(int(match[1]))


# By the `reason` in the `data` of the error.
_CHANGE_ERRORS: Final[dict[object, type[RpcError]]] = {
    kind.reason: kind
    for kind in (errors.PatchDoesNotApply, errors.EditNotFound, errors.EditAmbiguous)
}


def _change_error(error: RpcError) -> RpcError:
    """The error of its own class, if an edit or a patch does not fit."""
    reason = error.data.get("reason") if isinstance(error.data, dict) else None
    kind = _CHANGE_ERRORS.get(reason) if isinstance(reason, str) else None
    if kind is None:
        return error
    result = kind(error.message)
    result.code, result.data = error.code, error.data
    return result


def file_error(error: RpcError, path: str, target: str | None = None) -> RpcError:
    """The error with the paths in its text, of the class that fits its number or reason."""
    error = _change_error(error)
    number = error_number(error.message)
    if number is None and type(error) is errors.NotFound:
        number = errno.ENOENT
    if error.message in _REFUSALS:
        error = error.explained(_REFUSALS[error.message])
        if error.message == _IS_DIRECTORY:
            return IsADirectory.from_rpc(error, errno.EISDIR, path, target)
    if number is None and error.message.endswith(_NOT_A_FILE):
        plain = error.explained("not a regular file")
        return NotAFile.from_rpc(plain, errno.EINVAL, path, target)
    kind = FileError if number is None else _KINDS.get(number, FileError)
    if number is None:
        return error.explained(f"{_names(path, target)}: {error.message}")
    return kind.from_rpc(error, number, path, target)


def command_error(text: str) -> RpcError:
    """The error of a command that printed a text of strerror, in the C locale."""
    number = number_of_text(text)
    return errors.InternalError(text if number is None else f"{text} (os error {number})")


def is_a_directory(path: str) -> IsADirectory:
    """The error of reading a directory, which servers report without a number."""
    return IsADirectory.from_rpc(_IS_A_DIRECTORY, errno.EISDIR, path)


def already_exists(path: str) -> AlreadyExists:
    """The error of creating a path that the client has found to exist."""
    return AlreadyExists.from_rpc(_ALREADY_EXISTS, errno.EEXIST, path)


def not_found(path: str) -> NotFound:
    """The error of a path that the client has found to be missing."""
    return NotFound.from_rpc(_NOT_FOUND, errno.ENOENT, path)


class SandboxDenied(ExecServerError, PermissionError):
    """An operation failed, probably because of its sandbox.

    `denial` is the server's account of it, or None. The text has its path and its rule. `errno` is
    EACCES or EPERM, also where the kernel reported a read-only file system.
    """

    def __init__(self, text: str, denial: Denial | None = None, number: int = errno.EACCES) -> None:
        super().__init__(text)
        self.denial = denial
        self.errno = number
        self.strerror = "denied by the sandbox"
        self.filename = None if denial is None else denial.path

    def __reduce__(self) -> tuple[Callable[..., SandboxDenied], tuple[object, ...]]:
        return type(self), (self.args[0], self.denial, self.errno)

    def __str__(self) -> str:
        text: str = self.args[0]
        account = denial_account(self.denial, text)
        return printable(f"{_NUMBER.sub('', text)}{account}" if account else text, keep="\n")


class CommandFailed(ExecServerError):
    """A command run with `check` had an exit code other than 0; see `result`.

    The text has the end of its stderr, and not its arguments, which may contain secrets.
    """

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return printable(f"{self._summary()}{_end_of(self.result.stderr)}", keep="\n")

    def _summary(self) -> str:
        return f"{self.result.argv[0]} ended with exit code {self.result.exit_code}"


class CommandDenied(CommandFailed, SandboxDenied):
    """A checked command failed, probably because of its sandbox."""

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.denial = result.sandbox_denial
        self.filename = None if self.denial is None else self.denial.path

    def __reduce__(self) -> tuple[Callable[..., SandboxDenied], tuple[object, ...]]:
        return type(self), (self.result,)

    def _summary(self) -> str:
        return f"{super()._summary()}: denied by its sandbox{denial_account(self.denial)}"


def denial_account(denial: Denial | None, text: str = "") -> str:
    """The path, unless the text has it, and the rule of a denial, as far as they are known.

    In one line: the output of the command may be the source of the path.
    """
    if denial is None:
        return ""
    known = [
        each for each in (_known(each, text) for each in denial.candidates or (denial,)) if each
    ]
    which = "one of: " if len(known) > 1 else ""
    return f" ({which}{'; '.join(known)})" if known else ""


def _known(denial: Denial, text: str) -> str:
    has_path = denial.path is not None and denial.path not in text
    place = f"{denial.operation or 'access'} {denial.path}" if has_path else None
    if not has_path and denial.rule is None and denial.operation is not None and not text:
        place = f"a {denial.operation}"
    return ": ".join(printable(part) for part in (place, denial.rule) if part)


def _end_of(stderr: bytes) -> str:
    """The last lines of stderr, below the text of an exception."""
    text = stderr[-4 * STDERR_CHARACTERS :].decode("utf-8", "replace").rstrip()
    lines = text[-STDERR_CHARACTERS:].split("\n")[-STDERR_LINES:]
    if len(stderr) > 4 * STDERR_CHARACTERS or "\n".join(lines) != text:
        lines.insert(0, "…")
    return "".join(f"\n  {line}" for line in lines) if text else ""


class Timeout(ExecServerError, TimeoutError):
    """A command was killed after its timeout; `result` has its output so far.

    If `was_sent` is false, the server could not be reached in this time, and nothing runs. If
    `is_killed` is false, the end was not reported: the server does not answer. It kills the command
    when it gets the request, or gives up the session.
    """

    def __init__(
        self, seconds: float, result: Result, *, is_killed: bool = True, was_sent: bool = True
    ) -> None:
        super().__init__(seconds, result)
        self.seconds = seconds
        self.result = result
        self.is_killed = is_killed
        self.was_sent = was_sent

    def __str__(self) -> str:
        name = self.result.argv[0]
        if isinstance(self.result, ShellResult):
            name = f"the command of {name}"
        if not self.was_sent:
            return (
                f"{name} was not sent within {self.seconds:g} s, because there is no connection "
                "to the server; nothing runs"
            )
        text = f"{name} did not end within {self.seconds:g} s"
        if isinstance(self.result, ShellResult):
            if not self.result.shell_ended:
                return f"{text} and was interrupted"
            if self.is_killed:
                return f"{text} and was killed with its shell: the next one has none of its state"
        elif self.is_killed:
            return f"{text} and was killed"
        text += "; it may still run, because the server did not report its end"
        if isinstance(self.result, ShellResult):
            return f"{text}: the next command gets a new shell with none of its state"
        return text


class PortError(RpcError, OSError):
    """The server cannot listen on a port; `errno` is EADDRINUSE if another program does."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = error_number(message)
        self.strerror = _NUMBER.sub("", message).rpartition(": ")[2]

    def __str__(self) -> str:
        return printable(self.message, keep="\n")


class PatternNotFound(ExecServerError, EOFError):
    """The output of a process ended without a pattern, or was too long; see `output`.

    The output stays unread.
    """

    def __init__(self, pattern: object, output: bytes, *, is_over: bool) -> None:
        super().__init__(pattern, output)
        self.pattern = pattern
        self.output = output
        self._is_over = is_over

    def __str__(self) -> str:
        # Without the output, which may contain secrets.
        if self._is_over:
            return f"the output ended without {self.pattern!r}"
        return f"{len(self.output)} bytes of output are without {self.pattern!r}"


class NotAllCopied(ExecServerError):
    """Parts of a tree could not be copied; `transfer.failed` has each with its error."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        self.transfer = transfer

    def __str__(self) -> str:
        first, *others = self.transfer.failed
        more = f", and {len(others)} more" if others else ""
        return f"not everything was copied: {first.error}{more}"


def path_error(
    error: RpcError, path: AnyPath, *, is_confined: bool, target: AnyPath | None = None
) -> ExecServerError:
    """The error with the paths in its text, a FileError; SandboxDenied if the sandbox caused it."""
    name = path_text(path)
    to = None if target is None else path_text(target)
    text = f"{name}: {error.message}" if to is None else f"{name} to {to}: {error.message}"
    denial = _denial(error)
    if denial is not None or (is_confined and error.message.endswith(_DENIALS)):
        is_eperm = error_number(error.message) == errno.EPERM
        return SandboxDenied(text, denial, errno.EPERM if is_eperm else errno.EACCES)
    return file_error(error, name, to)


def _denial(error: RpcError) -> Denial | None:
    """The server's account of a denial, if it can be decoded."""
    data = error.data.get("sandboxDenial") if isinstance(error.data, dict) else None
    if not isinstance(data, dict):
        return None
    try:
        # A file operation has no output, and so no line of it that reports the denial.
        return msgspec.convert({"text": None, **data}, Denial)
    except msgspec.ValidationError:
        return None
