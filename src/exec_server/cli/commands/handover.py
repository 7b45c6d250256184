"""Handover: the state of a command that `quick_exec` has started and another module continues."""

from __future__ import annotations

import time


class Handover:
    """A running command of a session that has no connection any more."""

    # Not a dataclass, which is slow to import.
    def __init__(self, session_id: str, process_id: str, *, has_input: bool) -> None:
        self.session_id = session_id
        self.process_id = process_id
        self.has_input = has_input  # and its end was not read
        self.is_started = False  # the start was answered
        self.last_seq = 0  # the last event that was processed
        # Received and not written: descriptors and bytes.
        self.pending_output: list[tuple[int, bytes]] = []
        self.is_paused = False  # the server does not read its output
        self.writes = 0  # pieces of stdin that the server has acknowledged
        self.pending_input = b""  # the piece that it has not
        self.is_input_over = False
        # Received and not forwarded: numbers and the monotonic times of their arrival.
        self.signals: list[tuple[int, float]] = []

    def hold_signal(self, number: int, _frame: object = None) -> None:
        """Keep a signal for the command; also a handler for `signal.signal`."""
        self.signals.append((number, time.monotonic()))
