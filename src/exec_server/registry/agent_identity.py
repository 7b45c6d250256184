"""An agent's own identity: a signed token that carries its key, and assertions made with it.

The token is checked against the issuer's key set, then the agent's key registers a task, and
then signs each request for that task. What goes wrong is logged; the user reads one line.
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

from exec_server.errors import StartupError
from exec_server.registry.destination import Reach
from exec_server.registry.http import HttpClient, HttpFailed, Reply
from exec_server.registry.sealed_box import open_sealed

log = logging.getLogger(__name__)

ISSUER = "https://chatgpt.com/codex-backend/agent-identity"
AUDIENCE = "codex-app-server"
KEY_SET_BASE = "https://chatgpt.com/backend-api"
TASK_BASE = "https://auth.openai.com/api/accounts"
KEY_SET_VARIABLE = "CODEX_AGENT_IDENTITY_JWKS_BASE_URL"
TASK_VARIABLE = "CODEX_AGENT_IDENTITY_AUTHAPI_BASE_URL"

# For registering the task; other mistakes than a busy service do not get better by asking again.
ATTEMPTS = 3
RETRY_SECONDS = 0.2
# How far the clocks of issuer and machine may differ.
CLOCK_SKEW_SECONDS = 60

_UNAVAILABLE = "Agent Identity authentication is unavailable"
_ACCEPT = ("accept", "*/*")


class _Claims(msgspec.Struct, frozen=True):
    """What must be in the token; its signature and the registered claims are PyJWT's work."""

    agent_runtime_id: str
    agent_private_key: str
    account_id: str
    chatgpt_user_id: str
    plan_type: str
    chatgpt_account_is_fedramp: bool


class _Task(msgspec.Struct, frozen=True):
    """The answer to a registration, in any of its spellings."""

    task_id: str | None = None
    camel_task_id: str | None = msgspec.field(default=None, name="taskId")
    encrypted: str | None = msgspec.field(default=None, name="encrypted_task_id")
    camel_encrypted: str | None = msgspec.field(default=None, name="encryptedTaskId")


class _Agent(NamedTuple):
    runtime_id: str
    task_id: str
    key: Ed25519PrivateKey
    about: tuple[tuple[str, str], ...]  # headers beside the assertion


class AgentIdentity:
    """Assertions of an agent; of use only after `ready`."""

    hides_answers = False
    reach = Reach.ANYWHERE

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

    async def ready(self) -> None:
        """Check the token and register a task; raises StartupError."""
        try:
            self._agent = await self._introduced()
        except (ValueError, HttpFailed, msgspec.MsgspecError) as error:
            log.warning("agent identity: %s", error)
            raise StartupError(_UNAVAILABLE) from None

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """An assertion with the time of now."""
        assert self._agent is not None, "nobody has waited for it to be ready"
        timestamp = _timestamp(self._now())
        assertion = assertion_header(self._agent, timestamp)
        return [("authorization", assertion), *self._agent.about]

    async def _introduced(self) -> _Agent:
        reply = await self._http.request("GET", self._key_set_url, [_ACCEPT])
        if reply.status != 200:
            raise ValueError(f"the key set was answered with status {reply.status}")
        claims = verified_claims(self._token, reply.body)
        key = _private_key(claims.agent_private_key)
        task_id = await self._registered_task(claims.agent_runtime_id, key)
        about = [("chatgpt-account-id", claims.account_id)]
        if claims.chatgpt_account_is_fedramp:
            about.append(("X-OpenAI-Fedramp", "true"))
        return _Agent(claims.agent_runtime_id, task_id, key, tuple(about))

    async def _registered_task(self, runtime_id: str, key: Ed25519PrivateKey) -> str:
        url = f"{self._task_base}/v1/agent/{quote(runtime_id, safe='')}/task/register"
        headers = [("content-type", "application/json"), _ACCEPT]
        for attempt in range(ATTEMPTS):
            timestamp = _timestamp(self._now())
            signature = _signature(key, f"{runtime_id}:{timestamp}")
            body = msgspec.json.encode({"timestamp": timestamp, "signature": signature})
            try:
                reply = await self._http.request("POST", url, headers, body)
                if reply.status == 429 or reply.status >= 500:
                    raise HttpFailed(f"the task was answered with status {reply.status}")
                return _task_id(reply, key)
            except HttpFailed:
                if attempt == ATTEMPTS - 1:
                    raise
            await asyncio.sleep(RETRY_SECONDS)
        raise AssertionError("the last attempt returns or raises")


def key_set_url(base: str) -> str:
    """Where the keys of the issuer are."""
    base = base.rstrip("/")
    return f"{base}{'/wham' if '/backend-api' in base else ''}/agent-identities/jwks"


def verified_claims(token: str, key_set: bytes) -> _Claims:
    """What a token says, if one of these keys has signed it; raises ValueError."""
    import jwt  # here, since few need it and it takes its time to load

    try:
        header = jwt.get_unverified_header(token)
        keys = jwt.PyJWKSet.from_json(key_set.decode()).keys
        key = next((key for key in keys if key.key_id == header.get("kid")), None)
        if key is None or key.key_id is None:
            raise ValueError("no key of the issuer is the token's")
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
        # The last two are what a key set of another shape gives.
        raise ValueError(f"the token is refused: {type(error).__name__}") from None
    return msgspec.convert(claims, _Claims)


def assertion_header(agent: _Agent, timestamp: str) -> str:
    """The value of an Authorization header that is good for one request."""
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
        raise ValueError("the agent's key is of another kind")
    return key


def _task_id(reply: Reply, key: Ed25519PrivateKey) -> str:
    if not 200 <= reply.status < 300:
        raise ValueError(f"the task was answered with status {reply.status}")
    task = msgspec.json.decode(reply.body, type=_Task)
    if plain := task.task_id or task.camel_task_id:
        return plain
    sealed = task.encrypted or task.camel_encrypted
    if not sealed:
        raise ValueError("the task was answered without an id")
    return open_sealed(b64decode(sealed, validate=True), key).decode()


def _signature(key: Ed25519PrivateKey, text: str) -> str:
    return b64encode(key.sign(text.encode())).decode()


def _timestamp(now: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
