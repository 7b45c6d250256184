"""Sandboxes: loaded once, on first need; the parts themselves are tested in integration."""

from __future__ import annotations

from typing import Any, cast

import pytest

from exec_server.errors import InternalError
from exec_server.sandbox.sandboxes import Sandboxes, _Parts

pytestmark = pytest.mark.quick


class FakePart:
    """A part that records its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    def close(self) -> None:
        self._calls.append(f"close {self._name}")

    def drop_idle(self) -> None:
        self._calls.append(f"drop idle {self._name}")


class Counted(Sandboxes):
    """Sandboxes with parts that do nothing."""

    def __init__(self) -> None:
        super().__init__({}, lambda path, exists: None)
        self.calls: list[str] = []

    def _make_parts(self) -> _Parts:
        self.calls.append("load")
        parts: list[Any] = [FakePart(name, self.calls) for name in ("builder", "files", "commands")]
        return _Parts(*parts)


def test_nothing_is_loaded_before_it_is_needed() -> None:
    sandboxes = Counted()
    sandboxes.drop_idle()
    assert (sandboxes.is_loaded, sandboxes.calls) == (False, [])
    sandboxes.close()
    assert sandboxes.calls == []


def test_the_parts_are_made_once() -> None:
    sandboxes = Counted()
    files, commands = sandboxes.files, sandboxes.commands
    sandboxes.load()
    assert sandboxes.is_loaded
    assert (sandboxes.files, sandboxes.commands) == (files, commands)
    assert sandboxes.calls == ["load"]


def test_the_parts_end_before_their_launcher() -> None:
    sandboxes = Counted()
    sandboxes.load()
    sandboxes.drop_idle()
    sandboxes.close()
    assert sandboxes.calls[1:] == [
        *("drop idle files", "drop idle commands"),
        *("close commands", "close files", "close builder"),
    ]


def test_a_closed_server_starts_no_launcher() -> None:
    sandboxes = Counted()
    sandboxes.close()
    with pytest.raises(InternalError, match="shutting down"):
        cast(object, sandboxes.files)
    assert sandboxes.calls == []
