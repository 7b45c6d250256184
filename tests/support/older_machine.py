"""An older server in memory: its files are a dictionary, its commands are those of polyfills."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from exec_server.client.arguments import PathResolver
from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.polyfills import Polyfills
from exec_server.client.results import Result
from exec_server.errors import NotFound
from exec_server.protocol import files as wire
from exec_server.protocol.decoding import Call

_ENOENT = "No such file or directory"


class OlderMachine:
    """`contents` are the files, `links` the symlinks with their absolute targets."""

    def __init__(
        self,
        features: ServerFeatures,
        contents: dict[str, bytes],
        links: dict[str, str] | None = None,
    ) -> None:
        info = SimpleNamespace(user_home_dir=None, cwd="file:///w", temp_dir="file:///tmp")
        paths = PathResolver(cast(Any, info))
        self.contents = dict(contents)
        self.links = links or {}
        self.unreadable: set[str] = set()
        self.asked: list[str] = []
        self.ran: list[list[str]] = []
        self.sandboxes: list[Any] = []
        # The end of the next commands.
        self.lost_bytes = 0
        self.failure: str | None = None
        self.exit_code = 1
        self.session = cast(
            Any, SimpleNamespace(features=features, call_server=self._call_server, call=self._call)
        )
        self.commands = cast(Any, SimpleNamespace(run=self._run))
        self._missing = features.missing_methods
        self.polyfills = Polyfills(self.session, paths, self.commands).table

    # ---- methods ----------------------------------------------------------------------

    async def _call(self, call: Call[Any, Any], params: Any, **_: Any) -> Any:
        if call.name in self._missing:
            return await self.polyfills[call.name](params)
        return await self._call_server(call, params)

    async def _call_server(self, call: Call[Any, Any], params: Any, **_: Any) -> Any:
        self.asked.append(call.name)
        answer = getattr(self, "_" + call.name.partition("/")[2])
        return answer(params)

    def _getMetadata(self, params: wire.GetMetadataParams) -> wire.GetMetadataResult:  # noqa: N802
        named = params.path.native()
        path = self._resolved(named)
        if path not in self.contents and not self._is_directory(path):
            raise NotFound(f"{_ENOENT} (os error 2)")
        is_file = path in self.contents
        return wire.GetMetadataResult(not is_file, is_file, named in self.links, 0, 1, 2)

    def _canonicalize(self, params: wire.CanonicalizeParams) -> wire.CanonicalizeResult:
        return wire.CanonicalizeResult(self._resolved(params.path.native()))

    def _readDirectory(  # noqa: N802
        self, params: wire.ReadDirectoryParams
    ) -> wire.ReadDirectoryResult:
        path = params.path.native().rstrip("/")
        if path in self.unreadable:
            raise NotFound(f"{_ENOENT} (os error 2)")
        below = [*self.contents, *self.links]
        inside = [each[len(path) + 1 :] for each in below if each.startswith(f"{path}/")]
        names = {each.split("/")[0] for each in inside}
        entries = []
        for name in names:
            found = self._resolved(f"{path}/{name}")
            is_file = found in self.contents
            entries.append(wire.DirectoryEntry(name, not is_file, is_file))
        return wire.ReadDirectoryResult(entries)

    def _readFile(self, params: wire.ReadFileParams) -> wire.ReadFileResult:  # noqa: N802
        return wire.ReadFileResult(self.contents[params.path.native()])

    def _writeFile(self, params: wire.WriteFileParams) -> wire.Done:  # noqa: N802
        assert params.data_base64 == ""
        self.contents[params.path.native()] = b""
        return wire.Done()

    def _open(self, params: wire.OpenParams) -> wire.OpenResult:
        self._opened = params.path.native()
        return wire.OpenResult(params.handle_id)

    def _readBlock(self, params: wire.ReadBlockParams) -> wire.ReadBlockResult:  # noqa: N802
        data = self.contents[self._opened][params.offset : params.offset + params.len]
        return wire.ReadBlockResult(data, len(data) < params.len)

    def _close(self, params: wire.CloseParams) -> wire.Done:
        return wire.Done()

    def _resolved(self, path: str) -> str:
        for link, target in self.links.items():
            if path == link or path.startswith(f"{link}/"):
                return self._resolved(target + path[len(link) :])
        return path

    def _is_directory(self, path: str) -> bool:
        return path == "/" or any(each.startswith(f"{path}/") for each in self.contents)

    # ---- commands ---------------------------------------------------------------------

    async def _run(
        self,
        argv: list[str],
        *,
        sandbox: Any,
        input: bytes | None = None,  # noqa: A002 - the name in Environment.run
        **_: Any,
    ) -> Result:
        self.ran.append(argv)
        self.sandboxes.append(sandbox)
        data = input or b""
        program = argv[2].split()[0].lstrip("{[") if argv[0] == "/bin/sh" else argv[0]
        words = argv[4:] if argv[0] == "/bin/sh" else argv[1:]
        if self.failure is not None:
            return self._result(argv, b"", self.failure.encode(), self.exit_code)
        if "tail" in argv[2]:
            return self._tail(argv, *words)
        if program == "dd":
            path, size, count = words
            offset = int(size) * int(count)
            old = self.contents[path].ljust(offset, b"\0")
            self.contents[path] = old[:offset] + data + old[offset + len(data) :]
            return self._result(argv)
        if program == "stat":
            return self._result(argv, b"%d\n" % len(self.contents[self._resolved(words[-1])]))
        path = self._resolved(words[0])  # readlink
        exists = path in self.contents or self._is_directory(path)
        return self._result(argv, path.encode() if exists else b"", b"", 0 if exists else 4)

    def _tail(self, argv: list[str], path: str, start: str, size: str) -> Result:
        if path not in self.contents:
            return self._result(argv, b"", f"sh: {path}: {_ENOENT}\n".encode(), 2)
        begin = int(start) - 1
        return self._result(argv, self.contents[path][begin : begin + int(size)])

    def _result(
        self, argv: list[str], stdout: bytes = b"", stderr: bytes = b"", exit_code: int = 0
    ) -> Result:
        return Result(tuple(argv), stdout, stderr, exit_code, 0.0, lost_bytes=self.lost_bytes)
