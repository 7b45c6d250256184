"""HeadBuffer: the head of a request before it is parsed, amended where h11 is stricter than others.

h11 remains the only parser: the amendments can make a request invalid, but never another one. A
`Host` that was overlooked here makes two, which h11 refuses.
"""

from __future__ import annotations

import re
from typing import Final

# The end of a head, and the first bytes of other protocols, as h11 finds them.
_END: Final = re.compile(rb"\n\r?\n")
_FIRST_PRINTABLE: Final = 0x21
_HOST: Final = re.compile(rb"\nhost:", re.IGNORECASE)
_NOT_ASCII: Final = re.compile(rb"[\x80-\xff]")


class HeadBuffer:
    """The bytes of a connection from the beginning of a request."""

    def __init__(self, data: bytes = b"", is_closed: bool = False) -> None:
        """`data` are bytes that were read with the request before."""
        self.data = bytearray(data)
        self.is_closed = is_closed  # the process sends nothing more
        self._end = _END.search(self.data)

    def receive(self, data: bytes) -> None:
        """Add bytes; none at the end of the connection."""
        if not data:
            self.is_closed = True
            return
        start = max(0, len(self.data) - 2)  # a process may send a byte at a time
        self.data += data
        self._end = _END.search(self.data, start)

    @property
    def is_complete(self) -> bool:
        """Whether nothing has to be read before the head is parsed, or refused."""
        is_other = bool(self.data) and self.data[0] < _FIRST_PRINTABLE
        return self.is_closed or self._end is not None or is_other

    def amended(self) -> bytes:
        """The bytes for the parser: with a `Host`, and with a request line of ASCII."""
        if self._end is None:
            return bytes(self.data)
        head, rest = bytes(self.data[: self._end.start() + 1]), self.data[self._end.start() + 1 :]
        if not _HOST.search(head):
            # h11 refuses a request without Host before its target can be decided about. At the end
            # nothing can continue this line.
            head += b"Host:\r\n"
        first, newline, fields = head.partition(b"\n")
        return _ascii_line(first) + newline + fields + rest


def _ascii_line(line: bytes) -> bytes:
    """A request line whose target is percent-encoded (RFC 3986, 2.5), if that is UTF-8."""
    parts = line.split(b" ")
    try:
        parts[1].decode()
    except (IndexError, UnicodeDecodeError):
        return line
    parts[1] = _NOT_ASCII.sub(lambda found: b"%%%02X" % found[0][0], parts[1])
    return b" ".join(parts)
