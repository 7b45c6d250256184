"""Calls of the Linux C library that Python does not offer."""

from __future__ import annotations

import ctypes
import grp
import itertools
import os
import pwd
import signal
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from exec_server.errors import InvalidParams

_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_SYS_CLOSE_RANGE = 436  # on every architecture
_CLOSE_RANGE_CLOEXEC = 4
_USUAL_OPEN_MAX = 65_536
_SFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_SIGSET_BYTES = 128  # sizeof(sigset_t) in both glibc and musl
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# Freed memory that is kept for the next request. By default glibc returns the few megabytes of
# a file block to the kernel after each block and gets them zero-filled for the next one.
KEPT_BYTES = 8 * 1_048_576
# Larger allocations are mapped, and unmapped when freed.
MMAP_THRESHOLD_BYTES = 4 * 1_048_576

# The C library of the interpreter itself. A call through it releases the GIL.
LIBC = ctypes.CDLL(None, use_errno=True)
_HAS_GLIBC = hasattr(LIBC, "gnu_get_libc_version")
LIBC.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]

ENDING: Final = (signal.SIGTERM, signal.SIGINT)
# The signals with an action, once there is an event loop.
HANDLED: Final = (*ENDING, signal.SIGHUP)
# By default each of these ends a process. Operators send some of them to programs that reopen logs
# or print statistics on them.
UNUSED: Final = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
    *(signal.SIGIO, signal.SIGPWR, signal.SIGSTKFLT),
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)


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


if _HAS_GLIBC:
    LIBC.malloc_trim.argtypes = [ctypes.c_size_t]


def checked(result: int) -> int:
    """The result of a call; raises the OSError of one below 0."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _prctl(option: int, value: int) -> None:
    checked(LIBC.prctl(option, value, 0, 0, 0))


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of the machine's init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory, from one heap for all threads; a no-op elsewhere."""
    if _HAS_GLIBC:
        LIBC.mallopt(_M_ARENA_MAX, 1)
        LIBC.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        LIBC.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def return_freed_memory() -> None:
    """Return free memory to the kernel, also between used blocks; KEPT_BYTES remain at the end."""
    if _HAS_GLIBC:
        LIBC.malloc_trim(KEPT_BYTES)


def name_process(name: bytes) -> None:
    """Set the name of this process for ps and pkill; the kernel keeps 15 bytes."""
    buffer = ctypes.create_string_buffer(name)
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def hide_memory() -> None:
    """Deny processes of the same user to trace this one, and its memory, environment and
    descriptors in /proc. Forked processes inherit that; exec ends it.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def show_memory() -> None:
    """Undo `hide_memory`: the kernel gives files in /proc of a hidden process to root."""
    _prctl(_PR_SET_DUMPABLE, 1)


def erase_environment_values(names: Collection[str]) -> None:
    """Overwrite the values of variables, in any case, in the environment block of this process.

    The kernel shows that block in /proc/PID/environ, also the variables that were removed from
    os.environ. The copies in os.environ remain until they are deleted there.
    """
    block = ctypes.POINTER(ctypes.c_void_p).in_dll(LIBC, "environ")
    for address in itertools.takewhile(bool, (block[index] for index in itertools.count())):
        name, equals, value = ctypes.string_at(address).partition(b"=")
        if equals and os.fsdecode(name).upper() in names:
            ctypes.memset(address + len(name) + 1, 0, len(value))


def erase_argument(text: str) -> bool:
    """Overwrite a text in /proc/PID/cmdline, not in sys.argv; returns whether it was found."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # from the third one on
    except OSError:
        return False
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    secret = os.fsencode(text)
    is_found = False
    while (offset := ctypes.string_at(start, end - start).find(secret)) >= 0:
        ctypes.memset(start + offset, ord("*"), len(secret))
        is_found = True
    return is_found


def sigset(numbers: set[int]) -> ctypes.Array[ctypes.c_char]:
    """A C sigset_t."""
    bits = sum(1 << (number - 1) for number in numbers)
    return ctypes.create_string_buffer(bits.to_bytes(_SIGSET_BYTES, "little"), _SIGSET_BYTES)


def child_signal_descriptor() -> int:
    """Block SIGCHLD and return a descriptor that reports it; before other threads exist."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    return checked(LIBC.signalfd(-1, sigset({signal.SIGCHLD}), _SFD_FLAGS))


def exit_code(status: int) -> int:
    """The exit code on the wire: 128 plus the number for a death by signal."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def close_inherited_descriptors_on_exec() -> None:
    """Mark descriptors inherited from the parent close-on-exec, so that no child gets them."""
    if LIBC.syscall(_SYS_CLOSE_RANGE, 3, ctypes.c_uint(-1), _CLOSE_RANGE_CLOEXEC) == 0:
        return
    # A kernel before 5.11, or an outer filter that refuses the call.
    for descriptor in _possible_descriptors():
        try:
            os.set_inheritable(descriptor, False)
        except OSError:
            pass  # not open


def _possible_descriptors() -> Iterable[int]:
    """Numbers above 2 that may be open; all that a usual limit allows if there is no /proc."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    except OSError:
        return range(3, min(os.sysconf("SC_OPEN_MAX"), _USUAL_OPEN_MAX))


def ignore_unused() -> None:
    """Ignore the UNUSED signals, except those that a profiler handles. Children inherit this."""
    for number in UNUSED:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


def block_handled() -> None:
    """Hold the HANDLED signals back until there are handlers, which unblock them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


# Other users of this machine, for a server with the rights of root.
#
# Linux has credentials per thread, but the C library changes those of all threads at once. So
# `acting_as` makes the system calls itself: the thread gets the groups and the effective ids of
# the user, which are those of its file operations too, and the kernel takes all its capabilities
# away. The file system ids alone would not do: `/proc/sys` asks for the effective id, and
# `/proc/PID` for a capability that stays. The real and saved ids stay, so that the user can
# neither signal nor trace the thread.
class User(NamedTuple):
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
