"""What a credential for a registry is, and the destinations that each kind may be sent to."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Sequence
from enum import Enum
from typing import Final

from exec_server.errors import StartupError
from exec_server.host.event_loop import GuardedTasks
from exec_server.net.client_tls import PinnedContext
from exec_server.protocol.urls import Url, parse_address, parse_url

_HTTP = frozenset({"http", "https"})
_WEBSOCKET = frozenset({"ws", "wss"})
# The issuer of API keys; its keys are sent to no other host.
_OWN_DOMAINS = (".openai.com", ".openai.org")

_API_KEY_TEXT = (
    "remote exec-server API-key authentication is restricted to HTTPS openai.com and openai.org "
    "hosts and subdomains or loopback hosts"
)

_HTTPS_TEXT = "ChatGPT token registry URLs must use HTTPS without userinfo or fragments"

# Of an environment id, in every registry.
MAX_CHARACTERS: Final = 128
_OTHERS: Final = r"[^A-Za-z0-9._-]+"
_FALLBACK: Final = "machine"


class Destinations(Enum):
    """The destinations that a credential may be sent to."""

    ANYWHERE = "anywhere"
    ENCRYPTED = "https, or this machine"
    OWN_HOSTS = "https to the hosts that gave it out, or this machine"
    HTTPS = "https, also on this machine"


class Credential:
    """A credential for requests to a registry; the defaults are those of a constant token."""

    # Whether error texts omit responses of the registry, which may repeat the secret.
    hides_responses = False
    destinations: Destinations

    async def ready(self, tasks: GuardedTasks) -> None:
        """Wait until `headers` can be called; raises StartupError.

        `tasks` is for work that a request must not cancel; the server awaits it at its end.
        """

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """Return the headers for one request; raises RegistryError without a valid credential."""
        raise NotImplementedError

    async def renew(self, rejected: Sequence[tuple[str, str]]) -> bool:
        """After a 401 for these headers: whether `headers` now returns others."""
        return False

    async def wait_ended(self) -> None:
        """Return when the server has to end, with an error if ExecServerError is raised."""
        await asyncio.Event().wait()


def check_destination(
    credential: Credential, base_url: str, *, allow_any_https: bool = False
) -> None:
    """Raise StartupError unless the credential may be sent to this registry."""
    check_registry_url(credential.destinations, base_url, allow_any_https=allow_any_https)


def check_registry_url(
    destinations: Destinations, base_url: str, *, allow_any_https: bool = False
) -> None:
    """Raise StartupError if a credential must not be sent to this registry.

    `allow_any_https`: the user has confirmed that the API key is for this registry.
    """
    if destinations is Destinations.HTTPS:
        _check_https(base_url)
        return
    if destinations is Destinations.ANYWHERE and not base_url.strip():
        raise StartupError(
            "environment registry configuration error: environment registry base URL is required"
        )
    try:
        url = parse_url(base_url, _HTTP)
    except ValueError as error:
        if destinations is Destinations.ENCRYPTED:
            prefix = "environment registry configuration error: invalid remote endpoint URL"
        else:
            prefix = "invalid remote exec-server registration URL"
        raise StartupError(f"{prefix}: {error}") from None
    if destinations is Destinations.ANYWHERE or is_loopback(url):
        return
    if destinations is Destinations.ENCRYPTED:
        if not url.secure:
            raise StartupError(_encryption_text("https"))
    elif not url.secure:
        hint = " (--registry-auth api-key lifts this for https only)" * allow_any_https
        raise StartupError(_API_KEY_TEXT + hint)
    elif not allow_any_https and not f".{url.host}".endswith(_OWN_DOMAINS):
        raise StartupError(
            f"{_API_KEY_TEXT}; use --registry-auth api-key if the key is meant for {url.host}"
        )


def _check_https(base_url: str) -> None:
    try:
        url = parse_url(base_url, _HTTP)  # refuses user names
    except ValueError:
        raise StartupError(_HTTPS_TEXT) from None
    if not url.secure or "#" in base_url:
        raise StartupError(_HTTPS_TEXT)


def check_pinned_registry(tls: ssl.SSLContext | None, base_url: str) -> None:
    """Raise StartupError if pins would check nothing, because the registry has no certificate."""
    if isinstance(tls, PinnedContext) and not parse_url(base_url, _HTTP).secure:
        raise StartupError("a pin is for https:// registries: without TLS there is no certificate")


def check_direct_url(text: str) -> None:
    """Raise StartupError unless a signed upgrade and plain JSON-RPC may be sent to this URL."""
    try:
        url = parse_url(text, _WEBSOCKET | _HTTP)
    except ValueError as error:
        raise StartupError(
            f"environment registry configuration error: invalid remote endpoint URL: {error}"
        ) from None
    if url.scheme != "wss" and not (url.scheme == "ws" and is_loopback(url)):
        raise StartupError(_encryption_text("wss"))


def is_loopback(url: Url) -> bool:
    """Whether the host is this machine by name or address; names are not resolved."""
    if url.host == "localhost" or url.scheme == "unix":
        return True
    address = parse_address(url.host)
    return address is not None and address.is_loopback


def is_encrypted(base_url: str) -> bool:
    """Whether a secret may be sent to this URL: it is https, or on this machine."""
    try:
        url = parse_url(base_url, _HTTP)
    except ValueError:
        return False
    return url.secure or is_loopback(url)


def _encryption_text(scheme: str) -> str:
    return (
        "environment registry configuration error: remote transport requires "
        f"{scheme} for non-loopback endpoints"
    )


def environment_id(host_name: str | None = None) -> str:
    """The first host name label as an environment id, with invalid characters replaced."""
    name = socket.gethostname() if host_name is None else host_name
    label = name.partition(".")[0]
    return re.sub(_OTHERS, "-", label).strip("-")[:MAX_CHARACTERS] or _FALLBACK
