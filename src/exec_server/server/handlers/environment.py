"""environment/*, environmentConfig/read, capabilities/* and capabilityRoots/*: this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping

import msgspec

from exec_server.codex import installed
from exec_server.codex.installed import TreeListener
from exec_server.errors import InvalidParams, InvalidRequest
from exec_server.filesystem import operations, walk
from exec_server.protocol import codex, files
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Sandbox
from exec_server.protocol.session import EnvironmentInfo, EnvironmentStatus
from exec_server.sandbox.sandboxes import Sandboxes
from exec_server.server.context import ConnectionContext, Encoded
from exec_server.server.file_access import FileOpening, FileOperation, choose_access

# The reference's limit of one request.
MAX_ROOTS = 128

_READY = EnvironmentStatus("ready")

_METADATA = FileOperation(files.GET_METADATA, operations.get_metadata)
_WALK = FileOperation(files.WALK, walk.walk)
_READ = FileOpening(files.READ_FILE, lambda params: operations.open_for_read(params)[0])


def info(context: ConnectionContext, _params: None) -> EnvironmentInfo:
    return context.environment


def status(_context: ConnectionContext, _params: None) -> EnvironmentStatus:
    return _READY


def read(
    context: ConnectionContext, params: codex.ReadConfigParams
) -> Awaitable[codex.ReadConfigResult]:
    params.cwd.native(InvalidParams)  # raises for a path of another platform
    if not params.config_paths and not params.requirements_paths:
        raise InvalidParams("at least one config or requirements path is required")
    if not all([*params.config_paths, *params.requirements_paths]):
        raise InvalidParams("TOML paths must contain at least one key segment")
    return context.in_thread(_read, params, context.server.variables)


def _read(params: codex.ReadConfigParams, variables: Mapping[str, str]) -> codex.ReadConfigResult:
    from exec_server.codex import config  # slow imports stay out of start-up

    return config.read(params, variables)


class SandboxedFiles:
    """A `codex.capability_files.Files`: each look is an fs request with the client's sandbox."""

    def __init__(self, sandboxes: Sandboxes, sandbox: Sandbox | None) -> None:
        self._access = choose_access(sandboxes, sandbox, reading=True)

    def metadata(self, path: PathUri) -> files.GetMetadataResult:
        return self._access.perform(_METADATA, files.GetMetadataParams(path))

    def walk(self, path: PathUri, options: files.WalkOptions) -> files.WalkResult:
        return self._access.perform(_WALK, files.WalkParams(path, options))

    def read(self, path: PathUri, limit: int) -> bytes:
        descriptor = self._access.open(_READ, files.ReadFileParams(path))
        with os.fdopen(descriptor, "rb") as file:
            return file.read(limit)


async def discover(context: ConnectionContext, params: codex.DiscoverParams) -> Encoded:
    """All that is installed for the user; the cwd has no influence, as in the reference."""
    server, cache = context.server, context.server.capability_cache()
    inotify = server.inotify()
    key = msgspec.msgpack.encode(params.sandbox, enc_hook=str)
    kept = cache.get(key, inotify)
    if kept is not None:
        return Encoded(kept)
    files = SandboxedFiles(server.sandboxes, params.sandbox)
    listener = TreeListener()
    is_watched = False
    try:
        async with context.search_slots, server.search_slots:
            text, is_watched = await context.in_thread(
                installed.discover_cached, server.variables, files, inotify, listener
            )
    finally:
        if not is_watched:
            inotify.remove_listener_later(listener)
    if is_watched:
        cache.put(key, text, listener, inotify)
    return Encoded(text)


async def discover_roots(
    context: ConnectionContext, params: codex.DiscoverRootsParams
) -> codex.DiscoverRootsResult:
    """The roots in their order; several at a time, as many as a connection may search."""
    if len(params.roots) > MAX_ROOTS:
        raise InvalidRequest(f"capability root discovery accepts at most {MAX_ROOTS} roots")

    from exec_server.codex.bundle import ResponseBudget, discover_root

    budget = ResponseBudget()

    async def discover(root: codex.RootParams) -> codex.DiscoveredRoot:
        files = SandboxedFiles(context.server.sandboxes, root.sandbox)
        async with context.search_slots, context.server.search_slots:
            return await context.in_thread(discover_root, root, files, budget)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(discover(root)) for root in params.roots]
    return codex.DiscoverRootsResult([task.result() for task in running])
