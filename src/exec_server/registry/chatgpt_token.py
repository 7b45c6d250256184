"""The claims of a ChatGPT token, which are read and never verified, and the headers made of them.

The registry verifies the token. Here the claims only say whose token it is and when it expires.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode
from typing import Any

import msgspec

from exec_server.registry.decoding import decode_json

_ACCOUNT = "https://api.openai.com/auth"
_VISIBLE = re.compile(r"[\x21-\x7e]+")


class Account(msgspec.Struct, frozen=True):
    """The claims about the account and the user of a token."""

    chatgpt_account_id: str | None = None
    chatgpt_user_id: str | None = None
    user_id: str | None = None
    chatgpt_account_is_fedramp: bool = False

    @property
    def user(self) -> str | None:
        return self.chatgpt_user_id or self.user_id


class _Claims(msgspec.Struct, frozen=True):
    account: Account | None = msgspec.field(default=None, name=_ACCOUNT)


class _Expiry(msgspec.Struct, frozen=True):
    exp: float | None = None


def is_visible(text: str) -> bool:
    """Whether a token is visible ASCII, as every token is that can be sent in a header."""
    return _VISIBLE.fullmatch(text) is not None


def account_claims(token: str) -> Account:
    """The account of a JWT; raises ValueError unless the token is one."""
    claimed: Account | None = _decode(token, _Claims).account
    return claimed or Account()


def expiry(token: str) -> float | None:
    """The Unix time at which a token expires; None if the token does not say it."""
    try:
        found: float | None = _decode(token, _Expiry).exp
    except ValueError:
        return None
    return found


def token_headers(token: str, account_id: str | None, claims: Account) -> list[tuple[str, str]]:
    """The headers of a request with an access token; `claims` are those of the account."""
    headers = [("authorization", f"Bearer {token}")]
    if account_id is not None:
        headers.append(("chatgpt-account-id", account_id))
    if claims.chatgpt_account_is_fedramp:
        headers.append(("X-OpenAI-Fedramp", "true"))
    return headers


def _decode(token: str, kind: type[Any]) -> Any:
    # The reference also takes more segments than three, and any header and signature.
    head, *rest = token.split(".")
    if len(rest) < 2 or not (head and rest[0] and rest[1]):
        raise ValueError("the token is not a JWT")
    try:
        return decode_json(urlsafe_b64decode(rest[0] + "=" * 3), kind)
    except ValueError:
        raise ValueError("the token is not a JWT") from None
