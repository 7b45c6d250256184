"""Providers of credentials: the built-in ones, and those of clients."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import decode
from exec_server.protocol.network import CredentialProvider
from exec_server.proxy.credentials import (
    MAX_CHARACTERS,
    MAX_ITEMS,
    MAX_PROVIDERS,
    CredentialDestination,
    Provider,
    Usage,
    built_in_providers,
    custom_providers,
    parse_destination,
)

_URL = "https://api.example/v1/"
_GOOD = {"env": ["MY_TOKEN"], "patterns": ["tok_[a-z]+"], "url_prefixes": [_URL]}


def _provider(**members: Any) -> Provider:
    [provider] = custom_providers({"mine": decode(CredentialProvider, _GOOD | members)})
    return provider


def test_a_provider_of_a_client() -> None:
    provider = _provider()
    assert provider.variables == ("MY_TOKEN",)
    assert provider.usage == Usage((parse_destination(_URL),), frozenset({b"bearer"}))
    assert provider.patterns is not None
    assert custom_providers(None) == custom_providers({}) == ()


def test_ways_of_authentication() -> None:
    assert _provider(auth=[]).usage.schemes == {b"bearer"}
    assert _provider(auth=["token", "basic"]).usage.schemes == {b"token", b"basic"}
    usage = _provider(auth=["basic", "header"], header="X-Api-Key", prefix="Key ").usage
    assert usage.schemes == {b"basic"}
    assert (usage.header, usage.prefix) == (b"x-api-key", b"Key ")
    alone = Usage((parse_destination(_URL),), frozenset(), b"x-api-key", b"Key ")
    assert _provider(header="X-Api-Key", prefix="Key ").usage == alone
    assert _provider(header="X-Api-Key", prefix="Key ", auth=["header"]).usage == alone


def test_a_prefix_that_a_variable_names() -> None:
    provider = _provider(url_prefixes=[], url_prefix_from_env="MY_URL")
    assert provider.usage_in({}).destinations == ()
    for value in ("http://a.example/", "https://", "https://a.example:x/"):
        assert provider.usage_in({"MY_URL": value}).destinations == ()
    expected = (CredentialDestination("https", "a.example", 443, "/x"),)
    assert provider.usage_in({"MY_URL": " https://a.example/x "}).destinations == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("127.0.0.1:99/x", CredentialDestination("http", "127.0.0.1", 99, "/x")),
        ("localhost", CredentialDestination("http", "localhost", 80)),
        ("a.example:444", CredentialDestination("https", "a.example", 444)),
    ],
)
def test_a_prefix_without_a_scheme(value: str, expected: CredentialDestination) -> None:
    provider = _provider(url_prefixes=[], url_prefix_from_env="MY_URL")
    assert provider.usage_in({"MY_URL": value}).destinations == (expected,)
    _, enterprise, _ = built_in_providers()
    [destination] = enterprise.usage_in({"GH_HOST": value}).destinations
    assert destination.scheme == "https"


def test_built_in_providers_of_ones_own_hosts() -> None:
    _, enterprise, openai = built_in_providers()
    expected = (CredentialDestination("https", "git.example", 443, "/"),)
    assert enterprise.usage_in({"GH_HOST": "Git.example"}).destinations == expected
    further = openai.usage_in({"OPENAI_BASE_URL": "https://a.example/v1"}).destinations
    assert further[1:] == (CredentialDestination("https", "a.example", 443, "/v1"),)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"env": []}, "credential provider `mine` has no environment keys"),
        ({"env": ["A-B"]}, "credential provider `mine` has an invalid environment key"),
        (
            {"env": ["A", "GH_TOKEN"]},
            "credential provider `mine` overlaps a built-in credential source",
        ),
        ({"patterns": []}, "credential provider `mine` has no credential patterns"),
        (
            {"patterns": ["a", ".*"]},
            "credential provider `mine` has a pattern that matches the empty text",
        ),
        ({"url_prefixes": []}, "credential provider `mine` has no destination URL prefixes"),
        (
            {"url_prefixes": [_URL, "http://a.example/"]},
            "credential provider `mine`: credential destination must use HTTPS unless it targets "
            "loopback over HTTP",
        ),
        (
            {"url_prefix_from_env": "1"},
            "credential provider `mine` has an invalid host environment key",
        ),
        (
            {"prefix": "x"},
            "credential provider `mine` requires header authentication to use a header prefix",
        ),
        (
            {"auth": ["header"]},
            "credential provider `mine` requires a header name exactly when using header "
            "authentication",
        ),
        (
            {"auth": ["bearer"], "header": "x"},
            "credential provider `mine` requires a header name exactly when using header "
            "authentication",
        ),
        (
            {"auth": ["header"], "header": "Host"},
            "credential provider `mine` has an invalid header name",
        ),
        (
            {"auth": ["header"], "header": "a b"},
            "credential provider `mine` has an invalid header name",
        ),
        (
            {"auth": ["header"], "header": "a", "prefix": "\n"},
            "credential provider `mine` has an invalid header prefix",
        ),
        (
            {"patterns": ["x"] * (MAX_ITEMS + 1)},
            f"credential provider `mine` has more than {MAX_ITEMS} items, or one of more than "
            f"{MAX_CHARACTERS} characters",
        ),
        (
            {"url_prefixes": ["x" * (MAX_CHARACTERS + 1)]},
            f"credential provider `mine` has more than {MAX_ITEMS} items, or one of more than "
            f"{MAX_CHARACTERS} characters",
        ),
    ],
)
def test_refused_providers(members: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        _provider(**members)
    assert caught.value.message == f"invalid network proxy config: {text}"


def test_names_and_number_of_providers() -> None:
    good = decode(CredentialProvider, _GOOD)
    with pytest.raises(InvalidParams, match="credential provider name must not be empty"):
        custom_providers({"": good})
    bad = decode(CredentialProvider, {})
    with pytest.raises(InvalidParams, match=r"`x{64}…` has no environment keys"):
        custom_providers({"x" * 65: bad})
    with pytest.raises(InvalidParams, match=f"at most {MAX_PROVIDERS} credential providers"):
        custom_providers({str(number): good for number in range(MAX_PROVIDERS + 1)})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            {"urls": []},
            "unknown field `urls`, expected one of `env`, `patterns`, `url_prefixes`, "
            "`url_prefix_from_env`, `auth`, `header`, `prefix`",
        ),
        ({"auth": None}, "invalid type: null, expected a sequence"),
        (
            {"auth": ["x"]},
            "unknown variant `x`, expected one of `bearer`, `token`, `basic`, `header`",
        ),
        (None, "invalid type: null, expected struct CredentialProviderConfig"),
    ],
)
def test_objects_that_are_no_providers(value: object, text: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        decode(CredentialProvider, value)
    assert caught.value.message == text
