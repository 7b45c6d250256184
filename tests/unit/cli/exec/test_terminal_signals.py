"""Routing of signals; their delivery is tested in integration."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, cast

import pytest

from exec_server.cli.connection import unignored
from exec_server.cli.exec import terminal
from exec_server.cli.exec.terminal import MAX_PENDING, SignalForwarder
from exec_server.client.process import Process
from exec_server.errors import RpcError, Unsupported


class _Process:
    """Records signals, and answers while `may_answer` is set."""

    def __init__(self, *, knows_signals: bool = True) -> None:
        self.received: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._knows_signals = knows_signals

    async def signal(self, name: str) -> None:
        if not self._knows_signals:
            raise Unsupported("processSignals", "")
        self.received.append(name)
        await self.may_answer.wait()

    async def interrupt(self) -> None:
        self.received.append("interrupt")

    async def kill(self) -> None:
        self.received.append("kill")


def _try(body: Callable[[SignalForwarder, _Process, list[int]], Any], **options: bool) -> None:
    async def main() -> None:
        process, codes = _Process(**options), list[int]()

        def abort(code: int, text: str) -> None:
            codes.append(code)

        async with asyncio.TaskGroup() as tasks:
            forwarder = SignalForwarder(cast(Process, process), None, tasks, abort)
            await body(forwarder, process, codes)
            forwarder.remove()

    asyncio.run(main())


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_names_are_forwarded_and_only_two_interrupts_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    async def body(forwarder: SignalForwarder, process: _Process, codes: list[int]) -> None:
        nonlocal now
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            forwarder._forward(number)
        now += terminal.DOUBLE_INTERRUPT_SECONDS
        forwarder._forward(signal.SIGINT)
        await _settle()
        assert (process.received, codes) == (["INT", "TERM", "TERM", "USR1", "INT"], [])
        now += terminal.DOUBLE_INTERRUPT_SECONDS - 0.1
        forwarder._forward(signal.SIGINT)
        await _settle()
        assert (len(process.received), codes) == (5, [130])

    _try(body)


def test_a_server_that_supports_one_signal() -> None:
    async def body(forwarder: SignalForwarder, process: _Process, codes: list[int]) -> None:
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGQUIT):
            forwarder._forward(number)
            await _settle()
        assert (process.received, codes) == (["interrupt", "kill"], [])

    _try(body, knows_signals=False)


def test_a_hangup_ends_the_client_after_a_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "HANGUP_GRACE_SECONDS", 0.01)

    async def body(forwarder: SignalForwarder, process: _Process, codes: list[int]) -> None:
        forwarder._forward(signal.SIGHUP)
        assert codes == []
        while not codes:
            await asyncio.sleep(0.001)
        assert (process.received, codes) == (["HUP"], [129])

    _try(body)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_no_server_confirms_ends_the_client(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(terminal, "CONFIRMATION_SECONDS", 0.01)

    async def body(forwarder: SignalForwarder, process: _Process, codes: list[int]) -> None:
        process.may_answer.clear()
        forwarder._forward(signal.SIGUSR1)
        forwarder._forward(number)
        while not codes:
            await asyncio.sleep(0.001)
        assert codes == [128 + number]

    _try(body)


def test_signals_ignored_at_start_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = {signal.SIGHUP, signal.SIGTSTP}
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}

    async def body(forwarder: SignalForwarder, process: _Process, codes: list[int]) -> None:
        forwarder.install()
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        forwarder.suspend()
        forwarder.remove()
        assert unignored((*ignored, signal.SIGTERM)) == [signal.SIGTERM]

    try:
        _try(body)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_pending_signals_are_bounded() -> None:
    async def body(forwarder: SignalForwarder, process: _Process, codes: list[int]) -> None:
        process.may_answer.clear()
        for _ in range(2 * MAX_PENDING):
            forwarder._forward(signal.SIGUSR1)
        await _settle()
        assert len(process.received) == MAX_PENDING
        process.may_answer.set()
        await _settle()
        forwarder._forward(signal.SIGUSR1)
        await _settle()
        assert len(process.received) == MAX_PENDING + 1

    _try(body)


def test_a_signal_that_cannot_be_sent_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(forwarder: SignalForwarder, process: _Process, codes: list[int]) -> None:
        async def fail(name: str) -> None:
            raise RpcError("gone")

        monkeypatch.setattr(process, "signal", fail)
        forwarder._forward(signal.SIGTERM)
        await _settle()
        assert codes == []

    _try(body)
