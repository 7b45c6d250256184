"""CellOutput: shows the output of a command in a cell while it arrives. No I/O of its own."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from typing import Final, TextIO

from exec_server.client.results import Chunk

# Output that a cell shows from its beginning. A notebook stores what it shows, and a browser
# becomes slow; the end of longer output follows when the command has ended.
SHOWN_BYTES: Final = 1_048_576
END_BYTES: Final = 16_384

_DECODER: Final = codecs.getincrementaldecoder("utf-8")


class CellOutput:
    """Writes chunks to two text files as they are, colours included; `finish` writes the end."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._files = {"stdout": stdout, "stderr": stderr}
        self._decoders = {name: _DECODER("replace") for name in self._files}
        self._last = "stdout"
        self._shown = 0
        self._end: deque[tuple[str, bytes]] = deque()
        self._end_bytes = 0
        self._left_out = 0

    def show(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            name = "stderr" if chunk.stream == "stderr" else "stdout"
            room = SHOWN_BYTES - self._shown
            self._write(name, chunk.data[:room])
            if len(chunk.data) > room:
                self._keep(name, chunk.data[room:])
        self._files[self._last].flush()

    def finish(self) -> None:
        """Write the end of longer output, and incomplete characters."""
        if self._left_out:
            self._files["stderr"].write(f"\n[… {self._left_out:,} bytes not shown …]\n")
            self._last = "stderr"
        for name, data in self._end:
            self._write(name, data)
        for name, decoder in self._decoders.items():
            if rest := decoder.decode(b"", final=True):
                self._files[name].write(rest)
        for file in self._files.values():
            file.flush()

    def _write(self, name: str, data: bytes) -> None:
        self._shown += len(data)
        if text := self._decoders[name].decode(data):
            if name != self._last:  # the order of the streams is that of their flushes
                self._files[self._last].flush()
                self._last = name
            self._files[name].write(text)

    def _keep(self, name: str, data: bytes) -> None:
        self._end.append((name, data))
        self._end_bytes += len(data)
        while self._end_bytes > END_BYTES:
            first_name, first = self._end.popleft()
            surplus = min(self._end_bytes - END_BYTES, len(first))
            self._end_bytes -= surplus
            self._left_out += surplus
            if surplus < len(first):
                self._end.appendleft((first_name, first[surplus:]))
                break
