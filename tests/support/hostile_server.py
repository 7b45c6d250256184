"""A server on loopback that completes the handshake and then answers as the test decides.

It runs in a thread, so that clients may be subprocesses, blocking calls or tasks of another loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from exec_server.net.websocket.frames import Opcode
from tests.support.client import DEFAULT_TIMEOUT, scaled
from tests.support.raw_servers import Peer, serving

SESSION: Final = "11111111-2222-4333-8444-555555555555"
ENVIRONMENT: Final[dict[str, Any]] = {
    "shell": {"name": "sh", "path": "/bin/sh"},
    "cwd": "file:///home",
    "capabilities": {
        "processCloseStdin": True,
        "processReadLoss": True,
        "processSignals": True,
        "fileWriteStreaming": True,
    },
}

Message = dict[str, Any]
# A result, a Refusal, or a Reply with any messages.
Answer = Any


class Refusal:
    """An error instead of a result."""

    def __init__(self, message: str, code: int = -32603) -> None:
        self.error = {"code": code, "message": message}


class Reply:
    """Messages to send as they are instead of an answer; bytes need not be JSON."""

    def __init__(self, *messages: object) -> None:
        self.messages = messages


class Frame:
    """A frame to send as it is, perhaps a part of a message or a control frame."""

    def __init__(self, opcode: Opcode, payload: bytes = b"", *, fin: bool = True) -> None:
        self.opcode, self.payload, self.fin = opcode, payload, fin


class Flood:
    """Messages without end, as fast as the client reads them; the connection then ends."""

    def __init__(self, first: object, make: Callable[[int], object], limit: int) -> None:
        self.first, self.make, self.limit = first, make, limit


def notice(method: str, **params: object) -> Message:
    return {"method": method, "params": params}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def command_output(stdout: bytes, code: int = 0, stderr: bytes = b"") -> Callable[[Message], Reply]:
    """An answer to process/start: the command prints this and exits."""

    def answer(request: Message) -> Reply:
        of = request["params"]["processId"]
        messages: list[Message] = [
            {"id": request["id"], "result": {"processId": of, "sandboxType": "none"}}
        ]
        seq = 0
        for stream, data in (("stdout", stdout), ("stderr", stderr)):
            for at in range(0, len(data), 65_536):
                seq += 1
                chunk = encoded(data[at : at + 65_536])
                said = notice("process/output", processId=of, seq=seq, stream=stream, chunk=chunk)
                messages.append(said)
        messages.append(
            notice("process/exited", processId=of, seq=seq + 1, exitCode=code, sandboxDenied=False)
        )
        messages.append(notice("process/closed", processId=of, seq=seq + 2))
        return Reply(*messages)

    return answer


class HostileServer:
    """`answers` has a value, or a function of the request, for each method."""

    def __init__(self, url: str, answers: dict[str, Answer]) -> None:
        self.url = url
        self.answers: dict[str, Answer] = {
            "initialize": {"sessionId": SESSION, "environmentInfo": ENVIRONMENT},
            "environment/status": {"status": "ready"},
            "process/terminate": {"running": False},
            "fs/close": {},
        } | answers
        self.requests: list[Message] = []

    async def serve(self, peer: Peer) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await peer.upgrade()
            while (event := await peer.receive()) is not None:
                if event.opcode is Opcode.CLOSE:
                    peer.send(Opcode.CLOSE, event.payload[:2])
                    return
                if event.opcode in (Opcode.TEXT, Opcode.BINARY):
                    async for said in self._replies(json.loads(event.payload)):
                        if isinstance(said, Frame):
                            peer.send(said.opcode, said.payload, fin=said.fin)
                        else:
                            text = said if isinstance(said, bytes) else json.dumps(said).encode()
                            peer.send(Opcode.TEXT, text)
                        await peer.writer.drain()

    async def _replies(self, message: Message) -> AsyncIterator[object]:
        if "id" not in message or "method" not in message:
            return
        self.requests.append(message)
        answer = self.answers.get(message["method"], Refusal("it is not supported", -32601))
        if callable(answer):
            answer = answer(message)
        if isinstance(answer, Flood):
            yield answer.first
            for number in range(answer.limit):
                yield answer.make(number)
            raise ConnectionError
        if isinstance(answer, Reply):
            for said in answer.messages:
                yield said
        elif isinstance(answer, Refusal):
            yield {"id": message["id"], "error": answer.error}
        else:
            yield {"id": message["id"], "result": answer}


@contextlib.contextmanager
def hostile_server(**answers: Answer) -> Iterator[HostileServer]:
    """A server with these answers; in names of methods `_` stands for the slash."""
    server = HostileServer("", {name.replace("_", "/"): each for name, each in answers.items()})
    listening = threading.Event()
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        async with serving(server.serve) as port:
            server.url = f"ws://127.0.0.1:{port}"
            listening.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="hostile server")
    thread.start()
    try:
        assert listening.wait(scaled(DEFAULT_TIMEOUT))
        yield server
    finally:
        stop[0]()
        thread.join()
