"""The tree that a server describes: parsed in any pieces, and refused for the first wrong field."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.client.transfer import remote_tree as module
from exec_server.client.transfer.mirror import Item
from exec_server.client.transfer.remote_tree import Listing
from exec_server.errors import ExecServerError, InvalidRequest, MalformedAnswer

TOP = b"d\x0041755\x004096\x001.5\0\0\0"


def entry(path: str, kind: str = "f", target: str = "") -> bytes:
    fields = (kind, "644", "3", "1700000000.1234567890", path, target)
    return "".join(f"{field}\0" for field in fields).encode()


def parsed(*parts: bytes) -> Listing:
    listing = Listing("/s")
    for part in parts:
        listing.feed(part)
    listing.finish()
    return listing


def test_a_listing_is_parsed() -> None:
    listing = parsed(TOP, b"d\x00755\x000\x001\0a\0\0l\x00777\x001\x00-2\0a/b\n\xff\0target\0")
    items = [
        Item("", "d", 0o755, 4096, "1.5"),
        Item("a", "d", 0o755, 0, "1"),
        Item("a/b\n\udcff", "l", 0o777, 1, "-2", "target"),
    ]
    assert list(listing) == items
    assert list(listing.of_kind(listing.kinds, deepest_first=True)) == items[::-1]
    assert list(listing.of_kind("d")) == [item for item in items if item.kind == "d"]
    assert len(listing) == 3


def test_only_permissions_are_taken() -> None:
    [item] = parsed(b"f\x004755\x000\x001\0\0\0")
    assert item.mode == 0o755


@given(st.integers(1, 200))
def test_pieces_may_end_anywhere(size: int) -> None:
    text = TOP + entry("a", "d") + entry("a/x") + entry("a/y", "d") + entry("b", "l", "to")
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert list(parsed(*pieces)) == list(parsed(text))


def test_items_that_find_has_not_listed_are_taken() -> None:
    items = [Item("", "d", None, 0, "0"), Item("\udcff", "f", None, 7, "3.250")]
    listing = Listing("/s")
    assert listing.is_empty
    listing.add(items)
    listing.finish()
    assert list(listing) == items


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "d/../x",
        "/etc/passwd",
        "/x",
        "d//x",
        "d/./x",
        "e/x",
        "f/x",
        "l/x",
        "..",
        ".",
        "d/",
        "/",
    ],
)
def test_paths_that_lead_elsewhere_are_refused(path: str) -> None:
    """Also an entry below a file, below a symlink, and in a directory that is not listed."""
    before = [TOP, entry("d", "d"), entry("f"), entry("l", "l", "/etc")]
    assert len(parsed(*before)) == 4
    with pytest.raises(MalformedAnswer, match=r"^/s: the server lists"):
        parsed(*before, entry(path))


def test_separators_of_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEPARATORS", ("\\",))
    with pytest.raises(MalformedAnswer, match="it is not a name"):
        parsed(TOP, entry("..\\x"))


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([entry("a"), entry("a")], "lists 'a': it occurs twice"),
        ([entry("a", "d"), entry("a", "l", "/etc")], "lists 'a': it occurs twice"),
        ([entry("")], "the top occurs twice"),
        ([entry("a", "l")], "a symlink without a target"),
        ([b"f\x00644\x009999999999999999999\x001\0x\0\0"], "an impossible size"),
        ([b"f\x00644\x00-1\x001\0x\0\0"], "malformed at"),
        ([b"f\x00644\x001e3\x001\0x\0\0"], "malformed at"),
        ([b"f\x00999\x001\x001\0x\0\0"], "malformed at"),
        ([b"ff\x00644\x001\x001\0x\0\0"], "malformed at"),
        ([b"f\x00644\x001\0nan\0x\0\0"], "malformed at"),
        ([b"f\x00644\x001\x009999999999999999999\0x\0\0"], "malformed at"),
        ([b"f\x00644\x001\x001\0x\0"], "malformed at"),
        ([b"\n"], "malformed at"),
        ([b"x" * (module.ENTRY_BYTES + 1)], "malformed at"),
    ],
)
def test_impossible_entries_are_refused(entries: list[bytes], text: str) -> None:
    with pytest.raises(MalformedAnswer, match=text):
        parsed(TOP, *entries)


def test_an_empty_listing_is_refused() -> None:
    with pytest.raises(MalformedAnswer, match="malformed"):
        parsed()


def test_an_entry_after_its_directory_was_left_is_refused() -> None:
    with pytest.raises(MalformedAnswer, match="outside of the tree"):
        parsed(TOP, entry("a", "d"), entry("b"), entry("a/x"))


def test_names_that_other_file_systems_compare_equal_are_known() -> None:
    listing = parsed(TOP, entry("a"), entry("A"), entry("\u00e9"), entry("e\u0301"), entry("x"))
    assert [item.path for item in listing if listing.is_ambiguous(item.path)] == [
        *("a", "A", "\u00e9", "e\u0301")
    ]
    assert not parsed(TOP, entry("a")).is_ambiguous("a")


def test_a_tree_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    assert len(parsed(TOP, entry("a"))) == 2
    with pytest.raises(InvalidRequest, match="/s: more than 2 entries"):
        parsed(TOP, entry("a"), entry("b"))


def flood(listing: Listing) -> None:
    for number in range(1_000_000):
        listing.feed(entry(f"{number}"))


def test_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of entries is refused, and takes little more than its bytes before."""
    monkeypatch.setattr(module, "LISTING_BYTES", 1_000_000)
    listing = Listing("/s")
    listing.feed(TOP)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"more than \d{4,6} entries"):
            flood(listing)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_give_items_or_an_error_of_ours(parts: list[bytes]) -> None:
    try:
        listing = parsed(TOP, *parts)
    except ExecServerError:
        return
    assert next(iter(listing)).path == ""
