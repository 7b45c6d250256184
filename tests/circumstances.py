"""Runs servers under circumstances: as another user, without parts of the kernel.

`start_server_as` runs this file, which changes its own process and then becomes the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import pwd
import shlex
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

from wire import SOURCE, Server, server_command, start_server

User = Literal["root", "ordinary"]


@dataclass(frozen=True)
class Barrier:
    """What the kernel refuses a server and everything it starts."""

    namespaces: int = 0  # flags that clone and unshare may not have
    refused: tuple[str, ...] = ()  # calls that give EPERM
    absent: tuple[str, ...] = ()  # calls that give ENOSYS
    masked_proc: bool = False  # as in containers, where no fresh /proc may be mounted


_NEW_USER = 0x10000000
_NEW_MOUNTS = 0x00020000
_ALL_NAMESPACES = 0x7E020080
_MOUNT_CALLS = (
    "mount umount2 open_tree move_mount fsopen fsmount fsconfig fspick mount_setattr pivot_root"
)
_LANDLOCK_CALLS = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
_CALLS_OF_BOTH = (
    {"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432}
    | {"fspick": 433, "clone3": 435, "mount_setattr": 442}
    | dict(zip(_LANDLOCK_CALLS, (444, 445, 446), strict=True))
)
_CALLS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "mount": 165, "umount2": 166, "unshare": 272}
    | {"setns": 308},
    "aarch64": {"umount2": 39, "mount": 40, "pivot_root": 41, "unshare": 97, "clone": 220}
    | {"setns": 268},
}
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_NO_NAMESPACES = ("setns", *_MOUNT_CALLS.split())
BARRIERS = {
    "none": Barrier(),
    "no-namespaces": Barrier(_ALL_NAMESPACES, _NO_NAMESPACES, ("clone3",)),
    "no-namespaces-no-landlock": Barrier(
        _ALL_NAMESPACES, _NO_NAMESPACES, ("clone3", *_LANDLOCK_CALLS)
    ),
    "no-user-namespaces": Barrier(_NEW_USER, (), ("clone3",)),
    "masked-proc": Barrier(masked_proc=True),
}


def user_id(user: User) -> int:
    """The uid of a kind of user; an ordinary one is the tester, unless that is root."""
    if user == "root" or os.geteuid() != 0:
        return os.geteuid()
    taken = {account.pw_uid for account in pwd.getpwall()}
    return next(uid for uid in range(20_000, 60_000) if uid not in taken)


@contextlib.contextmanager
def start_server_as(
    kind: str,
    user: User,
    *flags: str,
    barrier: str = "none",
    env: Mapping[str, str | None] | None = None,
) -> Iterator[Server]:
    """A server as root or as an ordinary user, behind a barrier."""
    command = [sys.executable, __file__, str(user_id(user)), barrier, *server_command(kind)]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if kind == "reference":
            wrapper = Path(folder, "reference")
            wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(command[:-1])} "$@"\n')
            wrapper.chmod(0o755)
            changed = {"EXEC_SERVER_REFERENCE": str(wrapper)}
        else:
            changed = {"EXEC_SERVER_COMMAND": shlex.join(command)}
        with mock.patch.dict(os.environ, changed):
            server = stack.enter_context(start_server(kind, *flags, env=env))
        yield server


_BIND, _RECURSIVE = 0x1000, 0x4000
_PRIVATE, _SLAVE, _SHARED = 1 << 18, 1 << 19, 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str, target: str | os.PathLike[str], kind: str | None, flags: int = 0) -> None:
    """mount(2), without data."""
    words = (source.encode(), os.fsencode(target), kind.encode() if kind else None)
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), None), f"mount {target}")


def unmount(target: str | os.PathLike[str]) -> None:
    """umount2(2), at once for new users and in the end for those that still use it."""
    _checked(_libc.umount2(os.fsencode(target), 2), f"unmount {target}")


def leave_mounts() -> None:
    """From now on what this process mounts is its own; as root or with a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    _checked(_libc.unshare(_NEW_MOUNTS if uid == 0 else _NEW_USER | _NEW_MOUNTS), "unshare")
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    mount("none", "/", None, _RECURSIVE | _SLAVE)


def in_private_mounts(work: Callable[[], None]) -> None:
    """Runs something in a child with mounts of its own; what it raises fails the test."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            leave_mounts()
            mount("none", "/", None, _RECURSIVE | _PRIVATE)
            # As on most hosts; and what is mounted reaches a server with mounts of its own.
            mount("none", "/", None, _RECURSIVE | _SHARED)
            work()
        except BaseException as error:  # a test may fail with anything
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        trouble = stream.read().decode(errors="replace")
    os.waitpid(child, 0)
    assert not trouble, trouble


def _hidden_ancestor(path: Path) -> Path | None:
    """The first folder on the way that other users may not pass."""
    for folder in reversed([path, *path.parents]):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


def _open_way(needed: set[Path]) -> None:
    """Let every user reach these folders, by mounts that only this process sees.

    The interpreter of a developer who is root is often in a home that others may not enter.
    """
    hidden: dict[Path, list[Path]] = {}
    for path in sorted(needed):
        if (folder := _hidden_ancestor(path)) is not None:
            hidden.setdefault(folder, []).append(path)
    if hidden:
        leave_mounts()
    for folder, paths in hidden.items():
        opened = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in paths]
        mount("tmpfs", folder, "tmpfs")
        folder.chmod(0o755)
        for path, descriptor in opened:
            path.mkdir(parents=True, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, None, _BIND)
            os.close(descriptor)


def _instructions(barrier: Barrier) -> Iterator[tuple[int, int, int, int]]:
    """The barrier as a program of the kernel's packet filter."""
    machine = platform.machine()
    calls = _CALLS[machine] | _CALLS_OF_BOTH
    load, equal, has_bit, answer = 0x20, 0x15, 0x45, 0x06
    errno, allow = 0x00050000, 0x7FFF0000
    yield load, 0, 0, 4  # the architecture
    yield equal, 1, 0, _ARCHITECTURES[machine]
    yield answer, 0, 0, errno | 1
    yield load, 0, 0, 0  # the number of the call
    for names, number in ((barrier.refused, 1), (barrier.absent, 38)):
        for name in names:
            yield equal, 0, 1, calls[name]
            yield answer, 0, 0, errno | number
    yield equal, 2, 0, calls["clone"]
    yield equal, 1, 0, calls["unshare"]
    yield answer, 0, 0, allow
    yield load, 0, 0, 16  # the low half of the first argument
    yield has_bit, 0, 1, barrier.namespaces
    yield answer, 0, 0, errno | 1
    yield answer, 0, 0, allow


def _raise_barrier(barrier: Barrier) -> None:
    if barrier.masked_proc:
        leave_mounts()
        secrets = (Path("/proc", name) for name in ("kcore", "keys", "timer_list"))
        mount("/dev/null", next(path for path in secrets if path.exists()), None, _BIND)
    if not barrier.absent:
        return
    code = b"".join(struct.pack("HBBI", *line) for line in _instructions(barrier))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    if os.geteuid() != 0:
        _checked(_libc.prctl(38, 1, 0, 0, 0), "no new privileges")
    _checked(_libc.prctl(22, 2, program, 0, 0), "seccomp")


def _become(uid: int, barrier: Barrier, command: list[str]) -> None:
    """Turns this process into a server of that user behind that barrier."""
    if uid != os.geteuid():
        _open_way({Path(sys.prefix), Path(sys.base_prefix).resolve(), SOURCE})
    _raise_barrier(barrier)
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), BARRIERS[sys.argv[2]], sys.argv[3:])
