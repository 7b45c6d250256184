"""Origins with different parsers of HTTP, which record each connection and the requests on it.

h11 is strict and is what the proxy itself uses; Python's http.server is lenient, and like many
handlers it leaves the body of a GET unread; Node has the parser of many services (llhttp).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol, cast

import h11
from tests.support.client import scaled

# A connection takes milliseconds; a machine may pause.
_END_SECONDS = 30.0
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_NODE_SCRIPT = Path(__file__).with_name("proxy_origin.js")
# A path with this word is answered before its body is read.
EARLY = "early"


@dataclass
class SeenRequest:
    """A request as an origin has understood it."""

    method: str
    target: str
    headers: list[tuple[str, str]]  # names in lower case
    body: bytes | None = None  # None: not read to its end

    def values(self, name: str) -> list[str]:
        """The values of a header."""
        return [value for each, value in self.headers if each == name]


@dataclass
class SeenConnection:
    """A connection to an origin, from its acceptance to its end."""

    requests: list[SeenRequest] = field(default_factory=list)
    refusal: str | None = None  # of the parser
    rest: bytes = b""  # after the last request of a connection that has no other
    is_reset: bool = False


class Origin(Protocol):
    """A server on a port of loopback."""

    name: str
    port: int

    def take(self, count: int) -> list[SeenConnection]:
        """The next connections, so many, once they have ended."""
        ...

    def close(self) -> None: ...


Serve = Callable[[socket.socket, SeenConnection], None]


class _ThreadedOrigin:
    """An origin with a thread for each connection."""

    def __init__(self, name: str, serve: Serve) -> None:
        self.name = name
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()  # guards the two below
        self._accepted: list[SeenConnection] = []
        self._ended: list[SeenConnection] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            seen = SeenConnection()
            with self._changed:
                self._accepted.append(seen)
            threading.Thread(target=self._run, args=(accepted, seen), daemon=True).start()

    def _run(self, accepted: socket.socket, seen: SeenConnection) -> None:
        try:
            with accepted:
                self._serve(accepted, seen)
        except OSError:
            seen.is_reset = True
        finally:
            with self._changed:
                self._ended.append(seen)
                self._changed.notify_all()

    def take(self, count: int) -> list[SeenConnection]:
        def has_ended() -> bool:
            first = self._accepted[:count]
            ended = {id(each) for each in self._ended}
            return len(first) == count and all(id(each) in ended for each in first)

        with self._changed:
            if not self._changed.wait_for(has_ended, scaled(_END_SECONDS)):
                raise AssertionError(f"{self.name} has a connection that does not end")
            taken, self._accepted = self._accepted[:count], self._accepted[count:]
            self._ended = [each for each in self._ended if not any(each is one for one in taken)]
        return taken

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


# ---- h11 ------------------------------------------------------------------------------


def _serve_h11(accepted: socket.socket, seen: SeenConnection) -> None:
    parser = h11.Connection(h11.SERVER)
    body = b""
    while True:
        try:
            event = parser.next_event()
        except h11.RemoteProtocolError as error:
            seen.refusal = str(error)
            return
        if event is h11.NEED_DATA:
            parser.receive_data(accepted.recv(65_536))
        elif isinstance(event, h11.Request):
            body = b""
            seen.requests.append(
                SeenRequest(
                    event.method.decode(),
                    event.target.decode(),
                    [(name.decode(), value.decode("latin-1")) for name, value in event.headers],
                )
            )
            if EARLY.encode() in event.target:
                accepted.sendall(_ANSWER)
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            seen.requests[-1].body = body
            if EARLY not in seen.requests[-1].target:
                accepted.sendall(_ANSWER)
            parser.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
            parser.send(h11.EndOfMessage())
            if h11.MUST_CLOSE in (parser.their_state, parser.our_state):
                seen.rest = parser.trailing_data[0]
                while data := accepted.recv(65_536):
                    seen.rest += data
                return
            parser.start_next_cycle()
        else:
            return


# ---- http.server ----------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    """Records and answers any method; the body of a GET, HEAD or OPTIONS stays unread."""

    protocol_version = "HTTP/1.1"
    seen: SeenConnection

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        headers = [(name.lower(), value) for name, value in self.headers.items()]
        target = self.requestline.split(" ")[1]
        request = SeenRequest(self.command, target, headers)
        self.seen.requests.append(request)
        if self.command not in ("GET", "HEAD", "OPTIONS") and EARLY not in target:
            request.body = self._body()
        self.wfile.write(_ANSWER)

    def _body(self) -> bytes | None:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            length = int(self.headers.get("Content-Length", "0"))
            body = self.rfile.read(length)
            return body if len(body) == length else None
        body = b""
        while line := self.rfile.readline():
            size = int(line, 16)
            body += self.rfile.read(size)
            self.rfile.readline()
            if not size:
                return body
        return None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.seen.refusal = f"{code} {message}"
        super().send_error(code, message, explain)

    def log_message(self, *_: object) -> None:
        pass


def _serve_plainly(accepted: socket.socket, seen: SeenConnection) -> None:
    handler = type("_Bound", (_Handler,), {"seen": seen})
    handler(accepted, ("127.0.0.1", 0), cast(Any, None))


# ---- Node -----------------------------------------------------------------------------


class _NodeOrigin:
    """The http module of Node, in a process that ends with this one."""

    name = "node"

    def __init__(self, program: str) -> None:
        self._process = subprocess.Popen(
            [program, str(_NODE_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"]},
        )
        self.port: int = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def take(self, count: int) -> list[SeenConnection]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % count)
        self._process.stdin.flush()
        return [_from_node(each) for each in self._read()]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def _from_node(given: dict[str, Any]) -> SeenConnection:
    requests = []
    for each in given["requests"]:
        names, values = each["headers"][::2], each["headers"][1::2]
        headers = [(name.lower(), value) for name, value in zip(names, values, strict=True)]
        body = None if each["body"] is None else base64.b64decode(each["body"])
        requests.append(SeenRequest(each["method"], each["target"], headers, body))
    return SeenConnection(requests, given["refusal"], is_reset=given["isReset"])


def start_origins() -> list[Origin]:
    """An origin of each kind; without Node there are two."""
    origins: list[Origin] = [
        _ThreadedOrigin("h11", _serve_h11),
        _ThreadedOrigin("http.server", _serve_plainly),
    ]
    program = shutil.which("node")
    return origins if program is None else [*origins, _NodeOrigin(program)]
