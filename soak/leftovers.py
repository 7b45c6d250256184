"""What a server has left on the machine after its end: processes, files, ports, mounts, cgroups."""

import dataclasses
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from soak import footprint

# Killed processes need time to disappear, above all on a busy machine.
_END_SECONDS = 20.0
# Names in the text of a violation; the rest is counted.
_SHOWN = 5


@dataclass(frozen=True)
class Leftovers:
    """Everything found, a folder as one entry; empty lists are the goal."""

    processes: list[str]
    files: list[str]
    ports: list[str]
    mounts: list[str]

    def summary(self) -> list[str]:
        """One line for each kind of which something is left."""
        kinds = dataclasses.asdict(self)
        return [
            f"{len(found)} {kind}: {', '.join(found[:_SHOWN])}{', …' * (len(found) > _SHOWN)}"
            for kind, found in kinds.items()
            if found
        ]


def mount_points() -> set[str]:
    """The mount points of this namespace."""
    text = Path("/proc/self/mountinfo").read_text()
    return {line.split()[4] for line in text.splitlines()}


def find(
    token: str, own: set[int], folders: list[Path], port: int | None, mounts: set[str]
) -> Leftovers:
    """Look until nothing is found or time is up. Blocking.

    `own` are the pids of children that this program still needs, `folders` must be empty,
    `mounts` are those from before the server was started.
    """
    deadline = time.monotonic() + _END_SECONDS
    while True:
        found = Leftovers(
            [f"{p.pid} {p.name}" for p in _processes(token, own)],
            [str(path) for folder in folders for path in sorted(folder.iterdir())],
            [] if port is None or not _is_open(port) else [str(port)],
            sorted(mount_points() - mounts),
        )
        if not found.summary() or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def remove(token: str, own: set[int], folders: list[Path]) -> None:
    """Kill and delete everything that was found, so that the next phase starts clean."""
    for process in _processes(token, own):
        try:
            os.kill(process.pid, 9)
        except ProcessLookupError:
            continue
    for path in [path for folder in folders for path in folder.iterdir()]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _processes(token: str, own: set[int]) -> list[footprint.Process]:
    found = {process.pid: process for process in footprint.with_token(token)}
    found |= {process.pid: process for process in footprint.below(os.getpid())}
    return [process for pid, process in sorted(found.items()) if pid not in own]


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
