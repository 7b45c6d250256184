"""Target: a decoder and the inputs that its mutations start from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A row of the table: `words` are pieces of the format, which mutations insert."""

    name: str
    check: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    is_json: bool = False


def halves(data: bytes) -> tuple[bytes, bytes]:
    """Cut where the first byte says."""
    place = data[0] * len(data) // 256 if data else 0
    return data[:place], data[place:]


def as_text(data: bytes) -> str:
    """Bytes as text; others than UTF-8 become U+FFFD."""
    return data.decode(errors="replace")


def json_bytes(value: object) -> bytes:
    """A value as JSON."""
    return json.dumps(value).encode()
