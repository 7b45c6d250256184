"""The requests of executors and clients to a registry, one method each, and their responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, TypeVar
from urllib.parse import quote
from uuid import UUID

import msgspec

from exec_server.errors import RegistryError, RegistryUnavailable, RegistryUnreachable, StartupError
from exec_server.registry.credentials import Bearer
from exec_server.registry.decoding import decode_json
from exec_server.registry.destination import Credential, check_direct_url
from exec_server.registry.http import (
    CertificateFailed,
    CompleteResponse,
    HttpClient,
    HttpFailed,
    ResponseTooLarge,
)
from exec_server.relay.multiplexer import Verdict
from exec_server.relay.noise import SUITE, PublicKey

# Of an error body, in an error text.
SHOWN_CHARACTERS = 4096

# Errors of a registration after which an executor retries; all others end it.
TRANSIENT_REGISTRATION_ERRORS = {
    (502, "authentication_service_unavailable"),
    (503, "registration_conflict"),
}
_KNOWN_CODES = frozenset(code for _, code in TRANSIENT_REGISTRATION_ERRORS)
_HIDDEN = "[hidden]"
# Shorter secrets exist in tests only; hiding them would garble the text.
_SECRET_CHARACTERS = 8

T = TypeVar("T")
Response = TypeVar("Response", bound=msgspec.Struct)

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

Role = Literal["executor", "client"]
# The operation that shows each role. Neither changes anything if its body is empty.
_OPERATIONS: Final[tuple[tuple[Role, str], ...]] = (("executor", "validate"), ("client", "connect"))


class KeyObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON form of a public key."""

    suite: str
    x25519_public_key: str
    mlkem768_public_key: str


def key_object(key: PublicKey) -> KeyObject:
    return KeyObject(SUITE, b64encode(key.x25519).decode(), b64encode(key.mlkem768).decode())


def public_key(encoded: KeyObject) -> PublicKey:
    """Decode a key; raises ValueError unless it is valid."""
    if encoded.suite != SUITE:
        raise ValueError(f"unsupported suite `{encoded.suite}`")
    key = PublicKey(
        b64decode(encoded.x25519_public_key, validate=True),
        b64decode(encoded.mlkem768_public_key, validate=True),
    )
    key.check()
    return key


class RegistrationResponse(msgspec.Struct, frozen=True):
    """The response to a registration for encrypted streams."""

    environment_id: str
    url: str
    security_profile: str
    executor_registration_id: str
    # Whether the relay adds the token id of each client to its handshake; only our registry does.
    names_tokens: bool = False


class DirectRegistrationResponse(msgspec.Struct, frozen=True):
    """The response to a registration for the direct transport."""

    environment_id: str
    registration_id: str
    url: str
    transport: str


class PlainRegistrationResponse(msgspec.Struct, frozen=True):
    """The response to a registration of the historical forms, with either name of the id."""

    url: str
    environment_id: str | None = None
    executor_id: str | None = None


class ConnectionResponse(msgspec.Struct, frozen=True):
    """The response to a client's request for a connection."""

    environment_id: str
    security_profile: str
    url: str
    executor_registration_id: str
    executor_public_key: KeyObject
    harness_key_authorization: str


class ValidationResponse(msgspec.Struct, frozen=True):
    """The response to the validation of a client's key."""

    valid: bool


class _Error(msgspec.Struct, frozen=True):
    code: str | None = None
    message: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error | None = None


class ErrorResponse:
    """The status, code and message of a response other than 2xx."""

    def __init__(self, response: CompleteResponse, secrets: Sequence[str]) -> None:
        self.status = response.status
        try:
            error = decode_json(response.body, _ErrorBody).error or _Error()
        except msgspec.DecodeError:
            error = _Error()
        self.code = error.code
        text = error.message
        if text is None:
            text = response.body.decode(errors="replace").strip()
        self._text = _printable(text, secrets)
        self._shown_code = _printable(error.code or "", secrets)

    @property
    def is_transient(self) -> bool:
        """Whether the status says that a later attempt may succeed."""
        return self.status in (408, 429) or 500 <= self.status < 600

    def text(self, noun: str, *, hides_responses: bool = False) -> str:
        """The error text; `noun` is the kind of thing that this registry registers."""
        if self.status in (401, 403):
            shown = "response body omitted" if hides_responses else self._text or "empty error body"
            subject = f"{noun} registry authentication"
            return f"{subject} error: {subject} failed ({self._status_line()}): {shown}"
        code, shown = self._shown_code, self._text or "empty or malformed error body"
        if hides_responses:
            code = code if code in _KNOWN_CODES else ""
            shown = f"{noun} registry executor registration failed"
        line = self._status_line() + (f", {code}" if code else "")
        return f"{noun} registry request failed ({line}): {shown}"

    def _status_line(self) -> str:
        from http import HTTPStatus

        try:
            return f"{self.status} {HTTPStatus(self.status).phrase}"
        except ValueError:
            return f"{self.status} <unknown status code>"


def failure_text(failure: HttpFailed, noun: str) -> str:
    """The error text for a request without a response."""
    text = f"{noun} registry request failed: {failure.text}"
    if not failure.causes:
        return text
    lines = [
        f"    {number}: {cause}" for number, cause in enumerate((failure.text, *failure.causes))
    ]
    return "\n".join([text, "", "Caused by:", *lines])


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode the JSON of a response; raises RegistryError."""
    try:
        return decode_json(body, kind)
    except msgspec.DecodeError as error:
        raise RegistryError(
            f"failed to serialize or deserialize exec-server JSON: {error}"
        ) from None


def protocol_error(text: str) -> RegistryError:
    """The error for a response with unexpected values."""
    return RegistryError(f"exec-server protocol error: {text}")


def _printable(text: str, secrets: Sequence[str]) -> str:
    """A text of the registry without control characters and without our secrets."""
    for secret in secrets:
        if len(secret) >= _SECRET_CHARACTERS:
            text = text.replace(secret, _HIDDEN)
    # Truncate last: otherwise half of a secret could be left.
    shown = text[:SHOWN_CHARACTERS]
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in shown)


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
    proof: Sequence[tuple[str, str]]  # the headers of the credential

    @property
    def ok(self) -> bool:
        return 200 <= self.response.status < 300

    @property
    def secrets(self) -> list[str]:
        """The sent values that must not be shown if the response repeats them."""
        values = [value.partition(" ")[2] for name, value in self.proof if name == "authorization"]
        return [value for value in values if value]

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
        self._failure = ""  # why the last validation had no response

    @property
    def environment_id(self) -> str:
        return self._id

    async def register(self, key: PublicKey) -> Registration:
        """Register once; raises RegistryError.

        RegistryUnavailable: it asks for another attempt. RegistryUnreachable: no usable response.
        """
        body = {"security_profile": SECURITY_PROFILE, "executor_public_key": key_object(key)}
        exchange = await self._post_registration(
            _ENVIRONMENT, "register", msgspec.json.encode(body)
        )
        registered = self._decode_registration(exchange, RegistrationResponse)
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
        registered = self._decode_registration(exchange, DirectRegistrationResponse)
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
        registered = self._decode_registration(exchange, PlainRegistrationResponse)
        # The two forms have different names for the id.
        ids = (registered.executor_id, registered.environment_id)
        self._check_id(next((each for each in ids if each is not None), None), noun)
        return Registration(registered.url, "")

    async def validate(
        self, registration_id: str, key: PublicKey, authorization: str, stream_id: str
    ) -> Verdict:
        """Whether the registry accepts this client; a failure means no, 401 that it rejects us."""
        body = {
            "executor_registration_id": registration_id,
            "harness_public_key": key_object(key),
            "harness_key_authorization": authorization,
        }
        extra = []
        with contextlib.suppress(ValueError):  # the id is no UUID
            extra = [("x-codex-noise-stream-id", str(UUID(stream_id)))]
        try:
            exchange = await self._post(
                _ENVIRONMENT, "validate", msgspec.json.encode(body), extra=extra
            )
            if not exchange.ok:
                status = exchange.response.status
                if status == 401:
                    log.error("client refused: the registry rejects this executor's credential")
                    return Verdict.REJECTED
                log.warning("client refused: the registry responded %d", status)
                return Verdict.INVALID
            response = decode_body(exchange.response.body, ValidationResponse)
        except (HttpFailed, RegistryError) as error:
            # An error at first: clients see a reset only. Each of their attempts repeats it.
            is_repeated, self._failure = str(error) == self._failure, str(error)
            log.log(logging.WARNING if is_repeated else logging.ERROR, "client refused: %s", error)
            return Verdict.INVALID
        self._failure = ""
        if response.valid:
            return Verdict.VALID
        log.warning("client refused by the registry")
        return Verdict.INVALID

    async def _post_registration(self, noun: str, action: str, body: bytes) -> _Exchange:
        """Register, with a 2xx response; raises RegistryError or one of its subclasses."""
        try:
            exchange = await self._post(noun, action, body)
        except HttpFailed as failure:
            text = failure_text(failure, noun)
            if isinstance(failure, ResponseTooLarge | CertificateFailed):
                raise RegistryError(text) from None
            cause = failure.causes[-1] if failure.causes else failure.text
            reason = f"{noun} registry request failed: {cause}"
            raise RegistryUnreachable(text, reason) from None
        if exchange.ok:
            return exchange
        response = exchange.error_response()
        text = response.text(noun, hides_responses=self._credential.hides_responses)
        if (response.status, response.code) in TRANSIENT_REGISTRATION_ERRORS:
            raise RegistryUnavailable(text)
        if response.is_transient:
            raise RegistryUnreachable(text, text)
        raise RegistryError(text)

    def _decode_registration(self, exchange: _Exchange, kind: type[Response]) -> Response:
        """Decode a registration; errors show nothing that may repeat a hidden secret."""
        body = exchange.response.body
        if not self._credential.hides_responses:
            return decode_body(body, kind)
        invalid = protocol_error("invalid environment registry executor registration response")
        try:
            decoded = decode_body(body, kind)
        except RegistryError:
            raise invalid from None
        # Decoded too, because JSON can escape each character.
        members = [str(value) for value in msgspec.structs.astuple(decoded)]
        for text in (body.decode(), *members):
            if any(secret in text for secret in exchange.secrets):
                raise invalid
        return decoded

    async def connect(self, key: PublicKey) -> ConnectionBundle:
        """Request one connection; raises RegistryUnavailable for transient errors."""
        body = msgspec.json.encode({"harness_public_key": key_object(key)})
        try:
            exchange = await self._post(_ENVIRONMENT, "connect", body)
        except ResponseTooLarge as failure:
            raise RegistryError(failure_text(failure, _ENVIRONMENT)) from None
        except HttpFailed as failure:
            raise RegistryUnavailable(failure_text(failure, _ENVIRONMENT)) from None
        if not exchange.ok:
            response = exchange.error_response()
            is_offline = (response.status, response.code) == (409, "environment_offline")
            kind = RegistryUnavailable if is_offline or response.is_transient else RegistryError
            raise kind(response.text(_ENVIRONMENT))
        registered = decode_body(exchange.response.body, ConnectionResponse)
        self._check_id(registered.environment_id, _ENVIRONMENT)
        _check_profile(registered.security_profile)
        return _connection_bundle(registered)

    async def status(self, operation: str) -> int:
        """The status of a request with an empty object; raises RegistryError without a response."""
        try:
            exchange = await self._post(_ENVIRONMENT, operation, b"{}")
        except HttpFailed as error:
            # The innermost cause names the reason, such as a certificate or a refused connection.
            reason = error.causes[-1] if error.causes else str(error)
            raise RegistryError(f"cannot reach {self._base_url}: {reason}") from None
        if exchange.response.status in (502, 503):
            raise RegistryError(f"{self._base_url} is not available at the moment; try again")
        return exchange.response.status

    async def _post(
        self, noun: str, action: str, body: bytes, *, extra: Sequence[tuple[str, str]] = ()
    ) -> _Exchange:
        """Send one request; raises HttpFailed, or RegistryError without a valid credential."""
        # All characters are quoted, so that the id stays one segment of the path.
        url = f"{self._base_url}/cloud/{noun}/{quote(self._id, safe='')}/{action}"
        exchange = await self._send(url, body, extra)
        if exchange.response.status == 401 and await self._credential.renew(exchange.proof):
            return await self._send(url, body, extra)
        return exchange

    async def _send(self, url: str, body: bytes, extra: Sequence[tuple[str, str]]) -> _Exchange:
        proof = await self._credential.headers("POST", url, body)
        headers = [*proof, ("accept", "*/*"), *extra]
        if body:
            headers.insert(0, ("content-type", "application/json"))
        response = await self._http.request("POST", url, headers, body)
        return _Exchange(response, proof)

    def _check_id(self, environment_id: str | None, noun: str) -> None:
        if environment_id != self._id:
            raise protocol_error(f"{noun} registry returned a different {noun} id")


def retry_delay(attempt: int, uniform: Callable[[], float]) -> float:
    """The delay after an attempt, counted from 0; `uniform` returns 0 to 1."""
    # The exponent is limited, because attempts may go on for weeks.
    base = min(_FIRST_DELAY_SECONDS * 2.0 ** min(attempt, 16), _LAST_DELAY_SECONDS)
    return base + uniform() * base / 2


def _check_profile(profile: str) -> None:
    if profile != SECURITY_PROFILE:
        raise protocol_error(
            f"environment registry returned unsupported security profile `{profile}`"
        )


def _connection_bundle(registered: ConnectionResponse) -> ConnectionBundle:
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


class Permissions(NamedTuple):
    """The roles of a token."""

    roles: tuple[Role, ...]
    is_certain: bool  # False: the token does not cover the id that was asked about


async def probe(
    url: str, environment_id: str, token: str, tls: ssl.SSLContext | None
) -> Permissions:
    """A token's roles, without a change there; raises RegistryError if refused or no registry.

    A registry checks token, scopes, then body: an empty body gives 401 (refused), 403 (other
    operations or environments) or 400 (accepted).
    """
    http = HttpClient(tls)
    registry = Registry(url, environment_id, Bearer(token), http)
    try:
        statuses = {role: await registry.status(operation) for role, operation in _OPERATIONS}
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
