"""Ctrl-C for frameworks that wait in the main thread, and the processes that are left after it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from exec_server import sync
from tests.adapters.coding_task import COUNT_LEFT
from tests.support.server_internals import eventually


@contextlib.contextmanager
def interrupted(begun: Path) -> Iterator[None]:
    """A block that is interrupted as soon as a file exists; it has to raise KeyboardInterrupt."""

    def press() -> None:
        eventually("the command begins", begun.exists)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    # A job in the background of a shell ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        presser.join()
    finally:
        signal.signal(signal.SIGINT, before)


def nothing_is_left(server_url: str) -> bool:
    """Whether the command that never ends has ended, with its child; waits for that."""
    with sync.connect(server_url) as machine:
        return eventually("it ends", lambda: machine.shell(COUNT_LEFT).text == "0\n")
