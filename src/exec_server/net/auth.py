"""Listener authentication: the bearer tokens that open a WebSocket."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping

import msgspec

from exec_server.net.websocket.handshake import HttpRefusal

# Given the headers of an upgrade request, raises HttpRefusal unless they authenticate the client.
Authenticator = Callable[[Mapping[str, str]], None]

_MIN_SECRET_BYTES = 32
_HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def _bearer_token(headers: Mapping[str, str]) -> str:
    value = headers.get("authorization")
    if value is None:
        raise HttpRefusal(401, "missing websocket bearer token")
    scheme, space, token = value.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not space or not token or not value.isascii():
        raise HttpRefusal(401, "invalid authorization header")
    return token


def capability_token(digest: bytes) -> Authenticator:
    """Accept the one token with this SHA-256."""

    def authenticate(headers: Mapping[str, str]) -> None:
        presented = hashlib.sha256(_bearer_token(headers).encode()).digest()
        if not hmac.compare_digest(presented, digest):
            raise HttpRefusal(401, "invalid websocket bearer token")

    return authenticate


def is_digest(text: str) -> bool:
    """Whether a text is a SHA-256 in hexadecimal digits."""
    return _HEX_DIGEST.fullmatch(text) is not None


def is_strong_secret(secret: bytes) -> bool:
    """Whether a shared secret is long enough for HS256."""
    return len(secret) >= _MIN_SECRET_BYTES


class SignedTokens(msgspec.Struct, frozen=True):
    """The key of signed tokens and the claims that they must have."""

    secret: bytes
    issuer: str | None
    audience: str | None
    clock_skew: int
    now: Callable[[], float]


def signed_bearer_token(rules: SignedTokens) -> Authenticator:
    """Accept JSON web tokens signed with the shared secret."""
    # Imported here: other servers are spared its start-up time and memory.
    import jwt

    def authenticate(headers: Mapping[str, str]) -> None:
        token = _bearer_token(headers)
        try:
            # Signature and shape only; the claims are checked below, in the protocol's order.
            claims = jwt.decode(
                token,
                rules.secret,
                algorithms=["HS256"],
                options={
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                    "verify_aud": False,
                    "verify_iss": False,
                    "verify_sub": False,
                    "verify_jti": False,
                },
            )
        except (jwt.PyJWTError, RecursionError):  # the latter for deeply nested JSON
            raise HttpRefusal(401, "invalid websocket jwt") from None
        _check_claims(claims, rules)

    return authenticate


def _check_claims(claims: Mapping[str, object], rules: SignedTokens) -> None:
    expires, not_before = claims.get("exp"), claims.get("nbf")
    issuer, audience = claims.get("iss"), claims.get("aud")
    audiences = [audience] if isinstance(audience, str) else audience
    if (
        type(expires) is not int
        or not (not_before is None or type(not_before) is int)
        or not (issuer is None or isinstance(issuer, str))
        or not (audiences is None or isinstance(audiences, list))
        or not all(isinstance(name, str) for name in audiences or ())
    ):
        raise HttpRefusal(401, "invalid websocket jwt")
    now = int(rules.now())
    if now > expires + rules.clock_skew:
        raise HttpRefusal(401, "expired websocket jwt")
    if not_before is not None and now < not_before - rules.clock_skew:
        raise HttpRefusal(401, "websocket jwt is not valid yet")
    if rules.issuer is not None and issuer != rules.issuer:
        raise HttpRefusal(401, "websocket jwt issuer mismatch")
    if rules.audience is not None and rules.audience not in (audiences or []):
        raise HttpRefusal(401, "websocket jwt audience mismatch")
