"""Calls of the Linux C library that Python does not offer."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_SFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_SIGSET_BYTES = 128  # sizeof(sigset_t) in both glibc and musl
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# Freed memory that is kept for the next request. Left to itself, glibc gives the few megabytes
# that a block of a file takes back to the kernel after each block and has them filled with zeros
# for the next one, which takes longer than all else that is done with a block.
KEPT_BYTES = 8 * 1_048_576
# Larger pieces come from the kernel and go back there at once.
PIECE_BYTES = 4 * 1_048_576

# Loaded with the interpreter itself. A call through it releases the GIL.
LIBC = ctypes.CDLL(None, use_errno=True)
_HAS_GLIBC = hasattr(LIBC, "gnu_get_libc_version")
if _HAS_GLIBC:
    LIBC.malloc_trim.argtypes = [ctypes.c_size_t]
LIBC.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def _prctl(option: int, value: int) -> int:
    result: int = LIBC.prctl(option, value, 0, 0, 0)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of the machine's init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def keep_freed_memory() -> None:
    """Use again what is freed, from one heap for all threads; other C libraries have their way."""
    if _HAS_GLIBC:
        LIBC.mallopt(_M_ARENA_MAX, 1)
        LIBC.mallopt(_M_MMAP_THRESHOLD, PIECE_BYTES)
        LIBC.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def return_freed_memory() -> None:
    """Give the kernel what is free between pieces in use too, all but what is kept at the end."""
    if _HAS_GLIBC:
        LIBC.malloc_trim(KEPT_BYTES)


def name_process(name: bytes) -> None:
    """Set the name that ps and pkill know this process by; at most 15 bytes count."""
    buffer = ctypes.create_string_buffer(name)
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def hide_memory() -> None:
    """Keep processes of the same user out of this one's memory and environment in /proc."""
    _prctl(_PR_SET_DUMPABLE, 0)


def sigset(numbers: set[int]) -> ctypes.Array[ctypes.c_char]:
    """A C sigset_t."""
    bits = sum(1 << (number - 1) for number in numbers)
    return ctypes.create_string_buffer(bits.to_bytes(_SIGSET_BYTES, "little"), _SIGSET_BYTES)


def child_signal_descriptor() -> int:
    """Block SIGCHLD and return a descriptor that becomes readable when a child changes state.

    Must be called before other threads exist, since each thread has its own signal mask.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    descriptor: int = LIBC.signalfd(-1, sigset({signal.SIGCHLD}), _SFD_FLAGS)
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


def exit_code(status: int) -> int:
    """The exit code on the wire: 128 plus the number for a death by signal."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def close_inherited_descriptors_on_exec() -> None:
    """Mark what our own starter left open, so that no child of ours inherits it."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2:
            try:
                os.set_inheritable(descriptor, False)
            except OSError:
                pass  # the descriptor of the listing itself


def open_missing_standard_descriptors() -> None:
    """Fill 0, 1 and 2 with /dev/null, lest a pipe gets one of these numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
