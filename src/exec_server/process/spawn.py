"""Starts a Command on pipes or a terminal. Blocking, so it runs in a thread.

posix_spawn is called through ctypes instead of `os.posix_spawn`, which holds the GIL until the
program is loaded and cannot set the child's working directory. subprocess forks while holding
the GIL. The child leads a session of its own, so its pid is also its group and session id.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import termios
from collections.abc import Callable
from typing import Protocol

import msgspec

from exec_server.errors import InternalError
from exec_server.host import libc
from exec_server.process import tags
from exec_server.process.command import STATE_DESCRIPTOR, Command, candidates
from exec_server.process.orphans import Owner
from exec_server.protocol.process import Stream

_SPAWN_SETSIGDEF = 0x04
_SPAWN_SETSIGMASK = 0x08
_SPAWN_SETSID = 0x80
_OPAQUE_BYTES = 512  # larger than posix_spawnattr_t (336 in glibc), posix_spawn_file_actions_t
_TIOCSIG = 0x40045436  # has no name in the termios module
# All 64, including the two that the C library reserves and would otherwise leave ignored.
_ALL_SIGNALS = libc.sigset(set(range(1, 65)))
_NO_SIGNALS = libc.sigset(set())
_ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_SKIPPED_IN_SEARCH = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES})

_C = libc.LIBC
_C.posix_spawn_file_actions_addchdir_np.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_C.posix_spawn_file_actions_addopen.argtypes = [
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_uint,
]


def _attributes(flags: int) -> ctypes.Array[ctypes.c_char]:
    """Attributes for posix_spawn: default actions of all signals, none of them blocked."""
    attributes = ctypes.create_string_buffer(_OPAQUE_BYTES)
    _C.posix_spawnattr_init(attributes)
    flags |= _SPAWN_SETSIGDEF | _SPAWN_SETSIGMASK
    _C.posix_spawnattr_setflags(attributes, ctypes.c_short(flags))
    _C.posix_spawnattr_setsigdefault(attributes, _ALL_SIGNALS)
    _C.posix_spawnattr_setsigmask(attributes, _NO_SIGNALS)
    return attributes


# Made once: posix_spawn only reads them, in several threads at a time.
_OWN_SESSION = _attributes(_SPAWN_SETSID)
_SAME_SESSION = _attributes(0)


class ExitReport(Protocol):
    """A socket on which the exit of a child is reported, before the kernel reports it."""

    @property
    def is_at_end(self) -> bool:
        """Whether nothing more will be reported."""
        ...

    def fileno(self) -> int: ...

    def read(self) -> int | None:
        """The exit code if it is reported now; does not block."""
        ...


class Child(msgspec.Struct, frozen=True):
    """A started child and the server's ends of its streams, which the owner of the Child closes."""

    pid: int
    stdin: int | None
    outputs: tuple[tuple[Stream, int], ...]
    clean_up: Callable[[], None] | None = None  # called once, in any thread, after the exit
    listeners: tuple[int, ...] = ()  # sockets that listen on `Command.proxy_ports`
    exit_report: ExitReport | None = None  # stays open until the exit is published


class Streams(msgspec.Struct):
    """Descriptors opened for one start: the ends of the server and those of the child."""

    server_ends: list[int]
    child_ends: list[int]
    stdin: int | None
    outputs: tuple[tuple[Stream, int], ...]
    actions: list[tuple[int, int | bytes]]  # child descriptor; source to dup2 or path to open
    own_session: bool = True
    shell_state: int | None = None  # a file with `Command.shell_state`; among the actions too

    @classmethod
    def open(cls, command: Command) -> Streams:
        """Open a terminal or pipes for the command; the server's ends are non-blocking."""
        if command.tty:
            streams = _terminal(*command.tty_size)
        else:
            streams = _pipes(with_stdin=command.pipe_stdin, merge=command.merge_stderr)
        for descriptor in streams.server_ends:
            os.set_blocking(descriptor, False)
        if command.shell_state is not None:
            try:
                streams.shell_state = _sealed_file(command.shell_state)
            except OSError:
                streams.release(started=False)
                raise
            streams.actions.append((STATE_DESCRIPTOR, streams.shell_state))
        return streams

    @classmethod
    def inherited(cls, shell_state: int | None = None) -> Streams:
        """No descriptors: the child inherits the standard streams, the session and a state."""
        actions: list[tuple[int, int | bytes]] = []
        if shell_state is not None:
            actions.append((STATE_DESCRIPTOR, shell_state))
        return cls([], [], None, (), actions, own_session=False)

    def release(self, *, started: bool) -> None:
        """Close the child's ends, and the server's ends too if no child was started."""
        for descriptor in self.child_ends if started else self.child_ends + self.server_ends:
            os.close(descriptor)
        if self.shell_state is not None:
            os.close(self.shell_state)


def _sealed_file(content: bytes) -> int:
    """A file in memory that nothing can change."""
    descriptor = os.memfd_create("shell-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _ALL_SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def spawn(command: Command, owner: Owner) -> Child:
    """Start a command with a tag, which its owner gets; returns once its program runs.

    Raises OSError if the kernel refuses the start and InternalError if argv or environment cannot
    be passed to it. Only the descriptors of the returned Child are left open.
    """
    argv, env = encode(command)
    paths = candidates(command)
    check_directory(command.cwd)
    streams = Streams.open(command)
    started = False
    try:
        with tags.Tagged() as owner.tag:
            pid = spawn_first(paths, argv, env, command.cwd, streams)
        started = True
        tags.tag_running(pid, owner.tag)
    finally:
        streams.release(started=started)
    return Child(pid, streams.stdin, streams.outputs)


def encode(command: Command) -> tuple[list[bytes], list[bytes]]:
    """Encode argv and environment for the kernel."""
    words = list(command.argv)
    if command.arg0 is not None:
        words[0] = command.arg0
    if any("\0" in word for word in (command.argv[0], *words)):
        raise InternalError("nul byte found in provided data")
    env = []
    for name, value in command.env.items():
        if "\0" in name or ("\0" in value and command.tty):
            raise InternalError("nul byte found in provided data")
        if "\0" in value:
            raise InternalError("data provided contains a nul byte")
        env.append(os.fsencode(f"{name}={value}"))
    return [os.fsencode(word) for word in words], env


def check_directory(path: str) -> None:
    """Raise OSError unless a directory: posix_spawn cannot tell it from a missing program."""
    if not os.path.isdir(path):
        os.stat(path)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _pipes(*, with_stdin: bool, merge: bool) -> Streams:
    """Two output pipes, or one to `merge` both; and one for stdin if the client will write."""
    streams = Streams([], [], None, (), [])
    try:
        if with_stdin:
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            streams.server_ends.append(write_end)
            streams.child_ends.append(read_end)
            streams.stdin = write_end
            streams.actions.append((0, read_end))
        else:
            streams.actions.append((0, os.devnull.encode()))
        outputs: list[tuple[Stream, int]] = []
        labels: tuple[Stream, ...] = ("stdout",) if merge else ("stdout", "stderr")
        for number, stream in enumerate(labels, start=1):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            streams.server_ends.append(read_end)
            streams.child_ends.append(write_end)
            outputs.append((stream, read_end))
            streams.actions.append((number, write_end))
        if merge:
            streams.actions.append((2, write_end))
        streams.outputs = tuple(outputs)
    except OSError:
        for descriptor in streams.server_ends + streams.child_ends:
            os.close(descriptor)
        raise
    return streams


def resize_terminal(master: int, rows: int, columns: int) -> None:
    """Set the size of a terminal; on a change the kernel sends SIGWINCH to its foreground group."""
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def signal_foreground(master: int, number: int) -> None:
    """Send SIGINT, SIGQUIT or SIGTSTP to the foreground group, as the key of a terminal does."""
    # TIOCSIG is atomic: a group found with tcgetpgrp could change before killpg.
    fcntl.ioctl(master, _TIOCSIG, number)


def _terminal(rows: int, columns: int) -> Streams:
    """A terminal.

    The first one that a session leader opens becomes its controlling terminal, so the child opens
    the slave by name.
    """
    master, slave = os.openpty()
    try:
        resize_terminal(master, rows, columns)
        name = os.fsencode(os.ttyname(slave))
    except OSError:
        os.close(master)
        os.close(slave)
        raise
    actions: list[tuple[int, int | bytes]] = [(0, name), (1, 0), (2, 0)]
    return Streams([master], [slave], master, (("pty", master),), actions)


def spawn_first(
    paths: list[str], argv: list[bytes], env: list[bytes], cwd: str, streams: Streams
) -> int:
    """Start the first path that the kernel accepts; raises OSError as execvp would."""
    error_number = errno.ENOENT
    for path in paths:
        if len(paths) > 1 and not os.path.exists(os.path.join(cwd, path)):
            continue  # saves a fork for each directory of PATH without the program
        number, pid = _posix_spawn(os.fsencode(path), argv, env, os.fsencode(cwd), streams)
        if number == 0:
            return pid
        if number not in _SKIPPED_IN_SEARCH or len(paths) == 1:
            error_number = number
            break
        if number == errno.EACCES:
            error_number = number
    raise OSError(error_number, os.strerror(error_number))


def _posix_spawn(
    path: bytes, argv: list[bytes], env: list[bytes], cwd: bytes, streams: Streams
) -> tuple[int, int]:
    actions = ctypes.create_string_buffer(_OPAQUE_BYTES)
    pid = ctypes.c_int()
    _C.posix_spawn_file_actions_init(actions)
    try:
        for number, source in streams.actions:
            if isinstance(source, bytes):
                _C.posix_spawn_file_actions_addopen(actions, number, source, os.O_RDWR, 0)
            else:
                _C.posix_spawn_file_actions_adddup2(actions, source, number)
        _C.posix_spawn_file_actions_addchdir_np(actions, cwd)
        error: int = _C.posix_spawn(
            ctypes.byref(pid),
            path,
            actions,
            _OWN_SESSION if streams.own_session else _SAME_SESSION,
            (ctypes.c_char_p * (len(argv) + 1))(*argv),
            (ctypes.c_char_p * (len(env) + 1))(*env),
        )
    finally:
        _C.posix_spawn_file_actions_destroy(actions)
    return error, pid.value
