"""URLs, hosts and ports: the spellings that are accepted, and what each of them means."""

from __future__ import annotations

import subprocess
import sys
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.protocol.urls import (
    INVALID_NAME,
    InvalidUrl,
    OtherScheme,
    Url,
    domain_to_ascii,
    host_port,
    parse_address,
    parse_host,
    parse_http_url,
    parse_port,
    parse_url,
    split_authority,
)

_ALL = frozenset({"http", "https", "ws", "wss", "unix"})


# ---- hosts and ports ------------------------------------------------------------------


def test_only_the_usual_spelling_is_an_address() -> None:
    assert parse_address("127.0.0.1") == IPv4Address("127.0.0.1")
    assert parse_address("::ffff:7f00:1") == IPv6Address("::ffff:127.0.0.1")
    for other in ("127.1", "0x7f000001", "2130706433", "0177.0.0.1", "fe80::1%lo", "a"):
        assert parse_address(other) is None


def test_authority_is_written() -> None:
    assert host_port("a", 1) == "a:1"
    assert host_port("::1", 1) == "[::1]:1"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a", "a", None),
        ("a:1", "a", 1),
        ("a b:080", "a b", 80),
        (":1", "", 1),
        ("[0::1]", "::1", None),
        ("[fe80::1%eth0]:2", "fe80::1%eth0", 2),
    ],
)
def test_authority_is_split(text: str, host: str, port: int | None) -> None:
    assert split_authority(text) == (host, port)


@pytest.mark.parametrize("text", ["[::1", "[a]", "[::1]x", "[127.0.0.1]", "a:", "a:1:2", "[::1]:"])
def test_authority_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^invalid (host|port number)$"):
        split_authority(text)


@pytest.mark.parametrize("text", ["", "0", "65536", "123456", "-1", "+1", " 1", "\u0661", "x"])
def test_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^invalid port number$"):
        parse_port(text)


def test_plain_hosts_need_no_parser() -> None:
    code = """
import sys
from exec_server.protocol import urls
assert urls.parse_host("a-b.example") == urls.domain_to_ascii("A-b.example") == "a-b.example"
urls.parse_url("wss://[::1]:80/x?y", frozenset({"wss"}))
assert "ada_url" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Recorded from the reference.
HOSTS = [
    ("Example.COM", "example.com"),
    ("a.", "a."),
    ("a..b", "a..b"),
    ("-a_b-.ab--c", "-a_b-.ab--c"),
    ("a!$&'()*+,;=~b", "a!$&'()*+,;=~b"),
    ("%41.com", "a.com"),
    ("straße.de", "xn--strae-oqa.de"),
    ("ẞ.de", "xn--zca.de"),
    ("Bücher.example", "xn--bcher-kva.example"),
    ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
    ("xn--strae-oqa.de", "xn--strae-oqa.de"),
    ("βόλος.com", "xn--nxasmm1c.com"),
    ("☃.net", "xn--n3h.net"),
    ("xn--ls8h.la", "xn--ls8h.la"),
    ("\U0001fae9.com", "xn--b39h.com"),
    ("日本語。jp", "xn--wgv71a119e.jp"),
    ("\uff41\uff42\uff43.com", "abc.com"),
    ("℻", "fax"),
    ("-ü.com", "xn----eha.com"),
    ("ü_b.com", "xn--_b-wka.com"),
    ("ü..b", "xn--tda..b"),
    (".ü", ".xn--tda"),
    ("ü" * 70, "xn--td" + "a" * 70),
    ("a\u00adb.com", "ab.com"),
    ("\u00ad.com", ".com"),
    ("ن\u0627م\u0647\u200c\u0627ی.com", "xn--mgba3gch31f060k.com"),
    ("क्\u200dष.com", "xn--11b2ezcw70k.com"),
    ("א1.com", "xn--1-zhc.com"),
    ("אב..com", "xn--4dbc..com"),
    ("l·l.com", "xn--ll-0ea.com"),
    ("1.ü", "1.xn--tda"),
    ("127.1", "127.0.0.1"),
    ("0x7f.1", "127.0.0.1"),
    ("017700000001", "127.0.0.1"),
    ("2130706433.", "127.0.0.1"),
    ("\uff11.\uff12.\uff13.\uff14", "1.2.3.4"),
    ("0x.0", "0.0.0.0"),
    ("1.2.3.4x", "1.2.3.4x"),
    ("[0:0::1]", "[::1]"),
    ("[::127.0.0.1]", "[::7f00:1]"),
]


@pytest.mark.parametrize(("text", "host"), HOSTS)
def test_host(text: str, host: str) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize("host", [host for _, host in HOSTS])
def test_normalised_host_stays_as_it_is(host: str) -> None:
    assert parse_host(host) == host


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\u00ad",
        *(f"a{character}b" for character in " \x00\x7f#%/:<>?@[\\]^|"),
        "a%2fb",
        "a%ffb",
        "℀.com",
        "⒈.com",
        "\u0378.com",
        "\u0301a.com",
        "a\u200cb.com",
        "aא.com",
        "xn--a.com",
        "xn--.com",
        "xn--a-ecp.ru",
        "xn--ls8h=.la",
        "xn--1ug.com",
        "xn--zn7c.com",
        "xn--iñvalid.com",
        "ü" * 10_000,
        "256.0.0.1",
        "1.2.3.256",
        "1.2.3.4.5",
        "1..4",
        "foo.09",
        "ü.1",
        "xn--xn---epa",
        "xn--é",
        "9" * 5_000,
        "[::1",
        "[::1]x",
        "[::1%25eth0]",
        "[1::2::3]",
    ],
)
def test_no_host(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{INVALID_NAME}$"):
        parse_host(text)


def test_international_name() -> None:
    assert domain_to_ascii("Bücher.Example") == "xn--bcher-kva.example"
    assert domain_to_ascii("A_b*.Example") == "a_b*.example"
    for name in ("xn--a.example", "\u0301a.example", "\u00ad"):
        with pytest.raises(ValueError, match=f"^{INVALID_NAME}$"):
            domain_to_ascii(name)


# ---- URLs of users --------------------------------------------------------------------


def _url(text: str) -> Url:
    return parse_url(text, _ALL)


@pytest.mark.parametrize(
    ("text", "expected", "authority"),
    [
        ("ws://relay", Url("ws", "relay", 80, "/"), "relay"),
        ("  ws://relay \n", Url("ws", "relay", 80, "/"), "relay"),
        ("wss://Relay.Example:443/A?b=C", Url("wss", "relay.example", 443, "/A?b=C"), None),
        ("WSS://relay:80", Url("wss", "relay", 80, "/"), "relay:80"),
        ("http://relay:8080/", Url("http", "relay", 8080, "/"), "relay:8080"),
        ("https://relay:/", Url("https", "relay", 443, "/"), "relay"),
        ("unix:/run/a b?c", Url("unix", "/run/a b?c", 0, "/"), "localhost"),
        ("unix:///run/s", Url("unix", "/run/s", 0, "/"), "localhost"),
        ("http://[::1]:80/x", Url("http", "::1", 80, "/x"), "[::1]"),
        ("https://[2001:DB8::1]:8443", Url("https", "2001:db8::1", 8443, "/"), None),
        ("ws://127.0.0.1:9?x=1", Url("ws", "127.0.0.1", 9, "/?x=1"), "127.0.0.1:9"),
        ("ws://relay/a b?c d#fragment", Url("ws", "relay", 80, "/a%20b?c%20d"), "relay"),
        ("ws://relay/%2F//a/../b?%41&sig=a/b+c=", None, "relay"),
        ("ws://bücher.example/ä", Url("ws", "xn--bcher-kva.example", 80, "/%C3%A4"), None),
    ],
)
def test_url_is_taken_apart(text: str, expected: Url | None, authority: str | None) -> None:
    url = _url(text)
    if expected is not None:
        assert url == expected
    if authority is not None:
        assert url.authority == authority


def test_target_is_sent_as_it_was_given() -> None:
    assert _url("ws://relay/%2F//a/../b?%41&sig=a/b+c=").target == "/%2F//a/../b?%41&sig=a/b+c="


def test_what_is_secure() -> None:
    assert [_url(f"{scheme}://relay").secure for scheme in ("http", "https", "ws", "wss")] == [
        False,
        True,
        False,
        True,
    ]
    assert _url("wss://[2001:db8::1]:8443").authority == "[2001:db8::1]:8443"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "relative URL without a base"),
        ("relay", "relative URL without a base"),
        ("/path", "relative URL without a base"),
        ("ftp://relay", "URL must begin with ws:// or wss://"),
        ("http://relay", "URL must begin with ws:// or wss://"),
        ("unix:/s", "URL must begin with ws:// or wss://"),
        ("ws://", "empty host"),
        ("ws:///path", "empty host"),
        ("ws://:80", "empty host"),
        ("ws://user@relay", "URL must not contain a user name or password"),
        ("ws://user:secret@relay", "URL must not contain a user name or password"),
        ("ws://relay:0", "invalid port number"),
        ("ws://relay:65536", "invalid port number"),
        ("ws://relay:port", "invalid port number"),
        ("ws://re lay", "invalid host"),
        ("ws://xn--a", "invalid host"),
        ("ws://relay\\evil", "invalid host"),
        ("ws://a..b", "invalid host"),
        ("ws://" + "a" * 64, "invalid host"),
        ("ws://" + "a." * 127, "invalid host"),
        ("ws://[::1", "invalid URL"),
        ("ws://[::g]", "invalid URL|invalid host"),
        ("ws://relay/a\r\nHost: evil", "URL contains control characters"),
        ("ws://relay/\x7f", "URL contains control characters"),
    ],
)
def test_url_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^({reason})$"):
        parse_url(text, frozenset({"ws", "wss"}))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("unix:s", "the path of a unix socket must begin with /"),
        ("unix:", "the path of a unix socket must begin with /"),
        ("unix:/" + "s" * 107, "the path of a unix socket has at most 107 bytes"),
        ("unix:/a\nb", "URL contains control characters"),
        ("ftp://h", "URL must begin with http:// or https:// or unix: or ws:// or wss://"),
    ],
)
def test_invalid_unix_sockets(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}$"):
        _url(text)


# ---- URLs as browsers read them -------------------------------------------------------


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
        ("http://h/%zz{}|`\\x", "http://h/%zz%7B%7D|%60/x"),
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
def test_url_of_a_client(text: str, shown: str) -> None:
    assert str(parse_http_url(text)) == shown


def test_parts_of_a_url() -> None:
    url = parse_http_url("https://u%20s:p%40@Host:8443/a?b#c")
    assert url.href == "https://u%20s:p%40@host:8443/a?b#c"
    assert (url.user, url.password) == (b"u s", b"p@")
    assert str(url) == "https://host:8443/a?b#c"
    assert url.scheme == "https"
    assert url.root == "https://host:8443/"
    assert url.resource == "https://host:8443/a?b"


def test_password_with_an_at_sign() -> None:
    assert parse_http_url("http://a:b@@h/").password == b"b@"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "relative URL without a base"),
        ("//h/", "relative URL without a base"),
        ("1http://h", "relative URL without a base"),
        ("http:", "invalid URL"),
        ("http:///", "invalid URL"),
        ("http://:80/", "invalid URL"),
        ("http://h:65536/", "invalid URL"),
        ("http://h:x/", "invalid URL"),
        ("http://h:" + "1" * 5000, "invalid URL"),
        ("http://[::1", "invalid URL"),
        ("http://[::1]x/", "invalid URL"),
        ("http://[fe80::1%25eth0]/", "invalid URL"),
        ("http://256.0.0.1/", "invalid URL"),
        ("http://1.2.3.4.5/", "invalid URL"),
        ("http://1.2.3.256/", "invalid URL"),
        ("http://1..4/", "invalid URL"),
        ("http://09/", "invalid URL"),
        ("http://" + "9" * 5000, "invalid URL"),
        ("http://a b/", "invalid URL"),
        ("http://a%00b/", "invalid URL"),
        ("http://%ff/", "invalid URL"),
        ("http://%/", "invalid URL"),
        ("http://xn--a/", INVALID_NAME),
    ],
)
def test_no_http_url(text: str, why: str) -> None:
    with pytest.raises(InvalidUrl) as failed:
        parse_http_url(text)
    assert str(failed.value) == why


@pytest.mark.parametrize("text", ["ftp://h/", "FTP:x", "file:///x", "mailto:x"])
def test_other_scheme(text: str) -> None:
    with pytest.raises(OtherScheme) as failed:
        parse_http_url(text, parse_http_url("http://h/"))
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
    assert str(parse_http_url(text, parse_http_url("http://h/a/b?q#f"))) == shown


@given(st.text(alphabet="aü:/?#@[]\\%2e. \t{}<>\"'`^|~0x1"))
def test_what_is_normal_stays_as_it_is(rest: str) -> None:
    try:
        url = parse_http_url("http://" + rest)
    except InvalidUrl:
        return
    assert str(url).isascii()
    assert str(parse_http_url(str(url))) == str(url)
    assert parse_http_url("", url).resource == url.resource
