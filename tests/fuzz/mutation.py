"""Mutations of bytes and of JSON: the next input from an earlier one. Pure, by a given Random."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

# The largest input: large enough to show quadratic work, small enough for thousands a second.
MAX_BYTES = 65_536

# Numbers around the edges of the types that decoders know, and texts that are special somewhere.
_NUMBERS = (0, 1, -1, 2**7, 2**15, 2**16, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63) - 1, 10**400)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    *(None, True, False, 0.5, -0.0, 1e308, "", "\0", "\ud7ff", "\U0001f600", "x" * 5000),
    *(
        [],
        {},
        [[]],
        [None],
        {"": ""},
        {"type": "path"},
        {"kind": "root"},
        "file:///",
        "/",
        "..",
        "*",
    ),
)
_BYTES = (
    b"",
    b"\0",
    b"\xff",
    b"\r\n",
    b"\n",
    b"\r\n\r\n",
    b"%00",
    b"\xc3\xa9",
    b"\xf0\x9f\x98\x80",
)


def mutate(data: bytes, random: Random, others: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """Change an input in one to four places; `words` are pieces of the format."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        data = random.choice(_CHANGES)(data, random, others, words)
    return data[:MAX_BYTES]


def mutate_json(
    data: bytes, random: Random, others: Sequence[bytes], words: Sequence[bytes]
) -> bytes:
    """Like `mutate`, but mostly on the values of a JSON text."""
    if random.random() < 0.2:
        return mutate(data, random, others, words)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return mutate(data, random, others, words)
    for _ in range(random.choice((1, 1, 2, 3))):
        value = mutate_value(value, random, [word.decode(errors="replace") for word in words])
    return json.dumps(value, ensure_ascii=random.random() < 0.5).encode(errors="replace")[
        :MAX_BYTES
    ]


def mutate_value(value: Any, random: Random, words: Sequence[str] = ()) -> Any:
    """Change one value inside of a JSON value."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        return _mutate_object(value, random, words)
    if isinstance(value, list) and value and random.random() < 0.85:
        changed = list(value)
        index = random.randrange(len(changed))
        action = random.randrange(4)
        if action == 0:
            del changed[index]
        elif action == 1:
            changed.insert(index, changed[index])
        else:
            changed[index] = mutate_value(changed[index], random, words)
        return changed
    if isinstance(value, str) and value and random.random() < 0.6:
        index = random.randrange(len(value) + 1)
        piece = random.choice([*words, "/", "..", "%", "\0", "*", "[", " ", value])
        return value[:index] + piece + value[index + random.randrange(3) :]
    if isinstance(value, int) and random.random() < 0.5:
        return value + random.choice((-1, 1, 2**31, 2**63))
    return random.choice([*_VALUES, *words])


def _mutate_object(value: dict[str, Any], random: Random, words: Sequence[str]) -> dict[str, Any]:
    changed = dict(value)
    name = random.choice(list(changed))
    action = random.randrange(6)
    if action == 0:
        del changed[name]
    elif action == 1:
        changed[name + random.choice(["", "s", "Id", "\0"])] = changed[name]
    elif action == 2:
        changed[random.choice([*words, "type", "kind", "x"])] = random.choice(_VALUES)
    elif action == 3:
        changed[name] = changed[random.choice(list(changed))]
    else:
        changed[name] = mutate_value(changed[name], random, words)
    return changed


# ---- changes of bytes -----------------------------------------------------------------


def _place(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + random.choice((0, 1, 2, 4, 8, 32)))


def _flip(data: bytes, random: Random, others: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    if not data:
        return bytes([random.randrange(256)])
    index = random.randrange(len(data))
    changed = data[index] ^ random.choice((1, 2, 4, 8, 16, 32, 64, 128, 255))
    return data[:index] + bytes([changed]) + data[index + 1 :]


def _insert(data: bytes, random: Random, others: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    start, end = _place(data, random)
    piece = random.choice((*_BYTES, *words, random.randbytes(random.randint(1, 8))))
    return data[:start] + piece + data[random.choice((start, end)) :]


def _delete(data: bytes, random: Random, others: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    start, end = _place(data, random)
    return data[:start] + data[end:]


def _repeat(data: bytes, random: Random, others: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """A piece many times: quadratic work shows at a few ten thousand bytes."""
    start, end = _place(data, random)
    piece = data[start:end] or random.choice((*_BYTES[1:], *words)) or b"x"
    largest = MAX_BYTES // len(piece)
    count = random.choice((2, 3, 10, 100, largest)) if random.random() < 0.2 else 2
    return data[:start] + piece * min(count, largest) + data[end:]


def _splice(data: bytes, random: Random, others: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    other = random.choice(others) if others else b""
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def _number(data: bytes, random: Random, others: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    start, end = _place(data, random)
    number = random.choice(_NUMBERS[:-1]) % 2**64
    size = random.choice((1, 2, 4, 8))
    piece: bytes = number.to_bytes(8, "big")[-size:]
    if random.random() < 0.5:
        piece = piece[::-1]
    if random.random() < 0.3:
        piece = str(number).encode()
    return data[:start] + piece + data[end:]


def _truncate(
    data: bytes, random: Random, others: Sequence[bytes], words: Sequence[bytes]
) -> bytes:
    return data[: random.randrange(len(data) + 1)]


_Change = Callable[[bytes, Random, Sequence[bytes], Sequence[bytes]], bytes]
_CHANGES: tuple[_Change, ...] = (
    *(_flip, _flip, _insert, _insert, _insert, _delete, _repeat, _splice, _number, _truncate),
)
