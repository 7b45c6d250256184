"""Servers to which permissions of files mean something, also if the tests run as root."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.support.client import server_command, start_server

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
