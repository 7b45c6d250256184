"""SignalHandlers, in processes of their own: they change the whole process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from tests.support.forked import in_own_process

from exec_server.cli.serve.run import SignalHandlers
from exec_server.host.libc import ignore_unused


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@in_own_process
def test_ending_signals_end_and_unused_ones_are_logged() -> None:
    logged = _Lines()
    logging.getLogger("exec_server.cli.serve.run").addHandler(logged)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    signal.signal(signal.SIGRTMIN + 5, signal.SIG_DFL)
    own = []
    signal.signal(signal.SIGUSR2, lambda number, _: own.append(number))  # as a profiler does

    async def run() -> None:
        ended = asyncio.Event()
        ignore_unused()
        handlers = SignalHandlers(asyncio.get_running_loop(), ended.set)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN + 5, signal.SIGTERM):
            os.kill(os.getpid(), number)
        await asyncio.wait_for(ended.wait(), 20)
        handlers.close()

    asyncio.run(run())
    assert logged.lines == [
        "WARNING ignored SIGUSR1: the server has no action for it",
        f"WARNING ignored signal {signal.SIGRTMIN + 5}: the server has no action for it",
    ]
    assert own == [signal.SIGUSR2]
    # After the end of the loop no signal interrupts the clean-up.
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)


@in_own_process
def test_a_hangup_reloads_also_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        reloaded = asyncio.Event()
        SignalHandlers(loop, lambda: None).close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handlers = SignalHandlers(loop, lambda: None, reloaded.set)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(reloaded.wait(), 20)
        handlers.close()

    asyncio.run(run())
