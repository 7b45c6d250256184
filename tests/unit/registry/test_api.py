"""The requests to a registry, and what the user is told about their answers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import pytest
from tests.support.http_server import Answer, HttpServer, answer, hang_up, serving, silence

from exec_server.errors import RegistryError, RegistryUnavailable, StartupError
from exec_server.registry import api, http
from exec_server.registry.api import (
    ConnectionBundle,
    Registration,
    Registry,
    key_object,
    retry_delay,
)
from exec_server.registry.credentials import ApiKey, Bearer, ClientToken
from exec_server.registry.destination import Credential, Destinations
from exec_server.registry.http import HttpClient
from exec_server.relay.multiplexer import Verdict
from exec_server.relay.noise import Identity

T = TypeVar("T")

_KEY = Identity.generate().public
_KEY_OBJECT = msgspec.to_builtins(key_object(_KEY))
_SECRET = "sk-very-secret"
_REGISTERED = {
    "environment_id": "env-1",
    "security_profile": "noise_hybrid_ik_v1",
    "executor_registration_id": "reg-1",
    "url": "wss://r/x",
}
_CONNECTION = _REGISTERED | {
    "executor_public_key": _KEY_OBJECT,
    "harness_key_authorization": "authz",
}
_DIRECT = {
    "environment_id": "env-1",
    "registration_id": "reg-1",
    "url": "wss://r/x",
    "transport": "direct_jsonrpc_v1",
}
_UUID = "0d9c3f6e-1e43-4c57-9d60-3c1c2a7f8b11"

_CONFLICT = {"error": {"code": "registration_conflict", "message": "m"}}
_AUTH_DOWN = {"error": {"code": "authentication_service_unavailable", "message": "m"}}
_OFFLINE = {"error": {"code": "environment_offline", "message": "m"}}
_OTHER = {"error": {"code": "c", "message": "m"}}
_DEEP = b'{"more": ' + b"[" * 200_000


class _Rotating(Credential):
    """A credential whose answers are hidden, as the one on stdin."""

    hides_responses = True
    destinations = Destinations.ENCRYPTED

    def __init__(self) -> None:
        self.expired = False

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        if self.expired:
            raise RegistryError("unsigned: expired")
        return [("authorization", f"Bearer {_SECRET}")]


def _ask(
    job: Callable[[Registry], Awaitable[T]],
    *answers: Answer,
    credential: Credential | None = None,
    environment_id: str = "env-1",
    prefix: str = "",
) -> tuple[T, HttpServer]:
    async def run() -> tuple[T, HttpServer]:
        client = HttpClient()
        try:
            async with serving(*answers) as server:
                chosen = credential or ApiKey(_SECRET)
                base = server.url + prefix
                return await job(Registry(base, environment_id, chosen, client)), server
        finally:
            await client.close()

    return asyncio.run(run())


def _register(registry: Registry) -> Awaitable[Registration]:
    return registry.register(_KEY)


def _connect(registry: Registry) -> Awaitable[ConnectionBundle]:
    return registry.connect(_KEY)


def _direct(registry: Registry) -> Awaitable[Registration]:
    return registry.register_direct()


def _error(
    job: Callable[[Registry], Awaitable[Any]],
    *answers: Answer,
    credential: Credential | None = None,
) -> RegistryError:
    with pytest.raises(RegistryError) as failed:
        _ask(job, *answers, credential=credential)
    return failed.value


# ---- registration ---------------------------------------------------------------------


def test_register() -> None:
    result, server = _ask(_register, answer(200, _REGISTERED | {"more": 1}))
    assert result == Registration("wss://r/x", "reg-1")
    request = server.requests[0]
    assert request.line == "POST /cloud/environment/env-1/register HTTP/1.1"
    assert request.headers == [
        ("host", server.url.removeprefix("http://")),
        ("content-type", "application/json"),
        ("authorization", f"Bearer {_SECRET}"),
        ("accept", "*/*"),
        ("content-length", str(len(request.body))),
    ]
    assert json.loads(request.body) == {
        "security_profile": "noise_hybrid_ik_v1",
        "executor_public_key": _KEY_OBJECT,
    }


def test_prefix_of_the_base_is_kept() -> None:
    _, server = _ask(_register, answer(200, _REGISTERED), prefix="/api/v1//  ")
    assert server.requests[0].line.startswith("POST /api/v1/cloud/environment/env-1/register ")


def test_id_is_one_segment() -> None:
    strange = "a/b ?ü%"
    answered = answer(200, _REGISTERED | {"environment_id": strange})
    _, server = _ask(_register, answered, environment_id=f" {strange}\n")
    assert "/cloud/environment/a%2Fb%20%3F%C3%BC%25/register " in server.requests[0].line


def test_configuration() -> None:
    def refusal(base: str, environment_id: str) -> str:
        with pytest.raises(StartupError) as refused:
            Registry(base, environment_id, ApiKey("k"), HttpClient())
        return str(refused.value)

    what = "environment registry configuration error: "
    assert refusal(" / ", "x") == what + "environment registry base URL is required"
    assert refusal("http://x", " ") == (
        what + "environment id is required for remote exec-server registration"
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (answer(401, _OTHER), "(401 Unauthorized): m"),
        (answer(403), "(403 Forbidden): empty error body"),
        (answer(401, b" plain text\n"), "(401 Unauthorized): plain text"),
        (answer(401, b'{"error":{"code":"c"}}'), '(401 Unauthorized): {"error":{"code":"c"}}'),
    ],
)
def test_not_authenticated(given: bytes, text: str) -> None:
    error = _error(_register, given)
    assert str(error) == (
        "environment registry authentication error: "
        f"environment registry authentication failed {text}"
    )
    assert not isinstance(error, RegistryUnavailable)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (answer(500, _OTHER), "(500 Internal Server Error, c): m"),
        (answer(500), "(500 Internal Server Error): empty or malformed error body"),
        (answer(404, b"plain\n"), "(404 Not Found): plain"),
        (answer(409, b'{"error":{"message":"m"}}'), "(409 Conflict): m"),
        (answer(409, b'{"error":{"code":"c"}}'), '(409 Conflict, c): {"error":{"code":"c"}}'),
        (answer(409, b'{"error":{"code":5}}'), '(409 Conflict): {"error":{"code":5}}'),
        (answer(302, b"", "location: /x"), "(302 Found): empty or malformed error body"),
        (answer(599), "(599 <unknown status code>): empty or malformed error body"),
        (answer(500, b"x" * 5000), "(500 Internal Server Error): " + "x" * 4096),
        (answer(500, b"a\x1b[2J\xff"), "(500 Internal Server Error): a\ufffd[2J\ufffd"),
        (answer(502, _CONFLICT), "(502 Bad Gateway, registration_conflict): m"),
        (answer(503, _OTHER), "(503 Service Unavailable, c): m"),
        (answer(503, _DEEP), f"(503 Service Unavailable): {_DEEP[:4096].decode()}"),
        (answer(429), "(429 Too Many Requests): empty or malformed error body"),
    ],
)
def test_refused(given: bytes, text: str) -> None:
    error = _error(_register, given)
    assert str(error) == f"environment registry request failed {text}"
    assert not isinstance(error, RegistryUnavailable)


def test_a_secret_that_the_registry_repeats_is_not_shown() -> None:
    for status in (401, 500):
        text = str(_error(_register, answer(status, f"no {_SECRET}!".encode())))
        assert text.endswith(": no [hidden]!")
    code = {"error": {"code": _SECRET, "message": _SECRET}}
    assert _SECRET not in str(_error(_register, answer(500, code)))
    cut = b"x" * 4090 + _SECRET.encode()
    assert "sk-" not in str(_error(_register, answer(500, cut)))


@pytest.mark.parametrize("given", [answer(502, _AUTH_DOWN), answer(503, _CONFLICT)])
def test_worth_trying_again(given: bytes) -> None:
    assert isinstance(_error(_register, given), RegistryUnavailable)


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(port: int) -> str:
        registry = Registry(f"http://127.0.0.1:{port}", "env-1", ApiKey("k"), HttpClient())
        with pytest.raises(RegistryError) as failed:
            await registry.register(_KEY)
        assert not isinstance(failed.value, RegistryUnavailable)
        return str(failed.value)

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        text = asyncio.run(run(port))
    url = f"http://127.0.0.1:{port}/cloud/environment/env-1/register"
    assert text == (
        f"environment registry request failed: error sending request for url ({url})\n\n"
        f"Caused by:\n    0: error sending request for url ({url})\n"
        "    1: client error (Connect)\n    2: tcp connect error\n"
        "    3: Connection refused (os error 111)"
    )
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.05)
    error = _error(_register, silence)
    assert str(error) == "environment registry request failed: route-aware request timed out"
    assert not isinstance(error, RegistryUnavailable)


_JSON_TEXT = "failed to serialize or deserialize exec-server JSON: "
_PROTOCOL_TEXT = "exec-server protocol error: environment registry returned "


@pytest.mark.parametrize(
    "body",
    [b"", b"hello", b"{}", b"[]", b"\xff", _DEEP, json.dumps(_REGISTERED | {"url": 5}).encode()],
)
def test_answers_that_are_malformed(body: bytes) -> None:
    for job in (_register, _connect, _direct):
        assert str(_error(job, answer(200, body))).startswith(_JSON_TEXT)


def test_no_content() -> None:
    assert str(_error(_register, b"HTTP/1.1 204 No Content\r\n\r\n")).startswith(_JSON_TEXT)


@pytest.mark.parametrize("member", _REGISTERED)
def test_members_that_are_missing(member: str) -> None:
    body = {name: value for name, value in _REGISTERED.items() if name != member}
    assert member in str(_error(_register, answer(200, body)))


def test_another_environment_or_profile() -> None:
    other = answer(200, _REGISTERED | {"environment_id": "env-2", "security_profile": "x"})
    assert str(_error(_register, other)) == _PROTOCOL_TEXT + "a different environment id"
    other = answer(200, _REGISTERED | {"security_profile": "x"})
    assert str(_error(_register, other)) == _PROTOCOL_TEXT + "unsupported security profile `x`"


def test_hidden_answers() -> None:
    def text(given: bytes) -> str:
        return str(_error(_register, given, credential=_Rotating()))

    failed = "environment registry executor registration failed"
    useless = (
        "exec-server protocol error: invalid environment registry executor registration response"
    )
    assert text(answer(401, _OTHER)) == (
        "environment registry authentication error: environment registry authentication failed "
        "(401 Unauthorized): response body omitted"
    )
    assert text(answer(500, _OTHER)) == (
        f"environment registry request failed (500 Internal Server Error): {failed}"
    )
    assert text(answer(409, _CONFLICT)) == (
        f"environment registry request failed (409 Conflict, registration_conflict): {failed}"
    )
    assert text(answer(200, b"hello")) == useless
    assert text(answer(200, _REGISTERED | {"more": _SECRET})) == useless
    escaped = "".join(f"\\u{ord(character):04x}" for character in _SECRET)
    body = json.dumps(_REGISTERED | {"url": "wss://r/?"}).replace("/?", f"/?{escaped}")
    assert text(answer(200, body.encode())) == useless
    other = answer(200, _REGISTERED | {"environment_id": "env-2"})
    assert text(other) == _PROTOCOL_TEXT + "a different environment id"


# ---- again and again ------------------------------------------------------------------


def test_retry_delay() -> None:
    least = [retry_delay(attempt, lambda: 0.0) for attempt in range(7)]
    assert least == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert [retry_delay(attempt, lambda: 1.0) for attempt in (0, 1, 9)] == [0.75, 1.5, 7.5]
    assert retry_delay(1_000_000, lambda: 0.0) == 5.0


def test_register_until_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def at_once(attempt: int, uniform: Callable[[], float]) -> float:
        attempts.append(attempt)
        assert 0 <= uniform() < 1
        return 0.0

    monkeypatch.setattr(api, "retry_delay", at_once)
    busy = answer(503, _CONFLICT, "retry-after: 3600")
    answers = [busy, answer(502, _AUTH_DOWN), busy, answer(200, _REGISTERED)]
    result, server = _ask(lambda registry: registry.register_until_accepted(_KEY), *answers)
    assert result == Registration("wss://r/x", "reg-1")
    assert attempts == [0, 1, 2]
    assert len({request.body for request in server.requests}) == 1


def test_a_wait_for_the_registry_is_told_at_its_begin_and_once_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api, "retry_delay", lambda attempt, uniform: 0.0)
    answers = [answer(503, _CONFLICT)] * (api.TOLD_ATTEMPT + 3)
    accepted = answer(200, _REGISTERED)
    _ask(lambda registry: registry.register_until_accepted(_KEY), *answers, accepted)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.levelname for record in told] == ["WARNING", "ERROR"]
    assert all("registration_conflict" in record.message for record in told)


def test_register_until_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "retry_delay", lambda attempt, uniform: 0.0)
    error = _error(
        lambda registry: registry.register_until_accepted(_KEY),
        answer(503, _CONFLICT),
        answer(500, _OTHER),
    )
    assert "(500 Internal Server Error, c)" in str(error)


# ---- direct and historical forms ------------------------------------------------------


def test_register_direct() -> None:
    result, server = _ask(_direct, answer(200, _DIRECT))
    assert result == Registration("wss://r/x", "reg-1")
    assert server.requests[0].line == "POST /cloud/environment/env-1/direct/register HTTP/1.1"
    assert server.requests[0].body == b'{"transport":"direct_jsonrpc_v1"}'


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"environment_id": "x"}, _PROTOCOL_TEXT + "a different environment id"),
        ({"transport": "x"}, _PROTOCOL_TEXT + "unsupported direct transport `x`"),
        ({"url": " "}, _PROTOCOL_TEXT + "incomplete direct connection data"),
        ({"registration_id": ""}, _PROTOCOL_TEXT + "incomplete direct connection data"),
        (
            {"url": "ws://example.com"},
            "environment registry configuration error: remote transport requires wss for "
            "non-loopback endpoints",
        ),
    ],
)
def test_direct_answers_that_are_wrong(changes: dict[str, str], text: str) -> None:
    assert str(_error(_direct, answer(200, _DIRECT | changes))) == text


@pytest.mark.parametrize("given", [{"executor_id": "env-1"}, {"executor_id": "env-1", "id": "x"}])
def test_register_as_text(given: dict[str, str]) -> None:
    result, server = _ask(
        lambda registry: registry.register_plain(form="text"),
        answer(200, given | {"url": "wss://r/x"}),
        credential=Bearer("t"),
    )
    assert result == Registration("wss://r/x", "")
    request = server.requests[0]
    assert request.line == "POST /cloud/executor/env-1/register HTTP/1.1"
    assert (request.body, request.header("content-type")) == (b"", None)


@pytest.mark.parametrize("name", ["environment_id", "executor_id"])
def test_register_as_plain_relay(name: str) -> None:
    result, server = _ask(
        lambda registry: registry.register_plain(form="relay-plain"),
        answer(200, {name: "env-1", "url": "wss://r/x"}),
    )
    assert result == Registration("wss://r/x", "")
    assert server.requests[0].line == "POST /cloud/environment/env-1/register HTTP/1.1"


def test_historical_wording() -> None:
    def text(given: bytes) -> str:
        return str(_error(lambda registry: registry.register_plain(form="text"), given))

    assert text(answer(401, _OTHER)) == (
        "executor registry authentication error: executor registry authentication failed "
        "(401 Unauthorized): m"
    )
    assert text(answer(500, _OTHER)) == (
        "executor registry request failed (500 Internal Server Error, c): m"
    )
    assert text(answer(200, {"url": "wss://r/x"})) == (
        "exec-server protocol error: executor registry returned a different executor id"
    )


# ---- validation -----------------------------------------------------------------------


def _validate(stream_id: str) -> Callable[[Registry], Awaitable[Verdict]]:
    return lambda registry: registry.validate("reg-1", _KEY, "authz-s3cret", stream_id)


def test_validate() -> None:
    result, server = _ask(_validate(_UUID), answer(200, {"valid": True, "more": 1}))
    assert result is Verdict.VALID
    request = server.requests[0]
    assert request.line == "POST /cloud/environment/env-1/validate HTTP/1.1"
    assert request.header("x-codex-noise-stream-id") == _UUID
    assert json.loads(request.body) == {
        "executor_registration_id": "reg-1",
        "harness_public_key": _KEY_OBJECT,
        "harness_key_authorization": "authz-s3cret",
    }


@pytest.mark.parametrize(
    "stream_id", [_UUID.upper(), _UUID.replace("-", ""), f"{{{_UUID}}}", f"urn:uuid:{_UUID}"]
)
def test_stream_id_is_told_in_the_usual_spelling(stream_id: str) -> None:
    _, server = _ask(_validate(stream_id), answer(200, {"valid": True}))
    assert server.requests[0].header("x-codex-noise-stream-id") == _UUID


@pytest.mark.parametrize("stream_id", ["stream-1", _UUID[1:], f" {_UUID}", "x\r\n"])
def test_stream_id_that_is_no_uuid_is_not_told(stream_id: str) -> None:
    result, server = _ask(_validate(stream_id), answer(200, {"valid": True}))
    assert result is Verdict.VALID
    assert server.requests[0].header("x-codex-noise-stream-id") is None


@pytest.mark.parametrize("given", [answer(401), answer(401, _OTHER), answer(401, b"no JSON")])
def test_status_401_means_that_the_executor_itself_is_rejected(given: Answer) -> None:
    result, server = _ask(_validate(_UUID), given)
    assert (result, len(server.requests)) == (Verdict.REJECTED, 1)


@pytest.mark.parametrize(
    "given",
    [
        answer(200, {"valid": False}),
        answer(200, b'{"valid": 1}'),
        answer(200, b"{}"),
        answer(200, b"true"),
        answer(200, _DEEP),
        answer(503, _DEEP),
        answer(200),
        b"HTTP/1.1 204 No Content\r\n\r\n",
        answer(403, _OTHER),
        answer(503, _CONFLICT),
        answer(500, b"authz-s3cret " + _SECRET.encode()),
        answer(302, b"", "location: /x"),
        hang_up,
        b"garbage\r\n\r\n",
    ],
)
def test_whatever_else_means_no(given: Answer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        result, server = _ask(_validate(_UUID), given)
    assert result is Verdict.INVALID
    assert len(server.requests) == 1
    assert "refused" in caplog.text
    assert "s3cret" not in caplog.text
    assert _SECRET not in caplog.text


def test_silence_means_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.05)
    assert _ask(_validate(_UUID), silence)[0] is Verdict.INVALID


def test_expired_credential_means_no_without_asking() -> None:
    credential = _Rotating()
    credential.expired = True
    result, server = _ask(_validate(_UUID), b"unused", credential=credential)
    assert result is Verdict.INVALID
    assert not server.requests


def test_a_reason_is_an_error_once(caplog: pytest.LogCaptureFixture) -> None:
    credential = _Rotating()

    async def validate_often(registry: Registry) -> None:
        for expired in (True, True, False, True):
            credential.expired = expired
            await registry.validate("reg-1", _KEY, "authz", _UUID)

    _ask(validate_often, answer(200, {"valid": True}), credential=credential)
    text = "client refused: unsigned: expired"
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("ERROR", text),
        ("WARNING", text),
        ("ERROR", text),
    ]


# ---- a credential that can be renewed ---------------------------------------------------


class _Renewable(Credential):
    """A token, and the ones that follow it."""

    destinations = Destinations.ANYWHERE

    def __init__(self, *tokens: str) -> None:
        self._tokens = list(tokens)
        self.rejected: list[object] = []

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self._tokens[0]}")]

    async def renew(self, rejected: Sequence[tuple[str, str]]) -> bool:
        self.rejected.append(rejected)
        if len(self._tokens) == 1:
            return False
        del self._tokens[0]
        return True


_REJECTED = answer(401, b"")


def _sent_tokens(server: HttpServer) -> list[str | None]:
    return [request.header("authorization") for request in server.requests]


def test_a_rejected_credential_is_renewed_and_the_request_repeated() -> None:
    credential = _Renewable("old", "new")
    result, server = _ask(_register, _REJECTED, answer(200, _REGISTERED), credential=credential)
    assert result == Registration("wss://r/x", "reg-1")
    assert _sent_tokens(server) == ["Bearer old", "Bearer new"]
    assert server.requests[0].body == server.requests[1].body
    assert credential.rejected == [[("authorization", "Bearer old")]]


def test_a_credential_is_renewed_once() -> None:
    credential = _Renewable("a", "b", "c")
    verdict, server = _ask(_validate(_UUID), _REJECTED, _REJECTED, credential=credential)
    assert verdict is Verdict.REJECTED
    assert _sent_tokens(server) == ["Bearer a", "Bearer b"]


def test_a_request_with_the_only_credential_is_not_repeated() -> None:
    verdict, server = _ask(_validate(_UUID), _REJECTED, credential=_Renewable("a"))
    assert verdict is Verdict.REJECTED
    assert _sent_tokens(server) == ["Bearer a"]


# ---- the harness ----------------------------------------------------------------------


def test_connect() -> None:
    result, server = _ask(
        _connect, answer(200, _CONNECTION | {"more": 1}), credential=ClientToken("t", "acc")
    )
    assert result == ConnectionBundle("wss://r/x", _KEY, "reg-1", "authz")
    request = server.requests[0]
    assert request.line == "POST /cloud/environment/env-1/connect HTTP/1.1"
    assert request.header("authorization") == "Bearer t"
    assert request.header("chatgpt-account-id") == "acc"
    assert json.loads(request.body) == {"harness_public_key": _KEY_OBJECT}


@pytest.mark.parametrize(
    "changes",
    [
        {"environment_id": "x"},
        {"security_profile": "x"},
        {"url": " "},
        {"executor_registration_id": ""},
        {"harness_key_authorization": " "},
        {"harness_key_authorization": "é" * 2049},
        {"executor_public_key": _KEY_OBJECT | {"suite": "x"}},
        {"executor_public_key": _KEY_OBJECT | {"x25519_public_key": "AA=="}},
        {"executor_public_key": _KEY_OBJECT | {"more": 1}},
        {"executor_public_key": None},
    ],
)
def test_connections_that_are_wrong(changes: dict[str, Any]) -> None:
    error = _error(_connect, answer(200, _CONNECTION | changes))
    assert not isinstance(error, RegistryUnavailable)


def test_longest_authorization() -> None:
    longest = "é" * 2048
    result, _ = _ask(_connect, answer(200, _CONNECTION | {"harness_key_authorization": longest}))
    assert result.authorization == longest


@pytest.mark.parametrize(
    "given",
    [
        *(answer(status) for status in (408, 429, 500, 502, 503, 504)),
        answer(409, _OFFLINE),
        hang_up,
        b"garbage\r\n\r\n",
    ],
)
def test_harness_may_try_again(given: Answer) -> None:
    assert isinstance(_error(_connect, given), RegistryUnavailable)


def test_harness_may_try_again_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.05)
    assert isinstance(_error(_connect, silence), RegistryUnavailable)


@pytest.mark.parametrize(
    "given",
    [
        *(answer(status) for status in (302, 400, 401, 403, 404, 409)),
        answer(409, _OTHER),
        answer(404, _OFFLINE),
        answer(200, bytes(http.BODY_BYTES + 1)),
    ],
)
def test_harness_must_not_try_again(given: Answer) -> None:
    assert not isinstance(_error(_connect, given), RegistryUnavailable)


def test_offline_wording() -> None:
    assert str(_error(_connect, answer(409, _OFFLINE))) == (
        "environment registry request failed (409 Conflict, environment_offline): m"
    )
