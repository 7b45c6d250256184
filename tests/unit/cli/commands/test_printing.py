"""Output of the client commands to stdout and stderr."""

from __future__ import annotations

import logging
import os

import pytest

from exec_server.cli.commands import printing
from exec_server.cli.commands.errors import CommandError


def test_file_names_are_printed_as_their_bytes(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printing.print_text("a\udcff\n")
    assert capfdbinary.readouterr().out == b"a\xff\n"


def test_errors_can_be_printed_whatever_they_quote(capfd: pytest.CaptureFixture[str]) -> None:
    printing.print_error("half \ud800")
    assert capfd.readouterr().err == "half \\ud800\n"


def test_control_characters_are_escaped(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    printing.print_error("one\ntwo\x1b[2J\r")
    printing.print_text("raw \x1b\n")
    assert capfdbinary.readouterr() == (b"raw \x1b\n", b"one\ntwo\\x1b[2J\\r\n")
    monkeypatch.setattr("os.isatty", lambda descriptor: descriptor == 1)
    printing.print_text("\x1b[2J\n\udcff\n")
    assert capfdbinary.readouterr().out == b"\\x1b[2J\n\\xff\n"


def test_warnings_of_the_library_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        printing.print_log_records()
        logging.getLogger("exec_server.x").warning("it says %s", "\x1b[2J")
        printing.print_log_records()
        assert len(root.handlers) == 1
    finally:
        root.handlers = before
    assert capfd.readouterr().err == "exec-server: it says \\x1b[2J\n"


def test_status_lines_have_a_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    printing.print_status("one")
    printing.print_status("two\nthree", is_raw=True)
    printing.print_notice("four")  # stderr is no terminal here: nothing is cleared
    assert os.fsencode(capfd.readouterr().err) == (
        b"exec-server: one\nexec-server: two\nthree\nexec-server: four\n"
    ).replace(b"two\nthree\n", b"two\r\nthree\r\n")


def test_a_progress_bar_is_cleared_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.isatty", lambda descriptor: descriptor == 2)
    printing.print_notice("lost")
    assert capfd.readouterr().err == "\r\x1b[Kexec-server: lost\n"


def test_errors_of_stdout_name_stdout() -> None:
    text = "cannot write to stdout: No space left on device"
    with pytest.raises(CommandError, match=text), printing.describe_stdout_errors():
        raise OSError(28, "No space left on device")
    with pytest.raises(BrokenPipeError), printing.describe_stdout_errors():
        raise BrokenPipeError(32, "Broken pipe")


def test_a_closed_stderr_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, data: bytes) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(printing, "write_all", fail)
    printing.print_error("text")


def test_json_is_ascii() -> None:
    assert printing.json_text({"version": "\x9b"}) == '{\n  "version": "\\u009b"\n}\n'
