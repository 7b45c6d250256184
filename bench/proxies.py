"""The proxies of a process: added latency and throughput, `python -m bench.proxies`.

An origin on loopback answers small requests and one large one, directly and through the HTTP proxy
(absolute form), CONNECT and SOCKS5 of each server, in turns. Each small request has a connection of
its own.
"""

import argparse
import multiprocessing
import os
import re
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.client import BenchError, Connection, uri
from bench.servers import Server, default_servers, running

REQUESTS = 200
BULK_BYTES = 1 << 28
ROUNDS = 3
_SMALL = b"x" * 1024
_CHUNK = b"y" * (1 << 18)
_RECEIVE_BYTES = 1 << 18
_START_SECONDS = 10.0

# The connection to an origin, from the ports of the proxies and of the origin.
Dial = Callable[[], socket.socket]


def _serve(listener: socket.socket) -> None:
    """Answers each connection once: `/bulk` with BULK_BYTES, others with a small body."""
    while True:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(accepted,), daemon=True).start()


def _answer(accepted: socket.socket) -> None:
    with accepted:
        head = b""
        while b"\r\n\r\n" not in head:
            data = accepted.recv(65536)
            if not data:
                return
            head += data
        size = BULK_BYTES if b"/bulk" in head.split(b"\r\n")[0] else len(_SMALL)
        accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        try:
            if size == len(_SMALL):
                accepted.sendall(_SMALL)
            else:
                for _ in range(size // len(_CHUNK)):
                    accepted.sendall(_CHUNK)
        except OSError:
            pass  # the client has what it wants


def _dial(port: int) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def _tunnel(proxy: int, origin: int) -> socket.socket:
    link = _dial(proxy)
    link.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (origin, origin))
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += link.recv(1)
    return link


def _socks(proxy: int, origin: int) -> socket.socket:
    link = _dial(proxy)
    link.sendall(b"\x05\x01\x00\x05\x01\x00\x01\x7f\x00\x00\x01" + origin.to_bytes(2))
    received = b""
    while len(received) < 12:
        received += link.recv(12 - len(received))
    return link


def _request(dial: Dial, url: str, origin: int) -> int:
    """Makes one request and reads its whole answer; returns the size of the body."""
    with dial() as link:
        head = f"GET {url} HTTP/1.1\r\nHost: 127.0.0.1:{origin}\r\nConnection: close\r\n\r\n"
        link.sendall(head.encode())
        buffer = bytearray(_RECEIVE_BYTES)
        size, body = 0, 0
        start = b""
        while not body:
            start += link.recv(65536)
            body = start.find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in start else 0
        if b" 200 " not in start[:20]:
            raise BenchError(f"refused: {start[:100]!r}")
        wanted = BULK_BYTES if url.endswith("/bulk") else len(_SMALL)
        size = len(start) - body
        while size < wanted:
            count = link.recv_into(buffer)
            if not count:
                raise BenchError(f"only {size} of {wanted} bytes")
            size += count
    return size


def _start_process(connection: Connection, folder: str) -> tuple[int, int]:
    """Starts a process with proxies; returns their ports."""
    ports = Path(folder, f"ports-{time.monotonic_ns()}")
    script = f"echo $HTTP_PROXY $ALL_PROXY > {ports}.new; mv {ports}.new {ports}; exec sleep 600"
    proxy = {
        "enabled": True,
        "enableSocks5": True,
        "enableSocks5Udp": False,
        "allowUpstreamProxy": False,
        "dangerouslyAllowAllUnixSockets": False,
        "mode": "full",
        "domains": {"127.0.0.1": "allow"},
        "allowLocalBinding": False,
    }
    params = {
        "processId": "proxied",
        "argv": ["/bin/sh", "-c", script],
        "cwd": uri(folder),
        "env": {"PATH": os.environ["PATH"]},
        "tty": False,
        "networkProxy": {"proxy": proxy},
    }
    connection.call("process/start", params)
    deadline = time.monotonic() + _START_SECONDS
    while not ports.exists():
        if time.monotonic() > deadline:
            raise BenchError("the process did not start")
        time.sleep(0.01)
    http, socks = (int(port) for port in re.findall(r":(\d+)", ports.read_text()))
    return http, socks


def _measure(dial: Dial, prefix: str, origin: int, requests: int) -> tuple[float, float]:
    """The median time of a small request in microseconds, and the rate of a large one in MB/s."""
    times = []
    for _ in range(requests):
        began = time.perf_counter()
        _request(dial, f"{prefix}/small", origin)
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    _request(dial, f"{prefix}/bulk", origin)
    rate = BULK_BYTES / (time.perf_counter() - began) / 1e6
    return statistics.median(times) * 1e6, rate


def _drain(connection: Connection) -> None:
    """Reads the decisions that the server reports, as a client does."""
    try:
        while connection.socket.recv(_RECEIVE_BYTES):
            pass
    except OSError:
        pass


def _measure_server(server: Server, origin: int, requests: int) -> dict[str, tuple[float, float]]:
    """The results of all ways through the proxies of one server."""
    with tempfile.TemporaryDirectory() as folder, running(server, folder) as started:
        connection = started.connect()
        http, socks = _start_process(connection, folder)
        drain = threading.Thread(target=_drain, args=(connection,))
        drain.start()
        ways: dict[str, tuple[Dial, str]] = {
            "HTTP": (lambda: _dial(http), f"http://127.0.0.1:{origin}"),
            "CONNECT": (lambda: _tunnel(http, origin), ""),
            "SOCKS5": (lambda: _socks(socks, origin), ""),
        }
        results = {
            f"{name}, {server.label}": _measure(dial, prefix, origin, requests)
            for name, (dial, prefix) in ways.items()
        }
        connection.socket.shutdown(socket.SHUT_RDWR)
        drain.join()
        connection.socket.close()
    return results


def main() -> None:
    """Prints a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        # A process of its own: threads of one interpreter wait for each other.
        serving = multiprocessing.Process(target=_serve, args=(listener,), daemon=True)
        serving.start()
        origin = listener.getsockname()[1]
        for _ in range(arguments.rounds):
            direct = _measure(lambda: _dial(origin), "", origin, arguments.requests)
            found.setdefault("direct", []).append(direct)
            for server in default_servers():
                for name, result in _measure_server(server, origin, arguments.requests).items():
                    found.setdefault(name, []).append(result)
        serving.kill()
        serving.join()
    print("| way | request (µs) | download (MB/s) |\n|---|---:|---:|")
    for name, results in found.items():
        times, rates = zip(*results, strict=True)
        print(f"| {name} | {statistics.median(times):.0f} | {statistics.median(rates):.0f} |")


if __name__ == "__main__":
    main()
