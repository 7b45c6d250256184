"""From targets to connections, and from what fails there to words that a person can act on."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final

import uvloop

from exec_server.client.dialers import Dialer, WebSocketDialer
from exec_server.client.environment import Environment
from exec_server.client.program import StdioDialer
from exec_server.commands.failures import Failure, Mistake
from exec_server.commands.printing import complain, interject
from exec_server.commands.signals import heeded
from exec_server.commands.targets import Access, Target, find_target
from exec_server.errors import (
    ConnectFailed,
    ConnectionLost,
    ExecServerError,
    RegistryError,
    SessionLost,
    StartupError,
)
from exec_server.protocol.method import Notice
from exec_server.transports.dial import tls_context

# A connection that is back sooner than this was never worth a word.
PATIENCE_SECONDS: Final = 1.0

_NUMBER: Final = re.compile(r" \(os error \d+\)$")


def run_to_end(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run it, and cancel it for signals, so that it leaves nothing behind; the exit code."""
    ended_by: list[int] = []

    async def main() -> int:
        task = asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            ended_by.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in heeded((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            loop.add_signal_handler(number, end, number)
        return await work()

    try:
        return uvloop.run(main())
    except asyncio.CancelledError:
        return 128 + ended_by[0]


# ---- connecting -----------------------------------------------------------------------


class Connections:
    """One connection for each target that a command line names; for `async with`."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._stack = AsyncExitStack()
        self._open: dict[str, tuple[Target, Environment]] = {}

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Each is asked whether it is its own session that was lost.
        await self._stack.__aexit__(kind, error, traceback)

    async def get(self, name: str) -> Environment:
        """The environment behind what the user calls a target; raises Mistake or Failure."""
        if name not in self._open:
            target = find_target(name, self._access)
            environment = await self._stack.enter_async_context(connected(target))
            self._open[name] = (target, environment)
        return self._open[name][1]


@contextlib.asynccontextmanager
async def connected(
    target: Target,
    on_stderr: Callable[[str], None] = complain,
    tell: Callable[[str], None] = interject,
) -> AsyncIterator[Environment]:
    """The environment behind a target; raises Mistake and Failure instead of what is below.

    `on_stderr` gets what a program that is the target complains about, line by line; `tell` what
    the user should know while the connection is lost.
    """
    async with AsyncExitStack() as stack:
        try:
            environment = Environment(_dialer(target, on_stderr))
            await stack.enter_async_context(environment)
        except StartupError as error:
            raise Mistake(f"{target.label}: {error}") from None
        except ExecServerError as error:
            raise Failure(explain(error, target)) from None
        watch = _Watch(lambda text: tell(f"{target.label}: {text}"))
        stack.callback(environment.session.subscribe(watch))
        stack.callback(watch.stop)
        try:
            yield environment
        except (ConnectionLost, SessionLost) as error:
            if not watch.explains(error):
                raise  # it is of another target
            raise Failure(explain(error, target)) from None


class _Watch:
    """Tells the user when the connection is lost for a while; a Subscriber."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._timer: asyncio.TimerHandle | None = None
        self._has_told = False
        self._was_disconnected = False
        self._is_lost = False

    def explains(self, error: ConnectionLost | SessionLost) -> bool:
        """Whether the error can come from this session."""
        return self._is_lost if isinstance(error, SessionLost) else self._was_disconnected

    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        pass

    def on_disconnected(self) -> None:
        self._was_disconnected = True
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(PATIENCE_SECONDS, self._tell_loss)

    def _tell_loss(self) -> None:
        self._has_told = True
        self._tell("the connection is lost; trying to get it back")

    def on_resumed(self) -> None:
        self.stop()
        if self._has_told:
            self._has_told = False
            self._tell("connected again")

    def on_lost(self, error: SessionLost) -> None:
        self._is_lost = True
        self.stop()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _dialer(target: Target, on_stderr: Callable[[str], None]) -> Dialer:
    if target.argv is not None:
        return StdioDialer(target.argv, on_stderr=on_stderr)
    token = target.access.read_token()
    tls = _trust(target.access.ca_file)
    if target.url is not None:
        return WebSocketDialer(target.url, token=token, tls=tls)
    assert target.registry is not None
    assert target.environment_id is not None
    if token is None:
        raise Mistake(
            f"{target.label}: a registry wants a token: use --token-file, or token_file in "
            "targets.toml"
        )
    from exec_server.client.relay_dialers import RelayDialer  # takes a while to load

    return RelayDialer(
        target.registry,
        target.environment_id,
        token=token,
        executor_key_fingerprint=target.access.executor_key,
        tls=tls,
    )


def _trust(ca_file: str | None) -> ssl.SSLContext | None:
    if ca_file is None:
        return None
    try:
        return tls_context(ca_file)
    except ssl.SSLError:
        raise Mistake(f"there are no certificates in {ca_file}") from None
    except OSError as error:
        raise Mistake(f"cannot read {ca_file}: {error.strerror}") from None


# ---- explaining -----------------------------------------------------------------------


def reason(error: Exception, path: str = "") -> str:
    """The text of an error for people: without its number, and a path that they see anyway."""
    text = _NUMBER.sub("", str(error))
    return text.removeprefix(f"{path}: ") if path else text


def explain(error: ExecServerError, target: Target) -> str:
    """What to tell the user about a failure on the way to a target, or behind it."""
    text = f"{target.label}: {reason(error)}"
    if isinstance(error, ConnectFailed):
        return f"cannot connect to {text}{_advice(error, target)}"
    if isinstance(error, RegistryError):
        return f"cannot reach {text}"
    if isinstance(error, SessionLost):
        return f"the connection is lost: {text}"
    return text


def _advice(error: ConnectFailed, target: Target) -> str:
    if error.status in (401, 403):
        if target.access.has_token:
            return "\nIs the token the one that this server knows, and has it not expired?"
        return "\nThe server wants a token: use --token-file, or token_file in targets.toml."
    if error.status is not None:
        return "\nSomething answers there, but is it an exec-server?"
    if target.argv is not None:
        return "\nThe command must speak the protocol on its stdin and stdout, and nothing else."
    text = str(error).lower()
    if "refused" in text:
        return "\nIs it running, and is the port right? It prints its URL when it starts."
    if "lookup" in text:
        return "\nIs the name of the host spelt correctly?"
    if "certificate" in text:
        return "\nIf its certificate is of your own making, name the root with --ca-file."
    return ""
