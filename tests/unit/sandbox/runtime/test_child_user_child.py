"""The process of another user's command; it becomes nobody else here, and executes nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from exec_server.sandbox.runtime import child, messages
from exec_server.sandbox.runtime.messages import Status, UserRequest


class _Executed(BaseException):
    pass


def _request(argv: list[str], path: str = "/nowhere") -> UserRequest:
    return UserRequest(argv, "name", "/", {"PATH": path, "A": "b"}, 7, 8, (8,), False)


def _program(folder: Path, name: str, mode: int) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.chmod(mode)
    return str(path)


def test_the_first_program_that_can_be_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = _program(tmp_path / "a", "tool", 0o644)
    wanted = _program(tmp_path / "b", "tool", 0o755)
    tried: list[tuple[str, list[bytes], dict[bytes, bytes]]] = []

    def execute(path: str, argv: list[bytes], env: dict[bytes, bytes]) -> None:
        tried.append((path, argv, env))
        if path == refused:
            raise PermissionError(13, "no")
        raise _Executed

    monkeypatch.setattr(os, "execve", execute)
    path = f"{tmp_path}/missing:{tmp_path}/a:{tmp_path}/b"
    with pytest.raises(_Executed):
        child._execute(_request(["tool", "x"], path))
    assert [each[0] for each in tried] == [refused, wanted]
    assert tried[1][1:] == ([b"name", b"x"], {b"PATH": path.encode(), b"A": b"b"})


def test_a_refused_program_is_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, "execve", refuse)
    _program(tmp_path / "a", "tool", 0o644)
    with pytest.raises(PermissionError):
        child._execute(_request(["tool"], f"{tmp_path}/a:{tmp_path}/b"))
    with pytest.raises(FileNotFoundError):
        child._execute(_request(["other"], f"{tmp_path}/a:{tmp_path}/b"))


def test_an_error_is_reported_after_the_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise _Executed(code)

    monkeypatch.setattr(child, "_prepare", lambda *_: None)
    monkeypatch.setattr(os, "_exit", leave)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        messages.send(ours, _request(["/no/such/program"]), [])
        with pytest.raises(_Executed):
            child.run(theirs)
        assert messages.receive(ours, Status)[0] == Status("ready")
        assert messages.receive(ours, Status)[0] == Status("failed", "2")
