"""The stored sign-in: its file, its forms, its changes."""

from __future__ import annotations

import asyncio
import json
import os
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest

from exec_server.errors import RegistryError
from exec_server.registry.destination import Destinations
from exec_server.registry.sign_in import StoredSignIn, file_path

Headers = list[tuple[str, str]]


def _id_token(**account: object) -> str:
    claims = {"email": "a@b.c", "https://api.openai.com/auth": account}
    return f"e30.{urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.sig"


def _tokens(**changes: object) -> dict[str, object]:
    tokens = {"id_token": _id_token(), "access_token": "access", "refresh_token": "r"}
    return tokens | {"account_id": "acc-1"} | changes


def _write(path: Path, content: Any) -> None:
    """As a sign-in is refreshed: a new file in place of the old one."""
    new = path.with_suffix(".new")
    new.write_text(content if isinstance(content, str) else json.dumps(content))
    os.replace(new, path)


def _headers(stored: StoredSignIn) -> Headers:
    return asyncio.run(stored.headers("POST", "http://localhost", b""))


_CHATGPT: Headers = [("authorization", "Bearer access"), ("chatgpt-account-id", "acc-1")]
_KEY: Headers = [("authorization", "Bearer sk-x")]


@pytest.mark.parametrize(
    ("content", "headers", "destinations"),
    [
        ({"auth_mode": "apikey", "OPENAI_API_KEY": "sk-x"}, _KEY, Destinations.OWN_HOSTS),
        ({"OPENAI_API_KEY": "sk-x", "tokens": _tokens()}, _KEY, Destinations.OWN_HOSTS),
        (
            {"auth_mode": "apikey", "OPENAI_API_KEY": "sk-x", "tokens": _tokens()},
            _KEY,
            Destinations.OWN_HOSTS,
        ),
        (
            {"OPENAI_API_KEY": None, "tokens": _tokens(), "last_refresh": "x"},
            _CHATGPT,
            Destinations.ANYWHERE,
        ),
        (
            {"auth_mode": "chatgpt", "OPENAI_API_KEY": "sk-x", "tokens": _tokens()},
            _CHATGPT,
            Destinations.ANYWHERE,
        ),
        ({"auth_mode": "chatgptAuthTokens", "tokens": _tokens()}, _CHATGPT, Destinations.ANYWHERE),
        ({"tokens": _tokens(account_id=None)}, _CHATGPT[:1], Destinations.ANYWHERE),
        (
            {"tokens": _tokens(id_token=_id_token(chatgpt_account_is_fedramp=True))},
            [*_CHATGPT, ("X-OpenAI-Fedramp", "true")],
            Destinations.ANYWHERE,
        ),
    ],
)
def test_forms(
    tmp_path: Path, content: object, headers: Headers, destinations: Destinations
) -> None:
    _write(tmp_path / "auth.json", content)
    stored = StoredSignIn(tmp_path / "auth.json")
    assert stored.is_usable
    assert stored.destinations is destinations
    assert _headers(stored) == headers


@pytest.mark.parametrize(
    "content",
    [
        "nope",
        "[]",
        "{}",
        {"auth_mode": "zzz", "OPENAI_API_KEY": "sk-x"},
        {"auth_mode": "apikey", "OPENAI_API_KEY": None, "tokens": _tokens()},
        {"auth_mode": "chatgpt", "OPENAI_API_KEY": "sk-x"},
        {"OPENAI_API_KEY": ""},
        {"OPENAI_API_KEY": 5},
        {"tokens": {"access_token": "access"}},
        {"tokens": _tokens(id_token="x")},
        {"tokens": _tokens(id_token="x.!.y")},
        {"tokens": _tokens(id_token="x.bm8.y")},
    ],
)
def test_files_without_a_sign_in(tmp_path: Path, content: object) -> None:
    _write(tmp_path / "auth.json", content)
    assert not StoredSignIn(tmp_path / "auth.json").is_usable


def test_no_file(tmp_path: Path) -> None:
    assert not StoredSignIn(tmp_path / "auth.json").is_usable


def test_refreshed_tokens_are_used(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    _write(path, {"tokens": _tokens()})
    stored = StoredSignIn(path)
    _write(path, {"tokens": _tokens(access_token="newer")})
    assert _headers(stored)[0] == ("authorization", "Bearer newer")


@pytest.mark.parametrize("content", [None, "{}", {"OPENAI_API_KEY": "sk-x"}])
def test_another_kind_is_not_used(tmp_path: Path, content: object) -> None:
    # An API key must not go where only the tokens were allowed to.
    path = tmp_path / "auth.json"
    _write(path, {"tokens": _tokens()})
    stored = StoredSignIn(path)
    if content is None:
        path.unlink()
    else:
        _write(path, content)
    for _ in range(2):
        with pytest.raises(RegistryError, match="the stored sign-in is gone or of another kind"):
            _headers(stored)
    _write(path, {"tokens": _tokens()})
    assert _headers(stored) == _CHATGPT


def test_a_file_that_is_being_written_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    _write(path, {"tokens": _tokens()})
    stored = StoredSignIn(path)
    for half in ("", '{"tokens": {"id_token": "'):
        path.write_text(half)
        assert _headers(stored) == _CHATGPT


def test_where_it_is() -> None:
    assert file_path({"CODEX_HOME": "/c", "HOME": "/h"}) == Path("/c/auth.json")
    assert file_path({"CODEX_HOME": "", "HOME": "/h"}) == Path("/h/.codex/auth.json")
