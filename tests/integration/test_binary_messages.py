"""Binary messages: files, and input and output of processes, as bytes; on WebSockets only."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.client_targets import ClientTarget
from websockets.sync.client import ClientConnection, connect

from exec_server.client.connect import connect as connect_client
from exec_server.client.environment import Environment
from exec_server.client.transfer.batches import BATCH_FILES
from exec_server.protocol.jsonrpc import TEXT_BYTES, head, split


class Raw:
    """A client that sends and receives messages as they are."""

    def __init__(self, socket: ClientConnection, **options: Any) -> None:
        self._socket = socket
        self._number = 0
        result = self.ask("initialize", clientName="raw", **options)["result"]
        self.info = result["environmentInfo"]
        socket.send('{"method":"initialized","params":{}}')

    def ask(self, method: str, data: bytes | None = None, **params: object) -> dict[str, Any]:
        """The answer to a request; the data of a binary answer is its member `data`."""
        self.post(method, data, **params)
        return self.receive()

    def post(self, method: str, data: bytes | None = None, **params: object) -> None:
        """Send a request, and do not wait for the answer."""
        self._number += 1
        text = json.dumps({"id": self._number, "method": method, "params": params})
        self._socket.send(text if data is None else head(text.encode()) + data)

    def send(self, message: bytes) -> None:
        self._socket.send(message)

    def receive(self) -> dict[str, Any]:
        message = self._socket.recv()
        if isinstance(message, str):
            return dict(json.loads(message))
        answer, data = split(message)
        return {**json.loads(answer), "data": bytes(data)}


@pytest.fixture
def raw(ours: ClientTarget) -> Iterator[Raw]:
    with connect(ours.url, max_size=None, proxy=None) as socket:
        yield Raw(socket)


@pytest.fixture
def bytes_wanted(ours: ClientTarget) -> Iterator[Raw]:
    """A client that wants output as bytes."""
    with connect(ours.url, max_size=None, proxy=None) as socket:
        yield Raw(socket, binaryOutput=True)


@pytest.mark.quick
def test_blocks_are_written_and_read(raw: Raw, tmp_path: Path) -> None:
    assert raw.info["capabilities"]["fsBinary"] is True
    assert raw.ask("environment/info")["result"] == raw.info
    path, data = str(tmp_path / "file"), os.urandom(1_048_576)
    raw.ask("fs/open", handleId="w", path=path, mode="replace")
    for offset, block in ((0, data), (len(data), b"\0"), (len(data) + 1, data[:5000])):
        assert raw.ask("fs/writeBinary", block, handleId="w", offset=offset)["result"] == {}
    raw.ask("fs/close", handleId="w")
    assert Path(path).read_bytes() == data + b"\0" + data[:5000]
    raw.ask("fs/open", handleId="r", path=path, mode="read")
    answer = raw.ask("fs/readBinary", handleId="r", offset=0, len=len(data))
    assert (answer["result"], answer["data"]) == ({"eof": False}, data)
    answer = raw.ask("fs/readBinary", handleId="r", offset=len(data), len=9000)
    assert (answer["result"], answer["data"]) == ({"eof": True}, b"\0" + data[:5000])


def test_limits_and_errors_are_those_of_blocks(raw: Raw, tmp_path: Path) -> None:
    for block in (b"", bytes(1_048_577)):
        answer = raw.ask("fs/writeBinary", block, handleId="w", offset=0)
        assert "between 1 and 1048576" in answer["error"]["message"]
    assert raw.ask("fs/writeBinary", b"x", handleId="w", offset=0)["error"]["code"] == -32004
    assert raw.ask("fs/writeBinary", b"x", handleId="w")["error"]["code"] == -32602
    # In the form of a text the block is missing.
    assert "between 1" in raw.ask("fs/writeBinary", handleId="w", offset=0)["error"]["message"]
    answer = raw.ask("fs/readBinary", handleId="r", offset=0, len=1)
    assert answer["error"]["code"] == -32004
    assert raw.ask("fs/readFiles", paths=["/x"] * 257)["error"]["code"] == -32602
    file = {"path": str(tmp_path / "new"), "size": 1}
    limits: list[dict[str, Any]] = [{"sandbox": {}}, {"user": "nobody"}]
    for limit in limits:
        assert raw.ask("fs/readFiles", paths=["/x"], **limit)["error"]["code"] == -32602
        assert raw.ask("fs/writeFiles", b"x", files=[file], **limit)["error"]["code"] == -32602
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "message",
    [
        b"\0",
        b"\0\0\0\xff{}",
        head(b"{") + b"x",
        head(b'{"method":"initialized"}') + b"x",
        head(b'{"id":9,"method":"fs/readFile","params":{"path":"/etc/hosts"}}') + b"x" * 9000,
        head(b'{"id":9,"method":"unknown"}') + b"x",
        (TEXT_BYTES + 1).to_bytes(4, "big") + b" " * (TEXT_BYTES + 1),
    ],
)
def test_other_binary_messages_are_malformed(raw: Raw, message: bytes) -> None:
    raw.send(message)
    answer = raw.receive()
    assert answer["error"]["code"] == -32600
    assert "failed to parse" in answer["error"]["message"]
    assert raw.ask("environment/status")["result"] == {"status": "ready"}


def test_a_batch_of_files(raw: Raw, tmp_path: Path) -> None:
    files = [
        {"path": str(tmp_path / "a"), "size": 3, "mode": 0o600},
        {"path": str(tmp_path / "no" / "b"), "size": 1},
        {"path": str(tmp_path / "c"), "size": 0},
    ]
    assert raw.ask("fs/writeFiles", b"abcd", files=files)["result"] == {"failed": [1]}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    answer = raw.ask("fs/readFiles", paths=[file["path"] for file in files])
    assert (answer["result"], answer["data"]) == ({"sizes": [3, None, 0]}, b"abc")
    assert raw.ask("fs/writeFiles", b"abc", files=files)["error"]["code"] == -32602


def test_trees_of_small_files_take_few_requests(ours: ClientTarget, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(BATCH_FILES * 2 + 1):
        path = source / f"d{number % 7}" / f"f {number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(number))
        path.chmod(0o640 if number % 2 else 0o755)
    (source / "large").write_bytes(os.urandom(3_000_000))

    async def scene() -> None:
        async with connect_client(ours.url) as env:
            calls: list[str] = []
            call = env.session.call

            async def counted(method: Any, *args: Any, **options: Any) -> Any:
                calls.append(method.name)
                return await call(method, *args, **options)

            env.session.call = counted  # type: ignore[assignment,method-assign]
            sent = await env.files.upload(source, tmp_path / "there")
            got = await env.files.download(tmp_path / "there", tmp_path / "back")
            assert sent.files == got.files == BATCH_FILES * 2 + 2
            assert sent.copied_bytes == got.copied_bytes
            # The lengths of the paths limit a batch too, and those depend on the machine.
            for batch in ("fs/writeFiles", "fs/readFiles"):
                assert 3 <= calls.count(batch) <= 8
            assert "fs/writeFile" not in calls
            assert "fs/writeBlock" not in calls

    asyncio.run(scene())
    for path in source.rglob("*"):
        for copy in ("there", "back"):
            twin = tmp_path / copy / path.relative_to(source)
            assert twin.stat().st_mode == path.stat().st_mode
            assert path.is_dir() or twin.read_bytes() == path.read_bytes()


def test_a_file_of_a_batch_that_fails_has_its_error(ours: ClientTarget, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b", "c"):
        (source / name).write_text(name)
    (tmp_path / "there" / "b").mkdir(parents=True)

    async def scene() -> None:
        async with connect_client(ours.url) as env:
            sent = await env.files.upload(source, tmp_path / "there", check=False)
            assert [(each.path, sent.files) for each in sent.failed] == [("b", 2)]
            assert "directory" in str(sent.failed[0].error)

    asyncio.run(scene())
    assert (tmp_path / "there" / "c").read_text() == "c"


def test_sandboxed_files_are_transferred_too(ours: ClientTarget, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)

    async def scene() -> None:
        async with connect_client(ours.url) as env:
            files = env.files.sandboxed("workspace-write")
            path = tmp_path / "file"
            async with files.open(path, "wb") as new:
                await new.write(data)
            async with files.open(path) as old:
                assert await old.read() == data

    asyncio.run(scene())


def test_pipes_carry_no_binary_messages(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 2_000_000)

    async def scene() -> None:
        async with Environment.local() as env:
            assert env.capabilities.fs_binary is False
            assert env.capabilities.process_binary is False
            assert (await env.run(["cat"], input=b"\0\xff" * 100_000)).stdout == b"\0\xff" * 100_000
            async with env.files.open(tmp_path / "file") as file:
                assert len(await file.read()) == 2_000_000

    asyncio.run(scene())


def _start(raw: Raw, *argv: str) -> None:
    started = raw.ask(
        "process/start",
        processId="p",
        argv=list(argv),
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        tty=False,
        pipeStdin=True,
    )
    assert started["result"]["processId"] == "p"


def _events(raw: Raw, answers: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The params of notifications up to the close, with their data; answers go to the list."""
    while True:
        message = raw.receive()
        if "method" not in message:
            answers.append(message)
            continue
        yield {**message["params"], "data": message.get("data")}
        if message["method"] == "process/closed":
            return


@pytest.mark.quick
def test_input_and_output_of_a_process_are_bytes(bytes_wanted: Raw) -> None:
    raw = bytes_wanted
    assert raw.info["capabilities"]["processBinary"] is True
    _start(raw, "sh", "-c", "cat; echo done >&2")
    data = os.urandom(300_000)
    answers: list[dict[str, Any]] = []
    raw.post("process/writeBinary", data, processId="p", writeId="1")
    raw.post("process/writeBinary", b"!", processId="p", writeId="2")
    raw.post("process/writeBinary", b"!", processId="p", writeId="2")  # is not written twice
    raw.post("process/closeStdin", processId="p")
    events = list(_events(raw, answers))
    assert [answer["result"] for answer in answers] == [{"status": "accepted"}] * 3 + [{}]
    output = [event for event in events if event["data"] is not None]
    assert b"".join(e["data"] for e in output if e["stream"] == "stdout") == data + b"!"
    assert b"".join(e["data"] for e in output if e["stream"] == "stderr") == b"done\n"
    seq = 1
    for event in events:
        assert event["seq"] == seq
        seq += 1 if event["data"] is None else -(-len(event["data"]) // 8192)
    # The numbers are those of the chunks that can be read.
    read = raw.ask("process/read", processId="p")["result"]
    assert (read["nextSeq"], max(len(each["chunk"]) for each in read["chunks"])) == (seq, 10_924)


def test_a_client_that_does_not_ask_gets_text(raw: Raw) -> None:
    _start(raw, "head", "-c", "20000", "/dev/zero")
    raw.post("process/writeBinary", b"x", processId="other")
    answers: list[dict[str, Any]] = []
    chunks = [event["chunk"] for event in _events(raw, answers) if "chunk" in event]
    assert max(map(len, chunks)) <= 10_924
    assert sum(len(base64.b64decode(chunk)) for chunk in chunks) == 20_000
    [answer] = answers or [raw.receive()]  # before or after the process has ended
    assert answer["result"] == {"status": "unknownProcess"}


def test_wrong_input_is_refused(raw: Raw) -> None:
    for wrong in ({}, {"processId": 1}, {"processId": "p", "writeId": ""}):
        answer = raw.ask("process/writeBinary", b"x", **wrong)
        assert answer["error"]["code"] == -32602
    # In the form of a text there is no input.
    answer = raw.ask("process/writeBinary", processId="p")
    assert answer["result"] == {"status": "unknownProcess"}
    raw.send(head(b'{"id":9,"method":"process/write","params":{"processId":"p"}}') + b"x")
    assert "takes data" in raw.receive()["error"]["message"]


def test_much_goes_through_a_process_in_order(ours: ClientTarget) -> None:
    data = os.urandom(1 << 20) * 8

    async def scene() -> None:
        async with connect_client(ours.url) as env, env.start(["cat"], stdin=True) as process:

            async def feed() -> None:
                await process.write(data)
                await process.close_stdin()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(feed())
                got = bytearray()
                while chunks := await process.read_some():
                    for chunk in chunks:
                        got += chunk.data
            assert got == data

            async with env.start(["seq", "100000"]) as counting:
                lines = [line async for line in counting.lines()]
            assert lines == [str(number) for number in range(1, 100_001)]

    asyncio.run(scene())
