"""session/close: the client ends its session."""

from __future__ import annotations

import asyncio

from exec_server.protocol.decoding import EmptyResult
from exec_server.server.context import ConnectionContext


async def close(context: ConnectionContext, _params: None) -> EmptyResult:
    # The end goes on if the connection is lost meanwhile.
    await asyncio.shield(context.server.sessions.close(context.session))
    return EmptyResult()
