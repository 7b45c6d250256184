"""Where each kind of credential may be sent."""

from __future__ import annotations

import pytest

from exec_server.errors import StartupError
from exec_server.registry.destination import Destinations, check_direct_url, check_registry_url

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
@pytest.mark.parametrize("destinations", Destinations)
def test_this_machine_is_always_allowed(destinations: Destinations, url: str) -> None:
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
