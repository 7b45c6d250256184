"""Connects to targets, and describes connection errors together with a hint for the user."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import itertools
import re
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

from exec_server.cli.errors import CommandError, LostConnection, UsageError
from exec_server.cli.streams import print_error, print_log_records, print_notice
from exec_server.client import connect
from exec_server.client.engine.dialers import is_exposed_url
from exec_server.client.engine.session import Dialer
from exec_server.client.environment import Environment
from exec_server.client.results import ConnectionStatus
from exec_server.client.targets import AccessOptions, Target, find_target
from exec_server.errors import (
    CertificateRejected,
    ConnectFailed,
    ConnectionLost,
    ExecServerError,
    InvalidRequest,
    RegistryError,
    SessionLost,
    StartupError,
    printable,
)
from exec_server.host import event_loop
from exec_server.protocol.decoding import Notice

if TYPE_CHECKING:
    from exec_server.client.process import DetachedProcess

# When an interruption is reported, in seconds after the loss. A short one is not, and a long one
# does not fill the terminal.
NOTICE_SECONDS: Final = (1.0, 10.0, 60.0, 300.0)
# Between the later notices.
REPEAT_SECONDS: Final = 600.0

_ERRNO_SUFFIX: Final = r" \(os error \d+\)$"


def unignored(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """The signals that were not ignored when this process started (`nohup`, a shell's `&`)."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def run_until_signal(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a coroutine and return its exit code; SIGINT, SIGTERM and SIGHUP cancel it."""
    received: list[int] = []

    async def main() -> int:
        task = asyncio.current_task()
        assert task is not None

        def cancel(number: int) -> None:
            received.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in unignored((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            loop.add_signal_handler(number, cancel, number)
        return await work()

    try:
        return run_event_loop(main())
    except asyncio.CancelledError:
        return 128 + received[0]


def run_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run the coroutine of a command in a new event loop, with garbage collection."""
    gc.freeze()  # the modules are needed to the end
    gc.enable()
    return event_loop.run(main)


class Connections(AsyncExitStack):
    """One connection for each target of a command line; an async context manager.

    Two names of one target, such as that of EXEC_SERVER_TARGET, share it. An exception is described
    by the connection whose session was lost.
    """

    def __init__(self, access: AccessOptions) -> None:
        super().__init__()
        self._access = access
        self._open: dict[Target, Environment] = {}
        self._named: dict[str, Environment] = {}

    async def get(self, name: str) -> Environment:
        """Return the environment of a target; raises UsageError or CommandError."""
        if name not in self._named:
            target = find_target(name, self._access)
            key = target._replace(label="")
            if key not in self._open:
                self._open[key] = await self.enter_async_context(open_environment(target))
            self._named[name] = self._open[key]
        return self._named[name]


@contextlib.asynccontextmanager
async def open_environment(
    target: Target,
    on_stderr: Callable[[str], None] = print_error,
    on_status: Callable[[str], None] = print_notice,
) -> AsyncIterator[Environment]:
    """Connect to a target; errors become UsageError or CommandError.

    `on_stderr` gets each line that a stdio target writes to its stderr, `on_status` messages
    about a registry that is not there, and about a lost and a restored connection.
    """
    print_log_records()
    async with AsyncExitStack() as stack:
        try:
            dialer = make_dialer(target, on_stderr, on_status)
            environment = Environment(dialer, retention=target.access.retention)
            monitor = _ConnectionMonitor(target.label, environment, on_status)
            unsubscribe = environment.session.subscribe(monitor)
            await stack.enter_async_context(environment)
        except StartupError as error:
            raise UsageError(f"{target.label}: {error}") from None
        except ExecServerError as error:
            raise LostConnection(describe_error(error, target)) from None
        stack.callback(unsubscribe)
        stack.callback(monitor.stop)
        try:
            yield environment
        except (ConnectionLost, SessionLost) as error:
            if not monitor.may_have_raised(error):
                raise  # from the session of another target
            raise LostConnection(describe_error(error, target)) from None


def reconnecting_text(label: str, status: ConnectionStatus) -> str:
    """What is told while a connection is lost: since when, why, and for how long it is tried."""
    now = datetime.datetime.now(datetime.UTC)
    text = f"connection to {label} lost {_time_text(now - status.since)} ago"
    if status.reason:
        text += f" ({re.sub(_ERRNO_SUFFIX, '', printable(status.reason))})"
    if status.gives_up_at is not None:
        text += f"; trying again for {_time_text(status.gives_up_at - now)}"
    return text


def _time_text(time: datetime.timedelta) -> str:
    """A time in the two units that matter."""
    minutes, seconds = divmod(max(0, round(time.total_seconds())), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


class _ConnectionMonitor:
    """Reports longer interruptions of the connection to the user; a Subscriber."""

    def __init__(
        self, label: str, environment: Environment, on_status: Callable[[str], None]
    ) -> None:
        self._label = label
        self._environment = environment
        self._on_status = on_status
        self._timer: asyncio.TimerHandle | None = None
        self._has_reported = False
        self._was_disconnected = False
        self._is_lost = False

    def may_have_raised(self, error: ConnectionLost | SessionLost) -> bool:
        """Whether the error can come from this session."""
        return self._is_lost if isinstance(error, SessionLost) else self._was_disconnected

    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        pass

    def on_disconnected(self) -> None:
        self._was_disconnected = True
        self._report_after(itertools.pairwise((0.0, *NOTICE_SECONDS)))

    def _report_after(self, spans: Iterator[tuple[float, float]]) -> None:
        begin, end = next(spans, (0.0, REPEAT_SECONDS))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(end - begin, self._report_loss, spans)

    def _report_loss(self, spans: Iterator[tuple[float, float]]) -> None:
        self._has_reported = True
        self._on_status(reconnecting_text(self._label, self._environment.status))
        self._report_after(spans)

    def on_resumed(self) -> None:
        self.stop()
        if self._has_reported:
            self._has_reported = False
            self._on_status(f"{self._label}: reconnected")

    def on_lost(self, error: SessionLost) -> None:
        self._is_lost = True
        self.stop()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@contextlib.asynccontextmanager
async def attached(
    environment: Environment, target: Target, name: str, *, after: int = 0
) -> AsyncIterator[DetachedProcess]:
    """Attach to a detached command; raises CommandError if there is none of this name."""
    process = environment.attach(name, after=after)
    try:
        await process
    except InvalidRequest as error:
        import shlex

        text = f"{target.label}: {error_text(error)}"
        hint = f"`exec-server ps {shlex.quote(target.label)}` lists the names"
        raise CommandError(f"{text}\n{hint}") from None
    try:
        yield process
    finally:
        await process.aclose()


def make_dialer(
    target: Target,
    on_stderr: Callable[[str], None],
    on_status: Callable[[str], None] = print_notice,
) -> Dialer:
    """The dialer of a target; `on_stderr` gets each line of a stdio target. Raises StartupError."""
    access = target.access
    is_risky = access.has_token and access.allow_insecure_token
    if is_risky and target.url is not None and is_exposed_url(target.url):
        print_error(f"Warning: {target.label}: the token is sent without encryption")

    def on_retry(error: ExecServerError, seconds: float) -> None:
        text = _registry_text(error) if isinstance(error, RegistryError) else error_text(error)
        on_status(f"{target.label}: {text}; trying again for up to {seconds:g} s")

    return connect.make_dialer(target, on_stderr=on_stderr, on_retry=on_retry)


def error_text(error: Exception, path: str = "") -> str:
    """The error's single line, without its errno, and without the path if the caller prints it."""
    text = re.sub(_ERRNO_SUFFIX, "", printable(str(error)))
    return text.removeprefix(f"{printable(path)}: ") if path else text


def describe_error(error: ExecServerError, target: Target) -> str:
    """An error of a connection or session, with the target and a hint for the user."""
    if isinstance(error, RegistryError):
        return f"cannot reach {target.label}: {_registry_text(error)}"
    text = f"{target.label}: {error_text(error)}"
    if isinstance(error, ConnectFailed):
        return f"cannot connect to {text}{_hint(error, target)}"
    if isinstance(error, SessionLost):
        return f"connection lost: {text}"
    return text


def _registry_text(error: RegistryError) -> str:
    """The text of a registry's error in one line: of a chain of causes, only the last one."""
    first, mark, causes = str(error).partition("\n\nCaused by:\n")
    if not mark:
        return error_text(error)
    last = causes.rpartition("\n")[2].strip().partition(": ")[2]
    return error_text(RegistryError(f"{first}: {last}"))


def _hint(error: ConnectFailed, target: Target) -> str:
    is_unix = target.url is not None and target.url.startswith("unix:")
    if error.status == 403 and is_unix:
        return _unix_hint("permission denied")
    if error.status in (401, 403):
        if target.access.has_token:
            return "\nCheck that the token is the one this server expects and has not expired."
        return "\nThe server requires a token: use --token-file, or token_file in targets.toml."
    if error.status is not None:
        return "\nAnother kind of server answers at this address; check host and port."
    if target.argv is not None:
        return "\nThe command must speak the protocol on stdin and stdout, and print nothing else."
    text = str(error).lower()
    if isinstance(error, CertificateRejected):
        return _certificate_hint(text, target)
    if is_unix:
        return _unix_hint(text)
    is_ended = "stream reset" in text or "connection ended" in text
    if target.registry is not None and is_ended:
        return "\nThe log of the executor has the reason."
    if is_ended or "speak tls" in text or "speaks tls" in text:
        return "\nCheck the URL: ws:// is for servers without TLS, wss:// for servers with TLS."
    if "refused" in text:
        return "\nCheck that the server is running and the port is right: it prints its URL."
    if "lookup" in text:
        return "\nCheck the spelling of the host name."
    return ""


def _certificate_hint(text: str, target: Target) -> str:
    if target.access.pin:
        return "\nIf the certificate was replaced, pass its new fingerprint with --pin."
    if "mismatch" in text:
        return "\nUse a name of the certificate in the URL, or pin the certificate with --pin."
    if "expired" in text or "not yet valid" in text:
        return "\nRenew the certificate of the server, and check the clocks of both machines."
    return (
        "\nFor a private certificate authority name its root certificate with --ca-file; for a "
        "self-signed certificate pass its fingerprint with --pin."
    )


def _unix_hint(text: str) -> str:
    if "permission denied" in text:
        return "\nOnly the user of the server and root may connect to its unix socket."
    return "\nCheck that the server is running and the path is right: it prints its URL."
