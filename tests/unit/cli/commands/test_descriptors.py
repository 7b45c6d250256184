"""Which descriptors can deliver no input."""

from __future__ import annotations

import os

from exec_server.cli.commands.descriptors import is_null_device


def test_null_devices() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    assert is_null_device(null)
    os.close(null)
    assert is_null_device(null)  # closed
    reader, writer = os.pipe()
    assert not is_null_device(reader)
    os.close(reader)
    os.close(writer)
