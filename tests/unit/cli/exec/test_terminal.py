"""Modes of a terminal; tests with a real one are in integration."""

from __future__ import annotations

import contextlib
import os
import termios
from collections.abc import Iterator

import pytest
from tests.support.server_internals import eventually

from exec_server.cli.exec.terminal import Terminal, raw_modes, window_size

# Tests before these have left threads behind, which a client does not have when it forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture
def pty() -> Iterator[int]:
    master, slave = os.openpty()
    yield slave
    os.close(master)
    os.close(slave)


def test_raw_modes_pass_everything_and_leave_the_old_ones_alone(pty: int) -> None:
    before = termios.tcgetattr(pty)
    raw = raw_modes(before)
    assert before == termios.tcgetattr(pty)
    assert not raw[0] & (termios.ICRNL | termios.IXON | termios.ISTRIP)
    assert not raw[1] & termios.OPOST
    assert not raw[3] & (termios.ECHO | termios.ICANON | termios.ISIG | termios.IEXTEN)
    assert (raw[6][termios.VMIN], raw[6][termios.VTIME]) == (1, 0)


def test_a_terminal_is_left_as_it_came(pty: int) -> None:
    before = termios.tcgetattr(pty)

    def fail_inside() -> None:
        with Terminal(pty) as terminal:
            assert termios.tcgetattr(pty) == before
            terminal.make_raw()
            assert terminal.is_raw
            assert termios.tcgetattr(pty) == raw_modes(before)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert termios.tcgetattr(pty) == before


def test_it_can_be_raw_again(pty: int) -> None:
    before = termios.tcgetattr(pty)
    with Terminal(pty) as terminal:
        terminal.make_raw()
        terminal.restore()
        assert termios.tcgetattr(pty) == before
        terminal.make_raw()
        assert termios.tcgetattr(pty) != before
    assert termios.tcgetattr(pty) == before


def test_the_restorer_restores_modes_after_a_kill(pty: int) -> None:
    before = termios.tcgetattr(pty)
    pid = os.fork()
    if pid == 0:
        # As if killed: no cleanup of the client runs.
        Terminal(pty).__enter__().make_raw()
        os._exit(9)
    os.waitpid(pid, 0)
    eventually("sane", lambda: termios.tcgetattr(pty) == before)


def test_the_restorer_keeps_modes_that_another_program_has_set(pty: int) -> None:
    with Terminal(pty) as terminal:
        terminal.make_raw()
        shells = termios.tcgetattr(pty)
        shells[3] |= termios.ISIG
        termios.tcsetattr(pty, termios.TCSANOW, shells)
        terminal.is_raw = False  # as if killed: the client restores nothing
    assert termios.tcgetattr(pty) == shells


def test_sizes(pty: int) -> None:
    assert window_size(pty) is None  # 0 by 0 until it is set
    termios.tcsetwinsize(pty, (24, 80))
    assert window_size(pty) == (24, 80)
    reader, writer = os.pipe()
    assert window_size(reader) is None
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("is_faster", [False, True])
def test_the_restorer_writes_the_reset_sequence(is_faster: bool) -> None:
    """The last sequence counts; a shell that was faster has switched on bracketed paste itself."""
    master, slave = os.openpty()
    pid = os.fork()
    if pid == 0:
        os.close(master)
        terminal = Terminal(slave, screen=slave).__enter__()
        terminal.make_raw()
        if is_faster:
            terminal.restore()
        terminal.set_reset_sequence(b"never")
        terminal.set_reset_sequence(b"\x1b[?2004l\x1b[?25h")
        os._exit(9)
    os.waitpid(pid, 0)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # all descriptors of the slave are closed
        while data := os.read(master, 100):
            shown += data
    os.close(master)
    assert shown == (b"\x1b[?25h" if is_faster else b"\x1b[?2004l\x1b[?25h")


def test_the_restorer_writes_nothing_after_an_orderly_end() -> None:
    master, slave = os.openpty()
    with Terminal(slave, screen=slave) as terminal:
        terminal.set_reset_sequence(b"undo")
    os.close(slave)
    with pytest.raises(OSError, match="Input/output error"):  # the end, and nothing before it
        os.read(master, 100)
    os.close(master)


def test_an_end_by_an_exception_is_not_orderly() -> None:
    master, slave = os.openpty()

    def fail_inside() -> None:
        with Terminal(slave, screen=slave) as terminal:
            terminal.set_reset_sequence(b"undo")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert os.read(master, 100) == b"undo"
    os.close(slave)
    os.close(master)
