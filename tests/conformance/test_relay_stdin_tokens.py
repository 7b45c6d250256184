"""`--registration-bearer-stdin` and `--chatgpt-token-stdin`: input, errors, headers, secrecy."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.test_transcripts import TRANSCRIPTS
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.certificates import make_pair
from tests.support.cli import run_client, stderr_text
from tests.support.client import (
    Server,
    reference_version,
    scaled,
    server_command,
    server_environment,
)
from tests.support.relay import (
    ENVIRONMENT,
    RelayLink,
    exit_code,
    remote_flags,
    start_executor,
    wait_attached,
)
from tests.support.server_internals import eventually

_CAPTURES = TRANSCRIPTS.parent / "captures" / "0.169"
_BEARER = "--registration-bearer-stdin"
_CHATGPT = "--chatgpt-token-stdin"
_ACCOUNT = "--chatgpt-account-id"
_HTTP = ("--remote", "http://127.0.0.1:9", "--environment-id", ENVIRONMENT)
_HTTPS = ("--remote", "https://127.0.0.1:9", "--environment-id", ENVIRONMENT)

_NO_BEARER = "expected a newline-terminated registration bearer of at most 16 KiB"
_INVALID_BEARER = "invalid registration bearer"
_NO_TOKEN = "expected a bounded, newline-terminated ChatGPT access token"
_INVALID_TOKEN = "invalid ChatGPT access token"
_OTHER_ACCOUNT = "--chatgpt-account-id does not match the token"
_NO_ACCOUNT = "token has no ChatGPT account ID; supply --chatgpt-account-id"
_INVALID_ACCOUNT = "invalid ChatGPT account ID"
_NO_HTTPS = "ChatGPT token registry URLs must use HTTPS without userinfo or fragments"
_NO_PIPE = "ChatGPT token stdin must be a pipe or socket"
# A line that is accepted: the registry is asked, and is not there.
_UNREACHABLE = "environment registry request failed: error sending request for url ("


@pytest.fixture(autouse=True)
def known_to_the_reference(kind: str) -> None:
    if kind == "reference" and reference_version() < (0, 169):
        pytest.skip("older references do not have these flags")


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as running:
        yield running


@pytest.fixture
def encrypted(folder: Path) -> Iterator[tuple[ThreadedRelayService, dict[str, str]]]:
    """A registry with https, and the variables that make executors trust it."""
    roots, context = _certificate(folder)
    with ThreadedRelayService(tls=context) as running:
        yield running, {"SSL_CERT_FILE": roots}


def _certificate(folder: Path) -> tuple[str, ssl.SSLContext]:
    """The file of an authority, and a context to serve with: the reference wants both apart."""
    authority = make_pair(folder, "authority")
    pair = make_pair(folder, "registry", "127.0.0.1", issuer=authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    return str(authority.certificate), context


def _segment(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def _token(account: Any = None, **claims: Any) -> str:
    content = claims if account is None else {"https://api.openai.com/auth": account, **claims}
    return f"{_segment({'alg': 'none'})}.{_segment(content)}.signature"


def _line(*arguments: Any, **claims: Any) -> bytes:
    return _token(*arguments, **claims).encode() + b"\n"


_PRO = {"chatgpt_account_id": "acc-1", "chatgpt_plan_type": "pro"}


def _run(kind: str, stdin: bytes | int, *flags: str) -> tuple[int, str]:
    """The exit code and the first line on stderr."""
    given: dict[str, Any] = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    ended = subprocess.run(
        [*server_command(kind), *flags],
        env=server_environment(kind),
        capture_output=True,
        timeout=scaled(20),
        check=False,
        **given,
    )
    return ended.returncode, ended.stderr.decode().partition("\n")[0]


def _check(outcome: tuple[int, str], text: str) -> None:
    code, line = outcome
    assert code == 1
    assert line.startswith(f"Error: {text}") if text is _UNREACHABLE else line == f"Error: {text}"


# ---- lines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text"),
    [
        pytest.param(b"", _NO_BEARER, id="nothing"),
        pytest.param(b"abc", _NO_BEARER, id="no line end"),
        pytest.param(b"x" * 16_384 + b"\n", _NO_BEARER, id="too long"),
        pytest.param(b"x" * 16_383 + b"\r\n", _NO_BEARER, id="too long with CRLF"),
        pytest.param(b"x" * 16_385, _NO_BEARER, id="long without end"),
        pytest.param(b"\n", _INVALID_BEARER, id="empty"),
        pytest.param(b"\r\n", _INVALID_BEARER, id="empty with CRLF"),
        pytest.param(b"a\r\r\n", _INVALID_BEARER, id="CR"),
        pytest.param(b"a b\n", _INVALID_BEARER, id="blank"),
        pytest.param(b" a\n", _INVALID_BEARER, id="blank before"),
        pytest.param(b"a \n", _INVALID_BEARER, id="blank behind"),
        pytest.param(b"a\0b\n", _INVALID_BEARER, id="NUL"),
        pytest.param(b"a\x7f\n", _INVALID_BEARER, id="DEL"),
        pytest.param("ü\n".encode(), _INVALID_BEARER, id="not ASCII"),
        pytest.param(b"x" * 16_383 + b"\n", _UNREACHABLE, id="longest"),
        pytest.param(b"x" * 16_382 + b"\r\n", _UNREACHABLE, id="longest with CRLF"),
        pytest.param(b"t\nmore\xff", _UNREACHABLE, id="what follows"),
    ],
)
def test_bearer_lines(kind: str, line: bytes, text: str) -> None:
    _check(_run(kind, line, *_HTTP, _BEARER), text)


def test_a_bearer_that_is_not_utf8(kind: str) -> None:
    # By choice ours has one text for all lines that are no token.
    text = "stream did not contain valid UTF-8" if kind == "reference" else _INVALID_BEARER
    _check(_run(kind, b"\xff\n", *_HTTP, _BEARER), text)


@pytest.mark.parametrize(
    ("line", "account_id", "text"),
    [
        pytest.param(b"", None, _NO_TOKEN, id="nothing"),
        pytest.param(b"abc", None, _NO_TOKEN, id="no line end"),
        pytest.param(b"x" * 65_536 + b"\n", None, _NO_TOKEN, id="too long"),
        pytest.param(b"x" * 65_535 + b"\n", None, _INVALID_TOKEN, id="longest"),
        pytest.param(b"\n", None, _INVALID_TOKEN, id="empty"),
        pytest.param(b"abc\n", None, _INVALID_TOKEN, id="no JWT"),
        pytest.param(b"a.b\n", None, _INVALID_TOKEN, id="two segments"),
        pytest.param(b" " + _line(_PRO), None, _INVALID_TOKEN, id="blank before"),
        pytest.param(_line(_PRO)[:-10] + b"\n", None, _INVALID_TOKEN, id="empty signature"),
        pytest.param(b"." + _line(_PRO).partition(b".")[2], None, _INVALID_TOKEN, id="empty head"),
        pytest.param(b"a\0.b.c\n", None, _INVALID_TOKEN, id="NUL"),
        pytest.param("ü\n".encode(), None, _INVALID_TOKEN, id="not ASCII"),
        pytest.param(_line({"chatgpt_account_id": 5}), None, _INVALID_TOKEN, id="account a number"),
        pytest.param(_line("x"), None, _INVALID_TOKEN, id="claim of another type"),
        pytest.param(
            _line(_PRO | {"chatgpt_account_is_fedramp": "x"}), None, _INVALID_TOKEN, id="fedramp"
        ),
        pytest.param(_line(), None, _NO_ACCOUNT, id="no claim"),
        pytest.param(_line({"chatgpt_plan_type": "pro"}), None, _NO_ACCOUNT, id="no account"),
        pytest.param(_line(_PRO | {"chatgpt_account_id": ""}), None, _INVALID_ACCOUNT, id="empty"),
        pytest.param(
            _line(_PRO | {"chatgpt_account_id": "a b"}), None, _INVALID_ACCOUNT, id="blank"
        ),
        pytest.param(_line(_PRO), "acc-2", _OTHER_ACCOUNT, id="another account"),
        pytest.param(_line(_PRO), " acc-1 ", _OTHER_ACCOUNT, id="account with blanks"),
        pytest.param(_line(_PRO), "", _OTHER_ACCOUNT, id="empty account"),
        pytest.param(b"abc\n", "", _INVALID_TOKEN, id="token before account"),
        pytest.param(b"", "ü", _NO_TOKEN, id="line before account"),
        pytest.param(_line(_PRO), None, _UNREACHABLE, id="good"),
        pytest.param(_line(_PRO)[:-1] + b"\r\n", None, _UNREACHABLE, id="CRLF"),
        pytest.param(_line(_PRO), "acc-1", _UNREACHABLE, id="the same account"),
        pytest.param(_line(_PRO)[:-1] + b".x\n", None, _UNREACHABLE, id="four segments"),
        pytest.param(b"!!." + _line(_PRO).partition(b".")[2], None, _UNREACHABLE, id="any head"),
        pytest.param(_line(_PRO, exp=1), None, _UNREACHABLE, id="expired"),
        pytest.param(_line(_PRO, exp="x"), None, _UNREACHABLE, id="expiry of another type"),
    ],
)
def test_chatgpt_lines(kind: str, line: bytes, account_id: str | None, text: str) -> None:
    account = () if account_id is None else (_ACCOUNT, account_id)
    _check(_run(kind, line, *_HTTPS, _CHATGPT, *account), text)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:9", "http://registry.example", "https://u@127.0.0.1:9"),
        *("https://127.0.0.1:9/#x", "wss://127.0.0.1:9", "zzz", ""),
    ],
)
def test_a_chatgpt_token_needs_https(kind: str, url: str) -> None:
    # Before stdin is read: it would be refused too.
    with open(os.devnull) as nothing:
        flags = ("--remote", url, "--environment-id", ENVIRONMENT, _CHATGPT)
        _check(_run(kind, nothing.fileno(), *flags), _NO_HTTPS)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (
            "http://registry.example",
            "environment registry configuration error: remote transport requires https for "
            "non-loopback endpoints",
        ),
        (
            "zzz",
            "environment registry configuration error: invalid remote endpoint URL: relative URL "
            "without a base",
        ),
    ],
)
def test_a_bearer_for_another_machine_needs_encryption(kind: str, url: str, text: str) -> None:
    flags = ("--remote", url, "--environment-id", ENVIRONMENT, _BEARER)
    _check(_run(kind, b"token\n", *flags), text)


# ---- kinds of stdin ------------------------------------------------------------------------


def test_files_as_stdin(kind: str, folder: Path) -> None:
    (folder / "token").write_bytes(b"token\nmore")
    with open(folder / "token", "rb") as file:
        _check(_run(kind, file.fileno(), *_HTTP, _BEARER), _UNREACHABLE)
    with open(folder / "token", "rb") as file:
        _check(_run(kind, file.fileno(), *_HTTPS, _CHATGPT), _NO_PIPE)


@pytest.mark.parametrize(
    ("flags", "text"),
    [((*_HTTP, _BEARER), "Is a directory (os error 21)"), ((*_HTTPS, _CHATGPT), _NO_PIPE)],
)
def test_a_directory_as_stdin(kind: str, folder: Path, flags: tuple[str, ...], text: str) -> None:
    directory = os.open(folder, os.O_RDONLY)
    try:
        code, line = _run(kind, directory, *flags)
    finally:
        os.close(directory)
    assert code == 1
    # Python itself refuses such a stdin before a line of ours runs.
    assert line == f"Error: {text}" if kind == "reference" else "<stdin> is a directory" in line


def test_a_socket_as_stdin(kind: str) -> None:
    for line, flags in ((b"token\n", (*_HTTP, _BEARER)), (_line(_PRO), (*_HTTPS, _CHATGPT))):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(line)
            _check(_run(kind, theirs.fileno(), *flags), _UNREACHABLE)


# ---- combinations of flags -----------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        *((*_HTTP, _BEARER, other) for other in ("--use-agent-identity-auth", "--aws-sigv4")),
        *((*_HTTPS, _CHATGPT, other) for other in ("--use-agent-identity-auth", "--aws-sigv4")),
        (*_HTTP, _BEARER, "--executor-credential-stdin"),
        (*_HTTPS, _CHATGPT, "--executor-credential-stdin"),
        (*_HTTPS, _CHATGPT, _BEARER),
        (*_HTTPS, _ACCOUNT, "acc-1"),
        (_BEARER,),
        (_CHATGPT,),
        (_BEARER, "--listen", "ws://127.0.0.1:0"),
        ("forward", "--connect", "ws://127.0.0.1:9", *_HTTPS, _CHATGPT),
    ],
    ids=" ".join,
)
def test_usage_errors(kind: str, flags: tuple[str, ...]) -> None:
    code, _ = _run(kind, _line(_PRO), *flags)
    assert code == 2


@pytest.mark.parametrize("flag", [_BEARER, _CHATGPT, "--executor-credential-stdin"])
def test_the_direct_transport_takes_only_signatures(kind: str, flag: str) -> None:
    flags = (*_HTTPS, flag, "--remote-transport", "direct")
    _check(_run(kind, _line(_PRO), *flags), "--remote-transport direct requires --aws-sigv4")


def test_a_blank_id(kind: str) -> None:
    flags = ("--remote", "http://127.0.0.1:9", "--environment-id", " ", _BEARER)
    text = "environment id is required for remote exec-server registration"
    _check(_run(kind, b"token\n", *flags), f"environment registry configuration error: {text}")


# ---- requests ------------------------------------------------------------------------------


def _give(executor: Server, data: bytes) -> None:
    assert executor.process.stdin is not None
    executor.process.stdin.write(data)
    executor.process.stdin.flush()


def _proofs(service: ThreadedRelayService, endpoint: Endpoint) -> list[dict[str, str]]:
    """The headers of a credential in each request."""
    names = ("authorization", "chatgpt-account-id", "x-openai-fedramp")
    found = [{name: request.header(name) for name in names} for request in _to(service, endpoint)]
    return [{name: value for name, value in row.items() if value is not None} for row in found]


def _to(service: ThreadedRelayService, endpoint: Endpoint) -> list[Any]:
    return service.requests_to(endpoint)


@pytest.mark.quick
@pytest.mark.parametrize("words", [(), ("forward", "--connect", "ws://127.0.0.1:9")])
def test_a_bearer_for_all_requests(
    service: ThreadedRelayService, kind: str, words: tuple[str, ...]
) -> None:
    # It beats the API key, which `start_executor` gives.
    flags = (*words, *remote_flags(service), _BEARER)
    with start_executor(
        service, *flags, kind=kind, stdin=subprocess.PIPE, attached=False
    ) as executor:
        _give(executor, b"bearer-1\r\nnot read\n")
        wait_attached(service, executor)
        assert executor.process.stdin is not None
        executor.process.stdin.close()  # which means nothing
        RelayLink(service).close()
        assert executor.process.poll() is None
        # A new registration has the same token.
        service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, 401, "expired")
        service.executor(ENVIRONMENT).abort()
        eventually("a registration", lambda: len(_to(service, Endpoint.REGISTER)) == 2, 30)
    for endpoint in (Endpoint.REGISTER, Endpoint.VALIDATE):
        assert _proofs(service, endpoint)[-1] == {"authorization": "Bearer bearer-1"}


def _serve_command(service: ThreadedRelayService, roots: str) -> None:
    """One client of the executor, over https and wss."""
    words = ("exec", "--ca-file", roots, "--token-env", "TOKEN")
    target = f"relay:{service.url}/{ENVIRONMENT}"
    ended = run_client(*words, target, "--", "true", env={"TOKEN": "client"})
    assert ended.returncode == 0, stderr_text(ended)


@pytest.mark.parametrize(
    ("account", "more"),
    [
        pytest.param(_PRO, {}, id="plain"),
        pytest.param(
            _PRO | {"chatgpt_account_is_fedramp": True}, {"x-openai-fedramp": "true"}, id="fedramp"
        ),
    ],
)
def test_a_chatgpt_token_for_all_requests(
    encrypted: tuple[ThreadedRelayService, dict[str, str]],
    kind: str,
    account: dict[str, Any],
    more: dict[str, str],
) -> None:
    service, trust = encrypted
    with start_executor(
        service, _CHATGPT, kind=kind, env=trust, stdin=subprocess.PIPE, attached=False
    ) as executor:
        _give(executor, _line(account))
        wait_attached(service, executor)
        _serve_command(service, trust["SSL_CERT_FILE"])
    expected = {"authorization": f"Bearer {_token(account)}", "chatgpt-account-id": "acc-1", **more}
    for endpoint in (Endpoint.REGISTER, Endpoint.VALIDATE):
        assert _proofs(service, endpoint) == [expected]


def test_a_rejected_chatgpt_token_ends_the_executor(
    encrypted: tuple[ThreadedRelayService, dict[str, str]], kind: str
) -> None:
    service, trust = encrypted
    service.faults.http.answer(Endpoint.REGISTER, 401, _token(_PRO).encode())
    with start_executor(
        service, _CHATGPT, kind=kind, env=trust, stdin=subprocess.PIPE, attached=False
    ) as executor:
        _give(executor, _line(_PRO))
        assert exit_code(executor) == 1
        assert executor.stderr() == (
            "Error: environment registry authentication error: environment registry "
            "authentication failed (401 Unauthorized): response body omitted\n"
        )
    assert len(_to(service, Endpoint.REGISTER)) == 1


@pytest.mark.parametrize("ends", [False, True])
def test_end_of_stdin_after_the_line(service: ThreadedRelayService, kind: str, ends: bool) -> None:
    flags = (_BEARER, "--exit-on-stdin-close") if ends else (_BEARER,)
    with start_executor(
        service, *flags, kind=kind, stdin=subprocess.PIPE, attached=False
    ) as executor:
        _give(executor, b"bearer-1\nmore\n")
        wait_attached(service, executor)
        assert executor.process.stdin is not None
        executor.process.stdin.close()
        if ends:
            assert exit_code(executor) == 0
            assert executor.stderr() == ""
        else:
            RelayLink(service).close()
            assert executor.process.poll() is None


def test_stdin_that_ends_before_the_line(kind: str) -> None:
    _check(_run(kind, b"", *_HTTP, _BEARER, "--exit-on-stdin-close"), _NO_BEARER)


def test_nothing_happens_before_the_line(service: ThreadedRelayService, kind: str) -> None:
    with start_executor(
        service, _BEARER, kind=kind, stdin=subprocess.PIPE, attached=False
    ) as executor:
        for byte in b"bearer-1":
            _give(executor, bytes([byte]))
        assert service.requests == []
        _give(executor, b"\n")
        wait_attached(service, executor)
    assert _proofs(service, Endpoint.REGISTER) == [{"authorization": "Bearer bearer-1"}]


# ---- secrecy -------------------------------------------------------------------------------

_SECRET = "bearer-s3cret"
_REFUSED = "exec-server protocol error: invalid environment registry executor registration response"
_REGISTERED = {
    "environment_id": ENVIRONMENT,
    "security_profile": "noise_hybrid_ik_v1",
    "executor_registration_id": "reg",
    "url": "ws://127.0.0.1:9/",
}


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        pytest.param(
            403,
            _SECRET.encode(),
            "environment registry authentication error: environment registry authentication "
            "failed (403 Forbidden): response body omitted",
            id="403",
        ),
        pytest.param(
            404,
            {"error": {"code": _SECRET, "message": _SECRET}},
            "environment registry request failed (404 Not Found): environment registry executor "
            "registration failed",
            id="404",
        ),
        pytest.param(200, b"{", _REFUSED, id="malformed"),
        pytest.param(200, _REGISTERED | {"url": f"ws://h/?{_SECRET}"}, _REFUSED, id="echo"),
        pytest.param(200, _REGISTERED | {"more": [_SECRET]}, _REFUSED, id="echo elsewhere"),
    ],
)
def test_nothing_that_may_repeat_the_token_is_shown(
    service: ThreadedRelayService, kind: str, status: int, body: Any, text: str
) -> None:
    service.faults.http.answer(Endpoint.REGISTER, status, body)
    with start_executor(
        service, _BEARER, kind=kind, stdin=subprocess.PIPE, attached=False
    ) as executor:
        _give(executor, f"{_SECRET}\n".encode())
        assert exit_code(executor) == 1
        assert executor.stderr() == f"Error: {text}\n"


@pytest.mark.parametrize(
    ("status", "code"),
    [(502, "authentication_service_unavailable"), (503, "registration_conflict")],
)
def test_temporary_errors_are_retried(
    service: ThreadedRelayService, kind: str, status: int, code: str
) -> None:
    body = {"error": {"code": code, "message": _SECRET}}
    service.faults.http.answer(Endpoint.REGISTER, status, body, times=2)
    with start_executor(
        service, _BEARER, kind=kind, stdin=subprocess.PIPE, attached=False
    ) as executor:
        _give(executor, f"{_SECRET}\n".encode())
        wait_attached(service, executor)
        assert len(_to(service, Endpoint.REGISTER)) == 3
        assert _SECRET not in executor.stderr()


def test_a_header_that_repeats_the_token_is_not_shown(
    service: ThreadedRelayService, kind: str
) -> None:
    headers = (("location", f"http://h/{_SECRET}"), ("www-authenticate", _SECRET))
    service.faults.http.answer(Endpoint.REGISTER, 302, b"", headers=headers)
    with start_executor(
        service, _BEARER, kind=kind, stdin=subprocess.PIPE, attached=False
    ) as executor:
        _give(executor, f"{_SECRET}\n".encode())
        assert exit_code(executor) == 1
        assert "302 Found" in executor.stderr()
        assert _SECRET not in executor.stderr()


# ---- recorded ------------------------------------------------------------------------------


@pytest.mark.skipif(not _CAPTURES.is_dir(), reason=f"no captures in {_CAPTURES}")
@pytest.mark.parametrize("name", ["remote_registration_bearer_stdin", "remote_chatgpt_token_stdin"])
def test_recorded_requests(folder: Path, kind: str, name: str) -> None:
    """The same command line and line of stdin lead to the recorded requests of the executor."""
    lines = (_CAPTURES / f"{name}.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    start, recorded = entries[0], [e for e in entries if e["dir"] == "executor>registry"]
    with contextlib.ExitStack() as stack:
        trust, tls, token = {}, None, start["stdin"].removesuffix("\n")
        if "https" in start["argv"][3]:
            roots, tls = _certificate(folder)
            trust, token = {"SSL_CERT_FILE": roots}, _token(_PRO)
        service = stack.enter_context(ThreadedRelayService(tls=tls))
        flags = [service.url if word.startswith("http") else word for word in start["argv"][2:]]
        executor = stack.enter_context(
            start_executor(
                service, *flags, kind=kind, env=trust, stdin=subprocess.PIPE, attached=False
            )
        )
        _give(executor, f"{token}\n".encode())
        wait_attached(service, executor)
        if any(entry["kind"] == "frame" for entry in entries):
            RelayLink(service).close()
        sent = [r for r in service.requests if r.path.endswith(("/register", "/validate"))]
    assert len(sent) == len(recorded)
    for request, entry in zip(sent, recorded, strict=True):
        assert f"{request.method} {request.path}" == entry["request"]
        placeholder = start["stdin"].strip()
        for header, value in entry["headers"].items():
            found = request.header(header)
            if header != "x-codex-noise-stream-id":
                assert found == value.replace(placeholder, token)
        assert set(json.loads(request.body)) == set(entry["body"])
