"""Hosts of URLs: the spellings that are accepted, and the host that each of them means."""

from __future__ import annotations

import pytest

from exec_server.protocol.url_host import (
    INVALID_IPV4,
    INVALID_IPV6,
    INVALID_NAME,
    MAX_CHARACTERS,
    domain_to_ascii,
    parse_host,
)

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
    ("text", "why"),
    [
        ("", "empty host"),
        ("\u00ad", "empty host"),
        *((f"a{character}b", INVALID_NAME) for character in " \x00\x7f#%/:<>?@[\\]^|"),
        ("a%2fb", INVALID_NAME),
        ("a%ffb", INVALID_NAME),
        ("℀.com", INVALID_NAME),
        ("⒈.com", INVALID_NAME),
        ("\u0378.com", INVALID_NAME),
        ("\u0301a.com", INVALID_NAME),
        ("a\u200cb.com", INVALID_NAME),
        ("aא.com", INVALID_NAME),
        ("אב.1a", INVALID_NAME),
        ("xn--a.com", INVALID_NAME),
        ("xn--.com", INVALID_NAME),
        ("xn--a-ecp.ru", INVALID_NAME),
        ("xn--ls8h=.la", INVALID_NAME),
        ("xn--1ug.com", INVALID_NAME),
        ("xn--zn7c.com", INVALID_NAME),
        ("xn--iñvalid.com", INVALID_NAME),
        ("ü" * (MAX_CHARACTERS + 1), INVALID_NAME),
        ("256.0.0.1", INVALID_IPV4),
        ("1.2.3.256", INVALID_IPV4),
        ("1.2.3.4.5", INVALID_IPV4),
        ("1..4", INVALID_IPV4),
        ("foo.09", INVALID_IPV4),
        ("ü.1", INVALID_IPV4),
        ("xn--xn---epa", INVALID_NAME),
        ("xn--é", INVALID_NAME),
        ("9" * 5_000, INVALID_IPV4),
        ("[::1", INVALID_IPV6),
        ("[::1]x", INVALID_IPV6),
        ("[::1%25eth0]", INVALID_IPV6),
        ("[1::2::3]", INVALID_IPV6),
    ],
)
def test_no_host(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        parse_host(text)


def test_longest_international_name_is_encoded() -> None:
    name = "".join(map(chr, range(0x4E00, 0x4E00 + MAX_CHARACTERS)))
    assert domain_to_ascii(name) == "xn--" + name.encode("punycode").decode()
