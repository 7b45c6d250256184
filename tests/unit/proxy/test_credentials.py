"""Credential masking: dummies in the environment, secrets for the hosts of their providers."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import decode
from exec_server.protocol.network import CredentialProvider
from exec_server.proxy import credentials
from exec_server.proxy.credentials import (
    ACTIVE,
    BROKERED,
    CredentialMask,
    Provider,
    SearchTime,
    custom_providers,
)

_TOKEN = "ghp_" + "b" * 36
_KEY = "sk-proj-0123456789abcdef"
_ENV = {
    "GITHUB_TOKEN": _TOKEN,
    "OPENAI_API_KEY": _KEY,
    "COPY": f"token {_TOKEN}, {_KEY}",
    "OTHER": "plain",
}


def _time() -> SearchTime:
    return SearchTime(time.monotonic)


def _mask(env: dict[str, str] = _ENV) -> tuple[CredentialMask, dict[str, str]]:
    mask = CredentialMask(env, b"key", _time())
    return mask, mask.masked(env)


def _restored(mask: CredentialMask, host: str, authorization: bytes) -> bytes:
    """The `Authorization` of a request over TLS."""
    [(name, value)] = mask.restored(
        "https", (host, 443), b"/x", [(b"Authorization", authorization)]
    )
    assert name == b"Authorization"
    return value


def test_secrets_are_masked_wherever_they_occur() -> None:
    _, masked = _mask()
    assert not [value for value in masked.values() if _TOKEN in value or _KEY in value]
    token, key = masked["GITHUB_TOKEN"], masked["OPENAI_API_KEY"]
    assert token.startswith("ghp_masked")
    assert key.startswith("sk-proj-masked")
    assert masked["COPY"] == f"token {token}, {key}"
    assert masked["OTHER"] == "plain"
    assert masked[ACTIVE] == "1"
    assert json.loads(masked[BROKERED]) == [
        ["@alias:COPY", token],
        ["@alias:COPY", key],
        ["@alias:GITHUB_TOKEN", token],
        ["@alias:OPENAI_API_KEY", key],
        ["GITHUB_TOKEN", token],
        ["OPENAI_API_KEY", key],
    ]


_RANDOM = "Ab3dEf6hIj9l" * 8


@pytest.mark.parametrize(
    ("secret", "prefix"),
    [
        *((f"gh{kind}_{_RANDOM[:36]}", f"gh{kind}_") for kind in "pousr"),
        (f"github_pat_{_RANDOM[:22]}_{_RANDOM[:59]}", "github_pat_"),
        (f"sk-{_RANDOM[:48]}", "sk-"),
        (f"sk-proj-{_RANDOM[:20]}-{_RANDOM[:22]}", "sk-proj-"),
        (f"sk-svcacct-{_RANDOM[:40]}", "sk-svcacct-"),
        (f"sk-admin-{_RANDOM[:42]}", "sk-admin-"),
    ],
)
def test_tokens_are_masked_in_any_variable(secret: str, prefix: str) -> None:
    env = {"A": secret, "URL": f"https://x:{secret}@host/a.git", "B": f"a {secret},b"}
    mask, masked = _mask(env)
    dummy = masked["A"]
    assert dummy.startswith(f"{prefix}masked")
    assert masked["URL"] == f"https://x:{dummy}@host/a.git"
    assert masked["B"] == f"a {dummy},b"
    variable, host = ("GH_TOKEN", "github.com")
    if prefix.startswith("sk-"):
        variable, host = ("OPENAI_API_KEY", "api.openai.com")
    aliases = [[f"@alias:{name}", dummy] for name in ("A", "B", "URL")]
    assert json.loads(masked[BROKERED]) == [*aliases, [variable, dummy]]
    assert _restored(mask, host, f"Bearer {dummy}".encode()) == f"Bearer {secret}".encode()


@pytest.mark.parametrize(
    "text",
    [
        f"ghp_{_RANDOM[:35]}",
        f"ghx_{_RANDOM[:36]}",
        f"GHP_{_RANDOM[:36]}",
        f"github_pat_{_RANDOM[:28]}",
        f"sk-{_RANDOM[:47]}",
        "sk-proj-" + "a" * 40,
        f"sk-ant-{_RANDOM[:80]}",
        f"sk-or-v1-{_RANDOM[:64]}",
        f"/opt/task-{_RANDOM[:40]}",
        "/srv/task-fix-the-registry-node-so-that-it-does-not-crash-on-empty-host/bin:/usr/bin",
        "/srv/highs_and_lows_of_a_stock_market_in_the_last_ten_years",
    ],
)
def test_texts_that_are_no_tokens(text: str) -> None:
    _, masked = _mask({"A": text})
    assert masked["A"] == text
    assert masked[BROKERED] == "[]"


@pytest.mark.parametrize("before", ["%3D", "%2f", "\\n", "\\t", "_", "-", "=", "é"])
@pytest.mark.parametrize("secret", [f"ghp_{_RANDOM[:36]}", f"sk-{_RANDOM[:48]}"])
def test_tokens_after_an_escape_or_a_separator(before: str, secret: str) -> None:
    _, masked = _mask({"A": f"token{before}{secret}"})
    assert secret not in masked["A"]
    assert masked["A"].startswith(f"token{before}")


def test_a_run_longer_than_a_token_is_masked_whole() -> None:
    run = f"ghp_{'a' * 300}" * 3
    _, masked = _mask({"A": f"x {run} y"})
    assert (masked["A"][:2], masked["A"][-2:]) == ("x ", " y")
    assert "aaaa" not in masked["A"]


def test_long_secrets_within_texts_are_masked_in_time() -> None:
    env = {f"A{number}": f"x ghp_{'a' * 20_000}{number:02}" for number in range(60)}
    mask = CredentialMask(env, b"key", SearchTime(lambda: 0.0))
    began = time.thread_time()
    masked = mask.masked(env)
    # An expression of all secrets takes many times as long.
    assert time.thread_time() - began < 2
    assert not [name for name in env if "aaaa" in masked[name]]


def test_secrets_that_overlap_in_a_text() -> None:
    env = {
        "GH_TOKEN": "abcdefgh",
        "OPENAI_API_KEY": "efghijklmn",
        "A": "abcdefghijklmn abcdefghefgh",
    }
    _, masked = _mask(env)
    assert masked["A"] == f"{masked['GH_TOKEN']}ijklmn {masked['GH_TOKEN']}efgh"


def test_dummies_are_as_long_as_tokens_but_not_longer() -> None:
    for length in (36, 80):
        secret = f"ghp_{_RANDOM[:length]}"
        assert len(_mask({"A": secret})[1]["A"]) == len(secret)
    assert len(_mask({"GH_TOKEN": "x" * 1000})[1]["GH_TOKEN"]) == len("masked") + 256


def test_blanks_around_a_secret_are_no_part_of_it() -> None:
    mask, masked = _mask({"GH_TOKEN": " secret-text\n", "A": "secret-text"})
    assert masked["GH_TOKEN"] == f" {masked['A']}\n"
    sent = b"Bearer " + masked["A"].encode()
    assert _restored(mask, "github.com", sent) == b"Bearer secret-text"


def test_dummies_depend_on_the_value_and_on_the_server() -> None:
    first = CredentialMask(_ENV, b"key", _time()).masked(_ENV)["GITHUB_TOKEN"]
    assert first == CredentialMask(_ENV, b"key", _time()).masked(_ENV)["GITHUB_TOKEN"]
    assert first != CredentialMask(_ENV, b"other", _time()).masked(_ENV)["GITHUB_TOKEN"]
    other = {"GITHUB_TOKEN": _TOKEN + "c"}
    assert first != CredentialMask(other, b"key", _time()).masked(other)["GITHUB_TOKEN"]


def test_short_and_empty_values() -> None:
    env = {"GH_TOKEN": "abc", "A": "abcd", "B": "abc", "GITHUB_TOKEN": ""}
    _, masked = _mask(env)
    assert masked["GH_TOKEN"] == masked["B"] != "abc"
    assert (masked["A"], masked["GITHUB_TOKEN"]) == ("abcd", "")


def test_a_secret_within_another() -> None:
    env = {"GH_TOKEN": "longer-secret", "OPENAI_API_KEY": "longer-secret-still", "A": "x"}
    _, masked = _mask(env)
    assert "secret" not in "".join(masked[name] for name in env)


def test_hosts_that_are_intercepted() -> None:
    mask, _ = _mask()
    assert mask.is_intercepted("api.github.com", 443)
    assert mask.is_intercepted("api.openai.com", 443)
    assert not mask.is_intercepted("api.github.com", 80)
    assert not mask.is_intercepted("evil-api.github.com", 443)
    assert not CredentialMask({}, b"key", _time()).is_intercepted("api.github.com", 443)


def test_enterprise_hosts() -> None:
    env = {"GH_ENTERPRISE_TOKEN": _TOKEN, "GH_HOST": "Git.example"}
    mask, masked = _mask(env)
    assert mask.is_intercepted("git.example", 443)
    assert not mask.is_intercepted("github.com", 443)
    dummy = masked["GH_ENTERPRISE_TOKEN"].encode()
    assert _restored(mask, "git.example", b"Bearer " + dummy) == b"Bearer " + _TOKEN.encode()
    found = {"A": _TOKEN, "GH_HOST": "git.example"}
    mask = CredentialMask(found, b"key", _time())
    assert mask.is_intercepted("git.example", 443)
    assert mask.is_intercepted("github.com", 443)
    alone = {"GH_ENTERPRISE_TOKEN": _TOKEN}
    assert not CredentialMask(alone, b"key", _time()).is_intercepted("github.com", 443)
    assert _TOKEN not in CredentialMask(alone, b"key", _time()).masked(alone).values()


@pytest.mark.parametrize("scheme", [b"Bearer ", b"token ", b"BEARER  "])
def test_restored_tokens(scheme: bytes) -> None:
    mask, masked = _mask()
    dummy = masked["GITHUB_TOKEN"].encode()
    restored = _restored(mask, "api.github.com", scheme + dummy)
    assert restored.split() == [scheme.strip(), _TOKEN.encode()]


def test_restored_passwords() -> None:
    mask, masked = _mask()
    dummy = masked["GITHUB_TOKEN"]
    for pair, expected in (
        (f"me:{dummy}", f"me:{_TOKEN}"),
        (f"{dummy}:x", f"{_TOKEN}:x"),
        (dummy, _TOKEN),
        ("me:other", "me:other"),
    ):
        sent = b"Basic " + base64.b64encode(pair.encode())
        expected_value = b"Basic " + base64.b64encode(expected.encode())
        assert _restored(mask, "github.com", sent) == expected_value


def test_what_is_left_alone() -> None:
    mask, masked = _mask()
    token, key = masked["GITHUB_TOKEN"].encode(), masked["OPENAI_API_KEY"].encode()
    for host, value in (
        ("api.openai.com", b"Bearer " + token),
        ("api.github.com", b"Bearer " + key),
        ("api.github.com", b"Bearer x" + token),
        ("api.github.com", b"Digest " + token),
        ("api.github.com", token),
        ("api.github.com", b"Basic !!"),
    ):
        assert _restored(mask, host, value) == value


# ---- providers of clients -------------------------------------------------------------------

_SECRET = "tok_abcdefghij"
_CUSTOM = {
    "env": ["MY_TOKEN"],
    "patterns": ["tok_[a-z0-9]{10}"],
    "url_prefixes": ["https://api.example/v1/", "http://127.0.0.1:99/"],
}


def _custom(**members: Any) -> tuple[Provider, ...]:
    return custom_providers({"mine": decode(CredentialProvider, _CUSTOM | members)})


def test_secrets_of_a_client_are_masked_wherever_they_occur() -> None:
    env = {
        "MY_TOKEN": f"a {_SECRET} b",
        "OTHER": f"x{_SECRET}",
        "SHORT": "tok_",
        "GH_TOKEN": _TOKEN,
    }
    mask = CredentialMask(env, b"key", _time(), _custom())
    masked = mask.masked(env)
    dummy = masked["OTHER"][1:]
    assert dummy.startswith("tok_")
    assert dummy != _SECRET
    assert masked["MY_TOKEN"] == f"a {dummy} b"
    assert masked["SHORT"] == "tok_"
    assert masked["GH_TOKEN"].startswith("ghp_masked")
    assert json.loads(masked[BROKERED]) == [
        ["@alias:GH_TOKEN", masked["GH_TOKEN"]],
        ["@alias:MY_TOKEN", dummy],
        ["@alias:OTHER", dummy],
        ["GH_TOKEN", masked["GH_TOKEN"]],
        ["MY_TOKEN", dummy],
    ]


def test_short_secrets_are_masked_in_the_variables_of_their_provider() -> None:
    providers = _custom(patterns=["pin[0-9]{2}"])
    env = {"MY_TOKEN": "pin12", "A": "pin34", "B": "pin12 x"}
    masked = CredentialMask(env, b"key", _time(), providers).masked(env)
    assert masked["MY_TOKEN"].startswith("masked")
    assert (masked["A"], masked["B"]) == ("pin34", "pin12 x")
    env = {"MY_TOKEN": "pin12,pin34"}
    masked = CredentialMask(env, b"key", _time(), providers).masked(env)
    assert masked["MY_TOKEN"].count("masked") == 2
    assert "pin" not in masked["MY_TOKEN"]


def test_a_dummy_that_is_taken_is_not_used() -> None:
    env = {"MY_TOKEN": _SECRET}
    first = CredentialMask(env, b"key", _time(), _custom()).masked(env)["MY_TOKEN"]
    env = {"MY_TOKEN": _SECRET, "OTHER": f"/{first}"}
    masked = CredentialMask(env, b"key", _time(), _custom()).masked(env)
    assert masked["MY_TOKEN"].startswith("masked")


def test_too_many_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "MAX_SECRETS", 2)
    env = {"MY_TOKEN": "tok_0000000000 tok_0000000001 tok_0000000000"}
    CredentialMask(env, b"key", _time(), _custom())
    env = {"MY_TOKEN": env["MY_TOKEN"] + " tok_0000000002"}
    with pytest.raises(InvalidParams, match="match more than"):
        CredentialMask(env, b"key", _time(), _custom())


def _masking(**members: Any) -> tuple[CredentialMask, bytes]:
    env = {"MY_TOKEN": _SECRET}
    mask = CredentialMask(env, b"key", _time(), _custom(**members))
    return mask, mask.masked(env)["MY_TOKEN"].encode()


@pytest.mark.parametrize(
    ("scheme", "host", "port", "path", "is_restored"),
    [
        ("https", "api.example", 443, b"/v1/x", True),
        ("https", "api.example", 443, b"/v2/x", False),
        ("https", "api.example", 444, b"/v1/x", False),
        ("https", "b.example", 443, b"/v1/x", False),
        ("http", "api.example", 443, b"/v1/x", False),
        ("http", "127.0.0.1", 99, b"/x", True),
        ("https", "127.0.0.1", 99, b"/x", False),
    ],
)
def test_destinations_of_a_client(
    scheme: Any, host: str, port: int, path: bytes, is_restored: bool
) -> None:
    mask, dummy = _masking()
    headers = [(b"Authorization", b"Bearer " + dummy), (b"X", dummy), (b"Accept", b"*")]
    restored = mask.restored(scheme, (host, port), path, headers)
    shown = _SECRET.encode() if is_restored else dummy
    assert restored == [(b"Authorization", b"Bearer " + shown), *headers[1:]]


@pytest.mark.parametrize("name", [b"X-Original-URL", b"x-rewrite-url"])
def test_no_secret_if_a_header_names_another_path(name: bytes) -> None:
    mask, dummy = _masking()
    headers = [(b"Authorization", b"Bearer " + dummy), (name, b"/v2/")]
    assert mask.restored("https", ("api.example", 443), b"/v1/x", headers) == headers


def test_ways_of_authentication_of_a_client() -> None:
    def restored(name: bytes, value: bytes, **members: Any) -> bytes:
        mask, dummy = _masking(**members)
        value = value.replace(b"DUMMY", dummy)
        [(_, result)] = mask.restored("https", ("api.example", 443), b"/v1/", [(name, value)])
        return result.replace(_SECRET.encode(), b"SECRET").replace(dummy, b"DUMMY")

    assert restored(b"authorization", b"bearer DUMMY") == b"bearer SECRET"
    assert restored(b"authorization", b"token DUMMY") == b"token DUMMY"
    assert restored(b"authorization", b"token DUMMY", auth=["token"]) == b"token SECRET"
    header: dict[str, Any] = {"auth": ["header"], "header": "X-Key", "prefix": "Key "}
    assert restored(b"x-key", b"Key DUMMY", **header) == b"Key SECRET"
    assert restored(b"x-key", b"DUMMY", **header) == b"DUMMY"
    assert restored(b"x-key", b"Key xDUMMY", **header) == b"Key xDUMMY"
    assert restored(b"x-other", b"Key DUMMY", **header) == b"Key DUMMY"
    assert restored(b"authorization", b"Bearer DUMMY", **header) == b"Bearer DUMMY"


def test_a_secret_that_cannot_be_sent_stays_a_dummy() -> None:
    env = {"MY_TOKEN": "tok_abcd\nefghij"}
    mask = CredentialMask(env, b"key", _time(), _custom(patterns=[r"tok_[a-z\s]+"]))
    value = b"Bearer " + mask.masked(env)["MY_TOKEN"].encode()
    headers = [(b"Authorization", value)]
    assert mask.restored("https", ("api.example", 443), b"/v1/", headers) == headers


def test_two_providers_of_the_same_secret() -> None:
    both = {
        name: decode(CredentialProvider, _CUSTOM | {"url_prefixes": [f"https://{name}.example/"]})
        for name in ("a", "b")
    }
    env = {"MY_TOKEN": _SECRET}
    mask = CredentialMask(env, b"key", _time(), custom_providers(both))
    value = b"Bearer " + mask.masked(env)["MY_TOKEN"].encode()
    for host in ("a.example", "b.example"):
        assert mask.is_intercepted(host, 443)
        assert _restored(mask, host, value) == f"Bearer {_SECRET}".encode()
