"""From the --ws-* flags to the authenticator of a WebSocket server."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from exec_server.errors import StartupError, os_error_text

if TYPE_CHECKING:
    from exec_server.net.auth import Authenticator

_DEFAULT_CLOCK_SKEW = 30

_CAPABILITY_FLAGS = ("ws_token_file", "ws_token_sha256")
_SIGNED_FLAGS = (
    "ws_shared_secret_file",
    "ws_issuer",
    "ws_audience",
    "ws_max_clock_skew_seconds",
)


def build_authenticator(arguments: argparse.Namespace) -> Authenticator | None:
    """The authenticator that the flags select; raises StartupError if they conflict."""
    token_flags = _is_any_set(arguments, _CAPABILITY_FLAGS)
    signed_flags = _is_any_set(arguments, _SIGNED_FLAGS)
    if arguments.ws_auth is None and (token_flags or signed_flags):
        raise StartupError(
            "websocket auth flags require `--ws-auth capability-token` or "
            "`--ws-auth signed-bearer-token`"
        )
    if arguments.ws_auth == "capability-token" and signed_flags:
        raise StartupError(
            "`--ws-shared-secret-file`, `--ws-issuer`, `--ws-audience`, and "
            "`--ws-max-clock-skew-seconds` require `--ws-auth signed-bearer-token`"
        )
    if arguments.ws_auth == "signed-bearer-token" and token_flags:
        raise StartupError(
            "`--ws-token-file` and `--ws-token-sha256` require `--ws-auth capability-token`, "
            "not `signed-bearer-token`"
        )
    if arguments.ws_auth == "capability-token":
        return _capability_token(arguments)
    if arguments.ws_auth == "signed-bearer-token":
        return _signed_bearer_token(arguments)
    return None


def _is_any_set(arguments: argparse.Namespace, names: tuple[str, ...]) -> bool:
    return any(getattr(arguments, name) is not None for name in names)


# The modules of tokens are imported only here: most servers have no flag for them, and all servers
# parse their flags before they print their URL.


def _capability_token(arguments: argparse.Namespace) -> Authenticator:
    import hashlib

    from exec_server.net.auth import capability_token, is_digest

    path, digest = arguments.ws_token_file, arguments.ws_token_sha256
    if path is not None and digest is not None:
        raise StartupError("`--ws-token-file` and `--ws-token-sha256` are mutually exclusive")
    if digest is not None:
        if not is_digest(digest.strip()):
            raise StartupError("--ws-token-sha256 must be a 64-character hex SHA-256 digest")
        return capability_token(bytes.fromhex(digest.strip()))
    if path is None:
        raise StartupError(
            "`--ws-token-file` or `--ws-token-sha256` is required when "
            "`--ws-auth capability-token` is set"
        )
    return capability_token(hashlib.sha256(_read_secret(path)).digest())


def _signed_bearer_token(arguments: argparse.Namespace) -> Authenticator:
    from exec_server.net.auth import SignedTokens, is_strong_secret, signed_bearer_token

    path = arguments.ws_shared_secret_file
    if path is None:
        raise StartupError(
            "`--ws-shared-secret-file` is required when `--ws-auth signed-bearer-token` is set"
        )
    secret = _read_secret(path)
    if not is_strong_secret(secret):
        raise StartupError(f"signed websocket bearer secret {path} must be at least 32 bytes")
    skew = arguments.ws_max_clock_skew_seconds
    rules = SignedTokens(
        secret,
        (arguments.ws_issuer or "").strip() or None,
        (arguments.ws_audience or "").strip() or None,
        _DEFAULT_CLOCK_SKEW if skew is None else skew,
        time.time,
    )
    return signed_bearer_token(rules)


def _read_secret(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            secret = file.read().strip()
    except OSError as error:
        text = os_error_text(error)
        raise StartupError(f"failed to read websocket auth secret {path}: {text}") from None
    if not secret:
        raise StartupError(f"websocket auth secret {path} must not be empty")
    return secret
