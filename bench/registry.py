"""What a node of `exec-server registry` costs: processor time, latency, requests, memory.

    python -m bench.registry [--seconds N] [--executors N]

The node runs in a process of its own, with SQLite; both ends of its streams are in this one. With
PostgreSQL installed, two and four nodes are measured as well.
"""

import argparse
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.balancer import Balancer, start_balancer
from tests.support.postgres import programs, start_postgres
from tests.support.raw_links import frame_bytes
from tests.support.registry import Node, RawClient, RawEnd, RawExecutor, start_node
from tests.support.relay import key_object

from exec_server.relay.frames import Frame, Kind, encode
from exec_server.relay.noise import Identity

_LARGE, _SMALL = 60 * 1024, 1100
_ENVIRONMENT = "bench"
# A node that relays nothing for so long has lost a frame.
_STALLED_SECONDS = 20.0


def cpu_seconds(node: Node) -> float:
    """Processor time of the process so far."""
    text = Path(f"/proc/{node.server.process.pid}/schedstat").read_text()
    return int(text.split()[0]) / 1e9


def resident_bytes(node: Node) -> int:
    """Memory of the process that is not shared with files."""
    for line in Path(f"/proc/{node.server.process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no RssAnon")


@dataclass(frozen=True)
class Relayed:
    """The cost of frames that one end sent as fast as it could."""

    microseconds: float  # of processor time of the node, for each frame
    megabytes: float  # a second
    frames: int

    def __str__(self) -> str:
        cost = f"{self.microseconds:6.1f} µs of processor time"
        return f"{cost}, {self.megabytes:5.0f} MB/s, {self.frames} frames"


def relay(node: Node, sender: RawEnd, receiver: RawEnd, size: int, seconds: float) -> Relayed:
    """Processor time for each frame, and the rate, while one end sends as fast as it can."""
    frame = frame_bytes(2, encode(Frame("s", Kind.DATA, b"x" * size)))
    block = frame * max(1, 262_144 // len(frame))
    count = len(block) // len(frame)
    stop = threading.Event()
    sent = 0

    def send() -> None:
        nonlocal sent
        while not stop.is_set():
            sender.socket.sock.sendall(block)
            sent += count

    buffer = bytearray(1 << 20)
    received = 0
    thread = threading.Thread(target=send)
    began, cpu = time.monotonic(), cpu_seconds(node)
    thread.start()
    receiver.socket.sock.settimeout(0.2)
    last = began
    try:
        # Up to the last byte: the node takes the mask of each frame away.
        while thread.is_alive() or received < sent * (len(frame) - 4):
            if time.monotonic() - began > seconds:
                stop.set()
            try:
                received += receiver.socket.sock.recv_into(buffer)
                last = time.monotonic()
            except TimeoutError:  # the sender has just ended, or the machine is busy
                assert time.monotonic() - last < _STALLED_SECONDS, "a frame is lost"
    finally:
        stop.set()
        thread.join()
        receiver.socket.sock.settimeout(None)
    used = cpu_seconds(node) - cpu
    rate = received / (last - began) / 1e6
    return Relayed(used / sent * 1e6, rate, sent)


def round_trips(sender: RawEnd, receiver: RawEnd, count: int) -> float:
    """The median time in seconds of a small frame to the other end and back."""
    there = encode(Frame("s", Kind.DATA, b"x" * 100))
    times = []
    for _ in range(count):
        began = time.perf_counter()
        sender.send(there)
        receiver.receive()
        receiver.send(there)
        sender.receive()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def bare_round_trips(count: int) -> float:
    """The same between two sockets without a node."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
        for end in (one, two):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        with one, two:
            for _ in range(count):
                began = time.perf_counter()
                one.sendall(b"x" * 150)
                two.recv(1000)
                two.sendall(b"x" * 150)
                one.recv(1000)
                times.append(time.perf_counter() - began)
    return statistics.median(times)


def requests(node: Node, seconds: float) -> dict[str, float]:
    """Requests per second by their name."""
    executor = Identity.generate()
    registration = {
        "security_profile": "noise_hybrid_ik_v1",
        "executor_public_key": key_object(executor.public),
    }
    validation = {
        "executor_registration_id": "x",
        "harness_public_key": key_object(Identity.generate().public),
        "harness_key_authorization": "x",
    }
    return {
        verb: _rate(node, verb, body, seconds)
        for verb, body in (("register", registration), ("validate", validation))
    }


def _rate(node: Node, verb: str, body: dict[str, Any], seconds: float) -> float:
    """Requests per second of eight clients."""
    token = node.site.executor_token
    end = time.monotonic() + seconds

    def ask() -> int:
        count = 0
        while time.monotonic() < end:
            assert node.ask(verb, body, token, f"env-{count % 50}").status == 200
            count += 1
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        counts = [task.result() for task in [threads.submit(ask) for _ in range(8)]]
    return sum(counts) / (time.monotonic() - began)


def idle_executors(node: Node, count: int) -> float:
    """Bytes of memory of each idle executor."""
    with ExitStack() as stack:
        stack.enter_context(RawExecutor(node, "first"))
        time.sleep(1.5)
        before = resident_bytes(node)
        for number in range(count):
            stack.enter_context(RawExecutor(node, f"idle-{number}"))
        time.sleep(3)  # renewals and timers settle
        return (resident_bytes(node) - before) / count


@contextmanager
def two_nodes(balancer: Balancer) -> Iterator[tuple[Node, Node]]:
    """Two nodes on one PostgreSQL; tests choose the node by its port."""
    with start_postgres() as database:
        flags = ("--public-url", balancer.url)
        with (
            start_node(database.where, *flags) as one,
            start_node(database.where, *flags, site=one.site) as two,
        ):
            yield one, two


def direct(node: Node, url: str, balancer: Balancer) -> str:
    return url.replace(f":{balancer.port}/", f":{node.port}/")


def measure_one(seconds: float, executors: int) -> None:
    bare = bare_round_trips(3000)
    with tempfile.TemporaryDirectory() as folder, start_node(Path(folder) / "data") as node:
        node.site.admin(
            "tenant", "limit", "default", "--environments", "100000", "--sockets", "100000"
        )
        node.site.admin("tenant", "limit", "default", "--bytes-per-second", "100000000000")
        with RawExecutor(node, _ENVIRONMENT) as executor, RawClient(node, _ENVIRONMENT) as client:
            client.send(Frame("s", Kind.DATA, b"first"))
            executor.receive()
            for size in (_LARGE, _SMALL):
                to_client = relay(node, executor, client, size, seconds)
                to_executor = relay(node, client, executor, size, seconds)
                print(f"frame of {size:6} bytes to a client    ", to_client)
                print(f"frame of {size:6} bytes to an executor ", to_executor)
            one = round_trips(client, executor, 3000)
            print(f"round trip without a node  {bare * 1e6:7.0f} µs")
            print(f"… through one node         {one * 1e6:7.0f} µs")
        for name, rate in requests(node, seconds).items():
            print(f"{name:26} {rate:7.0f} requests/s")
        each = idle_executors(node, executors)
        print(f"memory of an idle executor {each / 1024:7.1f} KiB, of {executors}")


def measure_two() -> None:
    with start_balancer() as balancer, two_nodes(balancer) as (one, two):
        url = one.register(name=_ENVIRONMENT)["url"]
        with RawEnd(direct(one, url, balancer)) as executor:
            url = one.connect(Identity.generate(), name=_ENVIRONMENT).url
            with RawEnd(direct(two, url, balancer)) as client:
                client.send(Frame("s", Kind.DATA, b"first"))
                executor.receive()
                seconds = round_trips(client, executor, 3000)
        print(f"… through two nodes        {seconds * 1e6:7.0f} µs")


def measure_growth(seconds: float) -> None:
    """Registrations of eight clients that are spread over 1, 2 and 4 nodes on one database.

    The clients, the nodes and the database share the cores of this machine.
    """
    for count in (1, 2, 4):
        with ExitStack() as stack:
            database = stack.enter_context(start_postgres())
            nodes = [stack.enter_context(start_node(database.where))]
            while len(nodes) < count:
                nodes.append(stack.enter_context(start_node(database.where, site=nodes[0].site)))
            rate = _site_rate(nodes, seconds)
        print(f"register, {count} node{'s' * (count > 1):1} on PostgreSQL {rate:7.0f} requests/s")


def _site_rate(nodes: list[Node], seconds: float) -> float:
    """Registrations per second of eight clients, each at one of the nodes."""
    body = {
        "security_profile": "noise_hybrid_ik_v1",
        "executor_public_key": key_object(Identity.generate().public),
    }
    end = time.monotonic() + seconds

    def ask(number: int) -> int:
        node, count = nodes[number % len(nodes)], 0
        while time.monotonic() < end:
            reply = node.ask("register", body, nodes[0].site.executor_token, f"env-{number}")
            assert reply.status == 200, reply
            count += 1
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(ask, range(8)))
    return sum(counts) / (time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.registry", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--executors", type=int, default=1000, help="that are idle")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    measure_one(options.seconds, options.executors)
    if programs() is not None:
        measure_two()
        measure_growth(options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
