"""The capacity of pipes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from exec_server.host import pipes
from exec_server.host.pipes import ENLARGED_BYTES, PIPE_BYTES, enlarge_pipe


def test_a_pipe_is_enlarged() -> None:
    reader, writer = os.pipe()
    enlarge_pipe(reader)
    # An unprivileged user may have used up the pipe memory that the kernel allows.
    assert fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ) in (PIPE_BYTES, ENLARGED_BYTES)
    os.close(reader)
    os.close(writer)


def test_what_cannot_be_enlarged_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "file", "w") as file:
        enlarge_pipe(file.fileno())
        monkeypatch.setattr(pipes, "_RESIZE", None)  # as on macOS
        enlarge_pipe(file.fileno())
