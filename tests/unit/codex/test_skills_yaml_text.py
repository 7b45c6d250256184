"""YAML: limits, and what scalars mean."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.codex import skills
from exec_server.codex.skills import (
    Pairs,
    YamlFault,
    as_boolean,
    as_mapping,
    as_port,
    as_sequence,
    as_text,
    parse,
)


def test_scalars_stay_as_they_are_written() -> None:
    nodes = as_sequence(parse("[yes, 010, 2020-01-01, 'x', \"~\", ~, null, Null, !!str ~]"))
    written = ["yes", "010", "2020-01-01", "x", "~", None, None, None, "~"]
    assert [as_text(node) for node in nodes] == written
    assert parse("") is None
    assert parse("null") is None
    assert as_text(parse("|\n  a\n  b\n")) == "a\nb\n"


def table(text: str) -> Pairs:
    return as_mapping(parse(text))


def test_null_is_not_the_same_as_nothing() -> None:
    assert table("a: ~").get("a") is table("a:").get("a") is None
    assert (table("a: ~").has_null("a"), table("a:").has_null("a")) == (True, False)


def test_mappings_keep_repetitions() -> None:
    pairs = table("b: 1\na: {c: [2]}\nb: 3\n[x]: 4\n")
    assert [as_text(node) for node in as_sequence(as_mapping(pairs.get("a")).get("c"))] == ["2"]
    assert pairs.get("x") is None
    assert pairs.has("a")
    assert not pairs.has("x")
    with pytest.raises(YamlFault, match="duplicate field `b`"):
        pairs.get("b")


def test_aliases_are_the_same_node() -> None:
    first, second = as_sequence(parse("[&a {x: 1}, *a]"))
    assert first is second
    loop = parse("&a [*a]")
    assert as_sequence(loop)[0] is loop
    levels = "".join(f"a{n + 1}: &a{n + 1} [{f'*a{n},' * 9}]\n" for n in range(30))
    assert table(f"a0: &a0 x\n{levels}").has("a30")
    with pytest.raises(YamlFault, match="undefined alias"):
        parse("*x")


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "a: b: c",
        "a\n---\nb",
        "[" * 33 + "]" * 33,
        "[" * 60_000,
        "- " * 30_000,
        "x" * (skills.DOCUMENT_CHARACTERS + 1),
        "\x01",
    ],
)
def test_faults(text: str) -> None:
    with pytest.raises(YamlFault):
        parse(text)


def test_depth_and_size_within_the_limits() -> None:
    parse("[" * 32 + "]" * 32)
    longest = as_text(parse("x" * skills.DOCUMENT_CHARACTERS))
    assert longest is not None
    assert len(longest) == skills.DOCUMENT_CHARACTERS


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        (as_text, "", None),
        (as_boolean, "", None),
        (as_boolean, "True", True),
        (as_boolean, "false", False),
        (as_port, "", None),
        (as_port, "65535", 65535),
    ],
)
def test_conversions(function: Any, text: str, expected: Any) -> None:
    assert function(parse(text)) == expected


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (as_text, "[]"),
        (as_boolean, "yes"),
        (as_boolean, "'true'"),
        (as_port, "65536"),
        (as_port, "-1"),
        (as_port, "²"),
        (as_port, "'5'"),
        (as_sequence, ""),
        (as_sequence, "{}"),
        (as_mapping, "[]"),
    ],
)
def test_wrong_types(function: Any, text: str) -> None:
    with pytest.raises(YamlFault):
        function(parse(text))
