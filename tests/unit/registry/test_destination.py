"""Where each kind of credential may be sent."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from exec_server.errors import StartupError
from exec_server.registry.destination import (
    Credential,
    Destinations,
    check_direct_url,
    check_registry_url,
    is_encrypted,
)

_TASKS = cast(Any, None)  # this credential has none

_API_KEY = (
    "remote exec-server API-key authentication is restricted to HTTPS openai.com and openai.org "
    "hosts and subdomains or loopback hosts"
)
_NO_HTTPS = (
    "environment registry configuration error: remote transport requires https for "
    "non-loopback endpoints"
)
_NO_WSS = _NO_HTTPS.replace("https", "wss")


def _refusal(destinations: Destinations, url: str, *, allow: bool = False) -> str | None:
    try:
        check_registry_url(destinations, url, allow_any_https=allow)
    except StartupError as error:
        return str(error)
    return None


_LOOPBACK = [
    "http://localhost",
    "http://LOCALHOST:80/x",
    "http://127.0.0.1:8080/prefix/",
    "http://127.9.9.9",
    "http://[::1]:99",
    "https://localhost",
]
_OWN = [
    "https://openai.com",
    "https://openai.org/x",
    "https://api.OpenAI.com",
    "https://a.b.openai.org",
]
_FOREIGN = [
    "https://example.com",
    "https://openai.com.evil.org",
    "https://evil-openai.com",
    "https://openai.community",
    "https://127.0.0.1.example.com",
]
_UNENCRYPTED = ["http://openai.com", "http://example.com", "http://x.localhost", "http://10.0.0.1"]


@pytest.mark.parametrize("url", _LOOPBACK)
@pytest.mark.parametrize("destinations", [d for d in Destinations if d is not Destinations.HTTPS])
def test_this_machine_is_allowed_without_encryption(destinations: Destinations, url: str) -> None:
    assert _refusal(destinations, url) is None


@pytest.mark.parametrize("url", _OWN)
def test_api_key_to_its_owner(url: str) -> None:
    assert _refusal(Destinations.OWN_HOSTS, url) is None


@pytest.mark.parametrize("url", _FOREIGN)
def test_api_key_to_others_needs_the_users_word(url: str) -> None:
    refusal = _refusal(Destinations.OWN_HOSTS, url)
    assert refusal is not None
    assert refusal.startswith(_API_KEY + "; use --registry-auth api-key")
    assert _refusal(Destinations.OWN_HOSTS, url, allow=True) is None


@pytest.mark.parametrize("url", _UNENCRYPTED)
def test_api_key_is_never_sent_unencrypted(url: str) -> None:
    assert _refusal(Destinations.OWN_HOSTS, url) == _API_KEY
    refusal = _refusal(Destinations.OWN_HOSTS, url, allow=True)
    assert refusal == f"{_API_KEY} (--registry-auth api-key lifts this for https only)"


def test_other_secrets_need_encryption() -> None:
    for url in [*_OWN, *_FOREIGN]:
        assert _refusal(Destinations.ENCRYPTED, url) is None
    for url in _UNENCRYPTED:
        assert _refusal(Destinations.ENCRYPTED, url) == _NO_HTTPS
        assert _refusal(Destinations.ENCRYPTED, url, allow=True) == _NO_HTTPS


_HTTPS_TEXT = "ChatGPT token registry URLs must use HTTPS without userinfo or fragments"


def test_some_need_encryption_on_this_machine_too() -> None:
    for url in ("https://registry.example", "https://127.0.0.1:9/?x=1", " HTTPS://localhost "):
        check_registry_url(Destinations.HTTPS, url)
    for url in (
        *("", "zzz", "http://127.0.0.1", "wss://h", "https://u@h", "https://u:p@h"),
        *("https://h/#x", "https://h/#", "https://"),
    ):
        with pytest.raises(StartupError) as refused:
            check_registry_url(Destinations.HTTPS, url)
        assert str(refused.value) == _HTTPS_TEXT


def test_urls_that_secrets_may_go_to() -> None:
    for url in ("https://h", "http://localhost:9/x", "http://127.0.0.2", "http://[::1]"):
        assert is_encrypted(url)
    for url in ("http://h", "http://127.0.0.1.example", "ws://localhost", "", "zzz"):
        assert not is_encrypted(url)


def test_defaults_of_a_credential() -> None:
    async def run() -> None:
        credential = Credential()
        await credential.ready(_TASKS)
        assert not await credential.renew([])
        with pytest.raises(NotImplementedError):
            await credential.headers("POST", "https://h", b"")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await credential.wait_ended()

    asyncio.run(run())


def test_some_go_anywhere() -> None:
    for url in [*_OWN, *_FOREIGN, *_UNENCRYPTED]:
        assert _refusal(Destinations.ANYWHERE, url) is None


def test_urls_that_are_none() -> None:
    what = "invalid remote exec-server registration URL"
    assert _refusal(Destinations.OWN_HOSTS, "") == f"{what}: relative URL without a base"
    assert _refusal(Destinations.OWN_HOSTS, "x") == f"{what}: relative URL without a base"
    assert _refusal(Destinations.OWN_HOSTS, "http://") == f"{what}: empty host"
    assert (
        _refusal(Destinations.OWN_HOSTS, "http://127.0.0.1:99999") == f"{what}: invalid port number"
    )
    assert _refusal(Destinations.ENCRYPTED, "x") == (
        "environment registry configuration error: invalid remote endpoint URL: "
        "relative URL without a base"
    )
    assert _refusal(Destinations.ANYWHERE, " ") == (
        "environment registry configuration error: environment registry base URL is required"
    )
    for url in ("ftp://localhost", "https://user:word@openai.com", "https://openai.com\\@evil.org"):
        refusal = _refusal(Destinations.OWN_HOSTS, url)
        assert refusal is not None
        assert refusal.startswith(what)


@pytest.mark.parametrize("url", ["wss://example.com/x", "ws://127.0.0.1:1", "ws://localhost"])
def test_direct_url(url: str) -> None:
    check_direct_url(url)


@pytest.mark.parametrize("url", ["ws://example.com", "http://127.0.0.1", "https://example.com"])
def test_direct_url_that_is_not_encrypted(url: str) -> None:
    with pytest.raises(StartupError) as refused:
        check_direct_url(url)
    assert str(refused.value) == _NO_WSS


def test_direct_url_that_is_none() -> None:
    with pytest.raises(StartupError, match="invalid remote endpoint URL: relative URL without"):
        check_direct_url("foo")
