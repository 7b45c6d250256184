"""Patterns of clients for secrets: what they find, dummies that fit, and their time limit."""

from __future__ import annotations

import itertools
import re
import time

import pytest

from exec_server.errors import InvalidParams
from exec_server.proxy import credentials
from exec_server.proxy.credentials import (
    PATTERN_CHARACTERS,
    Draw,
    SearchTime,
    SecretPatterns,
    UnusablePattern,
)

_TOKEN = "tok_abcdefghij"


def _found(pattern: str, text: str, *, is_named: bool = True) -> list[str]:
    return list(SecretPatterns([pattern]).find(text, SearchTime(time.monotonic), is_named=is_named))


def _draw() -> Draw:
    count = itertools.count(7)
    return lambda alphabet: alphabet[next(count) * 13 % len(alphabet)]


def test_all_secrets_of_a_text_are_found() -> None:
    text = f"a {_TOKEN},tok_0123456789KL"
    assert _found("tok_[a-z0-9]{10}", text) == [_TOKEN, "tok_0123456789"]
    assert _found("tok_[a-z]{99}", text) == []
    assert _found("^tok_[a-z]+$", _TOKEN) == [_TOKEN]


def test_empty_matches_are_no_secrets() -> None:
    assert _found(r"\b", "a b") == []


def test_several_patterns() -> None:
    patterns = SecretPatterns(["aa[0-9]+", "bb[0-9]+"])
    assert list(patterns.find("bb1 aa2", SearchTime(time.monotonic), is_named=True)) == [
        "aa2",
        "bb1",
    ]


@pytest.mark.parametrize("pattern", [r"\w+", ".+", "[a-z]{8,}", "[0-9]{12}", "[A-F0-9]{8}"])
def test_a_pattern_of_ordinary_text_holds_for_its_own_variables_only(pattern: str) -> None:
    text = "abcdefghijkl01234567890123ABCDEF"
    assert _found(pattern, text)
    assert _found(pattern, text, is_named=False) == []


@pytest.mark.parametrize(
    "pattern", ["tok_[a-z]+", "(?i)TOK_[a-z]{10}", "[A-Z]{2}-[0-9]{6}", "[A-Za-z0-9]{24}"]
)
def test_a_specific_pattern_holds_for_all_variables(pattern: str) -> None:
    text = f"{_TOKEN} AB-123456 abcdefghABCDEFGH01234567"
    assert _found(pattern, text, is_named=False)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(", "is no regular expression"),
        ("a{2,1}", "is no regular expression"),
        ("(" * 500 + ")" * 500, "is no regular expression"),
        (".*", "matches the empty text"),
        ("(.*)" * 7 + r"\1\2\3\4\5\6\7[\x01\x02]", "takes too long for a short text"),
        ("a?", "matches the empty text"),
        ("a{65535}" * 100, "has more than 4000 parts with all repetitions"),
        ("(?:a{100}){100}", "has more than 4000 parts"),
        (r"(?:a{100}[(]\)){100}", "has more than 4000 parts"),
        ("(?:[[a]--[(]]a{100}){100}", "has more than 4000 parts"),
        ("(){5000}(?#comment)", "has more than 4000 parts"),
        ("(?x)(?:a{1 00}) {10 0}", "has more than 4000 parts"),
        ("(?x:(?:a{100}) # }\n {100})", "has more than 4000 parts"),
        ("(?x)a{#\n65535}", "has a comment within a repetition"),
        ("a" * (PATTERN_CHARACTERS + 1), f"is longer than {PATTERN_CHARACTERS} characters"),
    ],
)
def test_unusable_patterns(pattern: str, text: str) -> None:
    with pytest.raises(UnusablePattern, match=text):
        SecretPatterns([pattern])


@pytest.mark.parametrize(
    "pattern",
    [
        *("a{4000}", "a{1,65535}", "a{,65535}b", "(?:a(?#[)){1000}(?:b|c){400}", "[a{9999}]"),
        *("[[:alnum:]]{2000}", "(?x) a{20} [[:digit:]]{10} # a comment\n (?: b ){9}"),
    ],
)
def test_patterns_have_many_parts(pattern: str) -> None:
    SecretPatterns([pattern])


@pytest.mark.parametrize(
    ("pattern", "value", "kept"),
    [
        ("tok_[a-z0-9]{10}", _TOKEN, "tok_"),
        ("AKIA[0-9A-Z]{16}", "AKIA0123456789ABCDEF", "AKIA"),
        ("[A-Z]{4}-[0-9]{6}", "ABCD-123456", ""),
        ("(?:foo|bar)-[a-f0-9]{8}", "bar-00ff00ff", "bar-"),
        (r"eyJ[\w-]+\.[\w-]+\.[\w-]+", "eyJhbGci.eyJzdWIi.c2lnbmF0dXJl", "eyJ"),
        (".+", "correct horse battery staple", ""),
        ("[0-9]{12}", "123456789012", ""),
    ],
)
def test_dummies_fit_and_keep_little(pattern: str, value: str, kept: str) -> None:
    dummy = SecretPatterns([pattern]).dummy(value, _draw(), SearchTime(time.monotonic))
    assert dummy is not None
    assert re.fullmatch(pattern, dummy)
    assert dummy.startswith(kept)
    same = [one for one, other in zip(dummy[len(kept) :], value[len(kept) :], strict=True)
            if one == other and one.isalnum()]  # fmt: skip
    assert len(same) < 4


@pytest.mark.parametrize(
    ("pattern", "value"),
    [("hunter2-secret", "hunter2-secret"), ("[a-z]{7}", "abcdefg"), ("a", "other")],
)
def test_no_dummy_fits(pattern: str, value: str) -> None:
    assert SecretPatterns([pattern]).dummy(value, _draw(), SearchTime(time.monotonic)) is None


def test_a_pattern_of_exponential_time_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "SEARCH_SECONDS", 0.02)
    patterns = SecretPatterns(["(x+)+y"])
    search_time = SearchTime(time.monotonic)
    with pytest.raises(InvalidParams, match="take more than"):
        list(patterns.find("x" * 4000, search_time, is_named=True))
    with pytest.raises(
        InvalidParams, match="take more than"
    ):  # the time of a start is over for all of its patterns
        list(SecretPatterns(["b"]).find("b", search_time, is_named=True))
