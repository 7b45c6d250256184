"""BackgroundCloser: descriptors are closed soon, by a thread or by the caller."""

from __future__ import annotations

import os
import threading

import pytest

from exec_server.host import threads
from exec_server.host.threads import BackgroundCloser


def _pipe() -> tuple[int, int]:
    """A reader, which finds the end of the pipe once its writer is closed."""
    reader, writer = os.pipe()
    return reader, writer


def test_descriptors_are_closed_by_one_thread() -> None:
    background = BackgroundCloser()
    before = threading.active_count()
    for _ in range(3):
        reader, writer = _pipe()
        background.close(writer)
        assert os.read(reader, 1) == b""
        os.close(reader)
    assert threading.active_count() == before + 1


def test_an_error_does_not_stop_the_thread() -> None:
    background = BackgroundCloser()
    reader, writer = _pipe()
    background.close(-1)
    background.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_beyond_the_limit_the_caller_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_UNCLOSED", 0)
    reader, writer = _pipe()
    BackgroundCloser().close(writer)
    os.set_blocking(reader, False)
    assert os.read(reader, 1) == b""  # at once
    os.close(reader)


def test_without_a_thread_the_caller_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reader, writer = _pipe()
    BackgroundCloser().close(writer)
    os.set_blocking(reader, False)
    assert os.read(reader, 1) == b""  # at once
    os.close(reader)
