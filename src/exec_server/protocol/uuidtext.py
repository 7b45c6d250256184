"""UUID members: every form the reference accepts, and its words for what is wrong."""

from __future__ import annotations

import re
from typing import Self

from exec_server.errors import InvalidParams
from exec_server.protocol.jsontext import describe

_UUID = re.compile(
    r"(?:[0-9a-fA-F]{32}|(?:(?P<brace>\{)|urn:uuid:)?"
    r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?(brace)\}))"
)
_HYPHENATED_LENGTH = 36
_NOT_UUID = re.compile(r"[^0-9a-fA-F-]")
_GROUP_LENGTHS = (8, 4, 4, 4)
_LAST_GROUP_START = 24


class Uuid(str):
    """A UUID in its usual form: lower case, with hyphens."""

    __slots__ = ()

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """Accept a JSON string in any form the reference accepts; raises InvalidParams."""
        if not isinstance(value, str):
            raise InvalidParams(f"invalid type: {describe(value)}, expected a string")
        if _UUID.fullmatch(value) is None:
            raise InvalidParams(_uuid_mistake(value))
        digits = value.removeprefix("urn:uuid:").strip("{}").replace("-", "").lower()
        return cls("-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])))


def _unwrap(text: str) -> tuple[str, int]:
    """A UUID without its wrapping, and how long the prefix was."""
    if len(text) >= 2 and text[0] == "{" and text[-1] == "}":
        return text[1:-1], 1
    if text.startswith("urn:uuid:"):
        return text.removeprefix("urn:uuid:"), 9
    return text, 0


def _uuid_mistake(text: str) -> str:
    """Say what is wrong with a UUID, as the reference's parser does."""
    size = len(text.encode())
    inner, offset = _unwrap(text)
    if offset and len(inner.encode()) == _HYPHENATED_LENGTH:
        # A wrapped text of the right size is judged, and counted, without its wrapping.
        return _uuid_mistake(inner)
    if bad := _NOT_UUID.search(inner):
        at = offset + len(inner[: bad.start()].encode()) + 1
        return (
            "invalid character: expected an optional prefix of `urn:uuid:` followed by "
            f"[0-9a-fA-F-], found `{bad.group()}` at {at}"
        )
    groups = inner.split("-")
    if len(groups) == 1 and not offset:
        return f"invalid length: expected length 32 for simple format, found {size}"
    if len(groups) != 5:
        return f"invalid group count: expected 5, found {len(groups)}"
    for index, (group, length) in enumerate(zip(groups, _GROUP_LENGTHS, strict=False)):
        if len(group) != length:
            return f"invalid group length in group {index}: expected {length}, found {len(group)}"
    return f"invalid group length in group 4: expected 12, found {size - _LAST_GROUP_START}"
