"""The claims of ChatGPT tokens."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode

import pytest

from exec_server.registry.chatgpt_token import (
    Account,
    account_claims,
    expiry,
    is_visible,
    token_headers,
)


def _token(claims: object) -> str:
    return f"e30.{urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.sig"


def _with_account(**account: object) -> str:
    return _token({"https://api.openai.com/auth": account, "email": "a@b.c"})


def test_account() -> None:
    claims = account_claims(_with_account(chatgpt_account_id="a", user_id="u", more=1))
    assert (claims.chatgpt_account_id, claims.user) == ("a", "u")
    assert account_claims(_with_account(chatgpt_user_id="v", user_id="u")).user == "v"
    for token in (_token({}), _token({"https://api.openai.com/auth": None}), _with_account()):
        assert account_claims(token) == Account()


@pytest.mark.parametrize(
    "token",
    [
        *("", "x", "a.b", "a.!.c", "a.bm8.c", ".e30.c", "a..c", "a.e30.", "a.gICA.c"),
        _token("text"),
        _token({"https://api.openai.com/auth": "text"}),
        _with_account(chatgpt_account_id=5),
        _with_account(chatgpt_account_is_fedramp="yes"),
        _token([[]] * 3),
        f"e30.{urlsafe_b64encode(b'[' * 20_000).decode()}.s",
    ],
)
def test_texts_that_are_no_token(token: str) -> None:
    with pytest.raises(ValueError, match="the token is not a JWT"):
        account_claims(token)


def test_padding_and_more_segments_are_accepted() -> None:
    content = urlsafe_b64encode(b'{"exp": 5 }').decode()
    assert content.endswith("=")
    assert expiry(f"!.{content}.s.more") == 5.0


@pytest.mark.parametrize(
    ("token", "moment"),
    [
        (_token({"exp": 1_700_000_000}), 1_700_000_000.0),
        (_token({"exp": 1.5}), 1.5),
        (_token({}), None),
        (_token({"exp": "soon"}), None),
        ("opaque", None),
    ],
)
def test_expiry(token: str, moment: float | None) -> None:
    assert expiry(token) == moment


def test_visible_ascii() -> None:
    assert is_visible("!~aZ.-_")
    assert not any(map(is_visible, ("", "a b", "a\r\nX: y", "a\n", "a\x7f", "é")))


def test_headers() -> None:
    assert token_headers("t", None, Account()) == [("authorization", "Bearer t")]
    assert token_headers("t", "a", Account(chatgpt_account_is_fedramp=True)) == [
        ("authorization", "Bearer t"),
        ("chatgpt-account-id", "a"),
        ("X-OpenAI-Fedramp", "true"),
    ]
