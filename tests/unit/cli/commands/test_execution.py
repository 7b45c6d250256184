"""What `exec-server exec` imports, and signals before its session is resumed.

Its behaviour with a server is tested in integration.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from tests.support import jumping_loop

from exec_server.cli.commands import exec_command, execution
from exec_server.cli.commands.execution import MAX_HELD_SIGNALS, TERMINATE_SECONDS
from exec_server.cli.commands.handover import Handover
from exec_server.cli.commands.signals import DOUBLE_INTERRUPT_SECONDS, HANGUP_GRACE_SECONDS
from exec_server.cli.commands.targets import Target

# Each takes milliseconds, and no command on a WebSocket target needs it.
UNNEEDED = (
    "exec_server.client.engine.relay",
    "exec_server.client.engine.stdio",
    "exec_server.client.files",
    "exec_server.client.http",
    "exec_server.patching",
    "exec_server.server",
    "cryptography",
    "http",
    "pathlib",
    "shutil",
    "tempfile",
    "tomllib",
)


def test_unneeded_modules_are_not_imported() -> None:
    code = (
        "import sys; from exec_server.cli.commands import exec_command\n"
        "exec_command.build_parser().parse_words(['ws://h', 'true'])\n"
        "from exec_server.cli.commands import execution\n"
        "print(*sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert set(UNNEEDED) & set(ended.stdout.split()) == set()


class _Startup:
    """A command whose session cannot be resumed; `received` are signals and their times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self._now)

    def run(
        self, received: list[tuple[signal.Signals, float]], handover: Handover | None
    ) -> tuple[int | None, float]:
        """The exit code, or None if the client waits for the session, and when it leaves."""
        arguments = exec_command.build_parser().parse_words(["ws://h:1", "x"])
        running = execution._Execution(arguments, Target(label="x", url="ws://h:1"), None, handover)

        @contextlib.asynccontextmanager
        async def never_open(*_: object) -> AsyncIterator[None]:
            main = asyncio.current_task()
            assert main is not None
            for number, elapsed in received:
                self._now = 100.0 + elapsed
                running._signal_during_startup(number, main)
            await asyncio.Event().wait()
            yield

        self._monkeypatch.setattr(execution, "open_environment", never_open)

        async def main() -> tuple[int | None, float]:
            code = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(60):
                    code = await running.run()
            return code, round(asyncio.get_running_loop().time(), 1)

        return jumping_loop.run(main())


@pytest.mark.parametrize(
    ("received", "code", "leaves_at"),
    [
        ([(signal.SIGINT, 0.0)], None, 60),
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 0.5)], 130, TERMINATE_SECONDS),
        ([(signal.SIGINT, 0.0), (signal.SIGINT, DOUBLE_INTERRUPT_SECONDS)], None, 60),
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 0.0)], None, 60),
        ([(signal.SIGHUP, 0.0)], 129, HANGUP_GRACE_SECONDS),
        ([(signal.SIGTERM, 0.0)] * (MAX_HELD_SIGNALS + 1), 143, 0),
    ],
)
def test_signals_are_held_while_a_session_is_resumed(
    monkeypatch: pytest.MonkeyPatch,
    received: list[tuple[signal.Signals, float]],
    code: int | None,
    leaves_at: float,
) -> None:
    handover = Handover("s", "p", has_input=False)
    assert _Startup(monkeypatch).run(received, handover) == (code, leaves_at)


def test_signals_before_the_event_loop_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    startup = _Startup(monkeypatch)
    handover = Handover("s", "p", has_input=False)
    handover.hold_signal(signal.SIGINT)
    handover.hold_signal(signal.SIGINT)
    assert startup.run([], handover) == (130, TERMINATE_SECONDS)


def test_a_signal_before_the_start_of_the_command_ends_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _Startup(monkeypatch).run([(signal.SIGTERM, 0.0)], None) == (143, 0)
