"""UUID members, in the forms that the reference accepts."""

from __future__ import annotations

import re
from typing import Self
from uuid import UUID

from exec_server.errors import InvalidParams
from exec_server.protocol.json_text import describe


class Uuid(str):
    """A UUID in its canonical form: lower case, with hyphens."""

    __slots__ = ()

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """Accept a JSON string in any form the reference accepts; raises InvalidParams."""
        if not isinstance(value, str):
            raise InvalidParams(f"invalid type: {describe(value)}, expected a string")
        digits = value.removeprefix("urn:uuid:")
        try:
            uuid = UUID(digits)
        except ValueError:
            raise InvalidParams(_error_text(value, digits)) from None
        # UUID() also accepts hyphens anywhere, and any form after the prefix.
        forms = {str(uuid)} if digits != value else {str(uuid), uuid.hex, f"{{{uuid}}}"}
        if digits.lower() not in forms:
            raise InvalidParams(_error_text(value, digits))
        return cls(uuid)


def _error_text(value: str, digits: str) -> str:
    if bad := re.search("[^0-9a-fA-F-]", digits):
        at = len(value) - len(digits) + bad.start() + 1
        return (
            "invalid character: expected an optional prefix of `urn:uuid:` followed by "
            f"[0-9a-fA-F-], found `{bad[0]}` at {at}"
        )
    if "-" in digits:
        return "invalid group length: expected groups of 8, 4, 4, 4 and 12 digits"
    return f"invalid length: expected length 32 for simple format, found {len(value)}"
