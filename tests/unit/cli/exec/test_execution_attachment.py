"""Attaching without a terminal: streams, the exit code, and errors."""

from __future__ import annotations

import argparse
import asyncio
import os

import pytest
from tests.support.detached_commands import TARGET, FakeEnvironment, FakeProcess, listed

from exec_server.cli.errors import CommandError
from exec_server.cli.exec import execution
from exec_server.cli.exec.detached import build_attach_parser
from exec_server.client.results import Chunk
from exec_server.errors import SessionLost


def _arguments(*words: str) -> argparse.Namespace:
    return build_attach_parser().parse_words([*words, "box", "web"])


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> FakeEnvironment:
    return FakeEnvironment(listed()).open_in(monkeypatch, execution)


def test_output_and_exit_code_are_the_commands(
    environment: FakeEnvironment, capfd: pytest.CaptureFixture[str]
) -> None:
    environment.chunks = [Chunk("stdout", b"out"), Chunk("stderr", b"err\n")]
    environment.lost_bytes = 5
    assert execution.attach(_arguments("-n"), TARGET) == 3
    printed = capfd.readouterr()
    assert printed.out == "out"
    assert printed.err == "err\nexec-server: 5 bytes of older output are not retained any more\n"
    assert environment.opened[0].calls == ["aclose"]


def test_an_unknown_name(environment: FakeEnvironment) -> None:
    environment.listed.clear()
    with pytest.raises(CommandError, match="unknown detached process web"):
        execution.attach(_arguments("-n"), TARGET)


def test_a_lost_session(
    environment: FakeEnvironment, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def lost(process: object) -> list[Chunk]:
        raise SessionLost("the server is gone")

    monkeypatch.setattr(FakeProcess, "read_some", lost)
    assert execution.attach(_arguments("-n"), TARGET) == 255
    assert capfd.readouterr().err == "exec-server: connection lost: box: the server is gone\n"


@pytest.mark.parametrize(("error", "code"), [(BrokenPipeError(), 141), (OSError(28, "full"), 1)])
def test_output_that_cannot_be_written(
    environment: FakeEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: OSError,
    code: int,
) -> None:
    async def fail(writer: object, descriptor: int, data: bytes) -> None:
        raise error

    monkeypatch.setattr("exec_server.cli.streams.OutputWriter.write", fail)
    environment.chunks = [Chunk("stdout", b"out")]
    assert execution.attach(_arguments("-n"), TARGET) == code
    text = "exec-server: cannot write output: full\n" if code == 1 else ""
    assert capfd.readouterr().err == text


def test_input_is_sent_but_not_its_end(
    environment: FakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_some(process: FakeProcess) -> list[Chunk]:
        while not process.calls:  # the command ends after its input
            await asyncio.sleep(0)
        return []

    monkeypatch.setattr(FakeProcess, "read_some", read_some)
    reader, writer = os.pipe()
    os.write(writer, b"~.two\n")
    os.close(writer)
    saved = os.dup(0)
    os.dup2(reader, 0)
    os.close(reader)
    try:
        assert execution.attach(_arguments(), TARGET) == 3
    finally:
        os.dup2(saved, 0)
        os.close(saved)
    assert environment.opened[0].calls == [b"~.two\n", "aclose"]  # escapes are for terminals
