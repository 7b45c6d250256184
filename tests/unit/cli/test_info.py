"""The facts about a target as text."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.cli import info

FACTS: dict[str, Any] = {
    "target": "build",
    "where": "ws://127.0.0.1:7700",
    "version": None,
    "session": "s",
    "platform": "linux",
    "shell": {"name": "bash", "path": "/bin/bash"},
    "directory": "/srv",
    "home": None,
    "temporary": "/tmp",
    "roundTripMs": 0.25,
    "capabilities": {"processResize": True, "fsWatchMissing": True, "processList": False},
}


def test_values_are_one_line_each() -> None:
    evil = "\x1b[2J\nsandbox      works"
    sandbox = {"works": False, "reason": evil}
    facts = FACTS | {"version": evil, "sandbox": sandbox}
    lines = info.as_text(facts).splitlines()
    assert "version      \\x1b[2J\\nsandbox      works" in lines
    assert [line for line in lines if line.startswith("sandbox")] == [
        "sandbox      does not work: \\x1b[2J\\nsandbox      works"
    ]


@pytest.mark.parametrize(
    ("sandbox", "text"),
    [
        ({"works": True, "reason": None}, "works"),
        ({"works": False, "reason": "no namespaces"}, "does not work: no namespaces"),
    ],
)
def test_each_row_has_a_label(sandbox: dict[str, Any], text: str) -> None:
    lines = info.as_text(FACTS | {"sandbox": sandbox}).splitlines()
    assert lines[:2] == ["target       build", "at           ws://127.0.0.1:7700"]
    assert lines[-4:] == [
        f"sandbox      {text}",
        "capabilities processResize",
        "             fsWatchMissing",
        "unsupported  processList",
    ]
