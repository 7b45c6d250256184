"""Archives that a machine makes which is the test, or this one in its place."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exec_server.client.exceptions import PermissionDenied, SandboxDenied
from exec_server.client.results import Stat, Transfer
from exec_server.client.transfer.archive import ArchiveDownload
from exec_server.errors import ConnectionLost, NotFound, ProgramNotFound

pytestmark = pytest.mark.quick


def chunk(data: bytes, stream: str = "stdout", lost: int = 0) -> Any:
    return SimpleNamespace(data=data, stream=stream, lost_before=lost)


class Machine:
    """A machine whose `tar` has this output; it is the process as well."""

    def __init__(self, *chunks: Any, code: int = 0, is_directory: bool = True) -> None:
        self.argv: list[str] = []
        self.missing: Exception | None = None
        self._chunks = chunks
        self._code = code
        self._is_directory = is_directory

    async def stat(self, path: str) -> Stat:
        if path == "/none":
            raise NotFound(path)
        return Stat(self._is_directory, not self._is_directory, False, 0, 0.0, None)

    async def download(self, remote: str, local: str) -> Transfer:
        top = Path(local)
        if not self._is_directory:
            top.write_bytes(b"file")
        else:
            for name in ("a", "skip/b", "keep/skip/c"):
                (top / name).parent.mkdir(parents=True, exist_ok=True)
                (top / name).write_bytes(name.encode())
        return Transfer(1, 0, 0, 0, 0)

    def start(self, argv: list[str], **_: Any) -> Machine:
        self.argv = argv
        return self

    async def __aenter__(self) -> Machine:
        if self.missing is not None:
            raise self.missing
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_closed = True

    async def __aiter__(self) -> Any:
        for each in self._chunks:
            yield each

    async def wait(self) -> int:
        return self._code

    def read(self, path: str, *exclude: str, sandbox: Any = None) -> bytes:
        this = cast(Any, self)
        archive = ArchiveDownload(this, this, sandbox, exclude)

        async def scene() -> bytes:
            return b"".join([each async for each in archive.chunks(path)])

        return asyncio.run(scene())


def test_the_command_makes_the_archive() -> None:
    machine = Machine(chunk(b"ab"), chunk(b"warning", "stderr"), chunk(b"c"))
    assert machine.read("/d", "skip/", "./a*[b]?\\") == b"abc"
    assert machine.argv == [
        *("tar", "-C", "/d", "--exclude=./skip", "--exclude=./a\\*\\[b]\\?\\\\", "-cf", "-", ".")
    ]
    machine = Machine(chunk(b"1"), is_directory=False)
    assert machine.read("/d/-file") == b"1"
    assert machine.argv == ["tar", "-C", "/d", "-cf", "-", "./-file"]


def test_a_missing_path_is_its_own_error() -> None:
    with pytest.raises(NotFound, match="/none"):
        Machine().read("/none")


def test_a_failure_is_an_error_after_the_output() -> None:
    denied = chunk(b"tar: ./x: Cannot open: Permission denied\ntar: Exiting\n", "stderr")
    with pytest.raises(PermissionDenied, match="/d/x: Permission denied"):
        Machine(chunk(b"ab"), denied, code=2).read("/d")
    with pytest.raises(SandboxDenied):
        Machine(denied, code=2).read("/d", sandbox={})
    with pytest.raises(Exception, match="tar has failed with exit code 3"):
        Machine(code=3).read("/d")
    with pytest.raises(ConnectionLost, match="a part of the archive was lost"):
        Machine(chunk(b"x", lost=1)).read("/d")


@pytest.mark.parametrize("missing", [ProgramNotFound("tar"), None])
def test_without_the_command_the_archive_is_made_here(missing: Exception | None) -> None:
    machine = Machine(code=127)
    machine.missing = missing
    found = machine.read("/d", "skip", "keep/skip/none")
    with tarfile.open(fileobj=io.BytesIO(found)) as archive:
        assert sorted(archive.getnames()) == [".", "./a", "./keep", "./keep/skip", "./keep/skip/c"]
    machine = Machine(code=127, is_directory=False)
    with tarfile.open(fileobj=io.BytesIO(machine.read("/d/f"))) as archive:
        assert archive.getnames() == ["./f"]
