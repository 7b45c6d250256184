"""What a server takes from the machine, read from /proc: memory, descriptors, threads, children.

Nothing here depends on how a server tracks its children: a process belongs to a run if it
descends from this program, which is a subreaper, or if its environment or its arguments hold the
token of the run.
"""

import ctypes
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# Processes of our server that are no commands of clients, by the names that operators see.
HELPERS = ("exec-guardian", "exec-launcher", "exec-worker", "exec-init")

_PR_SET_CHILD_SUBREAPER = 36
_ANONYMOUS = re.compile(r"(?:anon_inode:)?\[?([a-z]+)")


@dataclass(frozen=True)
class Process:
    """One living process."""

    pid: int
    parent: int
    name: str
    started: int  # in clock ticks; distinguishes processes with the same pid


@dataclass(frozen=True)
class Footprint:
    """A server at one moment."""

    resident: int  # bytes, of the server process alone
    threads: int
    helpers: Counter[str] = field(default_factory=Counter)
    others: tuple[Process, ...] = ()  # processes below the server that are no helpers
    # Kinds of descriptors; None where the kernel hides them from this user.
    descriptors: Counter[str] | None = None

    @property
    def descriptor_count(self) -> int | None:
        """The number of open descriptors."""
        return None if self.descriptors is None else self.descriptors.total()


def become_subreaper() -> None:
    """Let orphans of this program's descendants become its children."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processes() -> dict[int, Process]:
    """Every living process of the machine; zombies are left out."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            text = Path("/proc", name, "stat").read_text(errors="replace")
        except OSError:
            continue
        # The name of the program may hold spaces and brackets; the fields follow the last one.
        head, _, rest = text.rpartition(")")
        fields = rest.split()
        if fields[0] not in "ZX":
            pid = int(name)
            title = head.partition("(")[2]
            found[pid] = Process(pid, int(fields[1]), title, int(fields[19]))
    return found


def below(root: int) -> list[Process]:
    """The living descendants of a process."""
    everything = processes()
    family = {root}
    while more := {p.pid for p in everything.values() if p.parent in family} - family:
        family |= more
    return [everything[pid] for pid in sorted(family - {root}) if pid in everything]


def with_token(token: str) -> list[Process]:
    """The living processes whose arguments or environment hold a token."""
    own, word = os.getpid(), token.encode()
    found = []
    for process in processes().values():
        if process.pid == own:
            continue
        for file in ("cmdline", "environ"):
            try:
                data = Path("/proc", str(process.pid), file).read_bytes()
            except OSError:
                continue
            if word in data:
                found.append(process)
                break
    return found


def measure(pid: int) -> Footprint:
    """The footprint of a running server."""
    status = Path("/proc", str(pid), "status").read_text()
    family = below(pid)
    return Footprint(
        resident=_number(status, "VmRSS") * 1024,
        threads=_number(status, "Threads"),
        helpers=Counter(p.name for p in family if p.name in HELPERS),
        others=tuple(p for p in family if p.name not in HELPERS),
        descriptors=_descriptors(pid),
    )


def resident(pid: int) -> int:
    """The resident bytes of one process."""
    return _number(Path("/proc", str(pid), "status").read_text(), "VmRSS") * 1024


def reap_orphans(spared: int) -> None:
    """Reap ended orphans that this program has inherited; call it while no other child runs."""
    for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if int(word) != spared:
            try:
                os.waitpid(int(word), os.WNOHANG)
            except ChildProcessError:
                continue


def _number(status: str, name: str) -> int:
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


def _descriptors(pid: int) -> Counter[str] | None:
    kinds: Counter[str] = Counter()
    folder = Path("/proc", str(pid), "fd")
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for name in names:
        try:
            target = os.readlink(folder / name)
        except OSError:
            continue  # closed meanwhile
        kinds[_kind(target)] += 1
    return kinds


def _kind(target: str) -> str:
    if target.startswith("/"):
        return "terminal" if target.startswith(("/dev/ptmx", "/dev/pts/")) else "file"
    match = _ANONYMOUS.match(target)
    return match[1] if match else target
