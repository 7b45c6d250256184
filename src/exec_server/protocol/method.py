"""Descriptions of methods: the name, and the structs of both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

P = TypeVar("P")
R = TypeVar("R")
N_co = TypeVar("N_co", covariant=True)


class Call(msgspec.Struct, Generic[P, R], frozen=True):
    """A request with a response; `params` is None for methods without params."""

    name: str
    params: type[P] | None
    result: type[R]


class Notice(msgspec.Struct, Generic[N_co], frozen=True):
    """A notification, without a response; `encode` makes the JSON text of its params."""

    name: str
    params: type[N_co]
    encode: Callable[[Any], bytes] = msgspec.json.encode
