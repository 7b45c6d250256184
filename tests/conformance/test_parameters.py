"""Every member of every method with every wrong type: parameters.json is the table.

A member's kind ends in `?` when it may be left out or null, in `=` when it may only be left
out, and in `*` when the reference requires what ours makes optional.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.matching import build
from tests.support.client import Client, uri

pytestmark = pytest.mark.quick

METHODS: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parent / "parameters.json").read_text()
)
_INVALID_PARAMS = -32602
_GOT: list[tuple[Any, str]] = [
    (None, "null"),
    (5, "number"),
    (True, "boolean `true`"),
    ("x", 'string "x"'),
    ([], "sequence"),
    ({}, "map"),
]
_NUMBERS = ("u64", "usize")
_WANT = {"string": "a string", "path": "a string", "base64": "a string", "boolean": "a boolean"}
# What each kind takes, so that it is not offered as wrong.
_RIGHT = {
    "string": ("x",),
    "boolean": (True,),
    "u64": (5,),
    "usize": (5,),
    "a sequence": ([],),
    "a map": ({},),
}
_NOT_A_URI = "invalid URI: relative URL without a base"


def _is(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _expected_text(kind: str, value: Any, got: str) -> str:
    if kind == "path" and value == "x":
        return _NOT_A_URI
    if kind == "base64" and value == "x":
        return "Invalid input length: 1"
    if kind.startswith("variant"):
        if value == "x":
            return f"unknown variant `x`, expected {kind.removeprefix('variant ')}"
        if value == {}:
            return "invalid value: map, expected map with a single key"
        return f"invalid type: {got}, expected string or map"
    return f"invalid type: {got}, expected {_WANT.get(kind, kind)}"


def _wrong_values(kind: str, *, nullable: bool) -> Iterator[tuple[Any, str]]:
    for value, got in _GOT:
        if value is None and nullable:
            continue
        if any(_is(value, right) for right in _RIGHT.get(kind, ())):
            continue
        # The members of a struct are another matter than its type.
        if kind.startswith("struct") and isinstance(value, list | dict):
            continue
        yield value, _expected_text(kind, value, got)
    if kind in _NUMBERS:
        yield from ((value, "invalid number") for value in (-1, 1.5, 2**64))


def _failures(client: Client, method: str, attempts: list[tuple[Any, str]]) -> list[str]:
    problems = []
    for params, text in attempts:
        got = client.failure(method, params)
        if got != (_INVALID_PARAMS, text):
            problems.append(f"{json.dumps(params)}\n  gives {got}\n  not   {text!r}")
    return problems


def wrong_params(method: str, folder: Path, kind: str) -> list[tuple[Any, str]]:
    """Params with one member that is wrong or missing, and the text of the error."""
    table = METHODS[method]
    good = build(table["good"], {"uri": uri(folder)})
    attempts: list[tuple[Any, str]] = []
    for member, described in table["members"].items():
        optional, nullable = described[-1] in "?=", described.endswith("?")
        if described.endswith("*"):
            optional = nullable = kind == "ours"
        for value, text in _wrong_values(described.rstrip("?=*"), nullable=nullable):
            attempts.append((good | {member: value}, text))
        if not optional:
            rest = {name: value for name, value in good.items() if name != member}
            attempts.append((rest, f"missing field `{member}`"))
    return attempts


@pytest.mark.parametrize("method", METHODS)
def test_member_of_wrong_type_or_missing(
    method: str, client: Client, folder: Path, kind: str
) -> None:
    attempts = wrong_params(method, folder, kind)
    assert not (problems := _failures(client, method, attempts)), "\n".join(problems)


@pytest.mark.parametrize("method", METHODS)
def test_params_that_are_no_object(method: str, client: Client) -> None:
    struct, count = METHODS[method]["struct"], len(METHODS[method]["good"])
    elements = f"{count} element" + ("s" if count > 1 else "")
    attempts = [(v, f"invalid type: {got}, expected struct {struct}") for v, got in _GOT[:4]]
    attempts.append(([], f"invalid length 0, expected struct {struct} with {elements}"))
    required = [m for m, k in METHODS[method]["members"].items() if k[-1] not in "?="]
    attempts.append(({}, f"missing field `{required[0]}`"))
    assert not (problems := _failures(client, method, attempts)), "\n".join(problems)


@pytest.mark.parametrize("method", METHODS)
def test_positional_params_of_the_wrong_length(method: str, client: Client, folder: Path) -> None:
    values = list(build(METHODS[method]["good"], {"uri": uri(folder)}).values())
    text = f"invalid length {len(values) + 1}, expected fewer elements in array"
    assert client.failure(method, [*values, 1]) == (_INVALID_PARAMS, text)


@pytest.mark.parametrize("method", ["environment/info", "environment/status"])
def test_method_without_parameters_takes_none(method: str, client: Client) -> None:
    empty: list[Any] = [None, {}]
    for params in empty:
        assert client.call(method, params)
    attempts = [
        ([], "invalid type: sequence, expected unit"),
        ([1], "invalid type: sequence, expected unit"),
        ({"a": 1}, "invalid type: map, expected unit"),
        ("x", 'invalid type: string "x", expected unit'),
        (5, "invalid type: number, expected unit"),
        (False, "invalid type: boolean `false`, expected unit"),
    ]
    assert not (problems := _failures(client, method, attempts)), "\n".join(problems)


def test_unknown_members_are_ignored(client: Client) -> None:
    params = {"processId": "never", "extra": [1, {"deep": None}]}
    assert client.call("process/terminate", params) == {"running": False}


def test_type_errors_come_in_message_order_before_missing_members(client: Client) -> None:
    params = {"tty": 1, "argv": "x"}
    expected = "invalid type: number, expected a boolean"
    assert client.failure("process/start", params) == (_INVALID_PARAMS, expected)
    swapped = {"argv": "x", "tty": 1}
    expected = 'invalid type: string "x", expected a sequence'
    assert client.failure("process/start", swapped) == (_INVALID_PARAMS, expected)
