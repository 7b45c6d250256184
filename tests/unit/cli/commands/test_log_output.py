"""Printing the retained output of a detached command, and what follows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.client_targets import TARGET, FakeEnvironment, listed

from exec_server.cli.commands import log_output
from exec_server.client.results import Chunk
from exec_server.protocol import process


def _answer(*chunks: process.Chunk, **others: Any) -> process.ReadResult:
    return process.ReadResult(list(chunks), 9, False, None, False, None, False, **others)


def test_the_retained_output_up_to_now(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(listed(next_seq=5)).open_in(monkeypatch, log_output)
    environment.answers = [
        _answer(
            process.Chunk(2, "stdout", b"one"),
            process.Chunk(3, "stderr", b"two"),
            first_seq=2,
            lost_bytes=10,
        ),
        _answer(process.Chunk(5, "stdout", b"more")),
    ]
    assert asyncio.run(log_output.print_output(TARGET, "web", is_following=False)) == 0
    printed = capfd.readouterr()
    assert printed.out == "onemore"
    text = "exec-server: 10 bytes of older output are not retained any more\n"
    assert printed.err == f"two{text}"
    assert [params.after_seq for params in environment.asked] == [0, 3]


def test_a_process_without_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(listed(next_seq=3)).open_in(monkeypatch, log_output)
    environment.answers = [_answer()]
    assert asyncio.run(log_output.print_output(TARGET, "web", is_following=False)) == 0
    assert capfd.readouterr() == ("", "")


def test_following(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    environment = FakeEnvironment(listed()).open_in(monkeypatch, log_output)
    environment.chunks = [Chunk("stdout", b"a"), Chunk("pty", b"b"), Chunk("stderr", b"c")]
    environment.lost_bytes = 7
    assert asyncio.run(log_output.print_output(TARGET, "web", is_following=True)) == 0
    printed = capfd.readouterr()
    assert printed.out == "ab"
    assert printed.err == "cexec-server: 7 bytes of older output are not retained any more\n"


def test_the_last_lines_and_what_follows(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(listed(next_seq=3)).open_in(monkeypatch, log_output)
    environment.answers = [_answer(process.Chunk(2, "stdout", b"one\ntwo\n"), lost_bytes=9)]
    environment.chunks = [Chunk("stdout", b"three\n")]
    code = asyncio.run(log_output.print_output(TARGET, "web", is_following=True, lines=1))
    assert code == 0
    assert capfd.readouterr() == ("two\nthree\n", "")


@pytest.mark.parametrize(
    ("chunks", "count", "kept"),
    [
        ([b"a\nb\nc\n"], 1, b"c\n"),
        ([b"a\nb\nc"], 1, b"c"),
        ([b"a\nb\n", b"c\n"], 2, b"b\nc\n"),
        ([b"a\nb\n", b""], 1, b"b\n"),
        ([b"a", b"b\n", b"\n"], 2, b"ab\n\n"),
        ([b"a\nb\n"], 0, b""),
        ([b"a\nb\n"], 9, b"a\nb\n"),
        ([], 3, b""),
    ],
)
def test_last_lines(chunks: list[bytes], count: int, kept: bytes) -> None:
    output = [("stdout", chunk) for chunk in chunks]
    assert b"".join(data for _, data in log_output.last_lines(output, count)) == kept
