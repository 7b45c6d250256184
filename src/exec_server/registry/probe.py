"""Asks a registry what a token is for, without changing anything there.

A registry checks the token, then its scopes, then the body of a request. An empty body therefore
tells a token that is refused (401) and one that is for other operations or environments (403) from
one that is accepted (400).
"""

from __future__ import annotations

import ssl
from typing import Final, Literal, NamedTuple
from urllib.parse import quote

from exec_server.errors import RegistryError
from exec_server.registry.credentials import Bearer
from exec_server.registry.http import HttpClient, HttpFailed

Role = Literal["executor", "client"]
# The operation that shows each role. Neither changes anything if its body is empty.
_OPERATIONS: Final[tuple[tuple[Role, str], ...]] = (("executor", "validate"), ("client", "connect"))


class Permissions(NamedTuple):
    """The roles of a token."""

    roles: tuple[Role, ...]
    is_certain: bool  # False: the token does not cover the id that was asked about


async def probe(
    url: str, environment_id: str, token: str, tls: ssl.SSLContext | None
) -> Permissions:
    """The roles of a token; raises RegistryError if the registry refuses it or is none."""
    http = HttpClient(tls)
    try:
        statuses = {
            role: await _status(http, url, environment_id, operation, token)
            for role, operation in _OPERATIONS
        }
    finally:
        await http.close()
    if 401 in statuses.values():
        raise RegistryError(
            f"{url} does not accept this token: it may be mistyped, expired or revoked"
        )
    unknown = [status for status in statuses.values() if status not in (400, 403)]
    if unknown:
        raise RegistryError(
            f"{url} does not answer like a registry (HTTP status {unknown[0]}); check the URL"
        )
    roles = tuple(role for role, status in statuses.items() if status == 400)
    return Permissions(roles, True) if roles else Permissions(("executor", "client"), False)


async def _status(
    http: HttpClient, url: str, environment_id: str, operation: str, token: str
) -> int:
    address = f"{url}/cloud/environment/{quote(environment_id, safe='')}/{operation}"
    headers = await Bearer(token).headers("POST", address, b"{}")
    try:
        response = await http.request(
            "POST", address, [*headers, ("content-type", "application/json")], b"{}"
        )
    except HttpFailed as error:
        # The innermost cause names the reason, such as a certificate or a refused connection.
        reason = error.causes[-1] if error.causes else str(error)
        raise RegistryError(f"cannot reach {url}: {reason}") from None
    if response.status in (502, 503):
        raise RegistryError(f"{url} is not available at the moment; try again")
    return response.status
