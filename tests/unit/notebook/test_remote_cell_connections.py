"""Connections of a notebook: which are shared, replaced and refused, without a server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from exec_server import sync
from exec_server.client.targets import AccessOptions, Target
from exec_server.errors import ConnectionLost, StartupError
from exec_server.notebook import remote_cell
from exec_server.notebook.remote_cell import NotebookConnections, RemoteError


class MemoryEnvironment:
    """An environment that is open without a connection."""

    failure: Exception | None = None  # raised by opening

    def __init__(self, make: Callable[[], object], *, has_children: bool) -> None:
        if self.failure is not None:
            raise self.failure
        self.is_open = True
        self.reconnects = 0

    def reconnect(self) -> None:
        self.reconnects += 1

    def close(self) -> None:
        self.is_open = False


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> type[MemoryEnvironment]:
    monkeypatch.setattr(sync, "Environment", MemoryEnvironment)
    monkeypatch.setattr(MemoryEnvironment, "failure", None)
    monkeypatch.setattr(remote_cell, "MAX_OPEN", 2)
    return MemoryEnvironment


def _target(name: str, token: str | None = None) -> Target:
    return Target(name, url=f"ws://{name}", access=AccessOptions(token_file=token))


def test_cells_share_the_connection_of_their_target() -> None:
    opened = NotebookConnections()
    first = opened.get(_target("a"))
    assert opened.get(_target("a")) is first
    assert opened.get(_target("a", token="t")) is not first
    assert opened.labels == ["a"]
    assert opened.close([]) == ["a"]
    assert not first.is_open
    assert opened.labels == []


def test_targets_of_one_label_have_connections_of_their_own() -> None:
    """Labels are without secrets, so those of different URLs may be equal."""
    opened = NotebookConnections()
    first = opened.get(_target("a"))
    assert opened.get(_target("a")._replace(url="ws://a?x=1")) is not first
    assert opened.close(["a"]) == ["a"]
    assert opened.labels == []


def test_a_lost_session_is_replaced_at_the_limit_too() -> None:
    opened = NotebookConnections()
    lost = opened.get(_target("a"))
    opened.get(_target("b"))
    with pytest.raises(RemoteError, match="2 targets are connected"):
        opened.get(_target("c"))
    lost.close()
    assert opened.get(_target("a")) is not lost
    assert opened.close(["b", "unknown"]) == ["b"]
    opened.get(_target("c"))


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (StartupError("no such file"), "a: no such file"),
        (ConnectionLost("refused"), "refused"),
        (RemoteError("mine"), "mine"),
    ],
)
def test_a_target_that_cannot_be_opened_is_one_line(
    in_memory: type[MemoryEnvironment],
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    text: str,
) -> None:
    monkeypatch.setattr(in_memory, "failure", failure)
    with pytest.raises(RemoteError, match=text) as raised:
        NotebookConnections().get(_target("a"))
    assert "\n" not in str(raised.value)


def test_lines_of_a_program_are_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    remote_cell._print_line("a\x1b[31mb")
    assert "\x1b" not in capsys.readouterr().err
