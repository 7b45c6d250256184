"""Which signals go where; that they arrive is tried in integration."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, cast

import pytest

from exec_server.client.process import Process
from exec_server.commands import signals
from exec_server.commands.signals import MAX_UNDER_WAY, SignalPasser
from exec_server.errors import RpcError, Unsupported


class _Process:
    """Takes note of what it is told, and answers when it may."""

    def __init__(self, *, knows_signals: bool = True) -> None:
        self.told: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._knows_signals = knows_signals

    async def signal(self, name: str) -> None:
        if not self._knows_signals:
            raise Unsupported("processSignals", "")
        self.told.append(name)
        await self.may_answer.wait()

    async def interrupt(self) -> None:
        self.told.append("interrupt")

    async def terminate(self) -> None:
        self.told.append("terminate")


def _try(body: Callable[[SignalPasser, _Process, list[int]], Any], **options: bool) -> None:
    async def main() -> None:
        process, codes = _Process(**options), list[int]()
        async with asyncio.TaskGroup() as tasks:
            passer = SignalPasser(cast(Process, process), None, tasks, codes.append)
            await body(passer, process, codes)
            passer.remove()

    asyncio.run(main())


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_names_are_passed_on_and_only_two_interrupts_give_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)

    async def body(passer: SignalPasser, process: _Process, codes: list[int]) -> None:
        nonlocal now
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            passer._pass_on(number)
        now += signals.INSIST_SECONDS
        passer._pass_on(signal.SIGINT)
        await _settle()
        assert (process.told, codes) == (["INT", "TERM", "TERM", "USR1", "INT"], [])
        now += signals.INSIST_SECONDS - 0.1
        passer._pass_on(signal.SIGINT)
        await _settle()
        assert (len(process.told), codes) == (5, [130])

    _try(body)


def test_a_server_that_knows_one_signal() -> None:
    async def body(passer: SignalPasser, process: _Process, codes: list[int]) -> None:
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGQUIT):
            passer._pass_on(number)
            await _settle()
        assert (process.told, codes) == (["interrupt", "terminate"], [])

    _try(body, knows_signals=False)


def test_a_command_may_outlive_its_user_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "HANG_UP_SECONDS", 0.01)

    async def body(passer: SignalPasser, process: _Process, codes: list[int]) -> None:
        passer._pass_on(signal.SIGHUP)
        assert codes == []
        while not codes:
            await asyncio.sleep(0.001)
        assert (process.told, codes) == (["HUP"], [129])

    _try(body)


def test_what_our_starter_ignores_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = {signal.SIGHUP, signal.SIGTSTP}
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}

    async def body(passer: SignalPasser, process: _Process, codes: list[int]) -> None:
        passer.install()
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        passer.suspend()
        passer.remove()
        assert signals.heeded((*ignored, signal.SIGTERM)) == [signal.SIGTERM]

    try:
        _try(body)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_under_way_are_bounded() -> None:
    async def body(passer: SignalPasser, process: _Process, codes: list[int]) -> None:
        process.may_answer.clear()
        for _ in range(2 * MAX_UNDER_WAY):
            passer._pass_on(signal.SIGUSR1)
        await _settle()
        assert len(process.told) == MAX_UNDER_WAY
        process.may_answer.set()
        await _settle()
        passer._pass_on(signal.SIGUSR1)
        await _settle()
        assert len(process.told) == MAX_UNDER_WAY + 1

    _try(body)


def test_a_signal_that_fails_is_no_failure_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(passer: SignalPasser, process: _Process, codes: list[int]) -> None:
        async def fail(name: str) -> None:
            raise RpcError("gone")

        monkeypatch.setattr(process, "signal", fail)
        passer._pass_on(signal.SIGTERM)
        await _settle()
        assert codes == []

    _try(body)
