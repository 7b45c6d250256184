"""SessionFiles: the file tools of Claude Managed Agents, inside the directory of one session.

They check paths as the package `anthropic` does for its own: links are followed first.
"""

from __future__ import annotations

import asyncio
import base64
import posixpath
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from exec_server.adapters.target import framework_missing
from exec_server.client.exceptions import FileError
from exec_server.client.files import Files
from exec_server.client.transfer.open_file import READ_BYTES
from exec_server.errors import InvalidRequest, Unsupported

try:
    import anthropic
    from anthropic.lib.tools import ToolError
    from anthropic.lib.tools import agent_toolset as package
    from anthropic.lib.tools.agent_toolset import AgentToolContext
except ImportError as error:
    raise framework_missing("anthropic", "claude-managed-agents", error) from error

# Matches of a search that are read from the target; the package shows fewer.
MAX_MATCHES: Final = 10_000
# Names of which the newest are shown: each costs a question about its time.
MAX_NAMES: Final = 1000
# Questions about times that are sent before the first answer.
CONCURRENT_STATS: Final = 64

_LINES: Final = re.compile(rb"[^\n]*\n|[^\n]+")
_PDF: Final = "application/pdf"
_MEDIA_TYPES: Final = {
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".pdf": _PDF,
    ".png": "image/png",
    ".webp": "image/webp",
}
# Directories that searches leave out, as the package's do.
_NOT_SEARCHED: Final = "{.git,node_modules}"


class SessionFiles:
    """The tools, with the parameters of the package's schemas; limits are those of the context."""

    def __init__(
        self, opened: Callable[[], Awaitable[tuple[Files, str]]], ctx: AgentToolContext
    ) -> None:
        """`opened` returns the files and the real path of the session's directory."""
        self._opened = opened
        self._ctx = ctx

    async def read(self, file_path: str, view_range: list[int] | None = None) -> Any:
        if view_range and len(view_range) != 2:
            raise ToolError("read: view_range has two numbers, the first and the last line")
        files, path = await self._inside(file_path)
        media_type = _MEDIA_TYPES.get(posixpath.splitext(path)[1].lower())
        if media_type is not None:
            if view_range:
                raise ToolError("read: an image or PDF has no lines: leave out view_range")
            limit = self._media_limit(media_type)
            data = await _read_whole(files, path, limit, "of an image or PDF")
            return [_media_block(data, media_type)]
        limit = _cap(self._ctx.max_file_bytes, package.DEFAULT_MAX_FILE_BYTES)
        if view_range:
            data = await _read_lines(files, path, view_range[0], view_range[1], limit)
        else:
            hint = "of a whole file; view_range, such as [1, 500], reads some of its lines"
            data = await _read_whole(files, path, limit, hint)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ToolError(f"read: {file_path}: neither UTF-8 text nor an image or PDF") from None

    async def write(self, file_path: str, content: str) -> str:
        data = content.encode()
        files, path = await self._inside(file_path)
        await files.write(path, data, parents=True)
        return f"wrote {len(data)} bytes to {file_path}"

    async def edit(
        self, file_path: str, old_string: str, new_string: str, replace_all: bool | None = None
    ) -> str:
        files, path = await self._inside(file_path)
        count = await files.edit(path, old_string, new_string, all=bool(replace_all))
        return f"edited {file_path} ({count} replacement(s))"

    async def glob(self, pattern: str, path: str | None = None) -> str:
        if pattern.startswith("/") or ".." in pattern.split("/"):
            raise ToolError("glob: a pattern is relative and has no '..'; path names a directory")
        files, root = await self._inside(path or ".")
        found = await files.glob(pattern, root, limit=MAX_NAMES)
        paths = [posixpath.join(root, name) for name in found]
        if not paths:
            return "no matches"
        shown = (await _newest_first(files, paths))[: package.GLOB_RESULT_LIMIT]
        left_out = len(paths) - len(shown)
        if found.truncated:
            shown.append(f"[there are more than {len(paths)} matches]")
        elif left_out:
            shown.append(f"[{left_out} older matches are left out]")
        return "\n".join(shown)

    async def grep(self, pattern: str, path: str | None = None) -> str:
        files, root = await self._inside(path or ".")
        try:
            found = await files.grep(pattern, root, exclude=_NOT_SEARCHED, limit=MAX_MATCHES)
        except Unsupported:  # a server that runs grep, which has no alternatives in its patterns
            found = await files.grep(pattern, root, limit=MAX_MATCHES)
        # The path of a match in a root that is a file is the name of this file.
        is_file = bool(found) and not (await files.stat(root)).is_directory
        lines: list[str] = []
        size = 0
        for each in found:
            place = root if is_file else posixpath.join(root, each.path)
            lines.append(f"{place}:{each.line}:{each.text}")
            size += len(lines[-1]) + 1
            if size > package.GREP_OUTPUT_LIMIT:
                lines[-1] = f"[the output is cut at {package.GREP_OUTPUT_LIMIT} bytes]"
                break
        else:
            if found.truncated:
                lines.append("[the search was ended by its limits: it may have missed lines]")
        return "\n".join(lines) or "no matches"

    async def _inside(self, path: str) -> tuple[Files, str]:
        """The files, and the real path if it is in the session's directory; ToolError otherwise."""
        if "\0" in path:
            raise ToolError("a path cannot contain a null character")
        files, directory = await self._opened()
        whole = posixpath.normpath(posixpath.join(directory, path))
        real = await files.realpath(f"/{whole.lstrip('/')}", strict=False)
        if real != directory and not real.startswith(f"{directory}/"):
            raise ToolError(f"{path!r} is outside of the session's directory {directory}")
        return files, real

    def _media_limit(self, media_type: str) -> int | None:
        """The bytes of an image or PDF: those of an image are limited after base64."""
        ctx = self._ctx
        if media_type == _PDF:
            limit = _cap(ctx.max_pdf_bytes, package.DEFAULT_MAX_PDF_BYTES)
        else:
            encoded = _cap(ctx.max_image_base64_bytes, package.DEFAULT_MAX_IMAGE_BASE64_BYTES)
            limit = None if encoded is None else encoded // 4 * 3
        explicit = _cap(ctx.max_file_bytes, None)
        limits = [each for each in (limit, explicit) if each is not None]
        return min(limits, default=None)


def _cap(configured: Any, default: int | None) -> int | None:
    """A limit of the context; None if there is none."""
    return default if isinstance(configured, anthropic.NotGiven) else configured


def _media_block(data: bytes, media_type: str) -> dict[str, Any]:
    text = base64.standard_b64encode(data).decode()
    source = {"type": "base64", "media_type": media_type, "data": text}
    return {"type": "document" if media_type == _PDF else "image", "source": source}


async def _read_whole(files: Files, path: str, limit: int | None, of: str) -> bytes:
    limit = READ_BYTES if limit is None else limit
    try:
        return await files.read(path, limit=limit)
    except InvalidRequest as error:
        if isinstance(error, OSError):
            raise
        raise ToolError(f"read: the file has more than {limit} bytes, the limit {of}") from None


async def _read_lines(files: Files, path: str, first: int, last: int, limit: int | None) -> bytes:
    """The lines from `first` to `last`, counted from 1; to the end if `last` is not positive."""
    skipped, wanted = max(first - 1, 0), max(last, 0) or None
    if wanted is not None and wanted <= skipped:
        return b""
    limit = READ_BYTES if limit is None else limit
    line, kept = 0, bytearray()
    async with files.open(path) as reader:
        async for block in reader:
            for piece in _LINES.findall(block):
                if line >= skipped:
                    kept += piece
                    if len(kept) > limit + 1:
                        raise ToolError(f"read: the lines have more than {limit} bytes")
                line += piece.endswith(b"\n")
                if wanted is not None and line >= wanted:
                    return bytes(kept.removesuffix(b"\n"))
    return bytes(kept)


async def _newest_first(files: Files, paths: list[str]) -> list[str]:
    """The paths by the times of their entries; those that have vanished meanwhile come last."""
    times: dict[str, float] = {}
    limit = asyncio.Semaphore(CONCURRENT_STATS)

    async def find_time(path: str) -> None:
        async with limit:
            try:
                times[path] = (await files.stat(path, follow_links=False)).modified
            except FileError:
                times[path] = 0.0

    try:
        async with asyncio.TaskGroup() as tasks:
            for path in paths:
                tasks.create_task(find_time(path))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return sorted(paths, key=lambda path: -times[path])
