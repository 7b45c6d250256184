"""YAML without recursion."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.codex import yaml_text
from exec_server.codex.yaml_text import NULL, Pairs, Plain, YamlFault, parse


def test_scalars_stay_as_they_are_written() -> None:
    written = ["yes", "010", "2020-01-01", "x", "~", NULL, NULL, NULL, "~"]
    assert parse("[yes, 010, 2020-01-01, 'x', \"~\", ~, null, Null, !!str ~]") == written
    assert parse("") is None
    assert parse("null") is None
    assert parse("a: ~").get("a") is parse("a:").get("a") is None
    assert (parse("a: ~").has_null("a"), parse("a:").has_null("a")) == (True, False)
    assert parse("|\n  a\n  b\n") == "a\nb\n"
    assert isinstance(parse("5"), Plain)
    assert not isinstance(parse("'5'"), Plain)


def test_mappings_keep_their_order_and_repetitions() -> None:
    table = parse("b: 1\na: {c: [2]}\nb: 3\n")
    assert table == [("b", "1"), ("a", [("c", ["2"])]), ("b", "3")]
    assert table.get("a").get("c") == ["2"]
    assert table.get("x") is None
    assert table.has("a")
    assert not table.has("x")
    with pytest.raises(YamlFault, match="duplicate field `b`"):
        table.get("b")


def test_anchors_are_resolved_once() -> None:
    assert parse("[&a {x: 1}, *a]") == [[("x", "1")]] * 2
    loop = parse("&a [*a]")
    assert loop[0] is loop
    with pytest.raises(YamlFault, match="unknown anchor x"):
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
        "x" * (yaml_text.DOCUMENT_CHARACTERS + 1),
        "\x01",
    ],
)
def test_faults(text: str) -> None:
    with pytest.raises(YamlFault):
        parse(text)


def test_depth_and_size_within_the_limits() -> None:
    parse("[" * 32 + "]" * 32)
    assert len(parse("x" * yaml_text.DOCUMENT_CHARACTERS)) == yaml_text.DOCUMENT_CHARACTERS


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (yaml_text.text, None, None),
        (yaml_text.text, "x", "x"),
        (yaml_text.boolean, None, None),
        (yaml_text.boolean, Plain("True"), True),
        (yaml_text.boolean, Plain("false"), False),
        (yaml_text.port, None, None),
        (yaml_text.port, Plain("65535"), 65535),
        (yaml_text.sequence, ["x"], ["x"]),
        (yaml_text.mapping, Pairs(), Pairs()),
    ],
)
def test_conversions(function: Any, value: Any, expected: Any) -> None:
    assert function(value) == expected


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (yaml_text.text, []),
        (yaml_text.boolean, Plain("yes")),
        (yaml_text.boolean, "true"),
        (yaml_text.port, Plain("65536")),
        (yaml_text.port, Plain("-1")),
        (yaml_text.port, Plain("²")),
        (yaml_text.port, "5"),
        (yaml_text.sequence, None),
        (yaml_text.sequence, Pairs()),
        (yaml_text.mapping, []),
    ],
)
def test_wrong_types(function: Any, value: Any) -> None:
    with pytest.raises(YamlFault):
        function(value)
