"""Denied accesses as text."""

from __future__ import annotations

import pytest

from exec_server.cli.commands.denial_text import denial_lines
from exec_server.protocol.sandbox import Denial


@pytest.mark.parametrize(
    ("denial", "lines"),
    [
        (Denial("text", "/a", "write", None), []),
        (Denial("text", "/a", "write", "rule"), ["denied: write /a", "rule"]),
        (Denial("text", None, "network", "rule"), ["denied: network access", "rule"]),
        (Denial("text", None, "syscall", "rule"), ["denied: a system call", "rule"]),
        (Denial("text", None, "read", "rule"), ["denied: a system call", "rule"]),
    ],
)
def test_access_and_rule(denial: Denial, lines: list[str]) -> None:
    assert denial_lines(denial) == lines
