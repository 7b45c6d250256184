"""From --ws-* flags to an authenticator; the error texts are checked in conformance."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from exec_server.cli.serve.arguments import parse
from exec_server.cli.serve.command import build_authenticator
from exec_server.errors import StartupError
from exec_server.net.auth import Authenticator
from exec_server.net.websocket.handshake import HttpRefusal


def _build(*flags: str) -> Authenticator | None:
    return build_authenticator(parse(list(flags)))


def test_no_flags_mean_no_authentication() -> None:
    assert _build() is None


def test_a_token_from_a_file_or_its_digest(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" secret \n")
    digest = hashlib.sha256(b"secret").hexdigest()
    for flags in (
        ("--ws-token-file", str(tmp_path / "token")),
        ("--ws-token-sha256", f" {digest} "),
    ):
        authenticate = _build("--ws-auth", "capability-token", *flags)
        assert authenticate is not None
        authenticate({"authorization": "Bearer secret"})
        with pytest.raises(HttpRefusal):
            authenticate({"authorization": "Bearer other"})


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ws-token-file", "{}/none"], "{}/none: No such file or directory (os error 2)"),
        (["--ws-token-file", "{}/blank"], "{}/blank must not be empty"),
        (["--ws-token-file", "{}/two"], "{}/two has 2 lines, and must have one: the token"),
        (["--ws-token-sha256", "abc"], "--ws-token-sha256 must be a 64-character hex"),
        ([], "`--ws-token-file` or `--ws-token-sha256` is required"),
    ],
)
def test_unusable_tokens_are_named(tmp_path: Path, flags: list[str], text: str) -> None:
    (tmp_path / "blank").write_text(" \n")
    (tmp_path / "two").write_text("one\ntwo\n")
    words = [word.format(tmp_path) for word in flags]
    with pytest.raises(StartupError) as caught:
        _build("--ws-auth", "capability-token", *words)
    assert text.format(tmp_path) in str(caught.value)


def test_a_shared_secret_must_be_long(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    words = ("--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", str(path))
    path.write_text("s" * 31)
    with pytest.raises(StartupError, match="at least 32 bytes"):
        _build(*words)
    path.write_text("s" * 32)
    assert _build(*words, "--ws-issuer", " ", "--ws-max-clock-skew-seconds", "0") is not None
