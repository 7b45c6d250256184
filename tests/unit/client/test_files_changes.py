"""Changes of files with a session and commands that are the test."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exec_server.client import files as module
from exec_server.client.arguments import PathResolver
from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.exceptions import NotFound, ProgramNotFound
from exec_server.client.polyfills import Polyfills
from exec_server.client.results import ChangedFile, DiskUsage, Result
from exec_server.errors import InvalidParams, RpcError, Unsupported
from exec_server.errors import NotFound as RpcNotFound
from exec_server.protocol import files as wire
from exec_server.protocol.files import Done
from exec_server.protocol.session import Capabilities

pytestmark = pytest.mark.quick

_FLAGS = [
    "append",
    "apply_patch",
    "chmod",
    "disk_usage",
    "edit",
    "glob",
    "rename",
    "set_times",
    "symlink",
]
_PATCH = "*** Begin Patch\n*** Update File: f\n@@\n-a\n+b\n*** Add File: n\n+x\n*** End Patch"
_MODE = "diff --git a/f b/f\nold mode 100644\nnew mode 100755\n"
_RESULTS: dict[str, Any] = {
    "fs/append": wire.AppendResult(1),
    "fs/edit": wire.EditResult(2),
    "fs/applyPatch": wire.ApplyPatchResult([wire.ChangedFile("f", "modified")]),
    "fs/glob": wire.GlobResult(["f"], True),
    "fs/diskUsage": wire.DiskUsageResult(3, 2, 1),
}


class Files(module.Files):
    """Files in a dictionary; `sent` are the requests and commands."""

    def __init__(self, *, extended: bool, exit_code: int = 0, stderr: bytes = b"") -> None:
        self.sent: list[Any] = []
        self.contents = {"/w/f": b"a\n", "/w/old": b"o"}
        flags = {f"fs_{name}": extended for name in _FLAGS}
        info = SimpleNamespace(
            capabilities=Capabilities(**flags),
            user_home_dir="file:///home",
            cwd="file:///w",
            temp_dir="file:///tmp",
        )
        features = ServerFeatures(capabilities=info.capabilities)
        session: Any = SimpleNamespace(features=features, call=self._answer)
        commands: Any = SimpleNamespace(run=self._command)
        paths = PathResolver(cast(Any, info))
        self._polyfills = Polyfills(session, paths, commands)
        self._polyfills._files = lambda params: self  # type: ignore[method-assign]
        self._missing = features.missing_methods
        super().__init__(session, paths, commands)
        self._end = (exit_code, stderr)

    async def _answer(self, call: Any, params: Any, *, is_retryable: bool) -> Any:
        if call.name in self._missing:
            return await self._polyfills.table[call.name](params)
        self.sent.append(params)
        return _RESULTS.get(call.name, Done())

    async def _command(self, argv: list[str], **_: Any) -> Result:
        self.sent.append(argv)
        stdout = b"10 3 2 1" if argv[0] == "stat" else b""
        return Result(tuple(argv), stdout, self._end[1], self._end[0], 0.0)

    async def read(self, path: Any, *, limit: int = 0) -> bytes:
        if path not in self.contents:
            raise RpcNotFound("missing")
        return self.contents[path]

    async def write(self, path: Any, data: bytes, **_: Any) -> None:
        self.contents[path] = data

    async def remove(self, path: Any, **_: Any) -> None:
        del self.contents[path]


async def _change(files: Files) -> None:
    await files.append("/w/f", b"x")
    await files.rename("/w/f", "/w/g")
    await files.chmod("/w/f", 0o755)
    await files.symlink("f", "/w/l")
    await files.touch("/w/f", modified=datetime.fromtimestamp(1.5, UTC))


@pytest.mark.parametrize("mode", [-1, 0o10000, 0o100644])
def test_a_mode_that_is_none_is_named(mode: int) -> None:
    files = Files(extended=True)
    with pytest.raises(InvalidParams, match=f"^mode must be from 0 to 0o7777, not {mode:#o}$"):
        asyncio.run(files.chmod("/w/f", mode))
    assert not files.sent


def test_extensions_are_requests() -> None:
    async def scene() -> None:
        files = Files(extended=True)
        await _change(files)
        assert [type(params) for params in files.sent] == [
            wire.AppendParams,
            wire.RenameParams,
            wire.ChmodParams,
            wire.SymlinkParams,
            wire.SetTimesParams,
        ]
        assert await files.edit("/w/f", [("a", "b")]) == 2
        assert await files.apply_patch(_PATCH) == [ChangedFile("f", "modified")]
        found = await files.glob("*")
        assert (found, found.truncated) == (["f"], True)
        assert await files.disk_usage() == DiskUsage(3, 2, 1)

    asyncio.run(scene())


def test_commands_replace_extensions() -> None:
    async def scene() -> None:
        files = Files(extended=False)
        await _change(files)
        assert [argv[0] for argv in files.sent] == [
            "/bin/sh",
            "mv",
            "chmod",
            "ln",
            "touch",
            "touch",
        ]
        assert await files.disk_usage() == DiskUsage(30, 20, 10)
        with pytest.raises(Unsupported):
            await files.rename("a", "b", replace=False)
        with pytest.raises(Unsupported):
            await files.glob("*")

    asyncio.run(scene())


def test_texts_are_changed_here_without_extensions() -> None:
    async def scene() -> None:
        files = Files(extended=False)
        assert await files.edit("/w/f", "a", "c") == 1
        with pytest.raises(RpcError, match="/w/f: the old text does not occur"):
            await files.edit("/w/f", "a", "c")
        await files.edit("/w/f", "c", "a")
        changed = [ChangedFile("f", "modified"), ChangedFile("n", "added")]
        assert await files.apply_patch(_PATCH, "/w") == changed
        assert files.contents["/w/f"] == b"b\n"
        await files.apply_patch(_MODE, "/w")
        assert files.sent[-1][0] == "chmod"
        removal = "*** Begin Patch\n*** Delete File: old\n*** End Patch"
        assert await files.apply_patch(removal, "/w") == [ChangedFile("old", "deleted")]
        absolute = _PATCH.replace("File: ", "File: /w/.//").replace("-a\n+b", "-b\n+c")
        changed = [ChangedFile("f", "modified"), ChangedFile("n", "modified")]
        assert await files.apply_patch(absolute.replace("+x", "+y"), "/w/../w/.") == changed
        assert files.contents == {"/w/f": b"c\n", "/w/n": b"y\n"}

    asyncio.run(scene())


def test_errors() -> None:
    async def scene() -> None:
        failing = Files(extended=False, exit_code=1, stderr=b"mv: x: No such file or directory\n")
        with pytest.raises(NotFound, match="/w/f to /w/g: No such file"):
            await failing.rename("/w/f", "/w/g")
        files = Files(extended=True)
        wrong: list[Any] = [
            files.append("f", cast(Any, "text")),
            files.glob(cast(Any, b"*")),
            files.apply_patch(cast(Any, b"x")),
            files.edit("f", "a"),
            files.edit("f", [("a", "b")], "c"),
        ]
        for work in wrong:
            with pytest.raises(TypeError):
                await work
        with pytest.raises(InvalidParams):
            await files.edit("f", [])

    asyncio.run(scene())


def test_times_are_exact_with_and_without_the_extension() -> None:
    async def scene() -> None:
        extended, plain = Files(extended=True), Files(extended=False)
        for files in (extended, plain):
            await files.touch("/w/f", modified_ns=1_700_000_000_123_456_789)
        [params] = extended.sent
        assert (params.modified_at_ms, params.modified_ns) == (1_700_000_000_123, 456_789)
        assert plain.sent[0][:4] == ["touch", "-m", "-d", "@1700000000.123456789"]
        await plain.touch("/w/f", modified_ns=-1_500_000_000)
        assert plain.sent[2][3] == "@-1.500000000"

    asyncio.run(scene())


def test_a_missing_program_is_no_missing_file() -> None:
    files = Files(extended=False)
    missing = ProgramNotFound("cannot start mv: No such file or directory (os error 2)")

    async def refuse(argv: list[str], **_: Any) -> Result:
        raise missing

    cast(Any, files)._commands.run = refuse
    with pytest.raises(ProgramNotFound) as caught:
        asyncio.run(files.rename("/w/f", "/w/g"))
    assert caught.value is missing
