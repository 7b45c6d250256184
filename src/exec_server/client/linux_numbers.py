"""Numbers of Linux, the system of servers, where other systems have other ones. Pure."""

from __future__ import annotations

import errno
from typing import Final, NamedTuple


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
