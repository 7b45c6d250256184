"""capabilityRoots/discoverV1 and capabilities/discoverV2: skills and plugins of this machine."""

from __future__ import annotations

import asyncio

import msgspec

from exec_server.codex import installed
from exec_server.codex.installed import TreeListener
from exec_server.errors import InvalidRequest
from exec_server.protocol import codex
from exec_server.protocol.codex import DiscoveredRoot, RootParams
from exec_server.server.context import ConnectionContext, Encoded
from exec_server.server.discovery_access import SandboxedFiles


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


# The reference's limit of one request.
MAX_ROOTS = 128


async def discover_roots(
    context: ConnectionContext, params: codex.DiscoverRootsParams
) -> codex.DiscoverRootsResult:
    """The roots in their order; several at a time, as many as a connection may search."""
    if len(params.roots) > MAX_ROOTS:
        text = f"capability root discovery accepts at most {MAX_ROOTS} roots"
        raise InvalidRequest(text)

    from exec_server.codex.bundle import ResponseBudget, discover_root

    budget = ResponseBudget()

    async def discover(root: RootParams) -> DiscoveredRoot:
        files = SandboxedFiles(context.server.sandboxes, root.sandbox)
        async with context.search_slots, context.server.search_slots:
            return await context.in_thread(discover_root, root, files, budget)

    async with asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(discover(root)) for root in params.roots]
    return codex.DiscoverRootsResult([task.result() for task in found])
