"""Strays: processes that a dead server has left. The watchdog finds them.

It learns from its own new parent which subreaper the children of the dead server have now. Strays
have a tag of the server, or at least the mark (see `process.tags`) below that parent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator

from exec_server.host import libc
from exec_server.process import descendants, tags

_PREFIX = "exec-server"  # of the name, before the pid of the server and a hexadecimal number
_DIGITS = "0123456789abcdef"
# Killed processes end within milliseconds. One that waits for a dead disk keeps its cgroup.
END_SECONDS = 5.0
_POLL_SECONDS = 0.005

# The kernel reports the end of the server's pipe shortly before it gives its children away.
_REPARENT_SECONDS = 5.0
_KILL_POLL_SECONDS = 0.001
_MAX_PID = 4_194_304  # of all kernels with 64 bits


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
    """A cgroup for a server and all its descendants, which the watchdog kills after its death.

    A process cannot leave it unless it may write to another one, and the kernel kills it at once.
    The server moves before it starts a child. Ordinary users need a delegated cgroup
    (`Delegate=yes`).
    """

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
    for name in os.listdir(parent):
        prefix, pid, number = (*name.split(".", 2), "", "")[:3]
        is_ours = prefix == _PREFIX and pid.isdecimal() and number and not number.strip(_DIGITS)
        if is_ours and not os.path.exists(f"/proc/{pid}"):
            _remove(os.path.join(parent, name))  # fails while there is a process in it


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


class Strays:
    """Recognises what a server leaves. Create it in a child of the server, before any other."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._start = descendants.start_of(os.getpid())
        self._cgroups = _cgroups_of(os.getpid())
        # Of one search: whether a marked process was left, and the starts of those that were.
        self._is_left: dict[int, bool] = {}
        self._starts: dict[int, int] = {}

    def kill(self) -> None:
        """Kill all that the ended server has left; return early if one does not die. Blocking."""
        deadline = time.monotonic() + _REPARENT_SECONDS
        while os.getppid() == self._server and time.monotonic() < deadline:
            time.sleep(_KILL_POLL_SECONDS)
        descendants.kill_all(self._find, self._is_still_stray)

    def _find(self) -> Iterator[tuple[int, int]]:
        self._is_left.clear()
        self._starts.clear()
        shown = (int(name) for name in os.listdir("/proc") if name.isdigit())
        for pid in shown if _shows_all_processes() else _try_all_pids():
            if self._is_stray(pid):
                yield pid, 0

    def _is_stray(self, pid: int) -> bool:
        if pid == os.getpid():
            return False
        if tags.is_of_this_server(pid):
            return True
        if not tags.is_marked(pid) or not self._is_below_root(pid):
            return False
        self._starts[pid] = descendants.start_of(pid)
        return True

    def _is_still_stray(self, pid: int, _: Container[int]) -> bool:
        return tags.is_of_this_server(pid) or self._starts.get(pid) == descendants.start_of(pid)

    def _is_below_root(self, pid: int) -> bool:
        """Whether a marked process is, or is below, a process that a server has left."""
        climbed = []
        while pid not in self._is_left:
            climbed.append(pid)
            parent = descendants.parent_of(pid)
            if tags.is_marked(parent):
                pid = parent
            else:
                self._is_left[pid] = self._is_root(pid)
        self._is_left.update(dict.fromkeys(climbed, self._is_left[pid]))
        return self._is_left[pid]

    def _is_root(self, pid: int) -> bool:
        """Whether a marked process with an unmarked parent was left by a server.

        Another server is marked too, but its watchdog, a child of it, is not. An ordinary user's
        process cannot have such a child.
        """
        return (
            descendants.parent_of(pid) == os.getppid()
            and descendants.start_of(pid) >= self._start
            and all(tags.is_marked(child) for child in descendants.children_of(pid))
            and self._is_in_own_cgroups(pid)
        )

    def _is_in_own_cgroups(self, pid: int) -> bool:
        """Whether a process is in the server's cgroups: each service has cgroups of its own."""
        theirs = _cgroups_of(pid)
        return theirs.keys() == self._cgroups.keys() and all(
            is_inside(theirs[number], own) for number, own in self._cgroups.items()
        )


def _try_all_pids() -> Iterator[int]:
    """The processes and threads among all numbers; takes two seconds for 4 million numbers.

    The newest number is no bound: a command can fork until the kernel begins at the low ones again,
    and forks that fail afterwards are counted nowhere.
    """
    try:
        numbers = range(1, int(_read("/proc/sys/kernel/pid_max")) + 1)
    except OSError:
        numbers = range(1, _MAX_PID + 1)
    # Not os.getpgid: an exception for each unused number would take longer than the call.
    groups = map(libc.LIBC.getpgid, numbers)
    return (pid for pid, group in zip(numbers, groups, strict=True) if group >= 0)


def _shows_all_processes() -> bool:
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return os.geteuid() == 0 or not hides_processes(file.read())
    except OSError:
        return False  # there is no /proc


def hides_processes(mounts: bytes) -> bool:
    """Whether a mount table has a procfs at /proc with an option that hides processes."""
    lines = (line.partition(b" - proc ") for line in mounts.split(b"\n"))
    return any(b" /proc " in mount and b"hidepid=" in options for mount, _, options in lines)


def _cgroups_of(pid: int) -> dict[str, str]:
    """The path of a process's cgroup in each hierarchy, by the number of the hierarchy."""
    try:
        lines = _read(f"/proc/{pid}/cgroup").splitlines()
    except OSError:
        return {}
    return {number: path for number, _, path in (line.split(":", 2) for line in lines)}
