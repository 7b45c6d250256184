"""Runs plain commands of `exec` without an event loop and without the client's modules.

Theory of operation. Up to the start of the command anything unusual makes `run` return None, and
the whole command does everything from the beginning. After the start the command belongs to a
session of the server, which outlives its connection. So anything unusual is handed over: this
module pauses the output of the command, so that the server need not discard any, and closes its
connection; `execution` resumes the session, reads the events after `Handover.last_seq`, and goes
on. Unusual are signals, output that cannot be written at once, a broken connection, and events out
of order.
"""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import sys
import time
from binascii import a2b_base64, b2a_base64
from typing import Any, Final

from exec_server.cli.commands import quick_request
from exec_server.cli.commands.descriptors import is_null_device
from exec_server.cli.commands.errors import LostConnection, command_code
from exec_server.cli.commands.handover import Handover
from exec_server.cli.commands.quick_request import Address, QuickRequest
from exec_server.errors import ConnectFailed, ConnectionLost
from exec_server.net.useless_messages import UselessMessages, flood_text
from exec_server.net.websocket.blocking import BlockingSocket

CLIENT_NAME: Final = "exec-server-client"
# Size of one write to stdin: the capacity of a pipe. One write is under way at a time.
INPUT_BYTES: Final = 65_536
# A pipe or terminal that is ready takes this many bytes without blocking (PIPE_BUF).
OUTPUT_BYTES: Final = 4096
# How long stdout may be full before the command is handed over.
STALL_MILLISECONDS: Final = 200
# After this time without a message the server is asked for a sign of life; after twice this time
# the connection is given up.
SILENCE_MILLISECONDS: Final = 10_000

# How long the server may take to pause the output. A server that floods would never answer, and
# the signal for which the command is handed over would not arrive.
PAUSE_SECONDS: Final = 2.0

_SIGNALS: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP),
)
_EVENTS: Final = frozenset({"process/output", "process/exited", "process/closed"})
_START: Final = 2  # the number of the request
_INHERIT_ALL: Final = {
    "inherit": "all",
    "ignoreDefaultExcludes": True,
    "exclude": [],
    "set": {},
    "includeOnly": [],
}


class _NotPlainError(Exception):
    """The command or its server needs the whole client; no command is running."""


class _UnusualError(Exception):
    """The command may be running and has to be handed over."""


def run(words: list[str]) -> int | None:
    """Run the command line of `exec` if it is plain; returns its exit code, or None."""
    if sys.platform != "linux":  # the poll of macOS knows no devices
        return None
    request = quick_request.parse(words)
    address = None if request is None else quick_request.find_address(request)
    variables = None if request is None else quick_request.variables(request)
    if request is None or address is None or variables is None:
        return None
    try:
        running = _open(request, address, variables)
    except (_NotPlainError, ConnectFailed, ConnectionLost, OSError, ValueError):
        return None  # the whole command reports it
    try:
        code = running.to_end()
    except _NotPlainError:
        running.leave()
        return None
    if code is not None:
        return code
    from exec_server.cli.commands.exec_command import take_over

    return take_over(words, running.handover)


# ---- before the start -----------------------------------------------------------------


def _open(request: QuickRequest, address: Address, variables: dict[str, str]) -> _RunningCommand:
    """Connect, and prepare the start of the command."""
    headers = [] if address.token is None else [("Authorization", f"Bearer {address.token}")]
    if address.port is None:
        link = BlockingSocket.open_unix(address.host, headers)
    else:
        link = BlockingSocket.open_tcp(address.host, address.port, headers)
    try:
        link.send(_request(1, "initialize", {"clientName": CLIENT_NAME}))
        answer = _initialize_answer(link)
        info = answer.get("environmentInfo") or {}
        capabilities = info.get("capabilities") or {}
        cwd = request.cwd or info.get("cwd")
        # A handover needs a server that keeps the output of a session without a connection.
        is_able = capabilities.get("processCloseStdin") and capabilities.get("processReadLoss")
        if cwd is None or not is_able:
            raise _NotPlainError
        has_input = request.has_stdin and not is_null_device(0)
        params = start_params(request.argv, cwd, variables, has_input=has_input)
        start = _request(_START, "process/start", params)
        handover = Handover(answer["sessionId"], params["processId"], has_input=has_input)
        link.send(b'{"method":"initialized","params":{}}')
        return _RunningCommand(link, handover, start)
    except BaseException:
        link.close()
        raise


def _initialize_answer(link: BlockingSocket) -> dict[str, Any]:
    messages = link.receive_first()
    answer = json.loads(messages[0])
    if len(messages) != 1 or not isinstance(answer.get("result"), dict):
        raise _NotPlainError
    result: dict[str, Any] = answer["result"]
    return result


def start_params(
    argv: list[str], cwd: str, variables: dict[str, str], *, has_input: bool
) -> dict[str, Any]:
    """The params of `process/start`, as the client's StartParamsBuilder makes them."""
    return {
        "processId": os.urandom(16).hex(),
        "argv": argv,
        "cwd": cwd,
        "envPolicy": _INHERIT_ALL,
        "env": variables,
        "tty": False,
        "pipeStdin": has_input,
    }


def _request(number: int, method: str, params: dict[str, Any]) -> bytes:
    """Encode a request; raises ValueError for text that is not UTF-8."""
    request = {"id": number, "method": method, "params": params}
    return json.dumps(request, ensure_ascii=False, separators=(",", ":")).encode()


# ---- from the start to the end --------------------------------------------------------


class _RunningCommand:
    """The command from the moment before its start."""

    def __init__(self, link: BlockingSocket, handover: Handover, start: bytes) -> None:
        self._link = link
        self._start = start
        self.handover = handover
        self._last_request = _START
        self._write_request = 0  # the write whose answer is awaited
        self._pause_request = 0
        self._received: list[bytes] = []  # messages that are not taken yet, the last one first
        self._exit_code: int | None = None
        self._end_code: int | None = None
        self._useless = UselessMessages()
        self._is_pausing = False  # output is no longer written here
        self._files = frozenset(fd for fd in (1, 2) if stat.S_ISREG(os.fstat(fd).st_mode))

    def to_end(self) -> int | None:
        """Start the command and run it to its end; None if it has to be handed over.

        Raises _NotPlainError if the server refuses the start.
        """
        wakeup = self._collect_signals()
        try:
            self._link.send(self._start)
            while self._end_code is None:
                if not self._received:
                    self._wait(wakeup)
                self._take_next()
            # Background children end with the command; the answer is not waited for.
            self._send("process/terminate", {})
        except _UnusualError:
            self._pause()
        except ConnectionLost:
            pass
        except (KeyError, TypeError, ValueError):
            pass  # the server's messages are not understood here
        self._link.close()
        return self._end_code if not self._is_pausing else None

    def leave(self) -> None:
        """Leave the command line to the whole command, and with it the signals so far."""
        self._link.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for received, _ in self.handover.signals:
            os.kill(os.getpid(), received)

    def _collect_signals(self) -> int:
        """Collect signals for a handover; returns the descriptor that each makes readable."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        numbers = [each for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
        self._handlers = {
            number: signal.signal(number, self.handover.hold_signal) for number in numbers
        }
        return reader

    def _pause(self) -> None:
        """Pause the output of the command, and keep what the server has sent before."""
        self._is_pausing = True
        try:
            self._pause_request = self._send("process/setFlow", {"flow": "pause"})
            deadline = time.monotonic() + PAUSE_SECONDS
            while self._pause_request and (remaining := deadline - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self._link, select.POLLIN)
                if self._received or poll.poll(1000 * remaining):
                    self._take_next()
        except (ConnectionLost, _UnusualError, KeyError, TypeError, ValueError):
            pass  # the server keeps a part of the output

    def _wait(self, wakeup: int) -> None:
        """Copy stdin until the server has sent something."""
        handover = self.handover
        is_pinged = False
        while True:
            poll = select.poll()
            poll.register(self._link, select.POLLIN)
            poll.register(wakeup, select.POLLIN)
            if handover.is_started and handover.has_input and not self._write_request:
                poll.register(0, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(SILENCE_MILLISECONDS)}
            if wakeup in ready:
                raise _UnusualError
            if self._link.fileno() in ready:
                return
            if 0 in ready:
                self._copy_input()
            elif is_pinged:
                raise _UnusualError
            else:
                self._link.ping()
                is_pinged = True

    def _copy_input(self) -> None:
        """Send the bytes that stdin has, or its end."""
        handover = self.handover
        try:
            data = os.read(0, INPUT_BYTES)
        except BlockingIOError:
            return  # another process that shares the descriptor has read the bytes
        except OSError:
            data = b""
        if data:
            handover.pending_input = data
            chunk = b2a_base64(data, newline=False).decode("ascii")
            write = {"chunk": chunk, "writeId": str(handover.writes + 1)}
            self._write_request = self._send("process/write", write)
        else:
            handover.has_input = False
            handover.is_input_over = True
            self._send("process/closeStdin", {})

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._last_request += 1
        params = {"processId": self.handover.process_id, **params}
        self._link.send(_request(self._last_request, method, params))
        return self._last_request

    # ---- messages of the server -------------------------------------------------------

    def _take_next(self) -> None:
        """Take the next message, if the server has sent a whole one."""
        if not self._received:
            self._received = self._link.receive()[::-1]
            if self._link.take_useless():
                self._judge(is_useful=False)
        if self._received:
            self._take(json.loads(self._received.pop()))

    def _take(self, received: dict[str, Any]) -> None:
        if "method" in received:
            self._take_notification(received)
        elif received["id"] == _START:
            if "result" not in received:
                raise _NotPlainError  # the whole command gets the same refusal, and explains it
            self.handover.is_started = True
        elif received["id"] == self._write_request:
            self._write_request = 0
            self.handover.pending_input = b""
            self.handover.writes += 1
            if received.get("result", {}).get("status") != "accepted":
                self.handover.has_input = False  # the command takes no input any more
        elif received["id"] == self._pause_request:
            self._pause_request = 0
            self.handover.is_paused = "result" in received
        else:
            self._judge(is_useful=False)

    def _judge(self, *, is_useful: bool) -> None:
        """Give a server up that sends nothing but useless messages for too long."""
        if is_useful:
            self._useless.useful_received()
        elif self._useless.useless_received(time.monotonic()):
            raise LostConnection(flood_text())

    def _take_notification(self, received: dict[str, Any]) -> None:
        method, params = received["method"], received["params"]
        if "id" in received:
            raise _UnusualError  # a request of the server
        if method not in _EVENTS or params["processId"] != self.handover.process_id:
            self._judge(is_useful=False)
            return
        self._judge(is_useful=params.get("chunk") != "")
        if params["seq"] != self.handover.last_seq + 1 or params.get("sandboxDenied"):
            raise _UnusualError
        if method == "process/output":
            try:
                data = a2b_base64(params["chunk"], strict_mode=True)
            except (KeyError, TypeError, ValueError):
                # Not handed over: the server would not send this output again.
                text = "malformed message from the server: process/output"
                raise LostConnection(text) from None
            self.handover.last_seq += 1
            descriptor = 2 if params["stream"] == "stderr" else 1
            if self._is_pausing:
                self.handover.pending_output.append((descriptor, data))
            else:
                self._write(descriptor, data)
        elif method == "process/exited":
            self._exit_code = command_code(params["exitCode"])
            self.handover.last_seq += 1
        else:
            if self._exit_code is None:
                raise _UnusualError
            self._end_code = self._exit_code

    def _write(self, descriptor: int, data: bytes) -> None:
        rest = memoryview(data)
        size = len(data) if descriptor in self._files else OUTPUT_BYTES
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        try:
            while rest:
                if not poll.poll(STALL_MILLISECONDS):
                    raise _UnusualError
                rest = rest[os.write(descriptor, rest[:size]) :]
        except (OSError, _UnusualError):
            self.handover.pending_output.append((descriptor, bytes(rest)))
            raise _UnusualError from None
