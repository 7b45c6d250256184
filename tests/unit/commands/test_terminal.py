"""Modes of a terminal; in a real one they are tried in integration."""

from __future__ import annotations

import os
import termios
from collections.abc import Iterator

import pytest

from exec_server.commands.terminal import Terminal, raw_modes, window_size
from inside import eventually

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


def test_the_keeper_does_what_its_master_cannot(pty: int) -> None:
    before = termios.tcgetattr(pty)
    pid = os.fork()
    if pid == 0:
        # Killed in the middle: nothing of ours runs any more.
        Terminal(pty).__enter__().make_raw()
        os._exit(9)
    os.waitpid(pid, 0)
    eventually("sane", lambda: termios.tcgetattr(pty) == before)


def test_the_keeper_leaves_modes_alone_that_are_not_ours(pty: int) -> None:
    with Terminal(pty) as terminal:
        terminal.make_raw()
        shells = termios.tcgetattr(pty)
        shells[3] |= termios.ISIG
        termios.tcsetattr(pty, termios.TCSANOW, shells)
        terminal.is_raw = False  # as if it had been killed: it restores nothing itself
    assert termios.tcgetattr(pty) == shells


def test_sizes(pty: int) -> None:
    assert window_size(pty) is None  # 0 by 0 until somebody says
    termios.tcsetwinsize(pty, (24, 80))
    assert window_size(pty) == (24, 80)
    reader, writer = os.pipe()
    assert window_size(reader) is None
    os.close(reader)
    os.close(writer)
