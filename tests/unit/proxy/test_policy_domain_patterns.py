"""Domain patterns: which are accepted, and what they match. All were tried at the reference."""

from __future__ import annotations

import time

import pytest

from exec_server.errors import InvalidParams
from exec_server.proxy import policy
from exec_server.proxy.policy import DomainPatterns


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("a.b", ["a.b"], ["x.a.b", "a.bc", "aa.b", "axb"]),
        ("A.B.", ["a.b"], ["a.b.c"]),
        ("a.b:443", ["a.b"], ["a.b.c"]),
        ("[::1]", ["::1"], ["::2"]),
        ("[0::1]:80", ["::1"], ["::2"]),
        ("*.a.b", ["x.a.b", "x.y.a.b"], ["a.b", "xa.b"]),
        ("**.a.b", ["a.b", "x.a.b", "x.y.a.b"], ["xa.b"]),
        ("*", ["a", "a.b", "::1"], []),
        ("[*]", ["a", "a.b"], []),
        ("**.*", ["a", "a.b"], []),
        ("*.*", ["a.b", "a.b.c"], ["a"]),
        ("c?.test", ["c1.test"], ["c.test", "c12.test"]),
        ("*a.test", ["a.test", "ya.test", "x.ya.test"], ["b.test"]),
        ("b.*.test", ["b.y.test", "b.y.z.test"], ["b.test"]),
        ("x*y.f", ["xy.f", "x1y.f", "x.y.f"], ["x.f"]),
        ("**.g*.test", ["g.test", "p.g1.test", "g.h.test"], ["p.test"]),
        ("a*b*c.d", ["abc.d", "a-b-c.d", "abbcc.d"], ["acb.d"]),
        # Requests name international hosts in ASCII.
        ("bücher.test", ["xn--bcher-kva.test"], ["bucher.test"]),
        ("BÜCHER.test.:443", ["xn--bcher-kva.test"], ["bücher.test"]),
        ("*.bücher.test", ["x.xn--bcher-kva.test"], ["xn--bcher-kva.test"]),
        ("**.x*.bücher.test", ["x1.xn--bcher-kva.test"], ["y.xn--bcher-kva.test"]),
        ("straße.test", ["xn--strae-oqa.test"], ["strasse.test"]),
        ("☃.test", ["xn--n3h.test"], []),
        ("\uff45\uff56\uff49\uff4c\u3002test", ["evil.test"], []),
        ("\uff11\uff12\uff17.0.0.1", ["127.0.0.1"], []),
    ],
)
def test_matches(pattern: str, matched: list[str], others: list[str]) -> None:
    patterns = DomainPatterns([pattern])
    assert [host for host in matched + others if patterns.match(host)] == matched


@pytest.mark.parametrize(
    ("pattern", "may_match"),
    [
        ("8.8.8.8", True),
        ("[::1]", True),
        ("10.*", True),
        ("10.0.0.?", True),
        ("1*8", True),
        ("fe80*", True),
        ("2001:db8:*", True),
        ("::ffff:10.*", True),
        ("*.1", True),
        ("**.1", True),
        ("**.*", True),
        ("*", True),
        ("*.169.254", True),
        ("a.b", False),
        ("localhost", False),
        ("cafe", False),
        ("*.de", False),
        ("**.de", False),
        ("*.ad*", False),
        ("10.*.test", False),
        ("b*.cafe", False),
        ("127.1", False),  # a name, for which the resolver finds an address
    ],
)
def test_which_patterns_are_about_addresses(pattern: str, may_match: bool) -> None:
    assert DomainPatterns(["other.test", pattern]).may_match_address == may_match
    assert not DomainPatterns(["other.test"]).may_match_address


def test_only_a_pattern_without_wildcards_names_a_host() -> None:
    patterns = DomainPatterns(["a.b", "*.c", "*"])
    assert patterns.names("a.b")
    assert not patterns.names("x.c")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("", "domain pattern is empty"),
        ("  ", "domain pattern is empty"),
        ("*.", "domain pattern is empty"),
        ("a b", "unsupported domain pattern syntax: a b"),
        ("a\tb", "unsupported domain pattern syntax: a\tb"),
        ("http://x/", "unsupported domain pattern syntax: http://x/"),
        ("{a,b}.c", "unsupported domain pattern syntax: {a,b}.c"),
        ("a}b", "unsupported domain pattern syntax: a}b"),
        ("a\\b", "unsupported domain pattern syntax: a\\b"),
        ("1.2.3.4/8", "unsupported domain pattern syntax: 1.2.3.4/8"),
        ("[x]", "brackets are only supported for IPv6 literals or [*]: [x]"),
        ("[::1", "brackets are only supported for IPv6 literals or [*]: [::1"),
        ("**", "unsupported repeated wildcard: **"),
        *(
            (
                pattern,
                f"domain pattern has no ASCII form: {pattern} (a label with other letters must "
                "be a valid international name without wildcards; write it as xn--…)",
            )
            for pattern in (
                *("bü*.test", "*ü.test", "bü?cher.test", "\uff0a.test", "a\u200d.test"),
                *("ü" * 64 + ".test", "ü." + "a." * 127, "\uff0f.test"),
            )
        ),
        ("**.a.**", "unsupported repeated wildcard: **.a.**"),
    ],
)
def test_refused_patterns(pattern: str, text: str) -> None:
    for denied in (False, True):
        with pytest.raises(InvalidParams) as caught:
            DomainPatterns([pattern], denied=denied)
        assert caught.value.message == f"invalid network proxy config: {text}"


@pytest.mark.parametrize("pattern", ["*", "[*]", "**.*"])
def test_not_everything_can_be_denied(pattern: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        DomainPatterns([pattern], denied=True)
    assert caught.value.message == (
        f"invalid network proxy config: invalid value for network.denied_domains: {pattern} "
        "(allowed exact hosts or scoped wildcards like *.example.com or **.example.com)"
    )


@pytest.mark.parametrize("pattern", ["*.*", "*.a", "**.a", "?", "a", "_x.y", "a@b"])
def test_patterns_that_can_be_denied(pattern: str) -> None:
    DomainPatterns([pattern], denied=True)


def test_number_and_length_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MAX_PATTERNS", 2)
    monkeypatch.setattr(policy, "PATTERN_CHARACTERS", 4)
    DomainPatterns(["aaaa", "b"])
    for patterns in (["a", "b", "c"], ["aaaaa"]):
        with pytest.raises(InvalidParams, match="at most 2 domain patterns of 4 characters"):
            DomainPatterns(patterns)


def test_many_stars_take_no_long_time() -> None:
    patterns = DomainPatterns(["*a" * 100 + "b"])
    begin = time.process_time()
    assert not patterns.match("a" * 253)
    assert time.process_time() - begin < 1
