"""A directory of the server's machine as a tar archive, made by the command `tar` of that machine.

Without the command, the directory is downloaded and the archive is made here.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import tarfile
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol

from exec_server.client.file_errors import command_error
from exec_server.client.paths import decoded, path_error
from exec_server.client.results import Stat, Transfer
from exec_server.client.transfer.helper_command import HelperCommand
from exec_server.client.transfer.open_file import BLOCK_BYTES
from exec_server.client.transfer.plan import HELPER_OUTPUT_BYTES, Commands
from exec_server.errors import NotFound, Unsupported

# The exit code of a shell without the command.
_NO_COMMAND: Final = 127


class ArchivedFiles(Protocol):
    """The file operations that an archive needs; `files.Files` implements them."""

    async def stat(self, path: str) -> Stat: ...

    async def download(self, remote: str, local: str) -> Transfer: ...


class ArchiveDownload:
    """One directory or file to archive; iterate over `chunks` once."""

    def __init__(
        self, files: ArchivedFiles, commands: Commands, sandbox: Any, exclude: Sequence[str]
    ) -> None:
        """Paths in `exclude` are relative to the directory."""
        self._files = files
        self._commands = commands
        self._sandbox = sandbox
        self._exclude = [path.strip("/").removeprefix("./") for path in exclude]

    async def chunks(self, path: str) -> AsyncGenerator[bytes, None]:
        """The archive in pieces; names are relative to the directory and begin with `./`."""
        found = await self._files.stat(path)  # raises NotFound, the clearest error
        directory, name = (path, "") if found.is_directory else posixpath.split(path)
        skipped = [f"--exclude=./{_escaped(each)}" for each in self._exclude]
        argv = ["tar", "-C", directory or "/", *skipped, "-cf", "-", f"./{name}" if name else "."]
        has_begun = False
        try:
            async with aclosing(self._run(argv, path)) as output:
                async for chunk in output:
                    has_begun = True
                    yield chunk
        except (NotFound, Unsupported):
            if has_begun:
                raise
            async with aclosing(self._archive_here(path, name)) as blocks:
                async for block in blocks:
                    yield block

    async def _run(self, argv: list[str], path: str) -> AsyncGenerator[bytes, None]:
        """The output of tar; NotFound if there is no such command."""
        tar = HelperCommand(self._commands, self._sandbox, error_bytes=HELPER_OUTPUT_BYTES)
        async with aclosing(tar.stdout(argv, f"{path}: a part of the archive")) as output:
            async for data in output:
                yield data
        code = tar.exit_code
        if code == _NO_COMMAND:
            raise NotFound("tar")
        if code:
            line = decoded(bytes(tar.errors)).strip().partition("\n")[0].removeprefix("tar: ")
            name, _, _ = line.partition(": ")
            text = line.rpartition(": ")[2] or f"tar has failed with exit code {code}"
            at = posixpath.join(path, name[2:]) if name.startswith("./") else path
            raise path_error(command_error(text), at, is_confined=self._sandbox is not None)

    async def _archive_here(self, path: str, name: str) -> AsyncGenerator[bytes, None]:
        with tempfile.TemporaryDirectory(prefix="exec-server-") as folder:
            copy, archive = os.path.join(folder, "copy"), os.path.join(folder, "archive")
            await self._files.download(path, copy)
            await asyncio.to_thread(self._write_archive, copy, archive, f"./{name}")
            with await asyncio.to_thread(open, archive, "rb") as file:
                while block := await asyncio.to_thread(file.read, BLOCK_BYTES):
                    yield block

    def _write_archive(self, copy: str, archive: str, name: str) -> None:
        skipped = {posixpath.normpath(each) for each in self._exclude}

        def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if posixpath.normpath(member.name) in skipped else member

        with tarfile.open(archive, "w") as file:
            file.add(copy, name.rstrip("/"), filter=keep)


def _escaped(path: str) -> str:
    """A path as a pattern of tar that matches this path alone."""
    return "".join(f"\\{letter}" if letter in "*?[\\" else letter for letter in path)
