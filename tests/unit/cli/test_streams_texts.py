"""Texts of the commands: escapes, errors, local times, denials."""

from __future__ import annotations

import logging
import math
import os
import time

import pytest

from exec_server.cli import streams
from exec_server.cli.errors import CommandError
from exec_server.cli.streams import denial_lines, local_time
from exec_server.protocol.sandbox import Denial


def test_file_names_are_printed_as_their_bytes(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    streams.print_text("a\udcff\n")
    assert capfdbinary.readouterr().out == b"a\xff\n"


def test_errors_can_be_printed_whatever_they_quote(capfd: pytest.CaptureFixture[str]) -> None:
    streams.print_error("half \ud800")
    assert capfd.readouterr().err == "half \\ud800\n"


def test_control_characters_are_escaped(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams.print_error("one\ntwo\x1b[2J\r")
    streams.print_text("raw \x1b\n")
    assert capfdbinary.readouterr() == (b"raw \x1b\n", b"one\ntwo\\x1b[2J\\r\n")
    monkeypatch.setattr("os.isatty", lambda descriptor: descriptor == 1)
    streams.print_text("\x1b[2J\n\udcff\n")
    assert capfdbinary.readouterr().out == b"\\x1b[2J\n\\xff\n"


def test_warnings_of_the_library_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        streams.print_log_records()
        logging.getLogger("exec_server.x").warning("it says %s", "\x1b[2J")
        streams.print_log_records()
        assert len(root.handlers) == 1
    finally:
        root.handlers = before
    assert capfd.readouterr().err == "exec-server: it says \\x1b[2J\n"


def test_status_lines_have_a_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    streams.print_status("one")
    streams.print_status("two\nthree", is_raw=True)
    streams.print_notice("four")  # stderr is no terminal here: nothing is cleared
    assert os.fsencode(capfd.readouterr().err) == (
        b"exec-server: one\nexec-server: two\nthree\nexec-server: four\n"
    ).replace(b"two\nthree\n", b"two\r\nthree\r\n")


def test_a_progress_bar_is_cleared_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.isatty", lambda descriptor: descriptor == 2)
    streams.print_notice("lost")
    assert capfd.readouterr().err == "\r\x1b[Kexec-server: lost\n"


def test_errors_of_stdout_name_stdout() -> None:
    text = "cannot write to stdout: No space left on device"
    with pytest.raises(CommandError, match=text), streams.describe_stdout_errors():
        raise OSError(28, "No space left on device")
    with pytest.raises(BrokenPipeError), streams.describe_stdout_errors():
        raise BrokenPipeError(32, "Broken pipe")


def test_a_closed_stderr_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, data: bytes) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(streams, "write_all", fail)
    streams.print_error("text")


def test_json_is_ascii() -> None:
    assert streams.json_text({"version": "\x9b"}) == '{\n  "version": "\\u009b"\n}\n'


def test_a_time_of_the_calendar() -> None:
    moment = time.mktime((2024, 5, 6, 7, 8, 9, 0, 0, -1))
    assert local_time(moment, "%Y-%m-%d %H:%M:%S") == "2024-05-06 07:08:09"


@pytest.mark.parametrize("seconds", [-(10**27), 10**400, math.inf, math.nan, 2.0**62])
def test_a_time_out_of_range(seconds: float) -> None:
    assert local_time(seconds, "%Y-%m-%d") == "?"


NETWORK = Denial(None, None, "network", "rule")


@pytest.mark.parametrize(
    ("denial", "lines"),
    [
        (Denial("text", "/a", "write", None), []),
        (Denial("text", "/a", "write", "rule"), ["denied: write /a", "rule"]),
        (Denial("text", None, "network", "rule"), ["denied: network access", "rule"]),
        (Denial("text", None, "syscall", "rule"), ["denied: a system call", "rule"]),
        (Denial("text", None, None, "rule"), ["denied: a system call", "rule"]),
        (
            Denial("a", None, "write", None, (Denial("a", None, "write", None), NETWORK)),
            ["denied: one of these", "- write of an unknown path (a)", "- network access (rule)"],
        ),
    ],
)
def test_access_and_rule(denial: Denial, lines: list[str]) -> None:
    assert denial_lines(denial) == lines
