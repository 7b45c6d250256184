"""FileOpener: the modes of `files.open`, and what is opened in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast

from exec_server.client.arguments import AnyPath, PathResolver, checked_count, path_text
from exec_server.client.commands import SystemCommands
from exec_server.client.engine.session import ClientSession
from exec_server.client.transfer.open_file import FileAppender, FileReader, FileWriter
from exec_server.client.transfer.plan import AtomicReplacement, RemoteFiles
from exec_server.client.transfer.text_file import TextFormat, TextReader, TextWriter
from exec_server.errors import Unsupported
from exec_server.protocol.files import HandleId, OpenParams
from exec_server.protocol.sandbox import Sandbox

Kind = Literal["r", "w", "a", "x"]


class OpeningFiles(RemoteFiles, Protocol):
    """The file operations that opening uses; `files.Files` implements them."""

    async def write(self, path: AnyPath, data: bytes, *, exclusive: bool = False) -> None: ...

    async def append(self, path: AnyPath, data: bytes) -> None: ...


def parse_mode(mode: str) -> tuple[Kind, bool]:
    """What a mode of `open` does, and whether it is one of text; raises ValueError."""
    kinds = [letter for letter in mode if letter in "rwax"]
    others = "".join(letter for letter in mode if letter not in "rwax")
    if "+" in mode:
        raise ValueError(f"mode {mode!r}: a file is read or written; edit() changes a part of it")
    if len(kinds) != 1 or others not in ("", "b", "t"):
        raise ValueError(f"mode must be 'r', 'w', 'a' or 'x' with 'b' or 't', not {mode!r}")
    return cast(Kind, kinds[0]), others != "b"


@dataclass(frozen=True)
class FileOpener:
    """Opens files with the rights of a `Files`."""

    files: OpeningFiles
    session: ClientSession
    paths: PathResolver
    commands: SystemCommands
    sandbox: Sandbox | None
    user: str | None

    def open(
        self, path: AnyPath, mode: str, text: TextFormat, *, offset: int, in_place: bool
    ) -> FileReader | FileWriter | FileAppender | TextReader | TextWriter:
        """The file in a mode; raises ValueError for options that the mode does not have."""
        kind, is_text = parse_mode(mode)
        if not is_text and text != TextFormat():
            raise ValueError(f"mode {mode!r} is binary: it takes no encoding, errors or newline")
        if checked_count(offset, "offset") and (kind, is_text) != ("r", False):
            raise ValueError(f"mode {mode!r} takes no offset")
        if in_place and (kind, is_text) != ("w", False):
            raise ValueError(f"mode {mode!r} takes no in_place")
        file = self._open(path, kind, offset, in_place)
        if not is_text:
            return file
        return TextReader(file, text) if isinstance(file, FileReader) else TextWriter(file, text)

    def _open(
        self, path: AnyPath, kind: Kind, offset: int, in_place: bool
    ) -> FileReader | FileWriter | FileAppender:
        uri, name = self.paths.uri(path), path_text(path)
        if kind == "r":
            params = OpenParams(HandleId(""), uri, "read", self.sandbox, user=self.user)
            return FileReader(self.session, params, name, offset)
        if kind == "a":
            return FileAppender(lambda data: self.files.append(path, data), name)
        features = self.session.features
        if not features.writes_blocks(is_confined=self.sandbox is not None):
            raise Unsupported("fileWriteStreaming", "write the whole file with files.write()")
        params = OpenParams(HandleId(""), uri, "replace", self.sandbox, user=self.user)
        if in_place:
            return FileWriter(self.session, params, name)
        replacement = AtomicReplacement(
            self.files,
            self.commands,
            self.sandbox,
            self.paths.absolute(path),
            self.session.spawn,
            create=(lambda: self.files.write(path, b"", exclusive=True)) if kind == "x" else None,
        )
        return FileWriter(self.session, params, name, replacement)
