"""fs/grep: searches by programs of the server, or by confined workers."""

from __future__ import annotations

import shutil
from functools import partial

from exec_server.filesystem import grep as grep_search
from exec_server.process.helper import run_helper
from exec_server.protocol import file_changes as wire
from exec_server.server.context import ConnectionContext
from exec_server.server.file_access import FileOperation, choose_access


async def grep(context: ConnectionContext, params: wire.GrepParams) -> wire.GrepResult:
    server = context.server
    env = {"PATH": server.variables.get("PATH", ""), "LC_ALL": "C.UTF-8"}
    search = partial(
        grep_search.grep_by_program,
        run=partial(run_helper, env=env),
        ripgrep=shutil.which("rg", path=env["PATH"]),
    )
    access = choose_access(server.sandboxes.files, params.sandbox, reading=True)
    async with context.search_slots, server.search_slots:
        return await context.in_thread(access.perform, FileOperation(wire.GREP, search), params)
