"""Looks inside a running server of ours, and starts one under unusual circumstances."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from unittest import mock

from tests.support.client import DEFAULT_TIMEOUT, Client, Server, scaled, start_server

T = TypeVar("T")

AS_NOBODY = """
import ctypes, os
# The user nobody may not read the files of the interpreter, so everything is loaded before.
import exec_server.cli.main, exec_server.cli.serve.command, exec_server.cli.serve.watchdog, shutil
import exec_server.registry.credentials, exec_server.cli.serve.run
import exec_server.sandbox.commands, exec_server.sandbox.files
from exec_server.filesystem.operations import load_all; load_all()
import exec_server.net.stdio, exec_server.net.websocket.server, exec_server.net.port_socket
import exec_server.server.shell_snapshots, urllib.parse
from exec_server.server import methods; methods.load_all()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable, as every program of a user is at its start
"""


@contextlib.contextmanager
def start_prepared(
    preparation: str,
    *flags: str,
    env: Mapping[str, str | None] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[Server]:
    """A server whose process runs some Python before anything else.

    `prefix` is a command line that executes the rest of it, like `behind_barrier`.
    """
    code = f"{preparation}\nfrom exec_server.cli.main import main\nmain()"
    command = shlex.join([*prefix, sys.executable, "-c", code])
    with contextlib.ExitStack() as stack:
        with mock.patch.dict(os.environ, {"EXEC_SERVER_COMMAND": command}):
            server = stack.enter_context(start_server("ours", *flags, env=env))
        yield server


def start_patched(
    constants: Mapping[str, object], *flags: str
) -> contextlib.AbstractContextManager[Server]:
    """A server with other limits; a constant is named like `process.table.MAX_LIVE`."""
    lines = []
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        lines.append(f"import exec_server.{module} as module")
        lines.append(f"assert hasattr(module, {constant!r})")
        lines.append(f"module.{constant} = {value!r}")
    return start_prepared("\n".join(lines), *flags)


def start_unprivileged(
    *flags: str, env: Mapping[str, str | None] | None = None
) -> contextlib.AbstractContextManager[Server]:
    """A server without privileges: run by the user nobody, if the tests are run by root."""
    return start_prepared(AS_NOBODY if os.geteuid() == 0 else "", *flags, env=env)


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command name: state, parent, group, session, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def children(pid: int) -> list[int]:
    """Direct children, zombies included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if stat_fields(int(entry.name))[1] == str(pid):
                    found.append(int(entry.name))
    return found


def watchdog_pid(server: Server) -> int:
    """The process that waits for the end of the server; 0 if it has been killed."""
    for pid in children(server.process.pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "exec-guardian\n":
                return pid
    return 0


def launcher_pid(server: Server) -> int:
    """The process that forks confined processes; 0 if it has been killed."""
    for pid in children(server.process.pid):
        with contextlib.suppress(OSError):
            if b"exec_server.sandbox.runtime.launcher" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def load_sandboxes(client: Client) -> None:
    """Have the server load its sandboxes and start the launcher, which it does on first need.

    The server itself reads under this policy, so this works on every machine.
    """
    entries = [{"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}]
    file_system = {"type": "restricted", "entries": entries}
    permissions = {"type": "managed", "file_system": file_system, "network": "restricted"}
    sandbox = {"permissions": permissions, "windowsSandboxLevel": "disabled"}
    client.call("fs/getMetadata", {"path": "file:///", "sandbox": sandbox})


def is_kept_for_later(pid: int) -> bool:
    """Whether a process is a file worker or a sandbox that waits for the next command."""
    with contextlib.suppress(OSError):
        return b"exec_server.sandbox.runtime.launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def commands(server: Server) -> list[int]:
    """The children of the server that clients have started, and orphans of those."""
    return [pid for pid in children(server.process.pid) if pid not in own_processes(server)]


def own_processes(server: Server) -> list[int]:
    """The server, its watchdog and its launcher."""
    found = (server.process.pid, watchdog_pid(server), launcher_pid(server))
    return [pid for pid in found if pid]


def open_descriptors(server: Server) -> int:
    """How many descriptors the server has open; only root may look."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def resident_bytes(server: Server) -> int:
    """Memory of the server."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def is_running(word: str) -> bool:
    """Whether there is a process, of whomever, with this word in its command line."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in entry.read_bytes().split(b"\0"):
                return True
    return False


def eventually(what: str, value: Callable[[], T | None], timeout: float = DEFAULT_TIMEOUT) -> T:
    """The first true value of a condition that nothing announces."""
    deadline = time.monotonic() + scaled(timeout)
    while not (found := value()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.005)
    return found
