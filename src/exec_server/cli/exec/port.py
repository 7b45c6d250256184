"""`exec-server port`: forward ports between this machine and a target until a signal."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.parser import CommandParser
from exec_server.cli.streams import print_text
from exec_server.cli.targets import TargetParser, chosen_target, with_access_flags

if TYPE_CHECKING:
    import asyncio
    import logging
    from contextlib import AsyncExitStack

    from exec_server.client.environment import Environment
    from exec_server.errors import SessionLost
    from exec_server.protocol.decoding import Notice


_DESCRIPTION: Final = """\
Make a port of a target reachable on this machine, or with -R a port of this machine on the target,
until Ctrl-C. One line for each port is printed when it is ready. Both ends use the loopback
addresses of their machine only.
"""
_EPILOG: Final = """\
LOCAL is a port of this machine, by default the same number as REMOTE; 0 is any free port. REMOTE
is a port of the target's machine, or HOST:PORT for another host that it reaches, if the server was
started with --allow-port-hosts.

examples:
  exec-server port build 3000
  exec-server port build 8080:80 0:5432
  exec-server port : 3000                          on the target of EXEC_SERVER_TARGET
  exec-server port -R build 3000:9000
  exec-server port build 5432:db.internal:5432
"""
HIGHEST_PORT: Final = 65_535
# Lines about connections that failed, in each period: a browser that tries again and again must not
# fill the terminal.
MAX_FAILURES: Final = 10
PERIOD_SECONDS: Final = 10.0
# The local port, a host and the remote port; an IPv6 address stands in brackets.
_FORWARDING: Final = re.compile(
    r"(?:(?P<local>[0-9]{1,5}):)?"
    r"(?:(?P<host>\[[^\[\]]+\]|[^\[\]:]*[^\[\]:0-9][^\[\]:]*):)?"
    r"(?P<remote>[0-9]{1,5})",
    re.ASCII,
)


class Forwarding(NamedTuple):
    """A parsed [LOCAL:]REMOTE operand."""

    local: int
    host: str | None
    remote: int


def parse_forwarding(text: str, *, is_reverse: bool) -> Forwarding:
    """Parse one operand; raises UsageError."""
    match = _FORWARDING.fullmatch(text)
    if match is None:
        raise UsageError(f"`{text}` is not [LOCAL:]PORT or [LOCAL:]HOST:PORT")
    remote = int(match["remote"])
    local = remote if match["local"] is None else int(match["local"])
    if max(local, remote) > HIGHEST_PORT:
        raise UsageError(f"`{text}`: a port is at most {HIGHEST_PORT}")
    host = match["host"]
    if is_reverse and host is not None:
        raise UsageError(f"`{text}`: with -R both sides are ports of loopback, without a host")
    if (local if is_reverse else remote) == 0:
        raise UsageError(f"`{text}`: connections cannot lead to port 0")
    return Forwarding(local, None if host is None else host.strip("[]"), remote)


def build_parser() -> CommandParser:
    parser = TargetParser("port", _DESCRIPTION, _EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("ports", metavar="[LOCAL:]REMOTE", nargs="+")
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "-L",
        dest="reverse",
        action="store_false",
        help="connections to LOCAL lead to REMOTE (default)",
    )
    direction.add_argument(
        "-R",
        dest="reverse",
        action="store_true",
        help="connections to REMOTE on the target lead to LOCAL",
    )
    parser.set_defaults(reverse=False)
    return with_access_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Forward the ports until a signal, or until the session is lost."""
    target = chosen_target(arguments)
    forwardings = [parse_forwarding(each, is_reverse=arguments.reverse) for each in arguments.ports]

    from contextlib import AsyncExitStack

    from exec_server.cli.connection import open_environment, run_until_signal

    async def work() -> int:
        async with open_environment(target) as environment, AsyncExitStack() as stack:
            ending = _Ending()
            _print_failures()
            stack.callback(environment.session.subscribe(ending))
            for forwarding in forwardings:
                open_port = _reverse if arguments.reverse else _forward
                await open_port(stack, environment, forwarding, target.label)
            await ending.lost
        return 0

    return run_until_signal(work)


async def _forward(
    stack: AsyncExitStack, environment: Environment, forwarding: Forwarding, label: str
) -> None:
    port = environment.forward_port(
        forwarding.remote, local_port=forwarding.local, host=forwarding.host
    )
    from exec_server.cli.connection import error_text
    from exec_server.errors import InvalidRequest

    try:
        await stack.enter_async_context(port)
    except InvalidRequest as error:
        raise CommandError(f"{label}: {error_text(error)}") from None
    except OSError as error:
        # The text of asyncio repeats the address.
        reason = os.strerror(error.errno) if error.errno else error
        text = f"cannot listen on 127.0.0.1:{forwarding.local}: {reason}"
        raise CommandError(f"{text}\nFor any free port write 0:{forwarding.remote}.") from None
    place = f"{label}:{forwarding.remote}"
    if forwarding.host is not None:
        place = f"{forwarding.host}:{forwarding.remote} by {label}"
    print_text(f"127.0.0.1:{port.port} -> {place}\n")


async def _reverse(
    stack: AsyncExitStack, environment: Environment, forwarding: Forwarding, label: str
) -> None:
    from exec_server.cli.connection import error_text
    from exec_server.errors import RpcError

    port = environment.reverse_port(forwarding.local, remote_port=forwarding.remote)
    try:
        await stack.enter_async_context(port)
    except RpcError as error:
        raise CommandError(f"{label}: {error_text(error)}") from None
    print_text(f"{label}:{port.port} -> 127.0.0.1:{forwarding.local}\n")


def _print_failures() -> None:
    """Let the records about reset connections pass, which are printed to stderr."""
    import logging

    from exec_server.client import port_forwarding

    port_forwarding.log.setLevel(logging.INFO)
    port_forwarding.log.addFilter(FailureLimit())


class FailureLimit:
    """Passes all warnings, and MAX_FAILURES other records in each period; a filter of a logger."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._passed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelname == "WARNING":
            return True
        if record.created - self._begin >= PERIOD_SECONDS:
            self._begin = record.created
            self._passed = 0
        self._passed += 1
        return self._passed <= MAX_FAILURES


class _Ending:
    """Waits for the loss of the session; a Subscriber."""

    def __init__(self) -> None:
        import asyncio

        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        pass

    def on_disconnected(self) -> None:
        pass

    def on_resumed(self) -> None:
        pass

    def on_lost(self, error: SessionLost) -> None:
        if not self.lost.done():
            self.lost.set_exception(error)
            self.lost.exception()  # a port may raise another exception first
