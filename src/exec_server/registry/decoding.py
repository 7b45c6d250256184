"""Decodes the JSON of responses, tokens and files."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_json(content: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode JSON; raises msgspec.DecodeError for all that is not JSON of this kind."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    except RecursionError:
        raise msgspec.DecodeError("recursion limit exceeded") from None
