"""FileSearches: the methods of `Files` that look at many files, by extensions of the server.

For a server without `fsGrep`, the command `grep` on its machine finds lines. Its dialects of
regular expressions are others, so `grep -P` takes a wider pattern, and the client looks itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from exec_server.client.file_changes import FileChanges
from exec_server.client.paths import AnyPath, path_text
from exec_server.client.results import Found, GrepMatch
from exec_server.errors import InvalidParams, Unsupported
from exec_server.protocol import file_changes as wire
from exec_server.protocol import files

if TYPE_CHECKING:
    from exec_server.client.file_watch import FileWatch

# Output of `grep` that is read; a longer one is cut, and the result is truncated.
GREP_OUTPUT_BYTES: Final = 4 * 1_048_576

# For one line; a pattern that takes exponential time raises TimeoutError.
LINE_SECONDS: Final = 1.0

_GREP: Final = 'grep "$@" | head -c ' + str(GREP_OUTPUT_BYTES)
# The lines of `grep -nZ`: a path, a number, and whether the line matches or is context.
_GREP_LINE: Final = re.compile(rb"([^\0]*)\0(\d{1,18})([:-])(.*)", re.DOTALL)
# Filters that mean the same to `grep --include`.
_SIMPLE_FILTER: Final = re.compile(r"[\w.*?-]+")
LineMatcher = Callable[[str], re.Match[str] | None]
# As long as those of the extension.
_SHOWN_CHARACTERS: Final = 1000


class FileSearches(FileChanges):
    """Searches in the contents of files, and watches of their changes."""

    async def grep(
        self,
        pattern: str,
        root: AnyPath = ".",
        *,
        literal: bool = False,
        ignore_case: bool = False,
        glob: str | None = None,
        exclude: str | None = ".git",
        before: int = 0,
        after: int = 0,
        context: int = 0,
        limit: int = 1000,
    ) -> Found[GrepMatch]:
        """The lines below `root`, a directory or a file, that match a regular expression.

        `literal` takes the pattern as a plain text. `glob` and `exclude` are patterns of paths
        like those of `glob()`; without a slash they match names at any depth. `before`, `after`
        and `context` (both) are numbers of lines around a match, at most 20. Binary files and
        links are skipped, hidden files and those in a .gitignore are not. At most `limit` matches
        are returned; `truncated` of the result tells whether there may be more. A search that
        takes longer than 5 seconds is truncated, too.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"pattern must be str, not {type(pattern).__name__}")
        params = wire.GrepParams(
            self._paths.uri(root, "root"),
            pattern,
            literal=literal,
            ignore_case=ignore_case,
            glob=glob,
            exclude=exclude,
            before=max(before, context),
            after=max(after, context),
            limit=limit,
            sandbox=self._sandbox,
        )
        if not self._capabilities.fs_grep or self._user is not None:
            return await self._grep_by_command(params, root)
        found = await self._call(wire.GREP, params, root)
        matches = (
            GrepMatch(
                each.path, each.line, each.column, each.text, tuple(each.before), tuple(each.after)
            )
            for each in found.matches
        )
        return Found(matches, truncated=found.truncated)

    def watch(self, path: AnyPath = ".", *, recursive: bool = False) -> FileWatch:
        """The changes of a directory's entries, or of a file, for `async with` and `async for`.

        With `recursive` also those of the directories below it, at most 4096. Renaming is a
        deletion and a creation. Links are not followed.
        """
        if not self._capabilities.fs_watch or self._user is not None:
            raise Unsupported("fsWatch", "compare the results of files.walk() at intervals")
        from exec_server.client.file_watch import FileWatch

        return FileWatch(
            self._session,
            self._paths.uri(path),
            path_text(path),
            recursive=recursive,
            sandbox=self._sandbox,
        )

    async def _grep_by_command(self, params: wire.GrepParams, root: AnyPath) -> Found[GrepMatch]:
        filters = [text for text in (params.glob, params.exclude) if text is not None]
        if not all(map(_SIMPLE_FILTER.fullmatch, filters)):
            raise Unsupported("fsGrep", "use a glob without slashes and braces")
        options, search = _line_search(params)
        metadata = files.GetMetadataParams(self._paths.uri(root, "root"), sandbox=self._sandbox)
        is_directory = (await self._call(files.GET_METADATA, metadata, root)).is_directory
        path = self._absolute(root, "root")
        base = f"{path.rstrip('/')}/./" if is_directory else f"{path.rpartition('/')[0]}/"
        words = [*_grep_words(params), *options, "--", base[:-1] if is_directory else path]
        done = await self._commands.run(
            ["/bin/sh", "-c", _GREP, "sh", *words],
            cwd="/",
            env={"LC_ALL": "C"},
            sandbox=self._sandbox,
            output_limit=2 * GREP_OUTPUT_BYTES,
        )
        if done.stderr:
            raise Unsupported("fsGrep", f"grep on its machine says: {done.error_text.strip()}")
        return _grep_matches(params, search, done.stdout, base)


def _line_search(params: wire.GrepParams) -> tuple[list[str], LineMatcher]:
    """The options of `grep` for all lines that may match, and a search in one of them."""
    from exec_server.filesystem.line_patterns import LinePattern

    pattern = LinePattern(params.pattern, literal=params.literal, ignore_case=params.ignore_case)
    if params.literal and (params.pattern.isascii() or not params.ignore_case):
        # Every grep knows this option, and no other module is needed.
        options = ["-F", *(["-i"] if params.ignore_case else []), "-e", params.pattern]
        flags = re.IGNORECASE if params.ignore_case else 0
        return options, re.compile(re.escape(params.pattern), flags).search
    try:
        import regex
    except ImportError:
        raise Unsupported("fsGrep", "install the package regex, or search for a text") from None
    flags = regex.IGNORECASE if pattern.ignore_case else 0
    options = ["-P", *(["-i"] if pattern.wide_ignores_case else []), "-e", pattern.wide]
    try:
        compiled = regex.compile(pattern.exact, flags | regex.MULTILINE)
    except regex.error as error:
        raise InvalidParams(f"pattern is not a regular expression: {error.msg}") from None
    return options, partial(compiled.search, timeout=LINE_SECONDS)


def _grep_words(params: wire.GrepParams) -> list[str]:
    words = ["-rnIZHs", f"-B{params.before}", f"-A{params.after}"]
    words += [f"--include={params.glob}"] if params.glob is not None else []
    if params.exclude is not None:
        words += [f"--exclude={params.exclude}", f"--exclude-dir={params.exclude}"]
    return words


def _grep_matches(
    params: wire.GrepParams, search: LineMatcher, output: bytes, base: str
) -> Found[GrepMatch]:
    """The matches in the output of `grep`, in the order of paths and lines."""
    is_cut = len(output) >= GREP_OUTPUT_BYTES
    lines: dict[bytes, dict[int, tuple[int, str]]] = {}  # the column of a match, or 0
    for text in output.split(b"\n")[: -1 if is_cut else None]:
        if (line := _GREP_LINE.fullmatch(text)) is not None:
            whole = line[4].decode("utf-8", "surrogateescape")
            match = search(whole) if line[3] == b":" else None
            shown = line[4].decode("utf-8", "replace")[:_SHOWN_CHARACTERS].rstrip("\r")
            column = 0 if match is None else match.start() + 1
            lines.setdefault(line[1], {})[int(line[2])] = (column, shown)
    matches = []
    for path in sorted(lines):
        found = lines[path]
        name = path.decode("utf-8", "replace").removeprefix(base)
        for number in sorted(number for number, (column, _) in found.items() if column):
            first, last = number - params.before, number + params.after
            before = tuple(found[n][1] for n in range(first, number) if n in found)
            after = tuple(found[n][1] for n in range(number + 1, last + 1) if n in found)
            matches.append(GrepMatch(name, number, *found[number], before, after))
    return Found(matches[: params.limit], truncated=is_cut or len(matches) > params.limit)
