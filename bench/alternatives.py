"""Hand-written pieces against what could replace each: `python -m bench.alternatives`.

Both sides of a row do the same work in this process, in turns. The table has the medians of the
rounds, and the median of the ratios of two rounds in a row, which other programs disturb least.
The docstrings of the pieces quote the ratios. The other side is a library, or a more general piece
of our own. A row whose library is not installed (the extra `dev` has all of them) is left out.

A second table has the time to import libraries that a start-up does without; of those, `dev` has
only the dependencies.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, cast

import uvloop
from tests.support.memory_transport import BYTE_RELAYS, MemoryTransport, StartRelay
from websockets.protocol import SERVER, Protocol

from exec_server.host.threads import ThreadPool
from exec_server.hosting.relay_link import LinkEnd, RelayLink
from exec_server.net import http_client
from exec_server.net.websocket.frames import FrameReader, Opcode, masked_frame, text_frame
from exec_server.net.websocket.socket import Cause, FramedSocket, SocketEnd
from exec_server.protocol import decoding
from exec_server.relay import frames as relay_frames

ROUNDS = 40
ROUND_SECONDS = 0.02

REQUEST = json.dumps(
    {
        "id": 17,
        "method": "process/write",
        "params": {"processId": "process-1", "chunk": "QUJDREVGR0g=", "writeId": "w-17"},
    },
    separators=(",", ":"),
).encode()
RESPONSE = b'{"id":17,"result":{"status":"accepted"}}'
KIB = 1024
# The relay frames of one read: one on a quiet link, and as many as a busy one brings at once.
LINK_FRAMES = (1, 16)

Side = Callable[[int], Awaitable[None]]  # does its work so many times


class Row(NamedTuple):
    """One comparison, and the name of the library."""

    name: str
    library: str
    ours: Side
    theirs: Side


def repeated(function: Callable[[], object]) -> Side:
    """A side from a plain function."""

    async def run(count: int) -> None:
        for _ in range(count):
            function()

    return run


# ---- rows -----------------------------------------------------------------------------


def websocket_rows() -> Iterator[Row]:
    """One request in and one response out, as a server does it."""
    for name, request in (("short", REQUEST), ("64 KiB", b"x" * 64 * KIB)):
        data = masked_frame(Opcode.TEXT, request, b"mask")
        reader, protocol = FrameReader(), Protocol(SERVER, max_size=None)

        def fast(data: bytes = data, reader: FrameReader = reader) -> None:
            assert reader.whole_message(data) is not None
            text_frame(RESPONSE)

        def buffered(data: bytes = data, reader: FrameReader = reader) -> None:
            reader.feed(data)
            assert reader.next_event() is not None
            text_frame(RESPONSE)

        def theirs(data: bytes = data, protocol: Protocol = protocol) -> None:
            protocol.receive_data(data)
            assert protocol.events_received()
            protocol.send_text(RESPONSE)
            protocol.data_to_send()

        if name == "short":
            yield Row("WebSocket, fast path", "websockets", repeated(fast), repeated(theirs))
        yield Row(f"WebSocket, {name}", "websockets", repeated(buffered), repeated(theirs))


def thread_rows() -> Iterator[Row]:
    """A function that returns at once, in a thread."""
    loop = asyncio.get_running_loop()
    pool, executor = ThreadPool(4, "bench"), ThreadPoolExecutor(4)

    def work() -> None:
        pass

    def sequential(submit: Callable[[], asyncio.Future[None]]) -> Side:
        async def run(count: int) -> None:
            for _ in range(count):
                await submit()

        return run

    def pipelined(submit: Callable[[], asyncio.Future[None]]) -> Side:
        async def run(count: int) -> None:
            while count > 0:
                await asyncio.wait([submit() for _ in range(100)])
                count -= 100

        return run

    def ours() -> asyncio.Future[None]:
        return pool.run(work)

    def theirs() -> asyncio.Future[None]:
        return loop.run_in_executor(executor, work)

    for name, make in (("in sequence", sequential), ("pipelined", pipelined)):
        yield Row(f"thread pool, {name}", "concurrent.futures", make(ours), make(theirs))


def relay_rows() -> Iterator[Row]:
    """One data frame encoded and decoded."""
    if importlib.util.find_spec("google.protobuf") is None:
        return
    frame_class = _protobuf_class()
    prefix = relay_frames.stream_prefix("stream-1")
    for size in (200, 60 * KIB):
        payload = b"x" * size

        def ours(payload: bytes = payload) -> None:
            relay_frames.decode(relay_frames.data_frame(prefix, 300, payload))

        def theirs(payload: bytes = payload) -> None:
            frame = frame_class(version=1, stream_id="stream-1")
            frame.data.seq, frame.data.segment_count, frame.data.payload = 300, 1, payload
            decoded = frame_class.FromString(frame.SerializeToString())
            assert len(decoded.data.payload) == len(payload)

        yield Row(f"relay frame, {size:,} B", "protobuf", repeated(ours), repeated(theirs))


def _protobuf_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    data = file.message_type.add(name="Data")
    for number, name in enumerate(("seq", "segment_index", "segment_count"), 1):
        data.field.add(name=name, number=number, type=kinds.TYPE_UINT32, label=1)
    data.field.add(name="payload", number=4, type=kinds.TYPE_BYTES, label=1)
    frame = file.message_type.add(name="Frame")
    frame.oneof_decl.add(name="body")
    frame.field.add(name="version", number=1, type=kinds.TYPE_UINT32, label=1)
    frame.field.add(name="stream_id", number=2, type=kinds.TYPE_STRING, label=1)
    frame.field.add(
        name="data", number=5, type=kinds.TYPE_MESSAGE, type_name=".bench.Data", label=1
    ).oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Frame"))


def link_rows() -> Iterator[Row]:
    """A read with relay frames of 1 KiB, delivered to an end that counts them."""
    for frames in LINK_FRAMES:
        data = masked_frame(Opcode.BINARY, bytes(KIB), b"mask") * frames
        transports = [MemoryTransport(asyncio.Protocol(), is_tls=True) for _ in range(2)]
        ends = _LinkEnd(), _LinkEnd()
        link = RelayLink(transports[0], "token")
        link.start(cast(LinkEnd, ends[0]), b"", KIB)
        end = cast(SocketEnd, ends[1])
        framed = FramedSocket(end, transports[1], -1, FrameReader(), lambda *_: b"")
        framed.change(Cause.UPGRADED)

        def receive(data: bytes = data, link: RelayLink = link) -> None:
            link.get_buffer(-1)[: len(data)] = data
            link.buffer_updated(len(data))

        ours = _counted(receive, ends[0], frames)
        theirs = _counted(partial(framed.feed, data), ends[1], frames)
        yield Row(f"link, {frames} x 1 KiB", "FramedSocket", ours, theirs)


def _counted(receive: Callable[[], None], end: _LinkEnd, frames: int) -> Side:
    """Waits for all frames of a read: some may have to wait for the event loop."""

    async def run(count: int) -> None:
        for _ in range(count):
            expected = end.count + frames
            receive()
            while end.count < expected:
                await asyncio.sleep(0)

    return run


class _LinkEnd:
    """Counts the messages of a RelayLink or FramedSocket."""

    count = 0

    def frame_received(self, frame: bytes) -> None:
        self.count += 1

    event_received = frame_received

    def bytes_read(self, count: int, messages: int, frames: int) -> None:
        pass


async def forward_rows() -> list[Row]:
    """1 KiB from one end of a relay of bytes to the other."""
    forwarded, carried = [await _forwarding(start) for start in BYTE_RELAYS.values()]
    return [Row("forward, 1 KiB", "carry", forwarded, carried)]


async def _forwarding(start: StartRelay) -> Side:
    loop = asyncio.get_running_loop()
    source, target = await start()
    piece = bytes(KIB)

    async def run(count: int) -> None:
        for _ in range(count):
            await loop.sock_sendall(source, piece)
            received = 0
            while received < KIB:
                received += len(await loop.sock_recv(target, KIB - received))

    return run


def json_rows() -> Iterator[Row]:
    """A request decoded, duplicate members refused."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        assert len(members) == len(pairs)
        return members

    decode = json.JSONDecoder(object_pairs_hook=unique).decode
    ours = repeated(lambda: decoding.parse(REQUEST))
    yield Row("JSON request", "json", ours, repeated(lambda: decode(REQUEST.decode())))


def http_rows(url: str) -> Iterator[Row]:
    """A GET request on a kept connection to a server in the same loop."""
    if importlib.util.find_spec("httpcore") is None:
        return
    import httpcore

    client, pool = http_client.Client(), httpcore.AsyncConnectionPool()

    async def ours(count: int) -> None:
        for _ in range(count):
            response = await client.open("GET", url, [])
            while await response.read():
                pass

    async def theirs(count: int) -> None:
        for _ in range(count):
            await pool.request("GET", url)

    yield Row("HTTP request", "httpcore", ours, theirs)


class _HttpServer(asyncio.Protocol):
    """Answers each request, which arrives in one piece."""

    _transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


# ---- imports --------------------------------------------------------------------------

# The modules, with those of the standard library or of our own that do their work.
IMPORTS = {
    "h11": "exec_server.net.http1",
    "ada_url": "exec_server.protocol.urls",
    "aiohappyeyeballs": "asyncio",
    "typer": "argparse",
    "tqdm": "time",
    "rich.progress": "time",
    "prometheus_client": "bisect",
    "sqlalchemy": "sqlite3",
}
IMPORT_ROUNDS = 7


def import_seconds(module: str) -> float:
    """The median time that a fresh interpreter with asyncio takes to import a module."""
    code = (
        "import asyncio, time; start = time.perf_counter(); "
        f"import {module}; print(time.perf_counter() - start)"
    )
    run = partial(subprocess.run, [sys.executable, "-c", code], check=True, capture_output=True)
    return statistics.median(float(run().stdout) for _ in range(IMPORT_ROUNDS))


def print_imports() -> None:
    print(f"\n{'import':20} {'library':>9} {'instead':>9}")
    for library, instead in IMPORTS.items():
        if importlib.util.find_spec(library.partition(".")[0]) is not None:
            theirs, ours = import_seconds(library) * 1e3, import_seconds(instead) * 1e3
            print(f"{library:20} {theirs:6.1f} ms {ours:6.1f} ms {instead}")


# ---- measuring ------------------------------------------------------------------------


async def measure(row: Row) -> tuple[float, float, float]:
    """Seconds for one repetition, of ours and of the library, and how many times ours is faster."""
    counts = [await _calibrated(side) for side in (row.ours, row.theirs)]
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for side, count, found in zip((row.ours, row.theirs), counts, samples, strict=True):
            start = time.perf_counter()
            await side(count)
            found.append((time.perf_counter() - start) / count)
    ratios = [theirs / ours for ours, theirs in zip(*samples, strict=True)]
    ours, theirs = map(statistics.median, samples)
    return ours, theirs, statistics.median(ratios)


async def _calibrated(side: Side) -> int:
    """How many repetitions take about the time of a round."""
    count = 100
    while True:
        start = time.perf_counter()
        await side(count)
        elapsed = time.perf_counter() - start
        if elapsed > ROUND_SECONDS / 4:
            return max(100, round(count * ROUND_SECONDS / elapsed / 100) * 100)
        count *= 4


async def main() -> None:
    print(f"{'piece':24} {'ours':>10} {'library':>10} {'ratio':>7}")
    server = await asyncio.get_running_loop().create_server(_HttpServer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    rows = [*websocket_rows(), *thread_rows(), *relay_rows(), *link_rows()]
    rows += [*await forward_rows(), *json_rows(), *http_rows(url)]
    for row in rows:
        ours, theirs, ratio = await measure(row)
        print(
            f"{row.name:24} {ours * 1e6:7.2f} µs {theirs * 1e6:7.2f} µs {ratio:6.1f}x {row.library}"
        )


if __name__ == "__main__":
    uvloop.run(main())
    print_imports()
