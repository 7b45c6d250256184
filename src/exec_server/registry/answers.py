"""What a registry answers: its JSON, and what the user is told when it refuses. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import TypeVar

import msgspec

from exec_server.errors import RegistryBusy, RegistryError
from exec_server.registry.http import AnswerTooLarge, HttpFailed, Reply
from exec_server.registry.keys import KeyObject

# Of an error body. It is for a person to read.
SHOWN_CHARACTERS = 4096

# Refusals of an executor that pass by themselves; everything else ends it.
BUSY_REGISTRATIONS = {
    (502, "authentication_service_unavailable"),
    (503, "registration_conflict"),
}
_KNOWN_CODES = frozenset(code for _, code in BUSY_REGISTRATIONS)
_HIDDEN = "[hidden]"
# A shorter one is for tests, and hiding it would leave no text.
_SECRET_CHARACTERS = 8

T = TypeVar("T")


class Registered(msgspec.Struct, frozen=True):
    """The answer to a registration for encrypted streams."""

    environment_id: str
    url: str
    security_profile: str
    executor_registration_id: str


class RegisteredDirect(msgspec.Struct, frozen=True):
    """The answer to a registration for the direct transport."""

    environment_id: str
    registration_id: str
    url: str
    transport: str


class RegisteredPlain(msgspec.Struct, frozen=True):
    """The answer to a registration of the historical forms, under either name of the id."""

    url: str
    environment_id: str | None = None
    executor_id: str | None = None


class Connection(msgspec.Struct, frozen=True):
    """The answer to a harness that wants to connect."""

    environment_id: str
    security_profile: str
    url: str
    executor_registration_id: str
    executor_public_key: KeyObject
    harness_key_authorization: str


class Verdict(msgspec.Struct, frozen=True):
    """The answer to the question whether a harness may connect."""

    valid: bool


class _Error(msgspec.Struct, frozen=True):
    code: str | None = None
    message: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error | None = None


class Refusal:
    """An answer other than 2xx, taken apart."""

    def __init__(self, reply: Reply, secrets: Sequence[str]) -> None:
        self.status = reply.status
        error = _error_of(reply.body)
        self.code = error.code
        text = error.message
        if text is None:
            text = reply.body.decode(errors="replace").strip()
        self._text = _presentable(text, secrets)
        self._shown_code = _presentable(error.code or "", secrets)

    def text(self, noun: str, *, hides_answers: bool = False) -> str:
        """What the user reads; `noun` is what this registry registers."""
        if self.status in (401, 403):
            shown = "response body omitted" if hides_answers else self._text or "empty error body"
            what = f"{noun} registry authentication"
            return f"{what} error: {what} failed ({self._status_line()}): {shown}"
        code, shown = self._shown_code, self._text or "empty or malformed error body"
        if hides_answers:
            code = code if code in _KNOWN_CODES else ""
            shown = f"{noun} registry executor registration failed"
        line = self._status_line() + (f", {code}" if code else "")
        return f"{noun} registry request failed ({line}): {shown}"

    def _status_line(self) -> str:
        try:
            return f"{self.status} {HTTPStatus(self.status).phrase}"
        except ValueError:
            return f"{self.status} <unknown status code>"


def failure_text(failure: HttpFailed, noun: str) -> str:
    """What the user reads when no answer came."""
    text = f"{noun} registry request failed: {failure.text}"
    if not failure.causes:
        return text
    lines = [
        f"    {number}: {cause}" for number, cause in enumerate((failure.text, *failure.causes))
    ]
    return "\n".join([text, "", "Caused by:", *lines])


def unanswered(failure: HttpFailed, noun: str) -> RegistryError:
    """The error for no answer, which may be different next time."""
    kind = RegistryError if isinstance(failure, AnswerTooLarge) else RegistryBusy
    return kind(failure_text(failure, noun))


def decoded(body: bytes, kind: type[T]) -> T:
    """The JSON of an answer; raises RegistryError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RegistryError(
            f"failed to serialize or deserialize exec-server JSON: {error}"
        ) from None


def protocol_error(text: str) -> RegistryError:
    """The error for an answer that is JSON and wrong all the same."""
    return RegistryError(f"exec-server protocol error: {text}")


def _error_of(body: bytes) -> _Error:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error or _Error()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Error()


def _presentable(text: str, secrets: Sequence[str]) -> str:
    """A text of the registry's that a terminal can show and that repeats no secret of ours."""
    for secret in secrets:
        if len(secret) >= _SECRET_CHARACTERS:
            text = text.replace(secret, _HIDDEN)
    # Cut afterwards, or half of a secret could be left.
    shown = text[:SHOWN_CHARACTERS]
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in shown)
