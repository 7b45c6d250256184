"""The requests of executors and harnesses to a registry, one method each."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Literal, NamedTuple
from urllib.parse import quote
from uuid import UUID

import msgspec

from exec_server.errors import RegistryBusy, RegistryError, StartupError
from exec_server.registry import answers
from exec_server.registry.answers import Refusal, decoded, protocol_error
from exec_server.registry.credentials import Credential
from exec_server.registry.destination import check_direct_url
from exec_server.registry.http import HttpClient, HttpFailed, Reply
from exec_server.registry.keys import key_object, public_key
from exec_server.relay.noise import PublicKey

log = logging.getLogger(__name__)

SECURITY_PROFILE = "noise_hybrid_ik_v1"
DIRECT_TRANSPORT = "direct_jsonrpc_v1"
# Of what a harness shows to the executor, which refuses more.
AUTHORIZATION_BYTES = 4096

_FIRST_DELAY_SECONDS = 0.5
_LAST_DELAY_SECONDS = 5.0
_ENVIRONMENT = "environment"
_EXECUTOR = "executor"

# The id under which a plain form registers, in its endpoint and in what the user reads.
_PLAIN_NOUNS = {"text": _EXECUTOR, "relay-plain": _ENVIRONMENT}


class Registration(NamedTuple):
    """Where the executor is to wait for harnesses, and what its registration is called."""

    url: str
    registration_id: str


class Bundle(NamedTuple):
    """What a harness needs for one connection, and for no second one."""

    url: str
    executor_key: PublicKey
    registration_id: str
    authorization: str


class _Exchange(NamedTuple):
    reply: Reply
    secrets: tuple[str, ...]  # what we have sent and nobody may read

    @property
    def ok(self) -> bool:
        return 200 <= self.reply.status < 300

    def refusal(self) -> Refusal:
        return Refusal(self.reply, self.secrets)


class Registry:
    """One registry as one environment sees it; the HTTP client is the caller's."""

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

    # ---- the executor's side ----------------------------------------------------------

    async def register(self, key: PublicKey) -> Registration:
        """Register once; raises RegistryBusy if it is worth trying again, or RegistryError."""
        body = {"security_profile": SECURITY_PROFILE, "executor_public_key": key_object(key)}
        exchange = await self._registering(_ENVIRONMENT, "register", msgspec.json.encode(body))
        answer = self._registered(exchange, answers.Registered)
        self._check_id(answer.environment_id, _ENVIRONMENT)
        _check_profile(answer.security_profile)
        return Registration(answer.url, answer.executor_registration_id)

    async def register_until_accepted(self, key: PublicKey) -> Registration:
        """Register, waiting for as long as the registry is busy; raises RegistryError."""
        attempt = 0
        while True:
            try:
                return await self.register(key)
            except RegistryBusy as error:
                delay = retry_delay(attempt, random.random)
                log.info("%s; asking again in %.1f s", error, delay)
            await asyncio.sleep(delay)
            attempt += 1

    async def register_direct(self) -> Registration:
        """Register for the direct transport; raises RegistryError."""
        body = msgspec.json.encode({"transport": DIRECT_TRANSPORT})
        exchange = await self._registering(_ENVIRONMENT, "direct/register", body)
        answer = self._registered(exchange, answers.RegisteredDirect)
        self._check_id(answer.environment_id, _ENVIRONMENT)
        if answer.transport != DIRECT_TRANSPORT:
            raise protocol_error(
                f"environment registry returned unsupported direct transport `{answer.transport}`"
            )
        if not answer.registration_id.strip() or not answer.url.strip():
            raise protocol_error("environment registry returned incomplete direct connection data")
        try:
            check_direct_url(answer.url)
        except StartupError as error:
            raise RegistryError(str(error)) from None
        return Registration(answer.url, answer.registration_id)

    async def register_plain(self, *, form: Literal["text", "relay-plain"]) -> Registration:
        """Register for a form without encryption, which knows no registration id."""
        noun = _PLAIN_NOUNS[form]
        exchange = await self._registering(noun, "register", b"")
        answer = self._registered(exchange, answers.RegisteredPlain)
        # Between the two forms the id changed its name.
        given = answer.executor_id if answer.executor_id is not None else answer.environment_id
        self._check_id(given, noun)
        return Registration(answer.url, "")

    async def validate(
        self, registration_id: str, key: PublicKey, authorization: str, stream_id: str
    ) -> bool:
        """Whether the registry knows this harness; whatever goes wrong means no."""
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
                log.warning("harness refused: the registry answered %d", exchange.reply.status)
                return False
            verdict = decoded(exchange.reply.body, answers.Verdict)
        except (HttpFailed, RegistryError) as error:
            log.warning("harness refused: %s", error)
            return False
        if not verdict.valid:
            log.warning("harness refused by the registry")
        return verdict.valid

    async def _registering(self, noun: str, action: str, body: bytes) -> _Exchange:
        """An exchange that was answered with 2xx; raises RegistryError or RegistryBusy."""
        try:
            exchange = await self._post(noun, action, body)
        except HttpFailed as failure:
            raise RegistryError(answers.failure_text(failure, noun)) from None
        if exchange.ok:
            return exchange
        refusal = exchange.refusal()
        text = refusal.text(noun, hides_answers=self._credential.hides_answers)
        if (refusal.status, refusal.code) in answers.BUSY_REGISTRATIONS:
            raise RegistryBusy(text)
        raise RegistryError(text)

    def _registered(self, exchange: _Exchange, kind: type[answers.T]) -> answers.T:
        """The JSON of a registration; of a secret one nothing is shown that may repeat it."""
        body = exchange.reply.body
        if not self._credential.hides_answers:
            return decoded(body, kind)
        useless = protocol_error("invalid environment registry executor registration response")
        if any(secret.encode() in body for secret in exchange.secrets):
            raise useless
        try:
            return decoded(body, kind)
        except RegistryError:
            raise useless from None

    # ---- the harness's side -----------------------------------------------------------

    async def connect(self, key: PublicKey) -> Bundle:
        """Ask for one connection; raises RegistryBusy if it is worth trying again."""
        body = msgspec.json.encode({"harness_public_key": key_object(key)})
        try:
            exchange = await self._post(_ENVIRONMENT, "connect", body)
        except HttpFailed as failure:
            raise answers.unanswered(failure, _ENVIRONMENT) from None
        if not exchange.ok:
            refusal = exchange.refusal()
            kind = RegistryBusy if _is_passing(refusal) else RegistryError
            raise kind(refusal.text(_ENVIRONMENT))
        answer = decoded(exchange.reply.body, answers.Connection)
        self._check_id(answer.environment_id, _ENVIRONMENT)
        _check_profile(answer.security_profile)
        return _bundle(answer)

    # ---- both sides -------------------------------------------------------------------

    async def _post(
        self,
        noun: str,
        action: str,
        body: bytes,
        *,
        extra: list[tuple[str, str]] | None = None,
    ) -> _Exchange:
        """Ask once, whatever the answer; raises HttpFailed, or RegistryError if unsigned."""
        # One segment of the path, whatever the id contains.
        url = f"{self._base_url}/cloud/{noun}/{quote(self._id, safe='')}/{action}"
        proof = await self._credential.headers("POST", url, body)
        headers = [*proof, ("accept", "*/*"), *(extra or [])]
        if body:
            headers.insert(0, ("content-type", "application/json"))
        reply = await self._http.request("POST", url, headers, body)
        return _Exchange(reply, _secrets(proof))

    def _check_id(self, given: str | None, noun: str) -> None:
        if given != self._id:
            raise protocol_error(f"{noun} registry returned a different {noun} id")


def retry_delay(attempt: int, uniform: Callable[[], float]) -> float:
    """How long to wait after the attempt with this number, from 0; `uniform` gives 0 to 1."""
    # The power is bounded before it is taken: attempts may go on for weeks.
    base = min(_FIRST_DELAY_SECONDS * 2.0 ** min(attempt, 16), _LAST_DELAY_SECONDS)
    return base + uniform() * base / 2


def _check_profile(given: str) -> None:
    if given != SECURITY_PROFILE:
        raise protocol_error(
            f"environment registry returned unsupported security profile `{given}`"
        )


def _bundle(answer: answers.Connection) -> Bundle:
    try:
        key = public_key(answer.executor_public_key)
    except ValueError as error:
        raise protocol_error(f"environment registry returned an invalid key: {error}") from None
    authorization = answer.harness_key_authorization
    needed = (answer.url, answer.executor_registration_id, authorization)
    if not all(text.strip() for text in needed):
        raise protocol_error("environment registry returned incomplete Noise connection data")
    if len(authorization.encode()) > AUTHORIZATION_BYTES:
        raise protocol_error(
            f"environment registry returned an authorization above {AUTHORIZATION_BYTES} bytes"
        )
    return Bundle(answer.url, key, answer.executor_registration_id, authorization)


def _is_passing(refusal: Refusal) -> bool:
    """Whether a harness may hope for another answer."""
    if refusal.status == 409:
        return refusal.code == "environment_offline"
    return refusal.status in (408, 429) or 500 <= refusal.status < 600


def _uuid_of(text: str) -> str | None:
    """The UUID that a text is in any of its spellings, in the usual one."""
    try:
        return str(UUID(text))
    except ValueError:
        return None


def _secrets(headers: list[tuple[str, str]]) -> tuple[str, ...]:
    """The values that an answer must not repeat to the user, without their scheme."""
    values = [value.partition(" ")[2] for name, value in headers if name == "authorization"]
    return tuple(value for value in values if value)
