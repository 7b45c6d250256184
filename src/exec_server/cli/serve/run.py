"""Runs the event loop of a server whose arguments are checked and whose sockets are bound."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import uvloop

from exec_server.cli import logs
from exec_server.cli.serve.watchdog import Watchdog
from exec_server.host import libc
from exec_server.host.descriptor_limit import raise_server_limit
from exec_server.host.interpreter import REGISTRY_NAMES, SECRET_NAMES, STRIPPED_NAMES
from exec_server.host.libc import ENDING, HANDLED, UNUSED
from exec_server.server.serve import Options, serve_stdio, serve_websocket

if TYPE_CHECKING:
    from exec_server.net.auth import Authenticator
    from exec_server.net.listen import BoundSocket
    from exec_server.net.tls_acceptor import ServerCertificate


def run_websocket(
    arguments: argparse.Namespace,
    watchdog: Watchdog,
    bound: list[BoundSocket],
    authenticate: Authenticator | None,
    certificate: ServerCertificate | None,
) -> None:
    """Serve bound sockets until a signal or, if the arguments say so, the end of stdin."""
    options = _prepare(arguments, watchdog)
    names = [*arguments.allow_host, *(each.name for each in bound if each.name is not None)]
    hosts = frozenset(name.lower() for name in names)
    stop = asyncio.Event()
    reload = asyncio.Event() if certificate is not None else None
    server = serve_websocket(
        bound,
        stop,
        options=options,
        variables=_inheritable_variables(),
        authenticate=authenticate,
        allowed_hosts=hosts if authenticate is None else None,
        certificate=certificate,
        reload=reload,
    )
    watch_stdin = arguments.exit_on_stdin_close
    uvloop.run(_run_until_signal(server, stop, watch_stdin=watch_stdin, reload=reload))


def run_stdio(arguments: argparse.Namespace, watchdog: Watchdog) -> None:
    """Serve stdin and stdout until a signal or the end of stdin."""
    options = _prepare(arguments, watchdog)
    stop = asyncio.Event()
    server = serve_stdio(stop, options=options, variables=_inheritable_variables())
    uvloop.run(_run_until_signal(server, stop))


def run_remote(arguments: argparse.Namespace, watchdog: Watchdog) -> None:
    """Serve clients through a relay until a signal."""
    # Imported only here: a listening server does not need the registry client.
    from exec_server.cli.serve.remote import RemoteMode

    options = _prepare(arguments, watchdog)
    libc.become_subreaper()
    remote = RemoteMode(arguments, dict(os.environ))
    variables = _inheritable_variables(SECRET_NAMES)
    stop = asyncio.Event()
    # The reader of a credential also handles the end of stdin.
    watch_stdin = arguments.exit_on_stdin_close and arguments.stdin_flag is None
    server = remote.run(stop, options, variables)
    uvloop.run(_run_until_signal(server, stop, watch_stdin=watch_stdin))


def _prepare(arguments: argparse.Namespace, watchdog: Watchdog) -> Options:
    logs.configure(arguments.log_level, arguments.log_format)
    watchdog.wait_until_ready()
    raise_server_limit()  # after the fork of the watchdog, which needs few descriptors
    return Options(
        arguments.concurrent_requests,
        arguments.session_retention,
        arguments.max_session_retention,
        arguments.process_retention,
        watchdog.register_cleanup,
        allow_port_hosts=arguments.allow_port_hosts,
        private_via_upstream=arguments.proxy_private_ips_via_upstream,
    )


async def _run_until_signal(
    server: Coroutine[Any, Any, None],
    stop: asyncio.Event,
    *,
    watch_stdin: bool = False,
    reload: asyncio.Event | None = None,
) -> None:
    # The loaded modules stay, so the garbage collector can skip them. Requests create no
    # reference cycles, so it need not run often either.
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
    loop = asyncio.get_running_loop()
    handlers = SignalHandlers(loop, stop.set, None if reload is None else reload.set)
    with contextlib.closing(handlers):
        if watch_stdin:
            threading.Thread(target=_wait_for_end_of_stdin, args=(loop, stop), daemon=True).start()
        await server


def _wait_for_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    # The reaper blocks SIGCHLD for threads started after it. This thread is older and must block
    # the signal itself, or the kernel could deliver it here instead of to the reaper.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        while os.read(0, 65_536):
            pass
    except OSError:
        pass  # an unreadable stdin counts as closed
    loop.call_soon_threadsafe(stop.set)


def _inheritable_variables(secret: frozenset[str] = frozenset()) -> dict[str, str]:
    """Remove secrets from os.environ, and return the rest, which children may inherit."""
    removed = STRIPPED_NAMES | REGISTRY_NAMES | secret
    for name in [name for name in os.environ if name.upper() in removed]:
        del os.environ[name]
    return dict(os.environ)


log = logging.getLogger(__name__)


class SignalHandlers:
    """Calls `end` on the event loop for each ENDING signal. The handlers are never removed.

    SIGHUP calls `reload`, also under nohup; without `reload` it keeps its action. These signals are
    unblocked: those that `block_handled` has held back are handled at once.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: Callable[[], None],
        reload: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._end = end
        self._reload = reload
        self._is_closed = False
        for number in ENDING:
            signal.signal(number, self._handle)
        if reload is not None:
            signal.signal(signal.SIGHUP, self._handle)
        for number in UNUSED:
            if signal.getsignal(number) == signal.SIG_IGN:  # see `ignore_unused`
                signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def close(self) -> None:
        """Ignore all further signals; call this before the loop is closed."""
        self._is_closed = True

    def _handle(self, number: int, _: object) -> None:
        # Called between any two instructions of the main thread, perhaps inside of a log call.
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._act, number)

    def _act(self, number: int) -> None:
        if number in ENDING:
            self._end()
        elif number == signal.SIGHUP and self._reload is not None:
            self._reload()
        else:
            log.warning("ignored %s: the server has no action for it", _name(number))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
