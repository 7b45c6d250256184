"""Listener authentication end to end: flags, statuses, texts, and where secrets do not go."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from tests.support.client import (
    HandshakeRefused,
    HttpReply,
    Server,
    http,
    run_command,
    start_server,
    upgrade_request,
)

_TOKEN = "correct-horse-battery-staple"
_SECRET = "a shared secret of more than 32 bytes"


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A folder with a token, a secret, and files that are neither."""
    (tmp_path / "token").write_text(f"  {_TOKEN}\n\n")
    (tmp_path / "secret").write_text(f"{_SECRET}\n")
    (tmp_path / "blank").write_text(" \n\t")
    (tmp_path / "short").write_text("x" * 31)
    return tmp_path


def _ask(server: Server, *headers: tuple[str, str], target: str = "/") -> HttpReply:
    return http(server.url, upgrade_request(target, headers))


def _bearer(server: Server, token: str) -> tuple[int, bytes]:
    reply = _ask(server, ("Authorization", f"Bearer {token}"))
    return reply.status, reply.body


def _signed(**claims: Any) -> str:
    secret = claims.pop("secret", _SECRET)
    algorithm = claims.pop("algorithm", "HS256")
    return jwt.encode({"exp": int(time.time()) + 60} | claims, secret, algorithm)


@pytest.mark.quick
def test_capability_token_from_a_file(secrets: Path) -> None:
    flags = ("--ws-auth", "capability-token", "--ws-token-file", "token")
    with start_server("ours", *flags, cwd=secrets) as server:
        with server.connect(headers=[("Authorization", f"bEaReR  {_TOKEN} ")]) as client:
            assert client.call("environment/status") == {"status": "ready"}
        reply = _ask(server)
        assert (reply.status, reply.body) == (401, b"missing websocket bearer token")
        assert reply.header("content-type") == "text/plain; charset=utf-8"
        assert _bearer(server, "wrong") == (401, b"invalid websocket bearer token")
        assert _bearer(server, "") == (401, b"invalid authorization header")
        basic = _ask(server, ("Authorization", f"Basic {_TOKEN}"))
        assert (basic.status, basic.body) == (401, b"invalid authorization header")
        with pytest.raises(HandshakeRefused):
            server.connect(target=f"/?token={_TOKEN}")


def test_first_of_two_headers_counts(secrets: Path) -> None:
    digest = hashlib.sha256(_TOKEN.encode()).hexdigest().upper()
    with start_server(
        "ours", "--ws-auth", "capability-token", "--ws-token-sha256", digest
    ) as server:
        right, wrong = ("Authorization", f"Bearer {_TOKEN}"), ("Authorization", "Bearer no")
        assert _ask(server, right, wrong).status == 101
        assert _ask(server, wrong, right).status == 401


def test_order_of_checks(secrets: Path) -> None:
    """Origin, then the path and the upgrade, then the token; and /readyz needs none."""
    flags = ("--ws-auth", "capability-token", "--ws-token-file", str(secrets / "token"))
    with start_server("ours", *flags) as server:
        right = ("Authorization", f"Bearer {_TOKEN}")
        assert _ask(server, ("Origin", "http://x"), right).status == 403
        assert _ask(server, right, target="/other").status == 404
        assert _ask(server, target="/readyz").status == 200
        plain = server.http(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (plain.status, plain.body) == (400, b"Connection header did not include 'upgrade'")


def test_host_does_not_matter_when_clients_authenticate(secrets: Path) -> None:
    flags = ("--ws-auth", "capability-token", "--ws-token-file", str(secrets / "token"))
    with start_server("ours", *flags) as server:
        request = upgrade_request("/", [("Authorization", f"Bearer {_TOKEN}")], host="my.example")
        assert server.http(request).status == 101


def test_signed_tokens(secrets: Path) -> None:
    flags = ("--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", "secret")
    with start_server("ours", *flags, cwd=secrets) as server:
        now = int(time.time())
        with server.connect(headers=[("Authorization", f"Bearer {_signed()}")]) as client:
            assert client.call("environment/status") == {"status": "ready"}
        assert _bearer(server, _signed(exp=now - 10))[0] == 101
        assert _bearer(server, _signed(exp=now - 60)) == (401, b"expired websocket jwt")
        early = (401, b"websocket jwt is not valid yet")
        assert _bearer(server, _signed(nbf=now + 60)) == early
        assert _bearer(server, _signed(iss="anybody", aud=["anything"]))[0] == 101
        invalid = (401, b"invalid websocket jwt")
        assert _bearer(server, _signed(secret="x" * 40)) == invalid
        assert _bearer(server, _signed(algorithm="HS512", secret=_SECRET * 2)) == invalid
        assert _bearer(server, _signed(exp=now + 0.5)) == invalid
        assert _bearer(server, _TOKEN) == invalid
        assert _ask(server).body == b"missing websocket bearer token"


def test_signed_tokens_with_all_rules(secrets: Path) -> None:
    flags = (
        *("--ws-auth", "signed-bearer-token"),
        *("--ws-shared-secret-file", str(secrets / "secret")),
        *("--ws-issuer", " us "),
        *("--ws-audience", "them"),
        *("--ws-max-clock-skew-seconds", "1000"),
    )
    with start_server("ours", *flags) as server:
        now = int(time.time())
        good = {"iss": "us", "aud": ["x", "them"], "exp": now - 900, "nbf": now + 900}
        assert _bearer(server, _signed(**good))[0] == 101
        assert _bearer(server, _signed(**good | {"iss": "x"}))[1] == (
            b"websocket jwt issuer mismatch"
        )
        assert _bearer(server, _signed(**good | {"aud": "x"}))[1] == (
            b"websocket jwt audience mismatch"
        )
        assert _bearer(server, _signed(**good | {"exp": now - 1100}))[1] == b"expired websocket jwt"


def test_empty_rules_are_no_rules(secrets: Path) -> None:
    flags = (
        *("--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", "secret"),
        *("--ws-issuer", " ", "--ws-audience", ""),
    )
    with start_server("ours", *flags, cwd=secrets) as server:
        assert _bearer(server, _signed())[0] == 101


_CAPABILITY = ["--ws-auth", "capability-token"]
_SIGNED = ["--ws-auth", "signed-bearer-token"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            _CAPABILITY,
            "`--ws-token-file` or `--ws-token-sha256` is required when "
            "`--ws-auth capability-token` is set",
        ),
        (
            [*_CAPABILITY, "--ws-token-file", "token", "--ws-token-sha256", "0" * 64],
            "`--ws-token-file` and `--ws-token-sha256` are mutually exclusive",
        ),
        (
            [*_CAPABILITY, "--ws-token-sha256", "0" * 63],
            "--ws-token-sha256 must be a 64-character hex SHA-256 digest",
        ),
        (
            [*_CAPABILITY, "--ws-token-file", "{dir}/none"],
            "failed to read websocket auth secret {dir}/none: "
            "No such file or directory (os error 2)",
        ),
        (
            [*_CAPABILITY, "--ws-token-file", "{dir}/blank"],
            "websocket auth secret {dir}/blank must not be empty",
        ),
        (
            _SIGNED,
            "`--ws-shared-secret-file` is required when `--ws-auth signed-bearer-token` is set",
        ),
        (
            [*_SIGNED, "--ws-shared-secret-file", "{dir}/short"],
            "signed websocket bearer secret {dir}/short must be at least 32 bytes",
        ),
        (
            [*_CAPABILITY, "--ws-token-sha256", "0" * 64, "--listen", "stdio"],
            "WebSocket auth requires a WebSocket listener, not stdio",
        ),
    ],
)
def test_settings_that_do_not_fit_together(flags: list[str], text: str, secrets: Path) -> None:
    ended = run_command("ours", *(flag.format(dir=secrets) for flag in flags))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: {text.format(dir=secrets)}\n"


@pytest.mark.parametrize(
    "flags",
    [
        ["--ws-token-file", "token"],
        ["--ws-token-sha256", "0" * 64],
        ["--ws-shared-secret-file", "secret"],
        ["--ws-issuer", "x"],
        ["--ws-audience", "x"],
        ["--ws-max-clock-skew-seconds", "5"],
        [*_CAPABILITY, "--ws-token-sha256", "0" * 64, "--ws-issuer", "x"],
        [*_SIGNED, "--ws-shared-secret-file", "secret", "--ws-token-file", "token"],
    ],
)
def test_flags_of_another_mode_are_refused(flags: list[str]) -> None:
    ended = run_command("ours", "--listen", "ws://127.0.0.1:0", *flags)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("Error: ")
    assert "--ws-auth" in ended.stderr


@pytest.mark.parametrize("mode", ["capability", "signed"])
def test_secrets_go_nowhere(mode: str, secrets: Path, python: Callable[[str], list[str]]) -> None:
    """Not into the log at its loudest, not into answers, not to children."""
    if mode == "capability":
        flags = [*_CAPABILITY, "--ws-token-file", str(secrets / "token")]
        token, hidden = _TOKEN, [_TOKEN, hashlib.sha256(_TOKEN.encode()).hexdigest()]
    else:
        flags = [*_SIGNED, "--ws-shared-secret-file", str(secrets / "secret")]
        token = _signed()
        hidden = [_SECRET, token]
    code = (
        "import os; print(dict(os.environ), open('/proc/self/cmdline').read(),"
        " open('/proc/self/environ').read(), sorted(os.listdir('/proc/self/fd')))"
    )
    with start_server("ours", *flags, "--log-level", "debug") as server:
        refusals = [_bearer(server, token[:-1] + "?"), _bearer(server, f"{token} {token}")]
        with server.connect(headers=[("Authorization", f"Bearer {token}")]) as client:
            policy = {
                "inherit": "all",
                "ignoreDefaultExcludes": True,
                "exclude": [],
                "set": {},
                "includeOnly": [],
            }
            seen = client.run(python(code), envPolicy=policy).stdout.decode()
            told = repr(client.messages)
        server.stop()
        texts = [server.stderr(), seen, told, repr(refusals)]
    assert "has session" in texts[0]
    for text in texts:
        assert not [secret for secret in hidden if secret in text]
