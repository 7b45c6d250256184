"""Requests of processes for hosts that their rules do not list: the program's answer."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from exec_server.protocol.network import Answer, PolicyParams, PolicyResult

# The server refuses longer reasons, and control characters in them.
_REASON_CHARACTERS: Final = 200
_NOT_ASKED: Final = "the client allows no further hosts"


class NetworkRequest(msgspec.Struct, frozen=True):
    """A host that a process wants to reach."""

    process_id: str
    protocol: str  # http, https_connect or socks5_tcp
    host: str
    port: int


# True allows the request; False, or a reason, denies it.
Decision = bool | str
OnNetworkRequest = Callable[[NetworkRequest], Decision | Awaitable[Decision]]


class NetworkRequests:
    """Answers network/policyRequest by a function of the program; without one, denies all."""

    def __init__(self, decide: OnNetworkRequest | None) -> None:
        self._decide = decide

    async def answer(self, params: PolicyParams) -> PolicyResult:
        """The handler of the request; an exception of the function denies it, too."""
        if self._decide is None:
            return _denial(_NOT_ASKED)
        asked = params.request
        request = NetworkRequest(params.process_id, asked.protocol, asked.host, asked.port)
        decided = self._decide(request)
        decision = await decided if inspect.isawaitable(decided) else decided
        if decision is True:
            return PolicyResult(Answer("allow"))
        return _denial(decision if isinstance(decision, str) else "denied by the client")


def _denial(reason: str) -> PolicyResult:
    printable = "".join(each if each.isprintable() else " " for each in reason)
    return PolicyResult(Answer("deny", printable[:_REASON_CHARACTERS]))
