"""Other users of this machine, for a server with the rights of root.

Linux has credentials per thread, but the C library changes those of all threads at once. So
`acting_as` makes the system calls itself: the thread gets the groups and the effective ids of the
user, which are those of its file operations too, and the kernel takes all its capabilities away.
The file system ids alone would not do: `/proc/sys` asks for the effective id, and `/proc/PID` for a
capability that stays. The real and saved ids stay, so that the user can neither signal nor trace
the thread.
"""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from exec_server.errors import InvalidParams
from exec_server.host.libc import LIBC, checked

# setgroups(2), setresuid(2), setresgid(2).
_CALLS: Final = {
    "x86_64": (116, 117, 119),
    "aarch64": (159, 147, 149),
    "riscv64": (159, 147, 149),
}.get(os.uname().machine)
_UNCHANGED: Final = 0xFFFF_FFFF
_CAP_SETGID: Final = 6
_CAP_SETUID: Final = 7
# A name of a user, far longer than those of real users; longer ones are refused unseen.
NAME_CHARACTERS: Final = 256


class User(msgspec.Struct, frozen=True):
    """A user of the machine, with all its groups."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


def can_switch(status_file: str = "/proc/thread-self/status") -> bool:
    """Whether this process may act as other users."""
    if os.geteuid() != 0 or _CALLS is None:
        return False
    try:
        with open(status_file, encoding="ascii", errors="replace") as file:
            effective = next(line for line in file if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return False
    capabilities = int(effective.split()[1], 16)
    return all(capabilities >> number & 1 for number in (_CAP_SETGID, _CAP_SETUID))


def find_user(text: str) -> User:
    """The user with a name or a number; raises InvalidParams. May block."""
    entry = None
    if 0 < len(text) <= NAME_CHARACTERS and "\0" not in text:
        try:
            is_number = text.isascii() and text.isdecimal()
            entry = pwd.getpwuid(int(text)) if is_number else pwd.getpwnam(text)
        except (KeyError, OverflowError):
            pass
    if entry is None:
        raise InvalidParams(f"unknown user {text[:NAME_CHARACTERS]}")
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    shell = entry.pw_shell or "/bin/sh"
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir, shell)


@contextmanager
def acting_as(user: User) -> Iterator[None]:
    """Make the file operations of this thread those of the user, inside the `with`.

    A thread that is started meanwhile would inherit the ids, and a program would not.
    """
    assert _CALLS is not None
    set_groups, set_user, set_group = _CALLS
    before, uid, gid = os.getgroups(), os.geteuid(), os.getegid()
    _call(set_groups, len(user.groups), _array(user.groups))
    try:
        _call(set_group, _UNCHANGED, user.gid, _UNCHANGED)
        _call(set_user, _UNCHANGED, user.uid, _UNCHANGED)
        yield
    finally:
        # A thread that stayed another user would fail, or succeed, for other requests. The user is
        # first: the capabilities for the rest come back with it.
        try:
            _call(set_user, _UNCHANGED, uid, _UNCHANGED)
            _call(set_group, _UNCHANGED, gid, _UNCHANGED)
            _call(set_groups, len(before), _array(before))
        except OSError:
            os.abort()


def become(user: User) -> None:
    """Make this process one of the user, for good; only for a process with one thread."""
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)


def own_terminal(descriptor: int, user: User) -> None:
    """Give a terminal to the user, as login does."""
    try:
        group = grp.getgrnam("tty").gr_gid
    except KeyError:
        group = user.gid
    os.fchown(descriptor, user.uid, group)
    os.fchmod(descriptor, 0o620)


def _array(groups: Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(groups))(*groups)


def _call(number: int, *arguments: int | ctypes.Array[ctypes.c_uint32]) -> None:
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    checked(LIBC.syscall(ctypes.c_long(number), *words))
