"""The command `python -m bench.floods`: the answers that one client gets while another floods.

One process sends garbage as fast as it can, over one connection at a time. Another client makes
the smallest request over and over; the percentiles of its waits are printed for each kind of
garbage, for all servers in turns. `cpu` is the 99th percentile of the processor time that the
server used during a wait: on a busy machine it is the better figure.
"""

import argparse
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from bench import hostile
from bench.client import BenchError, Connection, frame
from bench.servers import Running, Server, custom_server, default_servers, running
from bench.stalls import PROCESS_CLOCK

_SECONDS = 2.0
_MIB = 1_048_576

_UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
_HANDSHAKE = frame(b'{"id":1,"method":"initialize","params":{"clientName":"flood"}}') + frame(
    b'{"method":"initialized"}'
)


def _endless(start: bytes, more: bytes) -> Callable[[], Iterator[bytes]]:
    def data() -> Iterator[bytes]:
        yield start
        while True:
            yield more

    return data


def _once(data: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter((data,))


_OPEN = _UPGRADE + _HANDSHAKE

# What each connection sends; when it is over, or the server has hung up, the next one begins.
FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "nothing": lambda: iter(()),
    "connections": _once(b""),
    "halves of request heads": _once(_UPGRADE[:50]),
    "an endless request head": _endless(b"GET / HTTP/1.1\r\n", b"a: " + b"x" * 8000 + b"\r\n"),
    "refused requests": _endless(b"", b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200),
    "upgrades": _once(_UPGRADE),
    "handshakes": _once(_OPEN),
    "invalid frames": _once(_OPEN + b"\xff" * 1000),
    "empty fragments": _endless(
        _OPEN + hostile.fragment(b"", hostile.TEXT), hostile.fragment(b"") * 10_000
    ),
    "pings": _endless(_OPEN, frame(b"", 9) * 1000),
    "malformed messages": _endless(_OPEN, frame(b'{"id":1,"method":') * 1000),
    "malformed messages of 30 KiB": _endless(
        _OPEN, hostile.JSON["numbers and a comma"](30_000) * 4
    ),
    "malformed messages of 1 MiB": _endless(_OPEN, hostile.JSON["members with a duplicate"](_MIB)),
    "unknown methods": _endless(_OPEN, frame(b'{"id":1,"method":"x"}') * 1000),
    "invalid params of 30 KiB": _endless(
        _OPEN, hostile.PARAMS["a watched path of the wrong type"](30_000) * 4
    ),
    "invalid params of 1 MiB": _endless(
        _OPEN, hostile.PARAMS["a watched path of the wrong type"](_MIB)
    ),
    "requests": _endless(_OPEN, frame(b'{"id":1,"method":"environment/status"}') * 1000),
}


def main() -> int:
    """Measures the selected floods on all servers in turns and prints the table."""
    options = _parse()
    servers = {server.label: server for server in [*default_servers(), *options.server]}
    wanted = options.servers.split(",") if options.servers else list(servers)
    print("waits of another client in ms\n")
    heads = "".join(f"{label:>12}: p50{'p99':>8}{'max':>8}{'cpu':>8}" for label in wanted)
    print(f"{'':32}{heads}")
    with tempfile.TemporaryDirectory(prefix="exec-server-floods-") as folder:
        for name in FLOODS:
            if options.only in name:
                row = "".join(
                    _measure(servers[label], folder, name, options.seconds) for label in wanted
                )
                print(f"{name:32}{row}", flush=True)
    return 0


def _measure(server: Server, folder: str, name: str, seconds: float) -> str:
    with running(server, folder) as started:
        flood = multiprocessing.Process(
            target=_flood, args=(started.host, started.port, name), daemon=True
        )
        victim = started.connect()
        flood.start()
        try:
            waits, used = _waits(started, victim, seconds)
        except BenchError as error:
            return f"  {error!s:>38.38}"
        finally:
            flood.kill()
            flood.join()
            victim.socket.close()
    figures = (_percentile(waits, 50), _percentile(waits, 99), max(waits), _percentile(used, 99))
    p50, p99, most, cpu = (figure * 1000 for figure in figures)
    return f"{p50:17.2f}{p99:8.2f}{most:8.1f}{cpu:8.2f}"


def _waits(started: Running, victim: Connection, seconds: float) -> tuple[list[float], list[float]]:
    """The times of all requests, and the processor time that the server used during each."""
    request = victim.prepare("environment/status", {})
    processor = ~started.process.pid << 3 | PROCESS_CLOCK
    clock = time.perf_counter
    waits, used = [], []
    began = clock()
    while clock() < began + seconds:
        victim.deadline = time.monotonic() + 10
        before, start = time.clock_gettime(processor), clock()
        victim.exchange(*request)
        waits.append(clock() - start)
        used.append(time.clock_gettime(processor) - before)
    return waits, used


def _percentile(figures: list[float], percent: int) -> float:
    return sorted(figures)[len(figures) * percent // 100]


def _flood(host: str, port: int, name: str) -> None:
    """Connects and sends until it is killed; a full receive buffer is emptied, not decoded."""
    while name != "nothing":
        try:
            with socket.create_connection((host, port), 5) as flood:
                flood.setblocking(False)
                for data in FLOODS[name]():
                    _send(flood, data)
        except OSError:
            continue  # refused, or the server has hung up


def _send(flood: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[flood.send(view) :]
        except BlockingIOError:
            try:
                while flood.recv(_MIB):
                    pass
                raise ConnectionResetError
            except BlockingIOError:
                time.sleep(0.0005)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.floods",
        description="Measures the waits of one client while another one sends garbage.",
    )
    parser.add_argument("--seconds", type=float, default=_SECONDS, help=f"default {_SECONDS:g}")
    parser.add_argument("--only", default="", metavar="TEXT", help="floods whose name contains it")
    parser.add_argument("--servers", metavar="LABEL,...", help="default: all that are known")
    parser.add_argument(
        "--server", action="append", default=[], type=custom_server, metavar="LABEL=COMMAND"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
