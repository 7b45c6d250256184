"""Messages as lines of text, without a pipe: bytes in, lines out, and the other way round."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from exec_server.errors import ProtocolError

# The limit of the protocol, without the line end. A longer line ends the link.
LINE_BYTES = 64 * 1_048_576

# Close codes as a WebSocket has them; a pipe carries none.
_INVALID_TEXT = 1007
_TOO_BIG = 1009


class LineSplitter:
    """Splits received bytes into lines without their ends, LF or CRLF; skips blank lines."""

    def __init__(self, line_bytes: int = LINE_BYTES, *, must_be_utf8: bool = True) -> None:
        self._line_bytes = line_bytes
        self._must_be_utf8 = must_be_utf8
        self._partial = bytearray()
        self._lines: deque[bytes] = deque()

    def feed(self, data: bytes) -> None:
        end = data.rfind(b"\n") + 1
        if not end:
            self._partial += data
        elif self._partial:
            self._partial += memoryview(data)[:end]
            self._lines += bytes(self._partial).split(b"\n")[:-1]
            self._partial = bytearray(data[end:])
        else:
            self._lines += data[:end].split(b"\n")[:-1]
            self._partial += memoryview(data)[end:]

    def next_line(self) -> bytes | None:
        """The next line, None if no line is complete; ProtocolError if it is not acceptable."""
        while self._lines:
            line = self._lines.popleft().removesuffix(b"\r")
            if len(line) > self._line_bytes:
                raise ProtocolError(_TOO_BIG, "line is too long")
            if not line.isascii() and self._must_be_utf8 and not _is_utf8(line):
                raise ProtocolError(_INVALID_TEXT, "line is not UTF-8")
            if line.strip():
                return line
        if len(self._partial) > self._line_bytes + 1:  # a CR may still be part of the line end
            raise ProtocolError(_TOO_BIG, "line is too long")
        return None

    def clear(self) -> None:
        """Forget all received bytes."""
        self._lines.clear()
        self._partial.clear()


class LineWriter:
    """Writes one message in parts as a line; an outbox.PartWriter."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write

    def finish(self) -> None:
        self.write(b"\n")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
