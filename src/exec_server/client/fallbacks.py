"""Fallbacks: what the client does instead of a method that the server lacks.

Each is a function of the params of the method and returns its result, so that callers need not
know which servers have the method. What is not here has no equivalent: it raises Unsupported.
"""

from __future__ import annotations

from typing import Any, Final

from exec_server.client.engine.session import ClientSession
from exec_server.client.open_fallbacks import OpenFallbacks
from exec_server.client.transfer.plan import HELPER_OUTPUT_BYTES, Commands, for_each
from exec_server.errors import InternalError, InvalidRequest, NotFound, RpcError
from exec_server.protocol import files as wire
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import STATUS, EnvironmentStatus

# Requests about the entries of one directory that are in flight.
ENTRIES_AT_ONCE: Final = 16

_REALPATH: Final = '[ -e "$1" ] || exit 4; exec readlink -fn -- "$1"'
_MISSING: Final = 4
_ENOENT: Final = "No such file or directory (os error 2)"


def fallbacks(session: ClientSession, commands: Commands) -> dict[str, Any]:
    """The fallbacks that the session's server needs, by the names of methods."""
    features = session.features
    own = Fallbacks(session, commands)
    table: dict[str, Any] = {}
    if not features.has_status:
        table[STATUS.name] = own.status
    if not (features.has_file_sizes and features.refuses_symlinks):
        table[wire.GET_METADATA.name] = own.get_metadata
    if not features.has_canonicalize:
        table[wire.CANONICALIZE.name] = own.canonicalize
    if not features.has_walk:
        table[wire.WALK.name] = own.walk
    can_open = features.opens_for_reading(is_confined=True)
    if not (can_open and features.capabilities.file_write_streaming):
        table |= OpenFallbacks(session, commands).table()
    return table


class Fallbacks:
    """The methods of one session, by the methods and commands that its server has."""

    def __init__(self, session: ClientSession, commands: Commands) -> None:
        self._session = session
        self._commands = commands

    async def status(self, _: None) -> EnvironmentStatus:
        """A server that answers is ready."""
        root = wire.GetMetadataParams(PathUri.from_text("/"))
        await self._session.call_server(wire.GET_METADATA, root, is_retryable=True)
        return EnvironmentStatus("ready")

    async def get_metadata(self, params: wire.GetMetadataParams) -> wire.GetMetadataResult:
        features = self._session.features
        path = params.path.native()
        if params.follow_symlinks is False and not features.refuses_symlinks:
            canonical = wire.CanonicalizeParams(params.path, params.sandbox)
            found = (await self._session.call(wire.CANONICALIZE, canonical)).path
            if PathUri.from_text(found).native() != path:
                raise InvalidRequest("path contains a symbolic link")
        result = await self._session.call_server(wire.GET_METADATA, params, is_retryable=True)
        if features.has_file_sizes or not result.is_file:
            return result
        size = await self._size(params, path)
        times = (result.created_at_ms, result.modified_at_ms)
        return wire.GetMetadataResult(False, True, result.is_symlink, size, *times)

    async def _size(self, params: wire.GetMetadataParams, path: str) -> int:
        """The size of a file: by a command or, where that cannot be confined, by its content."""
        if not self._session.features.runs(is_confined=params.sandbox is not None):
            read = wire.ReadFileParams(params.path, sandbox=params.sandbox)
            return len((await self._session.call_server(wire.READ_FILE, read)).data_base64)
        words = ["stat", "-L", "-c", "%s", "--", path]
        output = await self._output(words, params.sandbox)
        if not output.strip().isdigit():
            raise InternalError("the size of the file is unknown: its machine has no `stat`")
        return int(output)

    async def canonicalize(self, params: wire.CanonicalizeParams) -> wire.CanonicalizeResult:
        words = ["/bin/sh", "-c", _REALPATH, "sh", params.path.native()]
        output = await self._output(words, params.sandbox)
        return wire.CanonicalizeResult(output.decode(errors="surrogateescape"))

    async def _output(self, words: list[str], sandbox: Any) -> bytes:
        done = await self._commands.run(
            words, cwd="/", sandbox=sandbox, output_limit=HELPER_OUTPUT_BYTES
        )
        if done.exit_code == _MISSING:
            raise NotFound(_ENOENT)
        if not done:
            raise InternalError(done.error_text.strip() or f"{words[0]} has failed")
        return done.stdout

    async def walk(self, params: wire.WalkParams) -> wire.WalkResult:
        """Walk with one request for each directory and one for each entry."""
        walk = _Walk(self._session, params)
        await walk.run()
        return wire.WalkResult(walk.entries, walk.errors, walk.is_truncated)


class _Walk:
    """One walk; each directory is before its entries."""

    def __init__(self, session: ClientSession, params: wire.WalkParams) -> None:
        self._session = session
        self._root = params.path
        self._options = params.options
        self._sandbox = params.sandbox
        self._directories = 0
        self.entries: list[wire.WalkEntry] = []
        self.errors: list[wire.WalkError] = []
        self.is_truncated = False

    async def run(self) -> None:
        unvisited = [(self._root, 0)]
        while unvisited:
            path, depth = unvisited.pop()
            self._directories += 1
            if self._directories > self._options.max_directories:
                self.is_truncated = True
                return
            try:
                below = await self._list(path)
            except RpcError as error:
                if path is self._root:
                    raise
                self.errors.append(wire.WalkError(path.uri, error.message))
                continue
            if len(self.entries) + len(below) > self._options.max_entries:
                self.is_truncated = True
                return
            self.entries += below
            if depth < self._options.max_depth:
                directories = [entry for entry in below if entry.kind == "directory"]
                inner = [(PathUri.from_text(entry.path), depth + 1) for entry in directories]
                unvisited += reversed(inner)

    async def _list(self, path: PathUri) -> list[wire.WalkEntry]:
        params = wire.ReadDirectoryParams(path, sandbox=self._sandbox)
        call = wire.READ_DIRECTORY
        listed = (await self._session.call_server(call, params, is_retryable=True)).entries
        base = path.native().rstrip("/")
        kinds: dict[str, wire.EntryKind] = {
            f"{base}/{entry.file_name}": "directory" if entry.is_directory else "file"
            for entry in listed
            if entry.is_directory or entry.is_file
        }
        if not self._options.follow_directory_symlinks:
            await for_each(list(kinds), lambda each: self._leave_out(each, kinds), ENTRIES_AT_ONCE)
        paths = ((PathUri.from_text(name), kind) for name, kind in sorted(kinds.items()))
        return [wire.WalkEntry(found.uri, kind) for found, kind in paths]

    async def _leave_out(self, path: str, kinds: dict[str, wire.EntryKind]) -> None:
        """Remove an entry that is a symlink, or has vanished."""
        params = wire.GetMetadataParams(PathUri.from_text(path), sandbox=self._sandbox)
        try:
            found = await self._session.call_server(wire.GET_METADATA, params, is_retryable=True)
        except RpcError as error:
            self.errors.append(wire.WalkError(params.path.uri, error.message))
            del kinds[path]
        else:
            if found.is_symlink:
                del kinds[path]
