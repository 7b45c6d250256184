"""A PostgreSQL of the Debian packages on a free port, started as an ordinary user."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.client import scaled
from tests.support.registry import free_port
from tests.support.server_internals import eventually


def programs() -> Path | None:
    """The directory of initdb and postgres; None if they are not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    path = shutil.which("initdb")
    return Path(path).parent if path else None


class Postgres:
    """One database server; `kill` and `start` again keep its port and its data."""

    def __init__(self, directory: Path) -> None:
        self._bin = programs()
        assert self._bin is not None
        self._data = directory / "data"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root.
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(directory, user.pw_uid, user.pw_gid)
            self._user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._run("initdb", "-D", str(self._data), "-U", "registry", "-A", "trust", "--no-sync")

    def _run(self, name: str, *words: str) -> None:
        assert self._bin is not None
        command = [str(self._bin / name), *words]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._user)

    @property
    def url(self) -> str:
        return f"postgresql://registry@127.0.0.1:{self.port}/postgres"

    @property
    def where(self) -> tuple[str, ...]:
        return ("--database", self.url)

    def start(self) -> None:
        assert self._bin is not None
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "max_connections": "80",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [str(self._bin / "postgres"), "-D", str(self._data), "-p", str(self.port)]
        self._process = subprocess.Popen(
            [*command, *words],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **self._user,
        )
        eventually("PostgreSQL answers", self._is_ready, 30)

    def _is_ready(self) -> bool:
        assert self._bin is not None
        command = [str(self._bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, check=False).returncode == 0

    def kill(self) -> None:
        """With SIGKILL, all of its processes; it recovers at the next start."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(scaled(10))
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # at once, without waiting for clients
            self._process.wait(scaled(30))
            self._process = None


@contextlib.contextmanager
def start_postgres() -> Iterator[Postgres]:
    # Not below the directory of pytest, which other users cannot enter.
    with tempfile.TemporaryDirectory(prefix="exec-server-pg-") as name:
        database = Postgres(Path(name))
        database.start()
        try:
            yield database
        finally:
            database.stop()
