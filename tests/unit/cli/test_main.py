"""The entry point: client commands, and the systems on which there is no server."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

import pytest

from exec_server import __version__
from exec_server.cli.main import main
from exec_server.host import interpreter, libc

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps the changes of the entry point away from the process of the tests."""

    def leave(status: int) -> NoReturn:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(libc, "keep_freed_memory", lambda: None)
    interrupt = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, interrupt)
    gc.enable()


def _run(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["exec-server", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_client_command_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], system: str
) -> None:
    monkeypatch.setattr(interpreter, "has_server", lambda: system == "linux")
    assert _run(monkeypatch, "version") == 0
    assert __version__ in capfd.readouterr().out


def test_a_server_needs_linux(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interpreter, "has_server", lambda: False)
    assert _run(monkeypatch, "serve") == 1
    assert capsys.readouterr().err == f"Error: {interpreter.SERVER_NEEDS_LINUX}\n"


def test_commands_need_posix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interpreter, "has_commands", lambda: False)
    assert _run(monkeypatch, "version") == 1
    assert capsys.readouterr().err == f"Error: {interpreter.COMMANDS_NEED_POSIX}\n"


def test_streams_that_cannot_be_opened_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> NoReturn:
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(interpreter, "open_missing", fail)
    assert _run(monkeypatch, "version") == 1
    assert (
        capsys.readouterr().err == f"Error: cannot open {os.devnull}: No such file or directory\n"
    )


def test_output_that_cannot_be_flushed_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interpreter, "flush", lambda: False)
    assert _run(monkeypatch, "version") == 1
