"""A cgroup for a server and all its descendants, which the watchdog kills after the server's death.

A process cannot leave its cgroup unless it may write to another one, and the kernel kills a whole
cgroup at once, however fast its processes fork. The server is moved before it starts its first
child; every child is then born in the cgroup, so commands cost nothing. Ordinary users need a
delegated cgroup (`Delegate=yes` in a systemd unit); where there is none, tags have to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

_PREFIX = "exec-server"  # of the name, before the pid of the server and a hexadecimal number
_DIGITS = "0123456789abcdef"
# Killed processes end within milliseconds. One that waits for a dead disk keeps its cgroup.
END_SECONDS = 5.0
_POLL_SECONDS = 0.005


def own_directory(cgroups: str, mounts: str) -> str | None:
    """The directory of a process's cgroup v2, from the texts of /proc/PID/cgroup and mountinfo."""
    path = next((line[3:] for line in cgroups.splitlines() if line.startswith("0::")), None)
    if path is None or path.startswith("/.."):  # outside of the cgroup namespace
        return None
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        if source.split(" ", 1)[0] != "cgroup2":
            continue
        root, mount_point = (_unescaped(field) for field in fields.split(" ")[3:5])
        if is_inside(path, root):
            return os.path.join(mount_point, os.path.relpath(path, root))
    return None


def is_inside(path: str, directory: str) -> bool:
    """Whether the path of a cgroup is that of another one or below it."""
    return directory in ("/", path) or path.startswith(directory + "/")


def _unescaped(field: str) -> str:
    """A field of mountinfo, in which space, tab, newline and backslash are octal numbers."""
    first, *others = field.split("\\")
    return first + "".join(chr(int(other[:3], 8)) + other[3:] for other in others)


class Cgroup:
    """A cgroup that this process has created but is not in."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    @classmethod
    def create_for(cls, pid: int) -> Cgroup | None:
        """Create a cgroup below the own one, and move a process to it; None if not possible."""
        try:
            parent = own_directory(_read("/proc/self/cgroup"), _read("/proc/self/mountinfo"))
            if parent is None:
                return None
            _remove_abandoned(parent)
            directory = os.path.join(parent, f"{_PREFIX}.{pid}.{os.urandom(4).hex()}")
            os.mkdir(directory)
        except OSError:
            return None
        try:
            _write(f"{directory}/cgroup.procs", str(pid))
        except OSError:
            _remove(directory)
            return None
        return cls(directory)

    def kill(self) -> None:
        """Send SIGKILL to all processes in it, and wait until they have ended. Blocking."""
        deadline = time.monotonic() + END_SECONDS
        try:
            _write(f"{self._directory}/cgroup.kill", "1")
            while self._is_populated() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        except OSError:
            pass  # a kernel before 5.14: tags have to do

    def remove(self) -> None:
        """Remove it and all cgroups below it."""
        for directory, _, _ in os.walk(self._directory, topdown=False):
            _remove(directory)

    def _is_populated(self) -> bool:
        return "populated 1" in _read(f"{self._directory}/cgroup.events")


def _remove_abandoned(parent: str) -> None:
    """Remove the cgroups of servers that were killed together with their watchdog."""
    for pid, directory in _siblings(parent):
        if not os.path.exists(f"/proc/{pid}"):
            _remove(directory)  # fails while there is a process in it


def _siblings(parent: str) -> Iterator[tuple[str, str]]:
    for name in os.listdir(parent):
        prefix, _, rest = name.partition(".")
        pid, _, number = rest.partition(".")
        if prefix == _PREFIX and pid.isdecimal() and number and not number.strip(_DIGITS):
            yield pid, os.path.join(parent, name)


def _remove(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        pass


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
