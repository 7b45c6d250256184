"""An agent's own identity: a signed token that carries its key, and assertions made with it.

The token is verified with the issuer's key set; its key registers a task and signs its requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_der_private_key

from exec_server.errors import StartupError, missing_package
from exec_server.host.event_loop import GuardedTasks
from exec_server.registry.decoding import decode_json
from exec_server.registry.destination import Credential, Destinations
from exec_server.registry.http import CompleteResponse, HttpClient, HttpFailed

# A task id has a few dozen characters; a longer box is not one.
BOX_BYTES = 4096

log = logging.getLogger(__name__)

ISSUER = "https://chatgpt.com/codex-backend/agent-identity"
AUDIENCE = "codex-app-server"
KEY_SET_BASE = "https://chatgpt.com/backend-api"
TASK_BASE = "https://auth.openai.com/api/accounts"
KEY_SET_VARIABLE = "CODEX_AGENT_IDENTITY_JWKS_BASE_URL"
TASK_VARIABLE = "CODEX_AGENT_IDENTITY_AUTHAPI_BASE_URL"

# Of registering the task, for a service that is unavailable; other errors are final.
ATTEMPTS = 3
RETRY_SECONDS = 0.2
# Allowed difference between the clocks of the issuer and of this machine.
CLOCK_SKEW_SECONDS = 60

_UNAVAILABLE = "Agent Identity authentication is unavailable"
_ACCEPT = ("accept", "*/*")


def open_sealed(box: bytes, key: Ed25519PrivateKey) -> bytes:
    """Decrypt a task id's NaCl sealed box; raises ValueError, StartupError without PyNaCl."""
    if len(box) > BOX_BYTES:
        raise ValueError("sealed box is too long")
    try:
        from nacl.exceptions import CryptoError
        from nacl.public import SealedBox
        from nacl.signing import SigningKey
    except ModuleNotFoundError:
        text = missing_package("the task id, which is encrypted,", "PyNaCl", "agent-identity")
        raise StartupError(text) from None
    private = SigningKey(key.private_bytes_raw()).to_curve25519_private_key()
    try:
        return SealedBox(private).decrypt(box)
    except (CryptoError, TypeError, ValueError):
        raise ValueError("sealed box is not for this key") from None


class _Claims(msgspec.Struct, frozen=True):
    """The private claims of the token; PyJWT checks the signature and the registered claims."""

    agent_runtime_id: str
    agent_private_key: str
    account_id: str
    chatgpt_user_id: str
    plan_type: str
    chatgpt_account_is_fedramp: bool


class _Task(msgspec.Struct, frozen=True):
    """The response to a registration, in any of its spellings."""

    task_id: str | None = None
    camel_task_id: str | None = msgspec.field(default=None, name="taskId")
    encrypted: str | None = msgspec.field(default=None, name="encrypted_task_id")
    camel_encrypted: str | None = msgspec.field(default=None, name="encryptedTaskId")


class _Agent(NamedTuple):
    runtime_id: str
    task_id: str
    key: Ed25519PrivateKey
    extra_headers: tuple[tuple[str, str], ...]  # beside the assertion


class AgentIdentity(Credential):
    """A credential of signed assertions; usable after `ready`."""

    destinations = Destinations.ANYWHERE

    def __init__(
        self,
        token: str,
        http: HttpClient,
        environ: Mapping[str, str],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._token = token
        self._http = http
        self._key_set_url = key_set_url(environ.get(KEY_SET_VARIABLE) or KEY_SET_BASE)
        self._task_base = (environ.get(TASK_VARIABLE) or TASK_BASE).rstrip("/")
        self._now = now
        self._agent: _Agent | None = None

    async def ready(self, tasks: GuardedTasks) -> None:
        """Check the token and register a task; raises StartupError."""
        try:
            self._agent = await self._authenticate()
        except (ValueError, HttpFailed, msgspec.MsgspecError) as error:
            log.warning("agent identity: %s", error)
            raise StartupError(_UNAVAILABLE) from None

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """Return an assertion with the current time."""
        assert self._agent is not None, "headers() before ready()"
        timestamp = _timestamp(self._now())
        assertion = assertion_header(self._agent, timestamp)
        return [("authorization", assertion), *self._agent.extra_headers]

    async def _authenticate(self) -> _Agent:
        response = await self._http.request("GET", self._key_set_url, [_ACCEPT])
        if response.status != 200:
            raise ValueError(f"request for the key set failed with status {response.status}")
        claims = verified_claims(self._token, response.body)
        key = _private_key(claims.agent_private_key)
        task_id = await self._register_task(claims.agent_runtime_id, key)
        extra_headers = [("chatgpt-account-id", claims.account_id)]
        if claims.chatgpt_account_is_fedramp:
            extra_headers.append(("X-OpenAI-Fedramp", "true"))
        return _Agent(claims.agent_runtime_id, task_id, key, tuple(extra_headers))

    async def _register_task(self, runtime_id: str, key: Ed25519PrivateKey) -> str:
        url = f"{self._task_base}/v1/agent/{quote(runtime_id, safe='')}/task/register"
        headers = [("content-type", "application/json"), _ACCEPT]
        for attempt in range(ATTEMPTS):
            timestamp = _timestamp(self._now())
            signature = _signature(key, f"{runtime_id}:{timestamp}")
            body = msgspec.json.encode({"timestamp": timestamp, "signature": signature})
            try:
                response = await self._http.request("POST", url, headers, body)
                if response.status == 429 or response.status >= 500:
                    raise HttpFailed(
                        f"registration of the task failed with status {response.status}"
                    )
                return _task_id(response, key)
            except HttpFailed:
                if attempt == ATTEMPTS - 1:
                    raise
            await asyncio.sleep(RETRY_SECONDS)
        raise AssertionError("the last attempt returns or raises")


def key_set_url(base: str) -> str:
    """The URL of the issuer's key set."""
    base = base.rstrip("/")
    return f"{base}{'/wham' if '/backend-api' in base else ''}/agent-identities/jwks"


def verified_claims(token: str, key_set: bytes) -> _Claims:
    """The claims of a token that one of these keys has signed; raises ValueError."""
    import jwt  # here, because few servers need it and it is slow to import

    try:
        header = jwt.get_unverified_header(token)
        keys = jwt.PyJWKSet.from_json(key_set.decode()).keys
        key = next((key for key in keys if key.key_id == header.get("kid")), None)
        if key is None or key.key_id is None:
            raise ValueError("the key set has no key for this token")
        claims = jwt.decode(
            token,
            key,
            algorithms=["RS256"],
            audience=AUDIENCE,
            issuer=ISSUER,
            leeway=CLOCK_SKEW_SECONDS,
            options={"require": ["iss", "aud", "iat", "exp"]},
        )
    except (jwt.PyJWTError, RecursionError, AttributeError, TypeError) as error:
        # PyJWT raises the last two for a key set of another shape.
        raise ValueError(f"the token is invalid: {type(error).__name__}") from None
    return msgspec.convert(claims, _Claims)


def assertion_header(agent: _Agent, timestamp: str) -> str:
    """The value of an Authorization header for one request."""
    signature = _signature(agent.key, f"{agent.runtime_id}:{agent.task_id}:{timestamp}")
    content = {
        "agent_runtime_id": agent.runtime_id,
        "signature": signature,
        "task_id": agent.task_id,
        "timestamp": timestamp,
    }
    return "AgentAssertion " + urlsafe_b64encode(msgspec.json.encode(content)).decode().rstrip("=")


def _private_key(text: str) -> Ed25519PrivateKey:
    key = load_der_private_key(b64decode(text, validate=True), password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("the agent's key is not an Ed25519 key")
    return key


def _task_id(response: CompleteResponse, key: Ed25519PrivateKey) -> str:
    if not 200 <= response.status < 300:
        raise ValueError(f"registration of the task failed with status {response.status}")
    task = decode_json(response.body, _Task)
    if plain := task.task_id or task.camel_task_id:
        return plain
    sealed = task.encrypted or task.camel_encrypted
    if not sealed:
        raise ValueError("the response to the registration of the task has no id")
    return open_sealed(b64decode(sealed, validate=True), key).decode()


def _signature(key: Ed25519PrivateKey, text: str) -> str:
    return b64encode(key.sign(text.encode())).decode()


def _timestamp(now: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
