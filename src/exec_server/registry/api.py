"""The requests of executors and clients to a registry, one method each."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Literal, NamedTuple
from urllib.parse import quote
from uuid import UUID

import msgspec

from exec_server.errors import RegistryError, RegistryUnavailable, StartupError
from exec_server.registry import responses
from exec_server.registry.credentials import Credential
from exec_server.registry.destination import check_direct_url
from exec_server.registry.http import CompleteResponse, HttpClient, HttpFailed
from exec_server.registry.keys import key_object, public_key
from exec_server.registry.responses import ErrorResponse, decode_body, protocol_error
from exec_server.relay.noise import PublicKey

log = logging.getLogger(__name__)

# Refusals for up to 20 s are normal, as during a restart. The next one is logged as an error, once,
# so that an executor that waits does not wait in silence. The first one is a warning, which
# `exec-server up` shows: its user waits for the line that the machine is reachable.
TOLD_ATTEMPT = 6
_LEVELS = {0: logging.WARNING, TOLD_ATTEMPT: logging.ERROR}

SECURITY_PROFILE = "noise_hybrid_ik_v1"
DIRECT_TRANSPORT = "direct_jsonrpc_v1"
# Of a client's authorization. Executors refuse a longer one.
AUTHORIZATION_BYTES = 4096

_FIRST_DELAY_SECONDS = 0.5
_LAST_DELAY_SECONDS = 5.0
_ENVIRONMENT = "environment"
_EXECUTOR = "executor"

# The word for the id in the endpoint of a plain form, and in its error texts.
_PLAIN_NOUNS = {"text": _EXECUTOR, "relay-plain": _ENVIRONMENT}


class Registration(NamedTuple):
    """The URL where an executor waits for clients, and the id of its registration."""

    url: str
    registration_id: str
    names_tokens: bool = False  # whether the relay adds the token id of each client


class ConnectionBundle(NamedTuple):
    """The data that a client needs for one connection; not valid for a second one."""

    url: str
    executor_key: PublicKey
    registration_id: str
    authorization: str


class _Exchange(NamedTuple):
    response: CompleteResponse
    secrets: tuple[str, ...]  # sent values that must not be shown

    @property
    def ok(self) -> bool:
        return 200 <= self.response.status < 300

    def error_response(self) -> ErrorResponse:
        return ErrorResponse(self.response, self.secrets)


class Registry:
    """The requests about one environment; the caller owns the HTTP client."""

    def __init__(
        self, base_url: str, environment_id: str, credential: Credential, http: HttpClient
    ) -> None:
        self._base_url = base_url.strip().rstrip("/")
        self._id = environment_id.strip()
        if not self._base_url:
            raise StartupError(
                "environment registry configuration error: environment registry base URL "
                "is required"
            )
        if not self._id:
            raise StartupError(
                "environment registry configuration error: environment id is required for "
                "remote exec-server registration"
            )
        self._credential = credential
        self._http = http

    @property
    def environment_id(self) -> str:
        return self._id

    # ---- executor ---------------------------------------------------------------------

    async def register(self, key: PublicKey) -> Registration:
        """Register once; raises RegistryError.

        It is RegistryUnavailable if the registry asks for another attempt, and RegistryUnreachable
        if there was no response, or one of a registry in trouble.
        """
        body = {"security_profile": SECURITY_PROFILE, "executor_public_key": key_object(key)}
        exchange = await self._post_registration(
            _ENVIRONMENT, "register", msgspec.json.encode(body)
        )
        registered = self._decode_registration(exchange, responses.RegistrationResponse)
        self._check_id(registered.environment_id, _ENVIRONMENT)
        _check_profile(registered.security_profile)
        return Registration(
            registered.url, registered.executor_registration_id, registered.names_tokens
        )

    async def register_until_accepted(self, key: PublicKey) -> Registration:
        """Register, and retry after transient errors; raises RegistryError."""
        attempt = 0
        while True:
            try:
                return await self.register(key)
            except RegistryUnavailable as error:
                delay = retry_delay(attempt, random.random)
                level = _LEVELS.get(attempt, logging.INFO)
                log.log(level, "%s; retrying in %.1f s", error, delay)
            await asyncio.sleep(delay)
            attempt += 1

    async def register_direct(self) -> Registration:
        """Register for the direct transport; raises RegistryError."""
        body = msgspec.json.encode({"transport": DIRECT_TRANSPORT})
        exchange = await self._post_registration(_ENVIRONMENT, "direct/register", body)
        registered = self._decode_registration(exchange, responses.DirectRegistrationResponse)
        self._check_id(registered.environment_id, _ENVIRONMENT)
        if registered.transport != DIRECT_TRANSPORT:
            raise protocol_error(
                "environment registry returned unsupported direct transport "
                f"`{registered.transport}`"
            )
        if not registered.registration_id.strip() or not registered.url.strip():
            raise protocol_error("environment registry returned incomplete direct connection data")
        try:
            check_direct_url(registered.url)
        except StartupError as error:
            raise RegistryError(str(error)) from None
        return Registration(registered.url, registered.registration_id)

    async def register_plain(self, *, form: Literal["text", "relay-plain"]) -> Registration:
        """Register for a form without encryption, which has no registration id."""
        noun = _PLAIN_NOUNS[form]
        exchange = await self._post_registration(noun, "register", b"")
        registered = self._decode_registration(exchange, responses.PlainRegistrationResponse)
        # The two forms have different names for the id.
        given = (
            registered.executor_id
            if registered.executor_id is not None
            else registered.environment_id
        )
        self._check_id(given, noun)
        return Registration(registered.url, "")

    async def validate(
        self, registration_id: str, key: PublicKey, authorization: str, stream_id: str
    ) -> bool:
        """Whether the registry accepts this client; every failure means no."""
        body = {
            "executor_registration_id": registration_id,
            "harness_public_key": key_object(key),
            "harness_key_authorization": authorization,
        }
        uuid = _uuid_of(stream_id)
        extra = [("x-codex-noise-stream-id", uuid)] if uuid is not None else []
        try:
            exchange = await self._post(
                _ENVIRONMENT, "validate", msgspec.json.encode(body), extra=extra
            )
            if not exchange.ok:
                log.warning("client refused: the registry responded %d", exchange.response.status)
                return False
            response = decode_body(exchange.response.body, responses.ValidationResponse)
        except (HttpFailed, RegistryError) as error:
            log.warning("client refused: %s", error)
            return False
        if not response.valid:
            log.warning("client refused by the registry")
        return response.valid

    async def _post_registration(self, noun: str, action: str, body: bytes) -> _Exchange:
        """Register, with a 2xx response; raises RegistryError or one of its subclasses."""
        try:
            exchange = await self._post(noun, action, body)
        except HttpFailed as failure:
            raise responses.registration_failure(failure, noun) from None
        if exchange.ok:
            return exchange
        response = exchange.error_response()
        text = response.text(noun, hides_responses=self._credential.hides_responses)
        raise responses.registration_refusal(response, text)

    def _decode_registration(self, exchange: _Exchange, kind: type[responses.T]) -> responses.T:
        """Decode a registration; errors show nothing that may repeat a hidden secret."""
        body = exchange.response.body
        if not self._credential.hides_responses:
            return decode_body(body, kind)
        invalid = protocol_error("invalid environment registry executor registration response")
        if any(secret.encode() in body for secret in exchange.secrets):
            raise invalid
        try:
            return decode_body(body, kind)
        except RegistryError:
            raise invalid from None

    # ---- client -----------------------------------------------------------------------

    async def connect(self, key: PublicKey) -> ConnectionBundle:
        """Request one connection; raises RegistryUnavailable for transient errors."""
        body = msgspec.json.encode({"harness_public_key": key_object(key)})
        try:
            exchange = await self._post(_ENVIRONMENT, "connect", body)
        except HttpFailed as failure:
            raise responses.no_response_error(failure, _ENVIRONMENT) from None
        if not exchange.ok:
            response = exchange.error_response()
            kind = RegistryUnavailable if _is_transient(response) else RegistryError
            raise kind(response.text(_ENVIRONMENT))
        registered = decode_body(exchange.response.body, responses.ConnectionResponse)
        self._check_id(registered.environment_id, _ENVIRONMENT)
        _check_profile(registered.security_profile)
        return _connection_bundle(registered)

    # ---- both -------------------------------------------------------------------------

    async def _post(
        self,
        noun: str,
        action: str,
        body: bytes,
        *,
        extra: list[tuple[str, str]] | None = None,
    ) -> _Exchange:
        """Send one request; raises HttpFailed, or RegistryError without a valid credential."""
        # All characters are quoted, so that the id stays one segment of the path.
        url = f"{self._base_url}/cloud/{noun}/{quote(self._id, safe='')}/{action}"
        proof = await self._credential.headers("POST", url, body)
        headers = [*proof, ("accept", "*/*"), *(extra or [])]
        if body:
            headers.insert(0, ("content-type", "application/json"))
        response = await self._http.request("POST", url, headers, body)
        return _Exchange(response, _secrets(proof))

    def _check_id(self, given: str | None, noun: str) -> None:
        if given != self._id:
            raise protocol_error(f"{noun} registry returned a different {noun} id")


def retry_delay(attempt: int, uniform: Callable[[], float]) -> float:
    """The delay after an attempt, counted from 0; `uniform` returns 0 to 1."""
    # The exponent is limited, because attempts may go on for weeks.
    base = min(_FIRST_DELAY_SECONDS * 2.0 ** min(attempt, 16), _LAST_DELAY_SECONDS)
    return base + uniform() * base / 2


def _check_profile(given: str) -> None:
    if given != SECURITY_PROFILE:
        raise protocol_error(
            f"environment registry returned unsupported security profile `{given}`"
        )


def _connection_bundle(registered: responses.ConnectionResponse) -> ConnectionBundle:
    try:
        key = public_key(registered.executor_public_key)
    except ValueError as error:
        raise protocol_error(f"environment registry returned an invalid key: {error}") from None
    authorization = registered.harness_key_authorization
    needed = (registered.url, registered.executor_registration_id, authorization)
    if not all(text.strip() for text in needed):
        raise protocol_error("environment registry returned incomplete Noise connection data")
    if len(authorization.encode()) > AUTHORIZATION_BYTES:
        raise protocol_error(
            f"environment registry returned an authorization above {AUTHORIZATION_BYTES} bytes"
        )
    return ConnectionBundle(registered.url, key, registered.executor_registration_id, authorization)


def _is_transient(response: ErrorResponse) -> bool:
    """Whether a client should retry."""
    if response.status == 409:
        return response.code == "environment_offline"
    return response.status in (408, 429) or 500 <= response.status < 600


def _uuid_of(text: str) -> str | None:
    """The canonical form of a UUID, None if the text is not one."""
    try:
        return str(UUID(text))
    except ValueError:
        return None


def _secrets(headers: list[tuple[str, str]]) -> tuple[str, ...]:
    """The credentials in the headers, which must not be shown if a response repeats them."""
    values = [value.partition(" ")[2] for name, value in headers if name == "authorization"]
    return tuple(value for value in values if value)
