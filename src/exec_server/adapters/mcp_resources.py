"""CommandResources: background commands as resources, and who is told when one ends.

A client of a protocol with `subscriptions/listen` is told through the bus of the SDK; an older one
by `resources/subscribe`. No client shows this to its model: the model learns it from the tool
`wait_command`, or from the next result of any tool.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from exec_server.adapters.mcp_commands import CommandSessions
from exec_server.adapters.target import framework_missing
from exec_server.errors import ExecServerError

try:
    from mcp.server.lowlevel.server import NotificationOptions
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.exceptions import ResourceError
    from mcp.server.subscriptions import (
        InMemorySubscriptionBus,
        ResourcesListChanged,
        ResourceUpdated,
    )
    from mcp.shared.exceptions import MCPError
    from mcp_types import (
        INVALID_PARAMS,
        EmptyResult,
        Resource,
        SubscribeRequestParams,
        UnsubscribeRequestParams,
    )
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS
except ImportError as error:
    raise framework_missing("mcp", "mcp", error) from error

# Subscriptions of older clients, each of which keeps the connection of a client in memory. Those of
# a command are forgotten with it.
MAX_SUBSCRIPTIONS: Final = 256

_SCHEME: Final = "command:///"


class CommandResources:
    """The background commands of some sessions as resources of a server."""

    def __init__(self, sessions: CommandSessions) -> None:
        self._sessions = sessions
        self._connections: dict[str, set[Any]] = {}  # subscribed, by URI
        self.bus = InMemorySubscriptionBus()
        sessions.on_end = self._ended

    def add_to(self, server: MCPServer) -> None:
        """Serve the resources and the subscriptions to them."""

        async def read(session_id: str) -> str:
            try:
                return self._sessions.describe(_number(session_id))
            except ExecServerError as error:
                raise ResourceError(str(error)) from None

        template = f"{_SCHEME}{{session_id}}"
        server.resource(template, name="command", title="A command of exec_command")(read)
        lowlevel: Any = server._lowlevel_server
        add = lowlevel.add_request_handler
        add("resources/subscribe", SubscribeRequestParams, self._subscribe)
        add("resources/unsubscribe", UnsubscribeRequestParams, self._unsubscribe)
        lowlevel.create_initialization_options = functools.partial(
            lowlevel.create_initialization_options, NotificationOptions(resources_changed=True)
        )

    def list(self) -> list[Resource]:
        """The commands that run in the background, or have ended there."""
        return [
            Resource(uri=_uri(number), name=f"command {number}", title=text, mime_type="text/plain")
            for number, text in self._sessions.background()
        ]

    async def announce(self, context: Context) -> None:
        """Tell clients that there is another command in the background."""
        await self.bus.publish(ResourcesListChanged())
        request = context.request_context
        if request.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            await request.session.send_resource_list_changed()

    async def _ended(self, session_id: int) -> None:
        uri = _uri(session_id)
        await self.bus.publish(ResourceUpdated(uri=uri))
        for connection in list(self._connections.get(uri, ())):
            await connection.send_resource_updated(uri)

    async def _subscribe(self, context: Any, params: SubscribeRequestParams) -> EmptyResult:
        known = {_uri(number) for number, _ in self._sessions.background()}
        uri = str(params.uri)
        if uri not in known:
            raise MCPError(INVALID_PARAMS, f"{uri} is no command that runs in the background")
        for forgotten in self._connections.keys() - known:
            del self._connections[forgotten]
        if sum(map(len, self._connections.values())) >= MAX_SUBSCRIPTIONS:
            raise MCPError(INVALID_PARAMS, f"there are {MAX_SUBSCRIPTIONS} subscriptions")
        self._connections.setdefault(uri, set()).add(context.session._connection)
        return EmptyResult()

    async def _unsubscribe(self, context: Any, params: UnsubscribeRequestParams) -> EmptyResult:
        self._connections.get(str(params.uri), set()).discard(context.session._connection)
        return EmptyResult()


def _uri(session_id: int) -> str:
    return f"{_SCHEME}{session_id}"


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0
