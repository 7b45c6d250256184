"""The registry: requests in, answers out. It knows paths and JSON, but no socket."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import unquote

from tests.relay_service.journal import Request
from tests.relay_service.state import (
    PROFILE,
    Authorizations,
    Callers,
    Directory,
    Form,
    Key,
    Refused,
    Registration,
)
from tests.relay_service.tickets import Tickets

DIRECT_TRANSPORT = "direct_jsonrpc_v1"
# The executor refuses longer ones; nothing that this registry issued is near that.
AUTHORIZATION_BYTES = 4096
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SIGNED = "AWS4-HMAC-SHA256 "


class Endpoint(StrEnum):
    """The endpoints of the service, as faults name them; the last two are upgrades."""

    REGISTER = "register"
    CONNECT = "connect"
    VALIDATE = "validate"
    DIRECT_REGISTER = "direct/register"
    EXECUTOR_SOCKET = "executor socket"
    HARNESS_SOCKET = "harness socket"


_PATHS = re.compile(
    r"/cloud/(?P<family>environment|executor)/(?P<id>[^/]+)"
    r"/(?P<endpoint>register|connect|validate|direct/register)"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer; a body that is not bytes becomes JSON."""

    status: int
    body: Any = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def refusal(cls, refused: Refused) -> Answer:
        return cls(refused.status, error_body(refused.code, refused.message))

    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def error_body(code: str, message: str = "") -> dict[str, Any]:
    """The body of an error answer."""
    return {"error": {"code": code, "message": message or code.replace("_", " ")}}


@dataclass(frozen=True, slots=True)
class _Call:
    family: str
    environment_id: str
    request: Request
    subject: str

    def members(self) -> dict[str, Any]:
        try:
            value = json.loads(self.request.body)
        except ValueError:
            raise Refused(400, "malformed_json") from None
        if not isinstance(value, dict):
            raise Refused(400, "malformed_json")
        return value


class Registry:
    """Answers register, connect and validate in all their forms."""

    def __init__(
        self,
        directory: Directory,
        authorizations: Authorizations,
        tickets: Tickets,
        callers: Callers,
        *,
        plaintext: bool = False,
        executor_form: Form = Form.TEXT,
    ) -> None:
        self._directory = directory
        self._authorizations = authorizations
        self._tickets = tickets
        self._callers = callers
        self._plaintext = plaintext
        self._executor_form = executor_form
        # Where WebSockets are accepted: known once the service listens.
        self.socket_base = ""
        self.prefix = ""

    def endpoint(self, request: Request) -> Endpoint | None:
        """Which endpoint a request is for, whether or not it will be granted."""
        found = self._parse(request)
        return None if found is None else Endpoint(found["endpoint"])

    def _parse(self, request: Request) -> re.Match[str] | None:
        if not request.path.startswith(self.prefix):
            return None
        return _PATHS.fullmatch(request.path[len(self.prefix) :])

    def answer(self, request: Request) -> Answer:
        """The answer of a registry in good health."""
        try:
            return Answer(200, self._dispatch(request))
        except Refused as refused:
            return Answer.refusal(refused)

    def _dispatch(self, request: Request) -> dict[str, Any]:
        found = self._parse(request)
        if found is None:
            raise Refused(404, "not_found")
        if request.method != "POST":
            raise Refused(405, "method_not_allowed")
        environment_id = unquote(found["id"])
        if not _ID.fullmatch(environment_id):
            raise Refused(400, "invalid_environment_id")
        authorization = request.header("authorization") or ""
        # Checking the signature needs the account of the caller, which this service has not.
        signed = authorization.startswith(_SIGNED)
        subject = "signed" if signed else self._callers.subject(authorization)
        call = _Call(found["family"], environment_id, request, subject)
        handlers: dict[str, Callable[[_Call], dict[str, Any]]] = {
            Endpoint.REGISTER: self._register,
            Endpoint.CONNECT: self._connect,
            Endpoint.VALIDATE: self._validate,
            Endpoint.DIRECT_REGISTER: self._register_direct,
        }
        return handlers[found["endpoint"]](call)

    def _register(self, call: _Call) -> dict[str, Any]:
        if call.family == "executor" or not call.request.body:
            return self._register_plain(call)
        members = call.members()
        if members.get("security_profile") != PROFILE:
            raise Refused(400, "unsupported_security_profile")
        key = Key.from_json(members.get("executor_public_key"))
        registration = self._directory.register(call.environment_id, Form.NOISE, key, call.subject)
        return {
            "environment_id": call.environment_id,
            "security_profile": PROFILE,
            "executor_registration_id": registration.id,
            "url": self.socket_base + self._tickets.for_executor(registration),
        }

    def _register_plain(self, call: _Call) -> dict[str, Any]:
        if not self._plaintext:
            raise Refused(403, "plaintext_disabled")
        form = self._executor_form if call.family == "executor" else Form.RELAY
        registration = self._directory.register(call.environment_id, form, None, call.subject)
        # The first executors send a body and require an id of their registration.
        first = {"id": registration.id} if call.request.body else {}
        return first | {
            f"{call.family}_id": call.environment_id,
            "url": self.socket_base + self._tickets.for_executor(registration),
        }

    def _register_direct(self, call: _Call) -> dict[str, Any]:
        if call.members().get("transport") != DIRECT_TRANSPORT:
            raise Refused(400, "unsupported_transport")
        registration = self._directory.register(
            call.environment_id, Form.DIRECT, None, call.subject
        )
        return {
            "environment_id": call.environment_id,
            "registration_id": registration.id,
            "url": self.socket_base + self._tickets.for_executor(registration),
            "transport": DIRECT_TRANSPORT,
        }

    def _connect(self, call: _Call) -> dict[str, Any]:
        registration = self._online(call.environment_id)
        if not call.request.body or call.request.body == b"{}":
            return self._connect_plain(registration)
        key = Key.from_json(call.members().get("harness_public_key"))
        if registration.form is not Form.NOISE or registration.key is None:
            raise Refused(409, "security_profile_mismatch")
        return {
            "environment_id": call.environment_id,
            "security_profile": PROFILE,
            "url": self.socket_base + self._tickets.for_harness(registration),
            "executor_registration_id": registration.id,
            "executor_public_key": registration.key.to_json(),
            "harness_key_authorization": self._authorizations.issue(registration, key),
        }

    def _connect_plain(self, registration: Registration) -> dict[str, Any]:
        """For clients of the forms that have no keys; not part of the reference's interface."""
        if registration.form is Form.NOISE:
            raise Refused(400, "invalid_public_key")
        return {
            "environment_id": registration.environment_id,
            "url": self.socket_base + self._tickets.for_plain_client(registration),
        }

    def _online(self, environment_id: str) -> Registration:
        self._directory.check_known(environment_id)
        registration = self._directory.current(environment_id)
        if registration is None or not registration.online:
            raise Refused(409, "environment_offline")
        return registration

    def _validate(self, call: _Call) -> dict[str, Any]:
        members = call.members()
        key = Key.from_json(members.get("harness_public_key"))
        text = members.get("harness_key_authorization")
        if not isinstance(text, str) or len(text) > AUTHORIZATION_BYTES:
            raise Refused(400, "invalid_authorization")
        registration = self._directory.current(call.environment_id)
        valid = (
            registration is not None
            and registration.id == members.get("executor_registration_id")
            and registration.subject == call.subject
            and self._authorizations.consume(text, registration, key)
        )
        return {"valid": valid}
