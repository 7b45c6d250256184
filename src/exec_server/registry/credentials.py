"""The credentials for a registry, and the choice of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from exec_server.errors import StartupError
from exec_server.registry.destination import Credential, Destinations
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


class _Token(Credential):
    def __init__(self, token: str) -> None:
        self._token = token

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


class AuthOptions(NamedTuple):
    """The command line options about authentication."""

    # The flag of the form that stdin delivers, and whether the end of stdin ends the server.
    stdin_flag: str | None = None
    exit_on_stdin_close: bool = False
    chatgpt_account_id: str | None = None
    use_agent_identity_auth: bool = False
    aws_sigv4: bool = False
    aws_region: str | None = None
    aws_service: str | None = None
    aws_profile: str | None = None
    needs_bearer_token: bool = False  # --executor-id accepts nothing else


def choose_credential(
    options: AuthOptions,
    environ: Mapping[str, str],
    *,
    environment_id: str,
    http: HttpClient,
    stdin: int = 0,
) -> Credential:
    """The credential that options and environment select, usable after `ready`.

    `http` is for the requests of the credential itself, to its issuer.
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
    if options.stdin_flag is not None:
        from exec_server.registry.stdin_credential import FORMS, Expected, StdinCredential

        return StdinCredential(
            FORMS[options.stdin_flag],
            Expected(environment_id, options.chatgpt_account_id),
            stdin,
            until_closed=options.exit_on_stdin_close,
        )
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

    stored = sign_in.load(environ, http)
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
