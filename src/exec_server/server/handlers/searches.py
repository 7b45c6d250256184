"""fs/grep: searches in a thread of the server, or by confined workers."""

from __future__ import annotations

import threading
from functools import partial

from exec_server.errors import InvalidParams
from exec_server.process.helper import run_helper
from exec_server.protocol import files as wire
from exec_server.server.context import ConnectionContext
from exec_server.server.file_access import FileOperation, choose_access


async def grep(context: ConnectionContext, params: wire.GrepParams) -> wire.GrepResult:
    if params.user is not None:
        raise InvalidParams("fs/grep takes no user: run a program as the user")
    server = context.server
    is_over = threading.Event()
    search = partial(_search, server.ripgrep, is_over)
    access = choose_access(server.sandboxes, params.sandbox, reading=True)
    try:
        async with context.search_slots, server.search_slots:
            return await context.in_thread(access.perform, FileOperation(wire.GREP, search), params)
    finally:
        is_over.set()  # a search of a client that has gone ends with the current match


def _search(
    ripgrep: str | None, is_over: threading.Event, params: wire.GrepParams
) -> wire.GrepResult:
    """Search without a sandbox. Blocking."""
    # Imported only here: most servers never search.
    from exec_server.filesystem.search import Ripgrep, grep

    run = partial(run_helper, env={"LC_ALL": "C.UTF-8"})
    return grep(params, None if ripgrep is None else Ripgrep(ripgrep, run), is_over.is_set)
