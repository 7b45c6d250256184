"""How a method is described: its name and the structs of both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

P = TypeVar("P")
R = TypeVar("R")
N_co = TypeVar("N_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[P, R]):
    """A request with an answer; `params` is None for the methods that take none."""

    name: str
    params: type[P] | None
    result: type[R]


@dataclass(frozen=True, slots=True)
class Notice(Generic[N_co]):
    """A notification; nobody answers it. `encode` makes the JSON text of its params."""

    name: str
    params: type[N_co]
    encode: Callable[[Any], bytes] = msgspec.json.encode
