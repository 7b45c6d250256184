"""Output that is passed on to callbacks, files, texts and loggers."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.memory_session import play

from exec_server.client import commands as delivery_module
from exec_server.client.commands import Delivery
from exec_server.client.results import Chunk

CHUNKS = [
    Chunk("stdout", b"one\nt\xc3"),
    Chunk("stderr", b"warning\r\n"),
    Chunk("stdout", b"\xbcwo"),
    Chunk("pty", b"!"),
]


def deliver(
    on_output: Any = None, stdout: Any = None, stderr: Any = None, more: tuple[Chunk, ...] = ()
) -> None:
    async def run() -> None:
        async with Delivery(on_output, stdout, stderr) as delivery:
            assert delivery.has_receivers
            await delivery.deliver(CHUNKS[:2])
            await delivery.deliver([*CHUNKS[2:], *more])

    play(run())


def test_callbacks_are_called_or_awaited() -> None:
    seen: list[Chunk] = []
    deliver(seen.append)
    assert seen == CHUNKS

    async def take(chunk: Chunk) -> None:
        seen.append(chunk)

    deliver(take)
    assert seen == CHUNKS * 2


def test_files_get_bytes(tmp_path: Path) -> None:
    opened = io.BytesIO()
    deliver(stdout=tmp_path / "out", stderr=opened)
    assert (tmp_path / "out").read_bytes() == b"one\nt\xc3\xbcwo!"
    assert opened.getvalue() == b"warning\r\n"
    deliver(stdout=str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == b"one\nt\xc3\xbcwo!"


def test_texts_get_whole_characters() -> None:
    text = io.StringIO()
    deliver(stdout=text)
    assert text.getvalue() == "one\ntüwo!"
    deliver(stdout=(cut := io.StringIO()), more=(Chunk("stdout", b"\xc3"),))
    assert cut.getvalue() == "one\ntüwo!\ufffd"


def test_loggers_get_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("test.delivery")
    deliver(stdout=logger, stderr=logging.LoggerAdapter(logger, {}))
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "one"),
        ("WARNING", "warning"),
        ("INFO", "tüwo!"),
    ]
    caplog.clear()
    monkeypatch.setattr(delivery_module, "LOGGED_CHARACTERS", 3)
    deliver(stdout=logger)
    assert [record.message for record in caplog.records] == ["one", "tüwo", "!"]


def test_without_receivers() -> None:
    async def run() -> None:
        async with Delivery(None, None, None) as delivery:
            assert not delivery.has_receivers

    play(run())


def test_errors_are_raised(tmp_path: Path) -> None:
    def fail(chunk: Chunk) -> None:
        raise KeyError("mine")

    closed = io.BytesIO()
    closed.close()
    cases: list[tuple[Callable[[], None], type[Exception]]] = [
        (lambda: deliver(fail), KeyError),
        (lambda: deliver(stdout=closed), ValueError),
        (lambda: deliver(stderr=tmp_path / "no" / "file"), FileNotFoundError),
        (lambda: deliver(stdout=3), TypeError),
    ]
    for case, kind in cases:
        with pytest.raises(kind):
            case()


def test_one_file_for_both_streams(tmp_path: Path) -> None:
    path = tmp_path / "both"
    deliver(stdout=path, stderr=f"{tmp_path}/./both")
    assert path.read_bytes() == b"one\nt\xc3warning\r\n\xbcwo!"


def test_the_word_that_merges_streams_elsewhere_names_the_option() -> None:
    with pytest.raises(ValueError, match="use merge_stderr=True"):
        Delivery(None, None, "stdout")
