"""Runs servers as another user, or without features of the kernel.

`start_server_as` runs this file, which changes its own process and then executes the server.
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

from tests.support.client import SOURCE, Server, server_command, start_server

User = Literal["root", "ordinary"]
ProcMount = Literal["usual", "absent", "hidepid"]


@dataclass(frozen=True)
class Barrier:
    """The calls that the kernel refuses to a server and everything it starts."""

    namespaces: int = 0  # flags that clone and unshare may not have
    refused: tuple[str, ...] = ()  # calls that give EPERM
    absent: tuple[str, ...] = ()  # calls that give ENOSYS
    masked_proc: bool = False  # as in containers, where no fresh /proc may be mounted
    in_container: bool = False  # as root of a user namespace that maps nobody else
    proc: ProcMount = "usual"  # only root may change it


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
    "no-proc": Barrier(proc="absent"),
    "hidden-proc": Barrier(proc="hidepid"),  # without other users' and undumpable processes
    "container": Barrier(_NEW_USER, (), ("clone3",), masked_proc=True, in_container=True),
    "container-no-landlock": Barrier(
        _NEW_USER, (), ("clone3", *_LANDLOCK_CALLS), masked_proc=True, in_container=True
    ),
}


def user_id(user: User) -> int:
    """The uid of a kind of user; an ordinary one is the tester, unless that is root."""
    if user == "root" or os.geteuid() != 0:
        return os.geteuid()
    taken = {account.pw_uid for account in pwd.getpwall()}
    return next(uid for uid in range(20_000, 60_000) if uid not in taken)


def behind_barrier(user: User, barrier: str) -> list[str]:
    """A prefix that runs the rest of the command line as this user behind a barrier."""
    root = str(SOURCE.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); from tests.support import barriers"
    return [sys.executable, "-c", f"{code}; barriers.main()", str(user_id(user)), barrier]


@contextlib.contextmanager
def start_server_as(
    kind: str,
    user: User,
    *flags: str,
    barrier: str = "none",
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Iterator[Server]:
    """A server as root or as an ordinary user, behind a barrier."""
    command = [*behind_barrier(user, barrier), *server_command(kind)]
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
            server = stack.enter_context(start_server(kind, *flags, env=env, cwd=cwd))
        yield server


_BIND, _RECURSIVE = 0x1000, 0x4000
_PRIVATE, _SLAVE, _SHARED = 1 << 18, 1 << 19, 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, action: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), action)


def mount(
    source: str,
    target: str | os.PathLike[str],
    kind: str | None,
    flags: int = 0,
    data: bytes | None = None,
) -> None:
    """mount(2)."""
    words = (source.encode(), os.fsencode(target), kind.encode() if kind else None)
    _check(_libc.mount(*words, ctypes.c_ulong(flags), data), f"mount {target}")


def unmount(target: str | os.PathLike[str]) -> None:
    """umount2(2) with MNT_DETACH: at once for new users, later for current ones."""
    _check(_libc.umount2(os.fsencode(target), 2), f"unmount {target}")


def leave_mounts() -> None:
    """Enter a new mount namespace; as root, or with a user namespace."""
    if os.geteuid() == 0:
        _check(_libc.unshare(_NEW_MOUNTS), "unshare")
    else:
        _enter_user_namespace(os.geteuid(), os.getegid())
    mount("none", "/", None, _RECURSIVE | _SLAVE)


def _enter_user_namespace(uid: int, gid: int) -> None:
    """Enter a new user and mount namespace, in which this user has these ids."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEW_USER | _NEW_MOUNTS), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {outer_uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {outer_gid} 1")


def in_private_mounts(work: Callable[[], None]) -> None:
    """Call `work` in a child with a private mount namespace; its exception fails the test."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            leave_mounts()
            mount("none", "/", None, _RECURSIVE | _PRIVATE)
            # Shared as on most hosts: new mounts propagate to a server in its own namespace.
            mount("none", "/", None, _RECURSIVE | _SHARED)
            work()
        except BaseException as error:  # a test may fail with anything
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        failure = stream.read().decode(errors="replace")
    os.waitpid(child, 0)
    assert not failure, failure


def _hidden_ancestor(path: Path) -> Path | None:
    """The first folder of the path that other users may not traverse."""
    for folder in reversed([path, *path.parents]):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


def _open_way(needed: set[Path]) -> None:
    """Let every user reach these folders, by mounts that only this process sees.

    The interpreter of a developer who works as root is often in a closed home directory.
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
    """The barrier as a classic BPF program."""
    machine = platform.machine()
    calls = _CALLS[machine] | _CALLS_OF_BOTH
    load, equal, has_bit, result = 0x20, 0x15, 0x45, 0x06
    errno, allow = 0x00050000, 0x7FFF0000
    yield load, 0, 0, 4  # the architecture
    yield equal, 1, 0, _ARCHITECTURES[machine]
    yield result, 0, 0, errno | 1
    yield load, 0, 0, 0  # the number of the call
    for names, number in ((barrier.refused, 1), (barrier.absent, 38)):
        for name in names:
            yield equal, 0, 1, calls[name]
            yield result, 0, 0, errno | number
    yield equal, 2, 0, calls["clone"]
    yield equal, 1, 0, calls["unshare"]
    yield result, 0, 0, allow
    yield load, 0, 0, 16  # the low half of the first argument
    yield has_bit, 0, 1, barrier.namespaces
    yield result, 0, 0, errno | 1
    yield result, 0, 0, allow


def _mask_proc() -> None:
    leave_mounts()
    secrets = (Path("/proc", name) for name in ("kcore", "keys", "timer_list"))
    mount("/dev/null", next(path for path in secrets if path.exists()), None, _BIND)


def _replace_proc(proc: ProcMount) -> None:
    leave_mounts()
    mount("none", "/", None, _RECURSIVE | _PRIVATE)
    unmount("/proc")
    if proc == "hidepid":
        mount("proc", "/proc", "proc", 0, b"hidepid=2")


def _install_filter(barrier: Barrier) -> None:
    code = b"".join(struct.pack("HBBI", *line) for line in _instructions(barrier))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    if os.geteuid() != 0:
        _check(_libc.prctl(38, 1, 0, 0, 0), "no new privileges")
    _check(_libc.prctl(22, 2, program, 0, 0), "seccomp")


def _execute_as(uid: int, barrier: Barrier, command: list[str]) -> None:
    """Execute a server as that user behind that barrier."""
    is_other = uid != os.geteuid()
    if is_other:
        _open_way({Path(sys.prefix), Path(sys.base_prefix).resolve(), SOURCE})
    if barrier.masked_proc:
        _mask_proc()
    if barrier.proc != "usual":
        _replace_proc(barrier.proc)
    if barrier.absent and not barrier.in_container:
        _install_filter(barrier)
    if is_other:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    if barrier.in_container:
        # Only a dumpable process may write its id maps. The namespace locks the mask of /proc.
        _check(_libc.prctl(4, 1, 0, 0, 0), "dumpable")
        _enter_user_namespace(0, 0)
        _install_filter(barrier)
    os.execvp(command[0], command)


def main() -> None:
    """The entry point for `behind_barrier`."""
    _execute_as(int(sys.argv[1]), BARRIERS[sys.argv[2]], sys.argv[3:])
