"""Binary messages: blocks and batches of files as bytes, on WebSockets only."""

from __future__ import annotations

import asyncio
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

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.info = self.ask("initialize", clientName="raw")["result"]["environmentInfo"]
        socket.send('{"method":"initialized","params":{}}')

    def ask(self, method: str, data: bytes | None = None, **params: object) -> dict[str, Any]:
        """The answer to a request; the data of a binary answer is its member `data`."""
        self._number += 1
        text = json.dumps({"id": self._number, "method": method, "params": params})
        self._socket.send(text if data is None else head(text.encode()) + data)
        return self.receive()

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
            async with env.files.open(tmp_path / "file") as file:
                assert len(await file.read()) == 2_000_000

    asyncio.run(scene())
