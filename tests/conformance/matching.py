"""The small language of the case files: placeholders in requests, matchers in answers.

A string may contain `{name}` for a known variable (`dir`, `uri`, `peer`, or one saved
before). An object with a single key that begins with `$` is a value to build or a matcher;
both are listed in README.md.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from typing import Any

Variables = dict[str, str]
_UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}


def _special(value: Any) -> tuple[str, Any] | None:
    """The name and argument of a `$…` object, or None for an ordinary value."""
    if isinstance(value, dict) and len(value) == 1:
        name, argument = next(iter(value.items()))
        if name.startswith("$"):
            return name, argument
    return None


def _fill(text: str, variables: Variables) -> str:
    names = "|".join(map(re.escape, variables))
    return re.sub(r"\{(" + names + r")\}", lambda m: variables[m[1]], text) if names else text


def build(value: Any, variables: Variables) -> Any:
    """The message to send: placeholders filled in, `$base64`, `$hex`, `$repeat`… computed."""
    if isinstance(value, str):
        return _fill(value, variables)
    if isinstance(value, list):
        return [build(item, variables) for item in value]
    if not isinstance(value, dict):
        return value
    special = _special(value)
    if special is None:
        return {_fill(k, variables): build(v, variables) for k, v in value.items()}
    name, argument = special
    match name:
        case "$base64":
            return base64.b64encode(build(argument, variables).encode()).decode()
        case "$hex":
            return base64.b64encode(binascii.unhexlify(argument)).decode()
        case "$repeat":
            return argument[0] * argument[1]
        case "$join":
            return "".join(build(argument, variables))
        case "$numbered":
            template, count = argument
            return [_fill(template, variables | {"n": str(n)}) for n in range(count)]
    raise AssertionError(f"{name} cannot be sent")


def mismatch(expected: Any, actual: Any, variables: Variables, where: str = "") -> str | None:
    """Why the two differ, or None if they do not; `$save` adds to the variables."""
    special = _special(expected)
    if special is not None and special[0] in _MATCHERS:
        return _MATCHERS[special[0]](special[1], actual, variables, where)
    if special is not None or isinstance(expected, str):
        expected = build(expected, variables)
    if isinstance(expected, dict) and isinstance(actual, dict):
        if expected.keys() != actual.keys():
            return f"{where}: members {sorted(actual)} instead of {sorted(expected)}: {actual!r}"
        return _members(expected, actual, variables, where)
    if isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            return f"{where}: {actual!r} instead of {expected!r}"
        pairs = enumerate(zip(expected, actual, strict=True))
        return _first(mismatch(e, a, variables, f"{where}[{i}]") for i, (e, a) in pairs)
    # True equals 1 in Python and not in JSON.
    if type(expected) is not type(actual) or expected != actual:
        return f"{where}: {actual!r} instead of {expected!r}"
    return None


def _first(reasons: Any) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _members(expected: Any, actual: Any, variables: Variables, where: str) -> str | None:
    return _first(mismatch(v, actual[k], variables, f"{where}.{k}") for k, v in expected.items())


def _any(kind: Any, actual: Any, _variables: Variables, where: str) -> str | None:
    if kind == "value":
        return None
    fits = isinstance(actual, _TYPES[kind]) and (kind == "boolean" or not isinstance(actual, bool))
    return None if fits else f"{where}: {actual!r} is no {kind}"


def _uuid(_: Any, actual: Any, _variables: Variables, where: str) -> str | None:
    fits = isinstance(actual, str) and _UUID4.fullmatch(actual)
    return None if fits else f"{where}: {actual!r} is no random UUID"


def _regex(pattern: Any, actual: Any, variables: Variables, where: str) -> str | None:
    filled = _fill(pattern, {name: re.escape(text) for name, text in variables.items()})
    fits = isinstance(actual, str) and re.fullmatch(filled, actual, re.DOTALL)
    return None if fits else f"{where}: {actual!r} does not match {filled!r}"


def _save(name: Any, actual: Any, variables: Variables, where: str) -> str | None:
    if not isinstance(actual, str):
        return f"{where}: {actual!r} is no string to keep"
    variables[name] = actual
    return None


def _has(expected: Any, actual: Any, variables: Variables, where: str) -> str | None:
    if not isinstance(actual, dict) or not expected.keys() <= actual.keys():
        return f"{where}: {actual!r} lacks members of {sorted(expected)}"
    return _members(expected, actual, variables, where)


def _one_of(choices: Any, actual: Any, variables: Variables, where: str) -> str | None:
    if any(mismatch(choice, actual, variables, where) is None for choice in choices):
        return None
    return f"{where}: {actual!r} is none of {choices!r}"


def _unordered(expected: Any, actual: Any, variables: Variables, where: str) -> str | None:
    if not isinstance(actual, list) or len(actual) != len(expected):
        return f"{where}: {actual!r} instead of {expected!r} in any order"
    rest = list(actual)
    for item in expected:
        found = next((a for a in rest if mismatch(item, a, variables) is None), None)
        if found is None:
            return f"{where}: {item!r} is missing in {actual!r}"
        rest.remove(found)
    return None


def _toml(expected: Any, actual: Any, variables: Variables, where: str) -> str | None:
    import tomli  # the reader of the server, which a machine may lack

    return mismatch(expected, tomli.loads(actual), variables, where)


_MATCHERS: Mapping[str, Callable[[Any, Any, Variables, str], str | None]] = {
    "$any": _any,
    "$uuid": _uuid,
    "$regex": _regex,
    "$save": _save,
    "$has": _has,
    "$one_of": _one_of,
    "$unordered": _unordered,
    "$toml": _toml,
}
