"""TreeWalk: the entries below a directory of the server, by as few requests as possible."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from exec_server.client.arguments import checked_count, native
from exec_server.client.results import Entry
from exec_server.errors import InternalError, InvalidRequest, MalformedAnswer, RpcError
from exec_server.protocol import files as wire
from exec_server.protocol.paths import PathUri

# Limits of one walk request: at most some seconds of work for the server.
WALK_DEPTH: Final = 64
WALK_DIRECTORIES: Final = 10_000
WALK_ENTRIES: Final = 50_000

# Directories that a walk remembers, if it needs a request for each.
MAX_DIRECTORIES: Final = 1_000_000
# Of an URI: a path of 4096 bytes, each of them escaped.
MAX_URI: Final = 3 * 4096 + 64


class TreeWalk:
    """Lists trees; `ask` sends a request and takes the path for its errors."""

    def __init__(
        self,
        ask: Callable[[wire.WalkParams, str], Awaitable[wire.WalkResult]],
        realpath: Callable[[str], Awaitable[str]],
        follow_links: bool,
        on_error: Callable[[RpcError], None] | None,
    ) -> None:
        self._ask = ask
        self._realpath = realpath
        self._follow_links = follow_links
        self._on_error = on_error

    async def below(self, root: PathUri, shown: str) -> AsyncIterator[Entry]:
        """Everything below a directory, each directory before its entries.

        Errors call it `shown`.
        """
        options = wire.WalkOptions(WALK_DEPTH, WALK_DIRECTORIES, WALK_ENTRIES, self._follow_links)
        answer = await self._walk(wire.WalkParams(root, options), shown)
        if answer.truncated:  # it has more entries than one answer
            async for entry in self.one_by_one(root, MAX_DIRECTORIES):
                yield entry
            return
        self._report(answer.errors)
        deepest = []
        for each in answer.entries:
            is_deepest = each.path.count("/") - root.uri.count("/") > WALK_DEPTH
            if each.kind == "directory" and is_deepest:
                deepest.append(each.path)
            yield _entry(each)
        for directory in deepest:
            async for entry in self.below(PathUri.from_text(directory), native(directory)):
                yield entry

    async def one_by_one(self, root: PathUri, depth: int) -> AsyncIterator[Entry]:
        """The same by a request for each directory, `depth` levels deep."""
        if checked_count(depth, "depth") < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        options = wire.WalkOptions(0, 1, WALK_ENTRIES, self._follow_links)
        seen = set()
        unvisited = [(root.uri, depth)]
        while unvisited:
            uri, levels = unvisited.pop()
            if self._follow_links:  # links may form a cycle
                canonical = await self._realpath(uri)
                if canonical in seen:
                    continue
                seen.add(canonical)
            answer = await self._walk(wire.WalkParams(PathUri.from_text(uri), options), native(uri))
            self._report(answer.errors)
            for each in answer.entries:
                yield _entry(each)
            if levels > 1:
                below = [each.path for each in answer.entries if each.kind == "directory"]
                unvisited += ((each, levels - 1) for each in reversed(below))
            if len(unvisited) + len(seen) > MAX_DIRECTORIES:
                text = f"more than {MAX_DIRECTORIES} directories: walk those in it one by one"
                raise InvalidRequest(f"{native(root.uri)}: {text}")

    async def _walk(self, params: wire.WalkParams, path: str) -> wire.WalkResult:
        """Walk once; the answer has paths below the root alone."""
        answer = await self._ask(params, path)
        prefix = params.path.uri.rstrip("/") + "/"
        for entry in answer.entries:
            if not entry.path.startswith(prefix) or len(entry.path) > MAX_URI:
                text = f"the server lists {entry.path[:100]!r}"
                raise MalformedAnswer(f"{path}: {text}, which is not below it")
        return answer

    def _report(self, errors: list[wire.WalkError]) -> None:
        if self._on_error is not None:
            for error in errors:
                self._on_error(InternalError(f"{native(error.path)}: {error.message}"))


def _entry(entry: wire.WalkEntry) -> Entry:
    return Entry(native(entry.path), entry.kind == "directory", entry.kind == "file")
