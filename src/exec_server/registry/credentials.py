"""The credentials for a registry, and the choice of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from exec_server.errors import StartupError
from exec_server.registry.destination import Destinations, check_registry_url
from exec_server.registry.http import HttpClient

OWN_API_KEY = "EXEC_SERVER_API_KEY"
API_KEY = "CODEX_API_KEY"
ACCESS_TOKEN = "CODEX_ACCESS_TOKEN"
BEARER_TOKEN = "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN"

_NO_CREDENTIAL = (
    "remote exec-server registration requires ChatGPT authentication or API key authentication; "
    "run `codex login` or set CODEX_API_KEY"
)
_SENDABLE = re.compile(r"[\x21-\x7e\x80-\U0010ffff]+")


class Credential(Protocol):
    """A credential for requests to a registry."""

    @property
    def hides_responses(self) -> bool:
        """Whether error texts omit responses of the registry, which may repeat the secret."""

    @property
    def destinations(self) -> Destinations:
        """The destinations that it may be sent to."""

    async def ready(self) -> None:
        """Wait until `headers` can be called; raises StartupError."""

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """Return the headers for one request; raises RegistryError without a valid credential."""


class _Token:
    hides_responses = False

    def __init__(self, token: str) -> None:
        self._token = token

    async def ready(self) -> None:
        """Return at once."""

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self._token}")]


class ApiKey(_Token):
    """An API key."""

    destinations = Destinations.OWN_HOSTS


class Bearer(_Token):
    """A token for one registry."""

    destinations = Destinations.ENCRYPTED


class ClientToken(_Token):
    """The token of a client, with the account that it belongs to."""

    destinations = Destinations.ANYWHERE

    def __init__(self, token: str, account_id: str | None = None) -> None:
        super().__init__(token)
        self._account_id = account_id

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        headers = await super().headers(method, url, body)
        return [*headers, ("chatgpt-account-id", self._account_id)] if self._account_id else headers


@dataclass(frozen=True, slots=True)
class AuthOptions:
    """The command line options about authentication."""

    executor_credential_stdin: bool = False
    use_agent_identity_auth: bool = False
    aws_sigv4: bool = False
    aws_region: str | None = None
    aws_service: str | None = None
    aws_profile: str | None = None
    needs_bearer_token: bool = False  # --executor-id accepts nothing else


def check_destination(
    credential: Credential, base_url: str, *, allow_any_https: bool = False
) -> None:
    """Raise StartupError unless the credential may be sent to this registry."""
    check_registry_url(credential.destinations, base_url, allow_any_https=allow_any_https)


def choose_credential(
    options: AuthOptions,
    environ: Mapping[str, str],
    *,
    environment_id: str,
    http: HttpClient,
    stdin: int = 0,
) -> Credential:
    """The credential that options and environment select, usable after `ready`.

    Raises StartupError. The secrets may be removed from the environment before `ready`.
    """
    # Each kind is imported where it is chosen: a client, which has a token, needs none of them.
    if options.aws_sigv4:
        from exec_server.registry.sigv4 import SigV4

        return SigV4(
            environ,
            region=options.aws_region,
            service=options.aws_service,
            profile=options.aws_profile,
        )
    if options.executor_credential_stdin:
        from exec_server.registry.executor_credential import ExecutorCredential

        return ExecutorCredential(environment_id, stdin)
    if options.use_agent_identity_auth:
        token = environ.get(ACCESS_TOKEN, "").strip()
        if not token:
            raise StartupError(f"{ACCESS_TOKEN} is required when --use-agent-identity-auth is set")
        from exec_server.registry.agent_identity import AgentIdentity

        return AgentIdentity(token, http, environ)
    if options.needs_bearer_token:
        return Bearer(_required_bearer_token(environ))
    for name in (OWN_API_KEY, API_KEY):
        if key := _secret(environ, name):
            return ApiKey(key)
    if token := _secret(environ, BEARER_TOKEN):
        return Bearer(token)
    from exec_server.registry import sign_in

    stored = sign_in.StoredSignIn(sign_in.file_path(environ))
    if not stored.is_usable:
        raise StartupError(_NO_CREDENTIAL)
    return stored


def _secret(environ: Mapping[str, str], name: str) -> str:
    """The value of a variable; raises StartupError if it cannot be sent in a header."""
    value = environ.get(name, "").strip()
    if value and not _SENDABLE.fullmatch(value):
        raise StartupError(f"{name} contains blanks or control characters")
    return value


def _required_bearer_token(environ: Mapping[str, str]) -> str:
    state = "is empty" if BEARER_TOKEN in environ else "is not set"
    if token := _secret(environ, BEARER_TOKEN):
        return token
    raise StartupError(
        "executor registry authentication error: executor registry bearer token environment "
        f"variable `{BEARER_TOKEN}` {state}"
    )
