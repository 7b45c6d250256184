"""fs/watch and fs/unwatch: changes of files, as notifications of a connection."""

from __future__ import annotations

import asyncio

from exec_server.errors import InvalidParams, InvalidRequest
from exec_server.filesystem.watch import ChangeWatch
from exec_server.protocol import files as wire
from exec_server.protocol.files import CANONICALIZE, CanonicalizeParams, Done
from exec_server.protocol.paths import PathUri
from exec_server.server.context import ConnectionContext

# Watches of a connection, each with a task: far more than the directories that a client shows.
MAX_WATCHES = 64
# Changes of a burst, such as a checkout, are gathered for this long before they are sent.
GATHER_SECONDS = 0.02


async def watch(context: ConnectionContext, params: wire.WatchParams) -> Done:
    if params.user is not None:
        raise InvalidParams("fs/watch takes no user")
    watches = context.change_watches
    if params.watch_id in watches:
        raise InvalidRequest(f"watch {params.watch_id} already exists")
    if len(watches) >= MAX_WATCHES:
        raise InvalidRequest(f"a connection has at most {MAX_WATCHES} watches: fs/unwatch one")
    opened = ChangeWatch(context.server.inotify(), is_recursive=params.recursive)
    watches[params.watch_id] = opened
    try:
        await context.in_thread(_open, context, params, opened)
    except BaseException:
        _end(context, params.watch_id)
        raise
    if params.watch_id in watches:  # not ended meanwhile
        context.start_task(_follow(context, params.watch_id, opened))
    return Done()


def unwatch(context: ConnectionContext, params: wire.UnwatchParams) -> Done:
    """End a watch; one that has ended or never existed is not an error."""
    _end(context, params.watch_id)
    return Done()


def _end(context: ConnectionContext, watch_id: int) -> None:
    ended = context.change_watches.pop(watch_id, None)
    if ended is not None:
        ended.close()
        ended.wake.set()  # its task ends


def _open(context: ConnectionContext, params: wire.WatchParams, opened: ChangeWatch) -> None:
    """Begin to watch under the policy of the request. Blocking."""
    path, sandbox = params.path, params.sandbox
    policy = None
    if sandbox is not None:
        policy = context.server.sandboxes.files.policy_for(sandbox, reading=True)
    if policy is None or policy.is_trusted_read:
        opened.open(path.native(), None)
        return
    # A worker finds the path: the server would tell a hidden path from a missing one.
    found = policy.perform(CANONICALIZE, CanonicalizeParams(path, sandbox=sandbox))
    try:
        opened.open(PathUri.from_text(found.path).native(), policy.visible)
    except OSError as error:
        raise policy.explain(params, error) from error


async def _follow(context: ConnectionContext, watch_id: int, watched: ChangeWatch) -> None:
    """Send the changes of a watch until it ends."""
    while context.change_watches.get(watch_id) is watched:
        await watched.wake.wait()
        await asyncio.sleep(GATHER_SECONDS)
        await context.drain()
        if context.change_watches.get(watch_id) is not watched:
            return
        batch = watched.take()
        if watched.needs_thread(batch):
            batch = await context.in_thread(watched.settle, batch)
        if context.change_watches.get(watch_id) is not watched:
            return
        if batch.changes or batch.overflow or watched.has_ended:
            changed = wire.ChangedParams(
                watch_id, batch.on_wire(), batch.overflow, watched.has_ended, watched.error
            )
            context.notify(wire.CHANGED, changed)
        if watched.has_ended:
            _end(context, watch_id)
