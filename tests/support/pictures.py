"""A small picture for clients that look at one."""

from __future__ import annotations

import struct
import zlib


def _chunk(name: bytes, data: bytes) -> bytes:
    check = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)


# PNG, four by four pixels of one colour.
PICTURE = b"".join(
    [
        b"\x89PNG\r\n\x1a\n",
        _chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0)),
        _chunk(b"IDAT", zlib.compress((b"\0" + b"\x10\x20\x30" * 4) * 4)),
        _chunk(b"IEND", b""),
    ]
)
