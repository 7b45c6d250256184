r"""The dialect of fs/grep: what a pattern matches, and what is refused."""

from __future__ import annotations

import pytest
import regex

from exec_server.errors import InvalidParams
from exec_server.filesystem.line_patterns import LinePattern

pytestmark = pytest.mark.quick


def _spans(
    pattern: str, text: str, *, literal: bool = False, ignore_case: bool = False
) -> list[str]:
    lines = LinePattern(pattern, literal=literal, ignore_case=ignore_case)
    flags = regex.V0 | regex.M | (regex.I if lines.ignore_case else 0)
    return [match[0] for match in regex.finditer(lines.exact, text, flags)]


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("a.c", "abc a\nc", ["abc"]),
        ("(?s)a.c", "abc a\nc", ["abc"]),
        ("^b$", "a\nb\nc", ["b"]),
        (r"\Ab\Z|\Ac\z", "a\nb\nc", ["b", "c"]),
        (r"a\s*b", "a b a\nb", ["a b"]),
        (r"a\W\D\Sb", "a\n  b a -xb", ["a -xb"]),
        (r"a[^x]b", "a\nb a-b", ["a-b"]),
        (r"a[\s\S]b", "a\nb a-b", ["a-b"]),
        (r"a[^\s\S]b", "a\nb a-b", []),
        (r"a[[:alpha:][:^alpha:]]b", "a\nb a-b", ["a-b"]),
        (r"a[\x00-\x20]b", "a\nb a b", ["a b"]),
        (r"a(?!\s)", "a\nab a ", ["a", "a"]),
        (r"(?<!\s)a", "\na a", ["a"]),
        (r"a\n?b", "ab a\nb", ["ab"]),
        (r"a\p{Cc}b", "a\nb a\tb", ["a\tb"]),
        (r"\<foo\>", "foo xfoo foox", ["foo"]),
        (r"\bfoo\B", "foo foox", ["foo"]),
        ("[[:alpha:]]+", "1aé2", ["aé"]),
        ("[[:^alpha:]]", "a1", ["1"]),
        ("[]a]+", "]a[", ["]a"]),
        ("[[a-]+", "[a-]", ["[a-"]),
        (r"[\]\-\t\b\w]+", "x]-\t\b", ["x]-\t\b"]),
        ("[a-c]+", "abcd", ["abc"]),
        (r"\x61\u0062\U00000063\x{64}\u{e9}", "abcdé", ["abcdé"]),
        (r"[\x61-\x63]+", "abcd", ["abc"]),
        ("a{2}b{,1}c{1,}", "aacc", ["aacc"]),
        ("f(x) {y}|{e<=1}", "fx {y} {e<=1}", ["fx {y}", "{e<=1}"]),
        (r"\.\/\é", "./é", ["./é"]),
        ("(?:a)(?#b)(?P<n>c)(?P=n)", "acc", ["acc"]),
        (r"(?<n>a)\1(?>b)(?(n)c|d)", "aabc", ["aabc"]),
        ("(?i)ab", "AB", ["AB"]),
        ("(?i:a)b(?-i:c)(?m-s:d)", "Abcd ABcd", ["Abcd"]),
        ("a*?b++", "abb", ["abb"]),
        (r"\pL\PL", "a1", ["a1"]),
    ],
)
def test_matches(pattern: str, text: str, matches: list[str]) -> None:
    assert _spans(pattern, text) == matches


def test_a_literal_pattern() -> None:
    assert _spans(r"a.[\d", r"a.[\d abcd", literal=True) == [r"a.[\d"]
    assert _spans("É.", "é. éx", literal=True, ignore_case=True) == ["é."]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("", "1 to 4096"),
        ("x" * 4097, "1 to 4096"),
        ("a\nb", "line break"),
        ("a\0b", "null character"),
        ("(a", "a parenthesis is not closed"),
        ("a)", "a parenthesis is not opened"),
        ("[a", "a set of characters is not closed"),
        ("[[:none:]]", "is not a class"),
        ("[b-a]", "a range of characters"),
        (r"[\w-a]", "a range of characters"),
        ("a\\", r"'\\\\' begins nothing"),
        ("(?R)", "begins nothing"),
        ("(?1)", "begins nothing"),
        ("(?x)a", "begins nothing"),
        ("(*SKIP)", "begins nothing"),
        (r"\K", "is not known"),
        (r"[\X]", "is not known"),
        (r"\U00110000", "is not a character"),
        ("a(?i)b", "at its beginning"),
        ("a{4001}", "more than 4000 parts"),
        ("(?:()){2001}", "more than 4000 parts"),
        ("(a{1000}){1000}", "more than 4000 parts"),
        ("a{99999999999}", "a repetition is too long"),
    ],
)
def test_refused_patterns(pattern: str, text: str) -> None:
    with pytest.raises(InvalidParams, match=text):
        LinePattern(pattern, literal=False, ignore_case=False)


@pytest.mark.parametrize(
    ("pattern", "ignore_case", "wide"),
    [
        ("ab", False, "ab"),
        ("a-é", False, r"a\x2d(?:\xc3\xa9)"),
        ("ak", True, r"a(?:k|[\x80-\xff]{1,4})"),
        ("é", True, r"(?:.|[\x80-\xff]{1,4})"),
        (r"^a\b$", False, "(?:)a(?:)(?:)"),
        ("(?=x)a(?<!y)", False, "(?:)a(?:)"),
        ("[a-c]{,2}", False, "[a-c]{0,2}"),
        (r"[a\n]", False, r"(?:.|[\x80-\xff]{1,4})"),
        (r"(?P<n>a)|\n", False, r"(?:a)|(?:.|[\x80-\xff]{1,4})"),
    ],
)
def test_the_wide_pattern(pattern: str, ignore_case: bool, wide: str) -> None:
    assert LinePattern(pattern, literal=False, ignore_case=ignore_case).wide == wide


def test_flags_widen_the_whole_pattern() -> None:
    assert LinePattern("(?i:a)b", literal=False, ignore_case=False).wide_ignores_case
    assert not LinePattern("(?:i)b", literal=False, ignore_case=False).wide_ignores_case
