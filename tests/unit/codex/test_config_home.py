"""The directories of Codex and its user, the name of the host."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from exec_server.codex import config
from exec_server.errors import InternalError


def test_codex_home_is_below_the_home_of_the_user(tmp_path: Path) -> None:
    assert config.codex_home({"HOME": "/h"}) == "/h/.codex"
    assert config.codex_home({"HOME": "/h", "CODEX_HOME": ""}) == "/h/.codex"
    (tmp_path / "link").symlink_to(tmp_path)
    real = os.path.realpath(tmp_path)
    assert config.codex_home({"CODEX_HOME": str(tmp_path / "link")}) == real


def test_a_codex_home_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, fault in [("none", "does not exist"), ("file", "is not a directory")]:
        text = f'CODEX_HOME points to "{tmp_path}/{name}", but that path {fault}'
        with pytest.raises(InternalError) as caught:
            config.codex_home({"CODEX_HOME": f"{tmp_path}/{name}"})
        assert caught.value.message == text


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(InternalError, match="Could not find home directory"):
        config.codex_home({})


@pytest.mark.parametrize(
    ("canonical", "expected"),
    [(["Box.Example.ORG."], "box.example.org"), (["box", "a.b"], "a.b"), (["box."], "own")],
)
def test_the_canonical_name_has_a_dot(
    canonical: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [(0, 0, 0, name, ()) for name in canonical]
    monkeypatch.setattr(socket, "gethostname", lambda: "Own")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    assert config.hostname.__wrapped__() == expected


def test_the_name_of_the_kernel_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(socket, "gethostname", lambda: "Own.")
    assert config.hostname.__wrapped__() == "own"
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    assert config.hostname.__wrapped__() is None
