"""NetworkController: the client of a session, as the proxies of its processes reach it."""

from __future__ import annotations

from exec_server.protocol.network import (
    DECISION,
    POLICY_REQUEST,
    DecisionParams,
    PolicyParams,
)
from exec_server.server.session import Session


class NetworkController:
    """Reports decisions to the client of a session, and asks it."""

    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    def report(self, decision: DecisionParams) -> None:
        """Send a decision; one that the connection cannot take now is dropped."""
        if self._session.is_writable:
            self._session.notify(DECISION, decision)

    async def ask(self, question: PolicyParams) -> object:
        return await self._session.ask(POLICY_REQUEST, question)
