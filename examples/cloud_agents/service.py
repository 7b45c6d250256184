"""Receives webhooks of OpenAI's Agents API and runs an executor for each session that needs one.

usage: python service.py --folder DIR [--listen IP:PORT] [--executors N] [--read-only DIR ...]

Variables: OPENAI_WEBHOOK_SECRET (of the webhook endpoint), OPENAI_API_KEY (to read sessions), and
OPENAI_EXECUTOR_API_KEY (the restricted key, which executors get as CODEX_API_KEY).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import fcntl
import ipaddress
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import h11
from executors import ID, Launcher
from openai import AsyncOpenAI, InvalidWebhookSignatureError, OpenAIError
from questions import CONFIRM_SECONDS, Questions
from sessions import CHECK_SECONDS, IDLE_SECONDS, Sessions

log = logging.getLogger("cloud-agents")

PATH = b"/webhook"
# An event has less than one KiB.
BODY_BYTES = 65_536
# For a whole request: a sender that takes longer is cut off.
REQUEST_SECONDS = 5.0
# Requests at a time; others are answered with 503, and the API sends their events again.
REQUESTS = 64
# A question to the API; the package repeats it twice.
API_SECONDS = 10.0
SIGNED = ("webhook-id", "webhook-timestamp", "webhook-signature")


class Refused(Exception):
    """A request that is answered with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Service:
    """HTTP in front of the sessions: one request for each connection."""

    def __init__(self, api: AsyncOpenAI, sessions: Sessions) -> None:
        self._api = api
        self._sessions = sessions
        self._requests = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._requests += 1
        http = h11.Connection(h11.SERVER)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                try:
                    if self._requests > REQUESTS:
                        raise Refused(503)
                    headers, body = await _receive(http, reader)
                    status = self._dispatch(headers, body)
                except Refused as refused:
                    status = refused.status
                except h11.RemoteProtocolError as error:
                    status = error.error_status_hint
                await _answer(http, writer, status)
        except (TimeoutError, OSError):
            pass  # the API sends the event again
        finally:
            self._requests -= 1
            writer.transport.abort()

    def _dispatch(self, headers: dict[str, str], body: bytes) -> int:
        """Verify an event and hand it on; returns the status of the answer."""
        try:
            event = self._api.webhooks.unwrap(body, headers)
        except (InvalidWebhookSignatureError, ValueError, RecursionError) as error:
            log.warning("refused: %s", error)
            return 400
        # The package does not check the members of an event.
        kind, data = str(getattr(event, "type", "")), getattr(event, "data", None)
        if not kind.startswith(("agent.session.", "agent.environment.")):
            return 200  # else the API would send it again
        name = getattr(data, "id", None)
        if not isinstance(name, str) or not ID.fullmatch(name):
            log.warning("refused: an event without a usable id")
            return 400
        if kind == "agent.session.action_required":
            action = getattr(data, "required_action", None)
            if getattr(action, "type", "") == "environment_connection":
                return 200 if self._sessions.connect(name) else 503
        if kind in ("agent.environment.expired", "agent.environment.failed"):
            self._sessions.check_environment(name)
        else:
            self._sessions.check(name)
        return 200


async def _receive(
    http: h11.Connection, reader: asyncio.StreamReader
) -> tuple[dict[str, str], bytes]:
    """A whole request; raises Refused for what is no webhook."""
    headers, body = {}, b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(BODY_BYTES))
        elif isinstance(event, h11.Request):
            headers = _check_head(event)
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > BODY_BYTES:
                raise Refused(413)
        elif isinstance(event, h11.EndOfMessage):
            return headers, body
        else:
            raise Refused(400)


def _check_head(request: h11.Request) -> dict[str, str]:
    if request.target != PATH:
        raise Refused(404)
    if request.method != b"POST":
        raise Refused(405)
    headers: dict[str, str] = {}
    for raw_name, raw_value in request.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        # The package compares signatures as ASCII, and takes one of each.
        if name in SIGNED and (name in headers or not value.isascii()):
            raise Refused(400)
        headers[name] = value
    if int(headers.get("content-length", 0)) > BODY_BYTES:
        raise Refused(413)
    return headers


async def _answer(http: h11.Connection, writer: asyncio.StreamWriter, status: int) -> None:
    headers = [("content-length", "0"), ("connection", "close")]
    writer.write(http.send(h11.Response(status_code=status, headers=headers)) or b"")
    await writer.drain()
    writer.close()
    await writer.wait_closed()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the files of sessions")
    parser.add_argument("--listen", default="127.0.0.1:8080", type=_address, metavar="IP:PORT")
    parser.add_argument("--executors", type=int, default=8, help="at a time (default: 8)")
    parser.add_argument("--read-only", action="append", default=[], metavar="DIR")
    parser.add_argument("--bwrap", default=shutil.which("bwrap"), metavar="PROGRAM")
    parser.add_argument("--allow-root", action="store_true", help="agents read what root reads")
    parser.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS)
    parser.add_argument("--check-seconds", type=float, default=CHECK_SECONDS)
    parser.add_argument("--confirm-seconds", type=float, default=CONFIRM_SECONDS)
    options = parser.parse_args()
    if options.bwrap is None:
        parser.error("bubblewrap is not installed; executors would not be confined")
    if os.geteuid() == 0 and not options.allow_root:
        # Without capabilities, but as the owner of files such as /etc/shadow.
        parser.error("run this as an ordinary user: executors have the rights of its user")
    for name in ("OPENAI_WEBHOOK_SECRET", "OPENAI_API_KEY", "OPENAI_EXECUTOR_API_KEY"):
        if not os.environ.get(name):
            parser.error(f"{name} is not set")
    try:
        base64.b64decode(os.environ["OPENAI_WEBHOOK_SECRET"].removeprefix("whsec_"), validate=True)
    except ValueError:
        parser.error(
            "OPENAI_WEBHOOK_SECRET is not of the form whsec_…: all events would be refused"
        )
    for directory in options.read_only:
        if not Path(directory).is_dir():
            parser.error(f"--read-only: {directory} is not a directory")
    return options


def _address(text: str) -> tuple[str, int]:
    """An IP address and a port; a missing address would mean all interfaces."""
    host, _, port = text.rpartition(":")
    ipaddress.ip_address(host.strip("[]"))
    return host.strip("[]"), int(port)


_address.__name__ = "IP:PORT"  # argparse prints the name of the type


def _own(folder: Path) -> int:
    """Lock the folder: two services would start two executors for a session."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        sys.exit(f"--folder: {error}")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another service uses {folder}")
    return lock


async def main() -> None:
    options = _options()
    lock = _own(options.folder)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    launcher = Launcher(options.bwrap, os.environ["OPENAI_EXECUTOR_API_KEY"], options.read_only)
    async with AsyncOpenAI(timeout=API_SECONDS) as api, asyncio.TaskGroup() as group:
        # With a wrong URL or key all sessions would seem to be deleted.
        await api.beta.agents.sessions.list(limit=1)
        sessions = Sessions(
            Questions(api.beta.agents, options.confirm_seconds),
            launcher,
            options.folder.resolve(),
            executors=options.executors,
            idle=options.idle_seconds,
            check=options.check_seconds,
        )
        running = group.create_task(sessions.run())
        await sessions.is_running.wait()
        host, port = options.listen
        try:
            server = await asyncio.start_server(Service(api, sessions).handle, host, port)
        except OSError as error:
            sys.exit(f"--listen: {error}")
        async with server:
            host, port = server.sockets[0].getsockname()[:2]
            print(f"http://{host}:{port}{PATH.decode()}", flush=True)
            await stopped.wait()
        running.cancel()
    os.close(lock)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    try:
        asyncio.run(main())
    except* OpenAIError as errors:
        sys.exit(f"the API cannot be asked: {errors.exceptions[0]}")
