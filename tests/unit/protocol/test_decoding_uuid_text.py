"""UUID members: the forms that are accepted, and the reference's text for every mistake."""

from __future__ import annotations

import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import Uuid

CHARACTER = (
    "invalid character: expected an optional prefix of `urn:uuid:` followed by [0-9a-fA-F-], found "
)
GROUPS = "invalid group length: expected groups of 8, 4, 4, 4 and 12 digits"
# Recorded from the reference.
MISTAKES = [
    ("", "invalid length: expected length 32 for simple format, found 0"),
    ("x", CHARACTER + "`x` at 1"),
    ("not-a-uuid", CHARACTER + "`n` at 1"),
    ("URN:UUID:67e55044-10b1-426f-9247-bb680e5fe0c8", CHARACTER + "`U` at 1"),
    (
        "67e5504410b1426f9247bb680e5fe0c",
        "invalid length: expected length 32 for simple format, found 31",
    ),
    (
        "67e5504410b1426f9247bb680e5fe0c8a",
        "invalid length: expected length 32 for simple format, found 33",
    ),
    ("67e55044-10b1-426g-9247-bb680e5fe0c8", CHARACTER + "`g` at 18"),
    ("67e55044-10b1-426f-9247-bb680e5fe0cg", CHARACTER + "`g` at 36"),
    ("g7e55044-10b1-426f-9247-bb680e5fe0c8", CHARACTER + "`g` at 1"),
    ("é7e55044-10b1-426f-9247-bb680e5fe0c8", CHARACTER + "`é` at 1"),
    ("67e55044-10b1-426f-9247-bb680e5fe0c8 ", CHARACTER + "` ` at 37"),
    (" 67e55044-10b1-426f-9247-bb680e5fe0c8", CHARACTER + "` ` at 1"),
    ("67e55044", "invalid length: expected length 32 for simple format, found 8"),
    ("{67e55044-10b1-426f-9247-bb680e5fe0c8", CHARACTER + "`{` at 1"),
    ("67e55044-10b1-426f-9247-bb680e5fe0c8}", CHARACTER + "`}` at 37"),
    ("urn:uuid:x", CHARACTER + "`x` at 10"),
    ("gggggggggggggggggggggggggggggggg", CHARACTER + "`g` at 1"),
    ("67e55044-10b1-426f-9247-bb680e5fe0c8é", CHARACTER + "`é` at 37"),
    ("0000000000000000000000000000000é", CHARACTER + "`é` at 32"),
    (
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "invalid length: expected length 32 for simple format, found 100",
    ),
    ("67e55044 10b1-426f-9247-bb680e5fe0c8", CHARACTER + "` ` at 9"),
    ("ggg-", CHARACTER + "`g` at 1"),
    ("a\x01", CHARACTER + "`\x01` at 2"),
    ("\n", CHARACTER + "`\n` at 1"),
    ("{", CHARACTER + "`{` at 1"),
    ("}", CHARACTER + "`}` at 1"),
    ("{67e55044-10b1-426f-9247-bb680e5fe0c8}a", CHARACTER + "`{` at 1"),
    ("urn:uuid:{67e55044-10b1-426f-9247-bb680e5fe0c8}", CHARACTER + "`{` at 10"),
    ("ü{}", CHARACTER + "`ü` at 1"),
]

# The reference has more texts, for each wrong group and for errors inside braces.
WORDED_OTHERWISE = [
    (
        "urn:uuid:67e5504410b1426f9247bb680e5fe0c8",
        "invalid length: expected length 32 for simple format, found 41",
    ),
    ("67e55044-10b1-426f-9247-bb680e5fe0c", GROUPS),
    ("67e55044-10b1-426f-9247-bb680e5fe0c8a", GROUPS),
    ("67e55044-10b1-426f-9247bb680e5fe0c8", GROUPS),
    ("67e55044-10b1-426f-92-47bb680e5fe0c8", GROUPS),
    ("67e550-4410b1-426f-9247-bb680e5fe0c8", GROUPS),
    ("67e55044-10b1-426f-9247-bb680e5fe0c8-", GROUPS),
    ("-", GROUPS),
    ("----", GROUPS),
    ("-----", GROUPS),
    ("a-b-c-d-e", GROUPS),
    ("67e55044-10b1-426f-9247-bb680e5f-0c8", GROUPS),
    ("{}", CHARACTER + "`{` at 1"),
    ("{67e5504410b1426f9247bb680e5fe0c8}", CHARACTER + "`{` at 1"),
    ("urn:uuid:", "invalid length: expected length 32 for simple format, found 9"),
    ("urn:uuid:67e55044-10b1-426g-9247-bb680e5fe0c8", CHARACTER + "`g` at 27"),
    ("{g7e55044-10b1-426f-9247-bb680e5fe0c8}", CHARACTER + "`{` at 1"),
    ("6-7e55044-10b1-426f-9247-bb680e5fe0c", GROUPS),
    ("a-a-a-a-a-a-a", GROUPS),
    ("67e55044010b1-426f-9247-bb680e5fe0c8", GROUPS),
    ("67e5504-410b1-426f-9247-bb680e5fe0c8", GROUPS),
    ("{{7e55044-10b1-426f-9247-bb680e5fe0c8}}", CHARACTER + "`{` at 1"),
    ("{67e55044-10b1-426f-9247-bb680e5fe0c}", CHARACTER + "`{` at 1"),
    ("urn:uuid:67e55044-10b1-426f-9247-bb680e5fe0c", GROUPS),
    ("{67e5504410b1426f9247bb680e5fe}", CHARACTER + "`{` at 1"),
    ("{g}", CHARACTER + "`{` at 1"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistake_is_worded_as_the_reference_does(text: str, message: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        Uuid.from_wire(text)
    assert caught.value.message == message


@pytest.mark.parametrize(("text", "message"), WORDED_OTHERWISE)
def test_mistake_is_worded_in_our_way(text: str, message: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        Uuid.from_wire(text)
    assert caught.value.message == message


@pytest.mark.parametrize(
    "text",
    [
        "67e5504410b1426f9247bb680e5fe0c8",
        "67e55044-10b1-426f-9247-bb680e5fe0c8",
        "67E55044-10B1-426F-9247-BB680E5FE0C8",
        "{67e55044-10b1-426f-9247-bb680e5fe0c8}",
        "urn:uuid:67e55044-10b1-426f-9247-bb680e5fe0c8",
    ],
)
def test_every_form_becomes_the_usual_one(text: str) -> None:
    uuid = Uuid.from_wire(text)
    assert type(uuid) is Uuid
    assert uuid == "67e55044-10b1-426f-9247-bb680e5fe0c8"


@pytest.mark.parametrize(
    ("value", "got"),
    [(None, "null"), (5, "number"), (True, "boolean `true`"), ([], "sequence"), ({}, "map")],
)
def test_only_strings_are_accepted(value: object, got: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        Uuid.from_wire(value)
    assert caught.value.message == f"invalid type: {got}, expected a string"
