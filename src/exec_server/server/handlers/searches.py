"""fs/grep: searches by programs of the server, or by confined workers."""

from __future__ import annotations

from functools import partial

from exec_server.errors import InvalidParams
from exec_server.process.helper import run_helper
from exec_server.protocol import file_changes as wire
from exec_server.server.context import ConnectionContext
from exec_server.server.file_access import FileOperation, choose_access


async def grep(context: ConnectionContext, params: wire.GrepParams) -> wire.GrepResult:
    if params.user is not None:
        raise InvalidParams("fs/grep takes no user: run a program as the user")
    server = context.server
    search = partial(_search, server.ripgrep)
    access = choose_access(server.sandboxes, params.sandbox, reading=True)
    async with context.search_slots, server.search_slots:
        return await context.in_thread(access.perform, FileOperation(wire.GREP, search), params)


def _search(ripgrep: str | None, params: wire.GrepParams) -> wire.GrepResult:
    """Search without a sandbox. Blocking."""
    # Imported only here: most servers never search.
    from exec_server.filesystem.grep import grep_by_program

    run = partial(run_helper, env={"LC_ALL": "C.UTF-8"})
    return grep_by_program(params, run=run, ripgrep=ripgrep)
