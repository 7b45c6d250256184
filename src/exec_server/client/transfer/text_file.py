"""Text in open files: characters and lines over a file of bytes."""

from __future__ import annotations

import codecs
import io
import re
from typing import Any, Final, NamedTuple, Self

from exec_server.client.handle import Handle
from exec_server.client.transfer.open_file import (
    READ_BYTES,
    FileAppender,
    FileReader,
    FileWriter,
    too_large_error,
)
from exec_server.errors import InvalidRequest

# One line in memory: more than any text has, and a file without line ends would fill the memory.
LINE_CHARACTERS: Final = 64 * 1_048_576

_ANY_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_NEWLINES: Final = (None, "", "\n", "\r", "\r\n")


class TextFormat(NamedTuple):
    """The options of the built-in `open` for text; the encoding is UTF-8 by default."""

    encoding: str | None = None
    errors: str | None = None
    newline: str | None = None

    def check(self) -> None:
        """Raise LookupError for an unknown encoding, ValueError for an impossible newline."""
        codecs.lookup_error(self.errors or "strict")
        if self.newline not in _NEWLINES:
            known = "None, '', '\\n', '\\r' or '\\r\\n'"
            raise ValueError(f"newline must be {known}, not {self.newline!r}")


class TextReader(Handle):
    """A text file to read, which `await` or `async with` opens; iterating gives its lines."""

    def __init__(self, file: FileReader, text: TextFormat) -> None:
        """Raises LookupError for an unknown encoding, ValueError for an impossible newline."""
        super().__init__()
        text.check()
        self._file = file
        self._newline = text.newline
        make_decoder = codecs.getincrementaldecoder(text.encoding or "utf-8")
        self._decoder: Any = make_decoder(text.errors or "strict")
        if not text.newline:
            is_translated = text.newline is None
            self._decoder = io.IncrementalNewlineDecoder(self._decoder, translate=is_translated)
        self._text = ""
        self._position = 0  # of the first character that was not read
        self._is_at_end = False

    def _target(self) -> str:
        return self._file.path

    async def _open(self) -> None:
        await self._file

    async def _close(self) -> None:
        await self._file.aclose()

    async def read(self, size: int | None = -1) -> str:
        """Read `size` characters, fewer only at the end of the file; all of them by default.

        All of them may be READ_BYTES at most; otherwise InvalidRequest is raised.
        """
        self._check_open()
        if size is not None and size >= 0:
            return await self._read(size)
        text = await self._read(READ_BYTES + 1)
        if len(text) > READ_BYTES:
            raise too_large_error(self._file.path, READ_BYTES)
        return text

    async def _read(self, size: int) -> str:
        parts = [self._text[self._position :]]
        count = len(parts[0])
        while count < size and not self._is_at_end:
            parts.append(await self._next_text())
            count += len(parts[-1])
        self._text = "".join(parts)
        self._position = min(size, len(self._text))
        return self._text[: self._position]

    async def readline(self) -> str:
        """Read a line with its end; empty at the end of the file.

        Raises InvalidRequest for a line of more than LINE_CHARACTERS.
        """
        self._check_open()
        searched = self._position
        while not (end := self._end_of_line(searched)):
            size = len(self._text) - self._position
            if size > LINE_CHARACTERS:
                text = f"a line has more than {LINE_CHARACTERS} characters: read it in parts"
                raise InvalidRequest(f"{self._file.path}: {text}")
            if self._is_at_end:
                end = len(self._text)
                break
            # A line end of two characters may be divided.
            searched = max(size - 1, 0)
            self._text = self._text[self._position :] + await self._next_text()
            self._position = 0
        return self._taken(end)

    def _taken(self, end: int) -> str:
        line = self._text[self._position : end]
        self._position = end
        return line

    def _end_of_line(self, searched: int) -> int:
        """The position behind the next line end that was received; 0 if there is none."""
        if self._newline == "":
            match = _ANY_LINE_END.search(self._text, searched)
            return 0 if match is None else match.end()
        newline = self._newline or "\n"
        start = self._text.find(newline, searched)
        return 0 if start < 0 else start + len(newline)

    async def _next_text(self) -> str:
        block = await anext(self._file, b"")
        self._is_at_end = not block
        text: str = self._decoder.decode(block, final=not block)
        return text

    async def take_lines(self) -> list[str]:
        """The next line and those that were received with it; an empty list at the end."""
        first = await self.readline()
        if not first:
            return []
        lines = [first]
        while end := self._end_of_line(self._position):
            lines.append(self._taken(end))
        return lines

    def put_back(self, text: str) -> None:
        """Make a text that was taken the next one again."""
        self._text = text + self._text[self._position :]
        self._position = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        line = await self.readline()
        if not line:
            raise StopAsyncIteration
        return line

    def _check_open(self) -> None:
        if not self.is_open:
            raise self._not_open(self._file.path)


class TextWriter(Handle):
    """A text file to write, which `await` or `async with` opens.

    What holds for the file of bytes holds for it: a replaced or new file is there when it is
    complete, at the end of the block, and appended text at once.
    """

    def __init__(self, file: FileWriter | FileAppender, text: TextFormat) -> None:
        """Raises LookupError for an unknown encoding, ValueError for an impossible one."""
        super().__init__()
        text.check()
        encoding = text.encoding or "utf-8"
        self._file = file
        self._encoder = codecs.getincrementalencoder(encoding)(text.errors or "strict")
        if isinstance(file, FileAppender) and self._encoder.getstate():
            raise ValueError(
                f"{encoding} begins with a byte order mark, which would be in the middle of the "
                "file: append with an encoding without one, such as utf-8 or utf-16-le"
            )
        self._line_end = text.newline or "\n"
        self._error: tuple[object, ...] = (None, None, None)

    def _target(self) -> str:
        return self._file.path

    async def _open(self) -> None:
        await self._file

    async def __aexit__(self, *error: object) -> None:
        self._error = error
        await self.aclose()

    async def _close(self) -> None:
        try:
            if self._error[0] is None and (end := self._encoder.encode("", final=True)):
                await self._file.write(end)
        finally:
            await self._file.__aexit__(*self._error)

    async def write(self, text: str) -> int:
        """Send text, and return its number of characters, as the built-in does.

        Waits while too much is in flight. Raises errors of earlier writes.
        """
        if not isinstance(text, str):
            kind = type(text).__name__
            raise TypeError(f"text must be str, not {kind}: open the file with 'b' in its mode")
        size = len(text)
        if self._line_end != "\n":
            text = text.replace("\n", self._line_end)
        await self._file.write(self._encoder.encode(text))
        return size

    async def flush(self) -> None:
        """Wait until all text so far is written."""
        await self._file.flush()
