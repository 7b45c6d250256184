"""Base64 members: strictness, and the reference's text for every kind of mistake."""

from __future__ import annotations

import base64

import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import Base64

# Recorded from the reference.
MISTAKES = [
    ("=", "Invalid symbol 61, offset 0."),
    ("==", "Invalid symbol 61, offset 0."),
    ("===", "Invalid symbol 61, offset 0."),
    ("====", "Invalid symbol 61, offset 0."),
    ("a", "Invalid input length: 1"),
    ("a=", "Invalid symbol 61, offset 1."),
    ("a==", "Invalid symbol 61, offset 1."),
    ("a===", "Invalid symbol 61, offset 1."),
    ("ab", "Invalid padding"),
    ("ab=", "Invalid padding"),
    ("ab==", "Invalid last symbol 98, offset 1."),
    ("aa==", "Invalid last symbol 97, offset 1."),
    ("ab===", "Invalid symbol 61, offset 2."),
    ("abc", "Invalid padding"),
    ("aaa=", "Invalid last symbol 97, offset 2."),
    ("abcd=", "Invalid symbol 61, offset 4."),
    ("abcd==", "Invalid symbol 61, offset 4."),
    ("abcd====", "Invalid symbol 61, offset 4."),
    ("abcda", "Invalid input length: 5"),
    ("abcdab", "Invalid padding"),
    ("abcdabc", "Invalid padding"),
    ("abcdaB==", "Invalid last symbol 66, offset 5."),
    ("ab=c", "Invalid symbol 61, offset 2."),
    ("a=bc", "Invalid symbol 61, offset 1."),
    ("=abc", "Invalid symbol 61, offset 0."),
    ("ab==abcd", "Invalid symbol 61, offset 2."),
    ("abcd=abc", "Invalid symbol 61, offset 4."),
    ("AA==AA==", "Invalid symbol 61, offset 2."),
    ("!", "Invalid symbol 33, offset 0."),
    ("!aaa", "Invalid symbol 33, offset 0."),
    ("a!aa", "Invalid symbol 33, offset 1."),
    ("aa!a", "Invalid symbol 33, offset 2."),
    ("aaa!", "Invalid symbol 33, offset 3."),
    ("aa!=", "Invalid symbol 33, offset 2."),
    ("aa=!", "Invalid symbol 61, offset 2."),
    ("aaaa!", "Invalid symbol 33, offset 4."),
    ("aaaa!===", "Invalid symbol 33, offset 4."),
    ("aaaaa!==", "Invalid symbol 33, offset 5."),
    ("aaaaaa!=", "Invalid symbol 33, offset 6."),
    ("aaaa aaaa", "Invalid symbol 32, offset 4."),
    ("aaaa\n", "Invalid symbol 10, offset 4."),
    ("YQ==\n", "Invalid symbol 10, offset 4."),
    (" YQ==", "Invalid symbol 32, offset 0."),
    ("YQ", "Invalid padding"),
    ("YQ=", "Invalid padding"),
    ("Y Q==", "Invalid symbol 32, offset 1."),
    ("é", "Invalid symbol 195, offset 0."),
    ("aé==", "Invalid symbol 195, offset 1."),
    ("aaé", "Invalid symbol 195, offset 2."),
    ("aaaé", "Invalid symbol 169, offset 4."),
    ("ł", "Invalid symbol 197, offset 0."),
    ("\U0001f600", "Invalid symbol 240, offset 0."),
    ("a\U0001f600", "Invalid symbol 128, offset 4."),
    ("aa\U0001f600", "Invalid symbol 240, offset 2."),
    ("aa==\U0001f600", "Invalid symbol 61, offset 2."),
    ("aa-_", "Invalid symbol 45, offset 2."),
    ("aa-=", "Invalid symbol 45, offset 2."),
    ("YR==", "Invalid last symbol 82, offset 1."),
    ("YWJ=", "Invalid last symbol 74, offset 2."),
    ("YWJj!", "Invalid symbol 33, offset 4."),
    ("aaaaaaaaa", "Invalid input length: 9"),
    ("aaaaaaaaaa", "Invalid padding"),
    ("aaaaaaaaaaa", "Invalid padding"),
    ("aaaaaaaaaaa=", "Invalid last symbol 97, offset 10."),
    ("aaaaaaaaaaaa!", "Invalid symbol 33, offset 12."),
    ("!!!!!", "Invalid symbol 33, offset 4."),
    ("!!!!", "Invalid symbol 33, offset 0."),
    ("aaaaa===", "Invalid symbol 61, offset 5."),
    ("aaaaa=", "Invalid symbol 61, offset 5."),
    ("aaaaa==", "Invalid symbol 61, offset 5."),
    ("aaaaaa=", "Invalid padding"),
    ("aaaaaaa", "Invalid padding"),
    ("aaaaaaaa=", "Invalid symbol 61, offset 8."),
    ("aaaaaaaa==", "Invalid symbol 61, offset 8."),
    ("aaaaaaaa===", "Invalid symbol 61, offset 8."),
    ("aa==a", "Invalid symbol 61, offset 2."),
    ("aa==aa", "Invalid symbol 61, offset 2."),
    ("aa==aaa", "Invalid symbol 61, offset 2."),
    ("aa===", "Invalid symbol 61, offset 2."),
    ("a=a=", "Invalid symbol 61, offset 1."),
    ("=a==", "Invalid symbol 61, offset 0."),
    ("A=A=AAAA", "Invalid symbol 61, offset 1."),
    ("aaaa=aaa", "Invalid symbol 61, offset 4."),
    ("aaaa==aa", "Invalid symbol 61, offset 4."),
    ("aaaa===a", "Invalid symbol 61, offset 4."),
    ("aaaa====", "Invalid symbol 61, offset 4."),
    ("aaaa=a==", "Invalid symbol 61, offset 4."),
    ("aaaa==a=", "Invalid symbol 61, offset 4."),
    ("aaaaa=a=", "Invalid symbol 61, offset 5."),
    ("aaaaaa=a", "Invalid symbol 61, offset 6."),
    ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!aaa", "Invalid symbol 33, offset 40."),
    ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!aa", "Invalid symbol 33, offset 41."),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistake_is_worded_as_the_reference_does(text: str, message: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        Base64.from_wire(text)
    assert caught.value.message == message


@pytest.mark.parametrize("text", ["", "abc=", "aaw=", "aaE=", "abcd", "abcdAA=="])
def test_strict_base64_is_decoded(text: str) -> None:
    decoded = Base64.from_wire(text)
    assert type(decoded) is Base64
    assert decoded == base64.b64decode(text)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100, 100_000, 100_001])
def test_encoded_bytes_come_back(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    assert Base64.from_wire(base64.b64encode(data[:size]).decode()) == data[:size]


@pytest.mark.parametrize(
    ("value", "got"),
    [(None, "null"), (5, "number"), (True, "boolean `true`"), ([], "sequence"), ({}, "map")],
)
def test_only_strings_are_accepted(value: object, got: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        Base64.from_wire(value)
    assert caught.value.message == f"invalid type: {got}, expected a string"
