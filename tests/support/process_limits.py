"""Servers under a limit on processes: RLIMIT_NPROC of an ordinary user, or a pids cgroup."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.support.client import Server, scaled, server_command, start_server
from tests.support.server_internals import AS_NOBODY, start_prepared

# Processes and threads: more than an idle server has, and few enough to be used up quickly.
ROOM = 60

# A user that no other process has: RLIMIT_NPROC counts all processes of the user.
_USER = 61_000 + os.getpid() % 1000

# Modules that are needed later, and that this user may not read.
_PRELOAD = "import encodings.idna, encodings.unicode_escape, exec_server.net.http_client"
_DROP_PRIVILEGES = f"{_PRELOAD}\n{AS_NOBODY.replace('65534', str(_USER))}"
_LIMIT_USER = f"""
import os, resource
used = 0
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        if os.stat(f"/proc/{{name}}").st_uid == os.getuid():
            used += len(os.listdir(f"/proc/{{name}}/task"))
    except OSError:
        pass  # ended meanwhile
resource.setrlimit(resource.RLIMIT_NPROC, (used + {ROOM}, used + {ROOM}))
"""


def _pids_directory() -> Path:
    """A directory in which a cgroup with a limit on processes can be created; else skips."""
    for mount in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, source = mount.partition(" - ")
        kind, _, options = source.split(" ", 2)
        directory = Path(fields.split()[4])
        if kind == "cgroup" and "pids" in options.split(","):
            return directory
        if kind == "cgroup2" and "pids" in (directory / "cgroup.subtree_control").read_text():
            return directory
    pytest.skip("no pids cgroup")


@contextlib.contextmanager
def _pids_cgroup() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    cgroup = _pids_directory() / f"exec-server-test-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "pids.max").write_text(str(ROOM))
        yield cgroup
    finally:
        deadline = time.monotonic() + scaled(10)
        while (cgroup / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)  # the watchdog ends shortly after its server
        cgroup.rmdir()


@contextlib.contextmanager
def start_limited(kind: str, *flags: str) -> Iterator[Server]:
    """A server that may have ROOM processes and threads, with those of its commands.

    `kind` is "user" (RLIMIT_NPROC, not as root) or "cgroup" (as root).
    """
    with contextlib.ExitStack() as stack:
        if kind == "user":
            preparation = (_DROP_PRIVILEGES if os.geteuid() == 0 else "") + _LIMIT_USER
        else:
            cgroup = stack.enter_context(_pids_cgroup())
            path = str(cgroup / "cgroup.procs")
            preparation = f"import os; open({path!r}, 'w').write(str(os.getpid()))"
        yield stack.enter_context(start_prepared(preparation, *flags))


# Servers to which permissions of files mean something, also if the tests run as root.


# Root may read and write everything, unless it cannot.
LIMITED = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


@contextlib.contextmanager
def limited_server(kind: str, folder: Path) -> Iterator[str]:
    """The URL of a server to whom permissions mean something."""
    prefix = LIMITED if os.geteuid() == 0 else []
    command = server_command(kind)
    changed = {"EXEC_SERVER_COMMAND": shlex.join([*prefix, *command])}
    if kind == "reference":
        wrapper = folder / "reference"
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join([*prefix, *command[:-1]])} "$@"\n')
        wrapper.chmod(0o755)
        changed = {"EXEC_SERVER_REFERENCE": str(wrapper)}
    with mock.patch.dict(os.environ, changed):
        server = start_server(kind)
        running = server.__enter__()
    try:
        yield running.url
    finally:
        server.__exit__(None, None, None)
