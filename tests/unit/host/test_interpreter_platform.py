"""The parts of the program that run on each operating system."""

from __future__ import annotations

import sys

import pytest

from exec_server.host import interpreter

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("system", "has_server", "has_commands"),
    [("linux", True, True), ("darwin", False, True), ("win32", False, False)],
)
def test_parts_that_run(
    monkeypatch: pytest.MonkeyPatch, system: str, has_server: bool, has_commands: bool
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert (interpreter.has_server(), interpreter.has_commands()) == (has_server, has_commands)
