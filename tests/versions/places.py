"""Where the checks run: a server that may be an old one, and a folder outside /tmp.

A workspace below /tmp would be writable under most policies, whatever its server makes of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.client import Server


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A new folder, removed at the end."""
    made = Path(os.path.realpath(tempfile.mkdtemp(prefix="exec-server-versions-", dir="/var/tmp")))
    try:
        yield made
    finally:
        shutil.rmtree(made)


@contextlib.contextmanager
def server(kind: str, cwd: Path) -> Iterator[Server]:
    """A server on a free port. Old ones do not end cleanly on SIGTERM, so it is killed."""
    running = Server(kind, ["--listen", "ws://127.0.0.1:0"], cwd=cwd)
    try:
        running.read_url()
        yield running
    finally:
        running.kill()
        running.release()
