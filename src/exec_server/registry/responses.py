"""Responses of a registry: their JSON, and the error texts for failures. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from exec_server.errors import RegistryError, RegistryUnavailable, RegistryUnreachable
from exec_server.registry.http import (
    CertificateFailed,
    CompleteResponse,
    HttpFailed,
    ResponseTooLarge,
)
from exec_server.registry.keys import KeyObject

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
        error = _error_of(response.body)
        self.code = error.code
        text = error.message
        if text is None:
            text = response.body.decode(errors="replace").strip()
        self._text = _printable(text, secrets)
        self._shown_code = _printable(error.code or "", secrets)

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


def registration_failure(failure: HttpFailed, noun: str) -> RegistryError:
    """The error for a registration without a response."""
    text = failure_text(failure, noun)
    if isinstance(failure, ResponseTooLarge | CertificateFailed):
        return RegistryError(text)
    cause = failure.causes[-1] if failure.causes else failure.text
    return RegistryUnreachable(text, f"{noun} registry request failed: {cause}")


def registration_refusal(response: ErrorResponse, text: str) -> RegistryError:
    """The error for a registration that was refused with this text."""
    if (response.status, response.code) in TRANSIENT_REGISTRATION_ERRORS:
        return RegistryUnavailable(text)
    if response.status in (408, 429) or 500 <= response.status < 600:
        return RegistryUnreachable(text, text)
    return RegistryError(text)


def no_response_error(failure: HttpFailed, noun: str) -> RegistryError:
    """The error for a request without a response, transient unless it was too large."""
    kind = RegistryError if isinstance(failure, ResponseTooLarge) else RegistryUnavailable
    return kind(failure_text(failure, noun))


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode the JSON of a response; raises RegistryError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RegistryError(
            f"failed to serialize or deserialize exec-server JSON: {error}"
        ) from None


def protocol_error(text: str) -> RegistryError:
    """The error for a response with unexpected values."""
    return RegistryError(f"exec-server protocol error: {text}")


def _error_of(body: bytes) -> _Error:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error or _Error()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Error()


def _printable(text: str, secrets: Sequence[str]) -> str:
    """A text of the registry without control characters and without our secrets."""
    for secret in secrets:
        if len(secret) >= _SECRET_CHARACTERS:
            text = text.replace(secret, _HIDDEN)
    # Truncate last: otherwise half of a secret could be left.
    shown = text[:SHOWN_CHARACTERS]
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in shown)
