"""Starts a Command on pipes or a terminal. Blocking, so it runs in a thread.

posix_spawn is called through ctypes because that releases the GIL while the kernel loads the
program, and because the C library's file actions can change the directory of the child
alone. The child leads a session of its own, so its pid is also its group and session id.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import termios
from collections.abc import Callable
from dataclasses import dataclass

from exec_server.core import descendants, system
from exec_server.core.command import Command
from exec_server.core.lookup import candidates
from exec_server.errors import InternalError
from exec_server.protocol.process import Stream

_SPAWN_SETSIGDEF = 0x04
_SPAWN_SETSIGMASK = 0x08
_SPAWN_SETSID = 0x80
_OPAQUE_BYTES = 512  # room for posix_spawnattr_t (336 in glibc) and posix_spawn_file_actions_t
_TIOCSIG = 0x40045436  # has no name in the termios module
# All 64, also the two that the C library keeps for itself and would otherwise set to be ignored.
_ALL_SIGNALS = system.sigset(set(range(1, 65)))
_NO_SIGNALS = system.sigset(set())
_SKIPPED_IN_SEARCH = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES})

_C = system.LIBC
_C.posix_spawn_file_actions_addchdir_np.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_C.posix_spawn_file_actions_addopen.argtypes = [
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_uint,
]


@dataclass(frozen=True, slots=True)
class Child:
    """A started child and our ends of its streams; whoever holds it closes them."""

    pid: int
    stdin: int | None
    outputs: tuple[tuple[Stream, int], ...]
    clean_up: Callable[[], None] | None = None  # once, in any thread, when it has ended


@dataclass(slots=True)
class Streams:
    """Descriptors made for one start: what the child gets, and what stays with us."""

    ours: list[int]
    theirs: list[int]
    stdin: int | None
    outputs: tuple[tuple[Stream, int], ...]
    actions: list[tuple[int, int | bytes]]  # child descriptor, and what to put there
    own_session: bool = True

    @classmethod
    def make(cls, command: Command) -> Streams:
        """A terminal or pipes, as the command wants; our ends do not block."""
        if command.tty:
            streams = _terminal(*command.tty_size)
        else:
            streams = _pipes(with_stdin=command.pipe_stdin)
        for descriptor in streams.ours:
            os.set_blocking(descriptor, False)
        return streams

    @classmethod
    def inherited(cls) -> Streams:
        """Nothing new: the child gets the standard streams and the session of this process."""
        return cls([], [], None, (), [], own_session=False)

    def release(self, *, started: bool) -> None:
        """Close what is the child's, and ours too if there is none."""
        for descriptor in self.theirs if started else self.theirs + self.ours:
            os.close(descriptor)


def spawn(command: Command, tag: int) -> Child:
    """Start a command under a tag of core.descendants; returns once its program is running.

    Raises OSError for what the kernel refuses and InternalError for what cannot be passed to
    it. Afterwards nothing is left open but what the returned Child holds.
    """
    argv, env = encoded(command)
    paths = candidates(command)
    check_directory(command.cwd)
    streams = Streams.make(command)
    started = False
    try:
        with descendants.tagged(tag) as carries_tag:
            pid = spawn_first(paths, argv, env, command.cwd, streams)
        started = True
        if not carries_tag:
            descendants.tag_late(pid, tag)
    finally:
        streams.release(started=started)
    return Child(pid, streams.stdin, streams.outputs)


def encoded(command: Command) -> tuple[list[bytes], list[bytes]]:
    """argv and environment as the kernel takes them."""
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
    # posix_spawn reports a failed chdir and a missing program alike, so this one is told apart
    # first. A directory that vanishes in between still fails, with the same error number.
    if not os.path.isdir(path):
        os.stat(path)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _pipes(*, with_stdin: bool) -> Streams:
    """Two output pipes, and one for stdin if the client wants to write."""
    streams = Streams([], [], None, (), [])
    try:
        if with_stdin:
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            streams.ours.append(write_end)
            streams.theirs.append(read_end)
            streams.stdin = write_end
            streams.actions.append((0, read_end))
        else:
            streams.actions.append((0, os.devnull.encode()))
        outputs: list[tuple[Stream, int]] = []
        labels: tuple[Stream, Stream] = ("stdout", "stderr")
        for number, stream in enumerate(labels, start=1):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            streams.ours.append(read_end)
            streams.theirs.append(write_end)
            outputs.append((stream, read_end))
            streams.actions.append((number, write_end))
        streams.outputs = tuple(outputs)
    except OSError:
        for descriptor in streams.ours + streams.theirs:
            os.close(descriptor)
        raise
    return streams


def resize_terminal(master: int, rows: int, columns: int) -> None:
    """Set the size of a terminal; if that is new, the kernel tells its foreground (SIGWINCH)."""
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def signal_foreground(master: int, number: int) -> None:
    """Send what a key of a terminal can send (SIGINT, SIGQUIT, SIGTSTP) as the key does it."""
    # By the kernel, at once: a group that we looked up could be another one when we signal it.
    fcntl.ioctl(master, _TIOCSIG, number)


def _terminal(rows: int, columns: int) -> Streams:
    """A new terminal.

    The child opens the slave by its name: the first terminal that a session leader opens
    becomes its controlling terminal, so nothing needs to run between fork and exec.
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
    paths: list[str],
    argv: list[bytes],
    env: list[bytes],
    cwd: str,
    streams: Streams,
) -> int:
    """Start the first path that the kernel accepts; the last refusal that matters is raised."""
    refusal = errno.ENOENT
    for path in paths:
        if len(paths) > 1 and not os.path.exists(os.path.join(cwd, path)):
            continue  # saves a fork for each directory of PATH without the program
        number, pid = _posix_spawn(os.fsencode(path), argv, env, os.fsencode(cwd), streams)
        if number == 0:
            return pid
        if number not in _SKIPPED_IN_SEARCH or len(paths) == 1:
            refusal = number
            break
        if number == errno.EACCES:
            refusal = number
    raise OSError(refusal, os.strerror(refusal))


def _posix_spawn(
    path: bytes,
    argv: list[bytes],
    env: list[bytes],
    cwd: bytes,
    streams: Streams,
) -> tuple[int, int]:
    """Call posix_spawn; returns its error number and the pid."""
    actions = ctypes.create_string_buffer(_OPAQUE_BYTES)
    attributes = ctypes.create_string_buffer(_OPAQUE_BYTES)
    pid = ctypes.c_int()
    _C.posix_spawn_file_actions_init(actions)
    _C.posix_spawnattr_init(attributes)
    try:
        for number, source in streams.actions:
            if isinstance(source, bytes):
                _C.posix_spawn_file_actions_addopen(actions, number, source, os.O_RDWR, 0)
            else:
                _C.posix_spawn_file_actions_adddup2(actions, source, number)
        _C.posix_spawn_file_actions_addchdir_np(actions, cwd)
        flags = _SPAWN_SETSIGDEF | _SPAWN_SETSIGMASK | (_SPAWN_SETSID if streams.own_session else 0)
        _C.posix_spawnattr_setflags(attributes, ctypes.c_short(flags))
        _C.posix_spawnattr_setsigdefault(attributes, _ALL_SIGNALS)
        _C.posix_spawnattr_setsigmask(attributes, _NO_SIGNALS)
        error: int = _C.posix_spawn(
            ctypes.byref(pid),
            path,
            actions,
            attributes,
            (ctypes.c_char_p * (len(argv) + 1))(*argv),
            (ctypes.c_char_p * (len(env) + 1))(*env),
        )
    finally:
        _C.posix_spawn_file_actions_destroy(actions)
        _C.posix_spawnattr_destroy(attributes)
    return error, pid.value
