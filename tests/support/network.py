"""A process with proxies, an origin behind them, and raw exchanges with both."""

from __future__ import annotations

import base64
import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from exec_server.protocol.decoding import decode
from exec_server.protocol.network import NetworkProxy
from tests.support.client import Client, scaled

SETTINGS: dict[str, Any] = {
    "enabled": True,
    "enableSocks5": True,
    "enableSocks5Udp": False,
    "allowUpstreamProxy": False,
    "dangerouslyAllowAllUnixSockets": False,
    "mode": "full",
    "allowLocalBinding": False,
}
PATH = "/usr/local/bin:/usr/bin:/bin"


def network_proxy(*, timeout: int | None = None, **members: Any) -> dict[str, Any]:
    """`networkProxy` of a start; `members` are those of its `proxy`."""
    value: dict[str, Any] = {"proxy": SETTINGS | members}
    return value if timeout is None else value | {"policyDecisionTimeoutMs": timeout}


def launch(*, timeout: int | None = None, **members: Any) -> NetworkProxy:
    """The same, decoded."""
    return decode(NetworkProxy, network_proxy(timeout=timeout, **members))


@dataclass
class WebOrigin:
    """A web server on loopback that records its requests."""

    port: int
    requests: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def web_origin() -> Iterator[WebOrigin]:
    """GET answers `origin`, `/redirect` leads to 169.254.169.254, other methods echo the body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            origin.requests.append(f"{self.requestline}\n{self.headers}")
            location = "http://169.254.169.254/" if self.path == "/redirect" else None
            self.send_response(200 if location is None else 302)
            if location is not None:
                self.send_header("Location", location)
            self.send_header("Content-Length", "6")
            self.send_header("X-Origin", "yes")
            if self.path == "/hop":
                self.send_header("Connection", "X-Hop")
                self.send_header("X-Hop", "1")
            self.end_headers()
            self.wfile.write(b"origin")

        def do_OPTIONS(self) -> None:
            self.do_GET()

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "6")
            self.end_headers()

        def do_POST(self) -> None:
            origin.requests.append(f"{self.requestline}\n{self.headers}")
            body = self._body()
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", "0")))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    origin = WebOrigin(server.server_port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield origin
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Proxies:
    """A process that sleeps, and the ports of its proxies."""

    client: Client
    process_id: str
    http: int
    socks: int | None

    def decisions(self) -> list[dict[str, Any]]:
        """The decisions about this process that were reported so far."""
        return [
            notice["params"]
            for notice in self.client.notifications
            if notice["method"] == "network/policyDecision"
            and notice["params"]["processId"] == self.process_id
        ]


def start_proxies(client: Client, proxy: dict[str, Any], **params: Any) -> Proxies:
    """Start a process that prints its proxies and sleeps."""
    script = "echo $HTTP_PROXY $ALL_PROXY; exec sleep 600"
    process_id = client.start(
        ["/bin/sh", "-c", script], env={"PATH": PATH}, networkProxy=proxy, **params
    )
    chunk = client.notice("process/output", process_id)["chunk"]
    ports = [int(port) for port in re.findall(r":(\d+)", base64.b64decode(chunk).decode())]
    return Proxies(client, process_id, ports[0], ports[1] if ports[1] != ports[0] else None)


def exchange(port: int, sent: bytes, *, until: bytes | None = None, timeout: float = 10) -> bytes:
    """What a loopback port answers to these bytes, until it closes, or has said `until`."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), scaled(timeout)) as link:
        link.sendall(sent)
        while until is None or until not in received:
            try:
                data = link.recv(65536)
            except ConnectionResetError:
                break
            if not data:
                break
            received += data
    return received


def status(answer: bytes) -> int:
    """The status of an HTTP answer."""
    return int(answer.split(b" ", 2)[1])


# Associations of a process for datagrams, as a client of SOCKS5 uses them.


LOOPBACK = "127.0.0.1"


@dataclass
class Association:
    """The connection of an association, its reply, and the socket for its datagrams."""

    control: socket.socket
    reply: bytes
    datagrams: socket.socket

    def send(self, host: str, port: int, payload: bytes, *, fragment: int = 0) -> None:
        header = bytes([0, 0, fragment, 1]) + socket.inet_aton(host) + port.to_bytes(2)
        self.send_raw(header + payload)

    def send_raw(self, data: bytes) -> None:
        self.datagrams.sendto(data, (LOOPBACK, int.from_bytes(self.reply[-2:])))

    def receive(self) -> bytes:
        """The payload of the next datagram."""
        data = self.datagrams.recv(65_536)
        assert data[:4] == b"\0\0\0\x01"
        return data[10:]


@contextlib.contextmanager
def udp_socket() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((LOOPBACK, 0))
        sock.settimeout(scaled(10))
        yield sock


@contextlib.contextmanager
def associate(proxy: int, *, declared: bool = True) -> Iterator[Association]:
    """UDP ASSOCIATE; `declared` tells the proxy the port of the datagrams."""
    with (
        udp_socket() as datagrams,
        socket.create_connection((LOOPBACK, proxy), scaled(10)) as control,
    ):
        port = datagrams.getsockname()[1] if declared else 0
        address = socket.inet_aton(LOOPBACK if declared else "0.0.0.0")
        control.sendall(b"\x05\x01\x00\x05\x03\x00\x01" + address + port.to_bytes(2))
        reply = b""
        while len(reply) < 12 and (data := control.recv(12 - len(reply))):
            reply += data
        yield Association(control, reply[2:], datagrams)
