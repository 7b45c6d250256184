"""URL prefixes that may get a secret."""

from __future__ import annotations

import pytest

from exec_server.proxy.credentials import CredentialDestination, parse_destination


@pytest.mark.parametrize(
    ("prefix", "destination"),
    [
        ("https://Api.Example/", CredentialDestination("https", "api.example", 443, "/")),
        ("https://api.example", CredentialDestination("https", "api.example", 443, "/")),
        (
            "https://api.example:8443/v1/",
            CredentialDestination("https", "api.example", 8443, "/v1/"),
        ),
        ("https://*.a.example/v1", CredentialDestination("https", "*.a.example", 443, "/v1")),
        ("http://127.0.0.1:99/", CredentialDestination("http", "127.0.0.1", 99, "/")),
        ("http://[::1]/", CredentialDestination("http", "::1", 80, "/")),
        ("http://localhost/x", CredentialDestination("http", "localhost", 80, "/x")),
    ],
)
def test_prefixes(prefix: str, destination: CredentialDestination) -> None:
    assert parse_destination(prefix) == destination


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        ("", "no hostname"),
        ("https:///x", "no hostname"),
        ("https://u@a.example/", "user information"),
        ("https://a.example/?x", "user information"),
        ("https://a.example/#", "user information"),
        ("http://a.example/", "must use HTTPS"),
        ("http://127.0.0.1.example/", "must use HTTPS"),
        ("ftp://a.example/", "must use HTTPS"),
        ("https://*/", "wildcard"),
        ("https://*.example/", "wildcard"),
        ("https://a*.b.example/", "wildcard"),
        ("https://*.*.b.example/", "wildcard"),
        ("https://a b/", "exact hostname"),
        ("https://ä.example/", "exact hostname"),
        ("https://a.example/x/../y/", "exact hostname"),
        ("https://[::1/", "Invalid IPv6"),
        ("https://a.example:99999/", "Port out of range"),
    ],
)
def test_refused_prefixes(prefix: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_destination(prefix)


def test_hosts_below_a_wildcard() -> None:
    destination = parse_destination("https://*.a.example/")
    assert destination.has_host("https", "x.a.example", 443)
    assert destination.has_host("https", "y.x.a.example", 443)
    for host in ("a.example", "xa.example", "a.example.evil", "x.a.example.evil"):
        assert not destination.has_host("https", host, 443)
    assert not destination.has_host("https", "x.a.example", 80)
    assert not destination.has_host("http", "x.a.example", 443)


def test_hosts_that_are_named() -> None:
    destination = parse_destination("https://a.example/")
    assert destination.has_host("https", "a.example", 443)
    assert not destination.has_host("https", "x.a.example", 443)


@pytest.mark.parametrize(
    ("prefix", "below", "others"),
    [
        (
            "https://a.example/v1/",
            [
                *("/v1/", "/v1/x", "/v1/x?next=/../", "/v1/a..b", "/v1/%41", "/v1//x", "/v1/x;y=1"),
                *("/v1/.well-known/x", "/v1/a%2Fb", "/v1/%c3%a9", "/v1/100%25", "/v1/a...b"),
            ],
            [
                *("/", "/v1", "/v1x", "/V1/x", "//v1/x", "*", "/v1/../x", "/v1/.", "/v1/%2e%2e/x"),
                *("/v1/%252e%252e/x", "/v1/x/..%2fy", "/v1/..\\x", "/v1/%5c..%5cx", "/v1/%2E./x"),
                "/v1/%2525252525252e",
                # Parameters of Java servers, and what is removed before `..` is looked for.
                *("/v1/..;/x", "/v1/..;a=b/x", "/v1/..%3b/x", "/v1/..%253b/x", "/v1/.;/../x"),
                *("/v1/..%00/x", "/v1/%00/x", "/v1/x%00", "/v1/..%0a/x", "/v1/.%09./x"),
                *("/v1/..%20/x", "/v1/%20../x", "/v1/.../x", "/v1/..,/x", "/v1/..%3f/x"),
                *("/v1/x\\..\\y", "/v1/..%5cx", "/v1/..%255cx", "/v1/x/..;x?y", "/v1/..#"),
                # Overlong, wide and compatible forms of dots and slashes.
                *("/v1/%c0%ae%c0%ae/x", "/v1/..%c0%afx", "/v1/%u002e%u002e/x", "/v1/%%32%65./x"),
                *("/v1/%ef%bc%8e%ef%bc%8e/x", "/v1/%e2%80%a5/x", "/v1/..%ef%bc%8fx", "/v1/%"),
                *("/v1/%c2%ad../x", "/v1/%e9", "/v1/%25u002e%25u002e/x"),
            ],
        ),
        ("https://a.example/v1", ["/v1", "/v1/x", "/v1?x"], ["/v1x", "/v", "/v1/../x"]),
        ("https://a.example/", ["/", "/x", "/x/../y", "//x"], ["", "*", "http://b/"]),
    ],
)
def test_paths(prefix: str, below: list[str], others: list[str]) -> None:
    destination = parse_destination(prefix)
    assert [each for each in below if not destination.has_path(each.encode())] == []
    assert [each for each in others if destination.has_path(each.encode())] == []


def test_a_target_that_another_header_may_name() -> None:
    assert parse_destination("https://a.example/").has_path(None)
    assert not parse_destination("https://a.example/v1/").has_path(None)
