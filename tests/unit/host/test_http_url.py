"""URLs as browsers read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.host.http_url import HttpUrl, InvalidUrl, OtherScheme, parse


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" http://h/x\n", "http://h/x"),
        ("HTTP://HOST:80", "http://host/"),
        ("https://h:443/?", "https://h/?"),
        ("http://h:081", "http://h:81/"),
        ("http://h?q", "http://h/?q"),
        ("http://h/a/../b/./c/", "http://h/b/c/"),
        ("http://h/..", "http://h/"),
        ("http://h/a/%2E%2e/b/.", "http://h/b/"),
        ("http://h//a//b", "http://h//a//b"),
        ("http://h/a b?c d\"<>'#e f`", "http://h/a%20b?c%20d%22%3C%3E%27#e%20f%60"),
        ("http://h/%zz{}|^`\\x", "http://h/%zz%7B%7D|^%60/x"),
        ("http://h/ü?ü#ü", "http://h/%C3%BC?%C3%BC#%C3%BC"),
        ("http://h/a\tb\nc", "http://h/abc"),
        ("http:\\\\h\\x", "http://h/x"),
        ("http:h/x", "http://h/x"),
        ("http:////h/x", "http://h/x"),
        ("http://u:p@h/", "http://h/"),
        ("http://%48%6f/", "http://ho/"),
        ("http://ü.test/", "http://xn--tda.test/"),
        ("http://a..b/", "http://a..b/"),
        ("http://[::0001]:1/", "http://[::1]:1/"),
        ("http://127.1/", "http://127.0.0.1/"),
        ("http://0x7F.0.1", "http://127.0.0.1/"),
        ("http://017700000001/", "http://127.0.0.1/"),
        ("http://2130706433./", "http://127.0.0.1/"),
        ("http://1.2.3.4x/", "http://1.2.3.4x/"),
    ],
)
def test_parse(text: str, shown: str) -> None:
    assert str(parse(text)) == shown


def test_parts() -> None:
    url = parse("https://u%20s:p%40@Host:8443/a?b#c")
    assert url == HttpUrl("https", "host", 8443, "/a", "b", "c", b"u s", b"p@")
    assert url.origin == ("https", "host", 8443)
    assert url.root == "https://host:8443/"
    assert url.resource == "https://host:8443/a?b"


def test_password_with_an_at_sign() -> None:
    assert parse("http://a:b@@h/").password == b"b@"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "relative URL without a base"),
        ("//h/", "relative URL without a base"),
        ("1http://h", "relative URL without a base"),
        ("http:", "empty host"),
        ("http:///", "empty host"),
        ("http://:80/", "empty host"),
        ("http://h:65536/", "invalid port number"),
        ("http://h:x/", "invalid port number"),
        ("http://h:" + "1" * 5000, "invalid port number"),
        ("http://[::1", "invalid IPv6 address"),
        ("http://[::1]x/", "invalid IPv6 address"),
        ("http://[fe80::1%25eth0]/", "invalid IPv6 address"),
        ("http://256.0.0.1/", "invalid IPv4 address"),
        ("http://1.2.3.4.5/", "invalid IPv4 address"),
        ("http://1.2.3.256/", "invalid IPv4 address"),
        ("http://1..4/", "invalid IPv4 address"),
        ("http://09/", "invalid IPv4 address"),
        ("http://" + "9" * 5000, "invalid IPv4 address"),
        ("http://a b/", "invalid international domain name"),
        ("http://a%00b/", "invalid international domain name"),
        ("http://%ff/", "invalid international domain name"),
        ("http://%/", "invalid international domain name"),
        ("http://xn--a/", "invalid international domain name"),
    ],
)
def test_no_url(text: str, why: str) -> None:
    with pytest.raises(InvalidUrl) as failed:
        parse(text)
    assert str(failed.value) == why


@pytest.mark.parametrize("text", ["ftp://h/", "FTP:x", "file:///x", "mailto:x"])
def test_other_scheme(text: str) -> None:
    with pytest.raises(OtherScheme) as failed:
        parse(text, parse("http://h/"))
    assert failed.value.scheme == text.partition(":")[0].lower()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "http://h/a/b?q"),
        ("x", "http://h/a/x"),
        ("../../x", "http://h/x"),
        ("/x?y", "http://h/x?y"),
        ("?z", "http://h/a/b?z"),
        ("#g", "http://h/a/b?q#g"),
        ("//k/z", "http://k/z"),
        ("\\\\k\\z", "http://k/z"),
        ("http:x", "http://h/a/x"),
        ("https:x", "https://x/"),
        ("http://k", "http://k/"),
    ],
)
def test_relative(text: str, shown: str) -> None:
    assert str(parse(text, parse("http://h/a/b?q#f"))) == shown


@given(st.text(alphabet="aü:/?#@[]\\%2e. \t{}<>\"'`^|~0x1"))
def test_what_is_normal_stays_as_it_is(rest: str) -> None:
    try:
        url = parse("http://" + rest)
    except InvalidUrl:
        return
    assert str(url).isascii()
    assert str(parse(str(url))) == str(url)
    assert parse("", url).resource == url.resource
