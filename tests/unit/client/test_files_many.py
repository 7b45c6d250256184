"""Many files with a machine that is the test."""

from __future__ import annotations

import asyncio
import errno
import os
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec import Raw

from exec_server.client.arguments import PathResolver
from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.exceptions import (
    IsADirectory,
    NoSpace,
    NotAllCopied,
    NotFound,
    SandboxDenied,
)
from exec_server.client.files import Files
from exec_server.client.results import FileContent, Transfer
from exec_server.client.transfer import batches
from exec_server.client.transfer.batches import BATCH_FILES, FILE_BYTES
from exec_server.errors import InvalidRequest
from exec_server.protocol.files import ReadFilesParams, WriteFilesResult
from exec_server.protocol.jsonrpc import Attached
from exec_server.protocol.session import Capabilities

pytestmark = pytest.mark.quick


class Machine(Files):
    """A machine with the directory /w, whose requests are counted."""

    def __init__(self, *, binary: bool = True, sandbox: Any = None) -> None:
        self.contents: dict[str, bytes] = {}
        self.directories = {"/", "/w"}
        self.requests: list[str] = []
        self.is_full = False
        info = SimpleNamespace(
            capabilities=Capabilities(fs_binary=binary),
            user_home_dir=None,
            cwd="file:///w",
            temp_dir="file:///tmp",
        )
        features = ServerFeatures(capabilities=info.capabilities)
        session = SimpleNamespace(features=features, call=self._batch)
        resolver = PathResolver(cast(Any, info))
        super().__init__(cast(Any, session), resolver, cast(Any, None), sandbox)

    async def _batch(self, call: Any, params: Any, *, is_retryable: bool) -> Any:
        self.requests.append(call.name)
        if isinstance(params, ReadFilesParams):
            found = [self.contents.get(path.native()) for path in params.paths]
            sizes = [None if data is None else len(data) for data in found]
            text = msgspec.json.encode({"sizes": sizes})
            return Attached(Raw(text), memoryview(b"".join(data or b"" for data in found)))
        view = memoryview(params.data)
        failed = []
        for position, file in enumerate(params.value.files):
            if not self._put(file.path.native(), bytes(view[: file.size])):
                failed.append(position)
            view = view[file.size :]
        return WriteFilesResult(failed)

    def _put(self, path: str, data: bytes) -> bool:
        if os.path.dirname(path) not in self.directories or path in self.directories:
            return False
        self.contents[path] = data
        return True

    async def read(self, path: Any, *, limit: int = 0) -> bytes:
        self.requests.append(f"read {path}")
        if self._absolute(path) not in self.contents:
            raise NotFound(f"{path}: no such file")
        data = self.contents[self._absolute(path)]
        if len(data) > limit:
            raise InvalidRequest("too large")
        return data

    async def write(self, path: Any, data: bytes, **_: Any) -> None:
        self.requests.append(f"write {path}")
        if self.is_full:
            error = NoSpace(f"{path}: no space left on device (os error 28)")
            error.errno = errno.ENOSPC
            raise error
        if not self._put(self._absolute(path), data):
            raise IsADirectory(f"{path}: is a directory")

    async def mkdir(self, path: Any, **_: Any) -> None:
        self.requests.append(f"mkdir {path}")
        if path.startswith("/closed"):
            raise SandboxDenied(path, None)
        while path not in self.directories:
            self.directories.add(path)
            path = os.path.dirname(path)


def test_small_files_are_read_together() -> None:
    machine = Machine()
    machine.contents = {"/w/a": b"1", "/b": b"2", "/w/large": bytes(FILE_BYTES)}
    found = asyncio.run(machine.read_many(["a", b"/b", "large", "/w/a"]))
    assert [(each.path, each.data, each.error) for each in found] == [
        ("a", b"1", None),
        ("/b", b"2", None),
        ("large", bytes(FILE_BYTES), None),
        ("/w/a", b"1", None),
    ]
    assert machine.requests == ["fs/readFiles"]
    assert asyncio.run(machine.read_many([])) == []
    assert asyncio.run(machine.read_many(["a"])) == [FileContent("a", b"1")]
    assert machine.requests[1:] == ["read a"]  # one file needs no batch


def test_a_request_names_as_many_files_as_may_fit() -> None:
    machine = Machine()
    machine.contents = {f"/{number}": b"x" for number in range(200)}
    assert len(asyncio.run(machine.read_many(machine.contents))) == 200
    assert machine.requests == ["fs/readFiles"] * 4


@pytest.mark.parametrize("binary", [True, False])
def test_each_file_has_its_error(binary: bool) -> None:
    machine = Machine(binary=binary)
    machine.contents = {"/w/a": b"123", "/w/b": b"1"}
    with pytest.raises(NotFound, match="none"):
        asyncio.run(machine.read_many(["a", "none"]))
    found = asyncio.run(machine.read_many(["none", "a", "b"], limit=2, check=False))
    assert [type(each.error) for each in found] == [NotFound, InvalidRequest, type(None)]
    assert [each.data for each in found] == [b"", b"", b"1"]
    with pytest.raises(InvalidRequest, match="too large"):
        asyncio.run(machine.read_many(["a", "b"], limit=2))


@pytest.mark.parametrize("bad", ["/w/nul\0", "/w/lone\ud800"])
def test_a_path_that_is_none_fails_alone(bad: str) -> None:
    machine = Machine()
    machine.contents = {"/w/a": b"1", "/w/b": b"2"}
    found = asyncio.run(machine.read_many(["a", bad, "b"], check=False))
    assert [each.data for each in found] == [b"1", b"", b"2"]
    assert [type(each.error) for each in found] == [type(None), NotFound, type(None)]
    assert machine.requests == ["fs/readFiles", f"read {bad}"]
    machine.directories.add(bad)  # so that it cannot be written
    done = asyncio.run(machine.write_many({"a": b"3", bad: b"", "b": b"4"}, check=False))
    assert [each.path for each in done.failed] == [bad]
    assert machine.contents == {"/w/a": b"3", "/w/b": b"4"}


def test_a_sandbox_confines_each_file() -> None:
    machine = Machine(sandbox={"type": "read-only"})
    machine.contents = {"/w/a": b"1", "/w/b": b"2"}
    asyncio.run(machine.read_many(["a", "b"]))
    asyncio.run(machine.write_many({"a": b"", "b": b""}))
    assert machine.requests == ["read a", "read b", "write a", "write b"]


def test_small_files_are_written_together() -> None:
    machine = Machine()
    done = asyncio.run(machine.write_many({str(number): b"x" for number in range(BATCH_FILES + 1)}))
    assert (done.files, done.copied_bytes) == (BATCH_FILES + 1, BATCH_FILES + 1)
    assert machine.requests == ["fs/writeFiles"] * 2
    assert asyncio.run(machine.write_many([])) == Transfer(0, 0, 0, 0, 0)


@pytest.mark.parametrize("files", [["ab"], ["a", "b"], [("a",)], [("a", b"1", b"2")], b"ab"])
def test_files_to_write_are_pairs(files: Any) -> None:
    machine = Machine()
    with pytest.raises(TypeError, match="files must be a dictionary or pairs"):
        asyncio.run(machine.write_many(files))
    assert not machine.requests


def test_the_last_of_equal_paths_counts() -> None:
    machine = Machine()
    asyncio.run(machine.write_many([("a", b"1"), (b"b", b"2"), ("/w/a", b"3")]))
    assert machine.contents["/w/b"] == b"2"
    assert machine.contents["/w/a"] == b"3"
    assert machine.requests == ["fs/writeFiles"]


def test_large_files_are_written_one_by_one() -> None:
    machine = Machine()
    files = {"a": bytes(FILE_BYTES + 1), "b": b"", "c": b"", "C:\\d": b""}
    with pytest.raises(NotAllCopied):
        asyncio.run(machine.write_many(files))
    assert machine.requests == ["fs/writeFiles", "write a", "write C:\\d"]


@pytest.mark.parametrize("binary", [True, False])
def test_missing_directories_are_made_once(binary: bool) -> None:
    machine = Machine(binary=binary)
    files = {"x/y/a": b"1", "x/b": b"2", "x/y/c": b"3", "/closed/d": b"4", "/e": b"5"}
    done = asyncio.run(machine.write_many(files, parents=True, check=False))
    assert [request for request in machine.requests if request.startswith("mkdir")] == [
        "mkdir /closed",
        "mkdir /w/x/y",
    ]
    assert (done.files, [each.path for each in done.failed]) == (4, ["/closed/d"])
    assert machine.contents["/w/x/y/c"] == b"3"


@pytest.mark.parametrize("binary", [True, False])
def test_the_other_files_are_written(binary: bool) -> None:
    machine = Machine(binary=binary)
    files = {"a": b"1", "/w": b"22", "b": b"333"}
    with pytest.raises(NotAllCopied, match="/w: is a directory") as raised:
        asyncio.run(machine.write_many(files))
    assert (raised.value.transfer.files, raised.value.transfer.copied_bytes) == (2, 4)
    assert [each.path for each in raised.value.transfer.failed] == ["/w"]


def test_a_full_disk_ends_it() -> None:
    machine = Machine(binary=False)
    machine.is_full = True
    with pytest.raises(NoSpace):
        asyncio.run(machine.write_many({"a": b"1"}, check=False))


def test_a_full_disk_ends_it_before_the_first_file(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(batches, "is_final", lambda error: True)
    with pytest.raises(SandboxDenied):
        asyncio.run(machine.write_many({"/closed/a": b""}, parents=True))


def test_text_is_not_bytes() -> None:
    with pytest.raises(TypeError, match="encode the text of a"):
        asyncio.run(Machine().write_many({"a": "text"}))  # type: ignore[arg-type]


def test_a_path_alone_is_no_list_of_paths() -> None:
    for alone in ("/w/a", b"/w/a"):
        with pytest.raises(TypeError, match="paths must be a list of paths"):
            asyncio.run(Machine().read_many(alone))  # type: ignore[arg-type]

    async def read() -> None:
        async for _ in Machine().read_tar("/w", exclude=".git"):
            pass

    with pytest.raises(TypeError, match="exclude must be a list of paths, not str"):
        asyncio.run(read())
