"""Scenes with an Environment whose server is the test, over in-memory streams."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from exec_server.client.environment import Environment
from exec_server.client.process import Process
from tests.support.memory_session import SESSION, MemoryDialer, MemoryStream, Message, play

OURS = {
    "sessionId": SESSION,
    "environmentInfo": {
        "shell": {"name": "sh", "path": "/bin/sh"},
        "cwd": "file:///home",
        "capabilities": {
            "processCloseStdin": True,
            "processReadLoss": True,
            "processSignals": True,
            "processTerminateExited": True,
        },
    },
}


# A server that can pause the output of one process.
PAUSING = msgspec.json.decode(msgspec.json.encode(OURS))
PAUSING["environmentInfo"]["capabilities"]["processFlowControl"] = True


class Scene:
    """An environment, the link that it has now, and the process `p` that it starts."""

    def __init__(self, env: Environment, dialer: MemoryDialer, stream: MemoryStream) -> None:
        self.env = env
        self.dialer = dialer
        self.stream = stream
        self.process_id = ""

    async def started(self, **options: Any) -> Process:
        """A process whose start the server has answered."""
        process = self.env.start(["p"], **options)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(process.__aenter__())
            request = await self.stream.next("process/start")
            self.process_id = request["params"]["processId"]
            self.accept(request)
        return process

    def accept(self, request: Message) -> None:
        answer = {"processId": request["params"]["processId"], "sandboxType": "none"}
        self.stream.answer(request, answer)

    def say(self, method: str, seq: int, **params: Any) -> None:
        said = {"processId": self.process_id, "seq": seq, **params}
        self.stream.say({"method": f"process/{method}", "params": said})

    def output(self, seq: int, data: bytes = b"x") -> None:
        self.say("output", seq, stream="stdout", chunk=base64.b64encode(data).decode())

    def exited(self, seq: int, code: int = 0) -> None:
        self.say("exited", seq, exitCode=code, sandboxDenied=False)

    async def reconnected(self) -> None:
        self.stream.lose()
        self.stream = await self.dialer.stream()
        await self.stream.past_handshake()

    async def answer_read(self, *chunks: tuple[int, bytes], **others: Any) -> Message:
        """Answer a process/read; returns its params."""
        request = await self.stream.next("process/read")
        last = chunks[-1][0] if chunks else 0
        answer = {
            "chunks": [
                {"seq": seq, "stream": "stdout", "chunk": base64.b64encode(data).decode()}
                for seq, data in chunks
            ],
            "nextSeq": last + 1,
            "exited": False,
            "exitCode": None,
            "closed": False,
            "failure": None,
            "sandboxDenied": False,
        }
        self.stream.answer(request, answer | others)
        params: Message = request["params"]
        return params


def in_environment(
    scene: Callable[[Scene], Awaitable[None]], greeting: Message = OURS
) -> Callable[[], None]:
    """A test that begins with an environment; processes that still run at its end are killed."""

    def test() -> None:
        async def run() -> None:
            dialer = MemoryDialer()
            dialer.greet = lambda stream, request: stream.answer(request, greeting)
            async with Environment(dialer) as env:
                stream = await dialer.stream()
                await stream.past_handshake()
                played = Scene(env, dialer, stream)
                await scene(played)
                # The scene does not answer the kills of the end.
                env._processes._processes.clear()
            assert dialer.closed

        play(run())

    test.__doc__ = scene.__doc__
    return test


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
