"""Ending detached commands one after the other."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.client_targets import TARGET, FakeEnvironment, listed

from exec_server.cli.commands import killing


@pytest.mark.parametrize(
    ("signal", "call"),
    [(None, "terminate"), ("kill", "kill"), ("9", "kill"), ("HUP", "HUP"), ("15", 15)],
)
def test_each_is_ended_or_signalled(
    monkeypatch: pytest.MonkeyPatch, signal: str | None, call: object
) -> None:
    environment = FakeEnvironment(listed("a"), listed("b")).open_in(monkeypatch, killing)
    assert asyncio.run(killing.kill_commands(TARGET, ["a", "b"], signal)) == 0
    assert [each.name for each in environment.opened] == ["a", "b"]
    assert [each.calls for each in environment.opened] == [[call, "aclose"]] * 2


def test_errors_do_not_stop_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(listed("ended", closed=True), listed("b"))
    environment.open_in(monkeypatch, killing)
    names = ["nothing", "ended", "b"]
    assert asyncio.run(killing.kill_commands(TARGET, names, "NONSENSE")) == 1
    assert capfd.readouterr().err == (
        "Error: box: unknown detached process nothing\n`exec-server ps box` lists the names\n"
        "Error: box: ended has already ended\n"
        "Error: box: b: unknown signal\n"
    )
    assert [each.name for each in environment.opened] == ["b"]
