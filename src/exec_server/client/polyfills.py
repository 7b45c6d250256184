"""Polyfills: the methods that a server lacks, by the methods and commands that it has.

`Polyfills.table` has a function from params to a result for each. `engine.server_features` tells
which methods are missing; those without an equivalent raise Unsupported.

Files in blocks take a command for each block; where no command can be confined, they are read as a
whole. `grep -P` takes a wider pattern, as its dialect differs, and the client checks its lines.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pybase64
from msgspec import Raw

from exec_server.client.arguments import PathResolver
from exec_server.client.commands import HELPER_OUTPUT_BYTES, SystemCommands
from exec_server.client.engine.messages import decode_as
from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import command_error, path_error
from exec_server.client.results import Result
from exec_server.client.transfer.plan import for_each
from exec_server.errors import (
    InternalError,
    InvalidParams,
    InvalidRequest,
    MalformedAnswer,
    NotFound,
    RpcError,
    Unsupported,
)
from exec_server.protocol import files as wire
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Confinable
from exec_server.protocol.session import STATUS, EnvironmentStatus

if TYPE_CHECKING:
    from exec_server.client.files import Files
    from exec_server.patching.patch import PatchedFile

# Requests about the entries of one directory that are in flight.
ENTRIES_AT_ONCE: Final = 16
# The largest block of dd: a divisor of every offset that the client's writers use.
DD_BYTES: Final = 524_288
# Messages of a command that cannot read its block.
ERROR_BYTES: Final = 4_096
# Output of `grep` that is read; a longer one is cut, and the result is truncated.
GREP_OUTPUT_BYTES: Final = 4 * 1_048_576
# For one line; a pattern that takes exponential time raises TimeoutError.
LINE_SECONDS: Final = 1.0

# Programs print the texts of the C library, which the client takes for errors.
_C_LOCALE: Final = {"LC_ALL": "C"}
_REALPATH: Final = '[ -e "$1" ] || exit 4; exec readlink -fn -- "$1"'
_MISSING: Final = 4
_ENOENT: Final = "No such file or directory (os error 2)"
_APPEND: Final = 'cat >> "$1"'
# A hard link is made only if its name does not exist, even as a symlink. The errors of dd have the
# texts of the C library, those of the shell have not.
_CREATE: Final = (
    'new=$1.$$.part; dd of="$new" status=none && ln -T -- "$new" "$1"; code=$?; '
    'rm -f -- "$new"; exit $code'
)
# `tail` complains if `head` has enough and SIGPIPE is ignored.
_READ: Final = '{ tail -c "+$2" 2> /dev/null | head -c "$3"; } < "$1"'
_WRITE: Final = 'dd of="$1" bs="$2" seek="$3" conv=notrunc iflag=fullblock status=none'
_GREP: Final = 'grep "$@" | head -c ' + str(GREP_OUTPUT_BYTES)
# The lines of `grep -nZ`: a path, a number, and whether the line matches or is context.
_GREP_LINE: Final = re.compile(rb"([^\0]*)\0(\d{1,18})([:-])(.*)", re.DOTALL)
# Filters that mean the same to `grep --include`.
_SIMPLE_FILTER: Final = re.compile(r"[\w.*?-]+")
LineMatcher = Callable[[str], re.Match[str] | None]
# As long as those of the extension.
_SHOWN_CHARACTERS: Final = 1000
_OCTAL: Final = re.compile("[0-7]{1,5}")


class _OpenFile:
    """A file of a handle; `content` is all of it, if it was read as a whole."""

    def __init__(self, params: wire.OpenParams, content: bytes | None) -> None:
        self.params = params
        self.path = params.path.native()
        self.content = content


class Polyfills:
    """The methods of one session, with the files that are open in this way."""

    def __init__(
        self, session: ClientSession, paths: PathResolver, commands: SystemCommands
    ) -> None:
        self._session = session
        self._paths = paths
        self._commands = commands
        self._open_files: dict[wire.HandleId, _OpenFile] = {}
        self.table: dict[str, Callable[[Any], Coroutine[Any, Any, Any]]] = {
            STATUS.name: self._status,
            wire.GET_METADATA.name: self._get_metadata,
            wire.CANONICALIZE.name: self._canonicalize,
            wire.WALK.name: self._walk,
            wire.OPEN.name: self._open,
            wire.READ_BLOCK.name: self._read_block,
            wire.WRITE_BLOCK.name: self._write_block,
            wire.CLOSE.name: self._close,
            wire.LIST.name: self._list,
            wire.CREATE.name: self._create,
            wire.RESOLVE.name: self._realpath,
            wire.APPEND.name: self._append,
            wire.RENAME.name: self._rename,
            wire.CHMOD.name: self._chmod,
            wire.SYMLINK.name: self._symlink,
            wire.SET_TIMES.name: self._set_times,
            wire.EDIT.name: self._edit,
            wire.APPLY_PATCH.name: self._apply_patch,
            wire.GLOB.name: self._glob,
            wire.GREP.name: self._grep,
            wire.DISK_USAGE.name: self._disk_usage,
        }

    async def _run(
        self,
        argv: list[str],
        params: Confinable,
        data: bytes = b"",
        output_limit: int = HELPER_OUTPUT_BYTES,
    ) -> Result:
        """Run a command in the sandbox and with the rights of a request."""
        return await self._commands.run(
            argv,
            env=_C_LOCALE,
            input=data or None,
            sandbox=params.sandbox,  # type: ignore[attr-defined]  # all of its subclasses have one
            user=params.user,
            output_limit=output_limit,
        )

    async def _checked(self, argv: list[str], params: Confinable, data: bytes = b"") -> Result:
        """Run a command; raises the error of the operating system that it prints."""
        result = await self._run(argv, params, data)
        if not result:
            raise command_error(_reason(result) or f"{argv[0]} has failed")
        return result

    async def _status(self, _: None) -> EnvironmentStatus:
        """A server that answers is ready."""
        root = wire.GetMetadataParams(PathUri.from_text("/"))
        await self._session.call_server(wire.GET_METADATA, root, is_retryable=True)
        return EnvironmentStatus("ready")

    async def _get_metadata(self, params: wire.GetMetadataParams) -> wire.GetMetadataResult:
        features = self._session.features
        path = params.path.native()
        if params.follow_symlinks is False and not features.refuses_symlinks:
            canonical = wire.CanonicalizeParams(params.path, params.sandbox)
            real = (await self._session.call(wire.CANONICALIZE, canonical)).path
            if PathUri.from_text(real).native() != path:
                raise InvalidRequest("path contains a symbolic link")
        result = await self._session.call_server(wire.GET_METADATA, params, is_retryable=True)
        if features.has_file_sizes or not result.is_file:
            return result
        size = await self._size(params, path)
        times = (result.created_at_ms, result.modified_at_ms)
        return wire.GetMetadataResult(False, True, result.is_symlink, size, *times)

    async def _size(self, params: wire.GetMetadataParams, path: str) -> int:
        """The size of a file: by a command or, where that cannot be confined, by its content."""
        if not self._session.features.runs(is_confined=params.sandbox is not None):
            read = wire.ReadFileParams(params.path, sandbox=params.sandbox)
            return len((await self._session.call_server(wire.READ_FILE, read)).data_base64)
        output = (await self._checked(["stat", "-L", "-c", "%s", "--", path], params)).stdout
        if not output.strip().isdigit():
            raise InternalError("the size of the file is unknown: its machine has no `stat`")
        return int(output)

    async def _canonicalize(self, params: wire.CanonicalizeParams) -> wire.CanonicalizeResult:
        result = await self._run(["/bin/sh", "-c", _REALPATH, "sh", params.path.native()], params)
        if result.exit_code == _MISSING:
            raise NotFound(_ENOENT)
        if not result:
            raise command_error(_reason(result) or "readlink has failed")
        return wire.CanonicalizeResult(result.stdout.decode(errors="surrogateescape"))

    async def _walk(self, params: wire.WalkParams) -> wire.WalkResult:
        """Walk with one request for each directory and one for each entry."""
        walk = _Walk(self._session, params)
        await walk.run()
        return wire.WalkResult(walk.entries, walk.errors, walk.is_truncated)

    async def _open(self, params: wire.OpenParams) -> wire.OpenResult:
        features = self._session.features
        is_confined = params.sandbox is not None
        content = None
        if params.mode == "replace":
            write = wire.WriteFileParams(params.path, "", sandbox=params.sandbox)
            await self._session.call_server(wire.WRITE_FILE, write, is_retryable=True)
        elif features.opens_for_reading(is_confined=is_confined):
            return await self._session.call_server(wire.OPEN, params, is_retryable=True)
        else:
            await self._check_file(params)
            if not features.runs(is_confined=is_confined):
                read = wire.ReadFileParams(params.path, sandbox=params.sandbox)
                # Not retryable: an answer that is too large ends the connection each time.
                content = (await self._session.call_server(wire.READ_FILE, read)).data_base64
        self._open_files[params.handle_id] = _OpenFile(params, content)
        return wire.OpenResult(params.handle_id)

    async def _check_file(self, params: wire.OpenParams) -> None:
        request = wire.GetMetadataParams(params.path, sandbox=params.sandbox)
        metadata = await self._session.call_server(wire.GET_METADATA, request, is_retryable=True)
        if not metadata.is_file:
            raise InvalidRequest(f"path `{params.path.native()}` is not a file")

    async def _read_block(self, params: wire.ReadBlockParams) -> Raw:
        """The answer to `fs/readBlock` as JSON text, which readers decode themselves."""
        file = self._open_files.get(params.handle_id)
        if file is None:
            call = wire.READ_BLOCK
            block = await self._session.call_server(call, params, is_retryable=True)
            return _block(block.chunk, is_last=block.eof)
        start, size = params.offset, params.len
        if file.content is not None:
            return _block(file.content[start : start + size], start + size >= len(file.content))
        argv = ["/bin/sh", "-c", _READ, "sh", file.path, str(start + 1), str(size)]
        result = await self._run(argv, file.params, output_limit=size + ERROR_BYTES)
        if result.stderr:
            raise command_error(_reason(result))
        if result.lost_bytes:
            # The answer for a handle that ended with its connection: the reader opens again.
            raise NotFound(f"unknown file handle `{params.handle_id}`")
        return _block(result.stdout, len(result.stdout) < size)

    async def _write_block(self, text: Raw) -> wire.Done:
        params = decode_as(wire.WriteBlockParams, text, "block of a file")
        file = self._open_files[params.handle_id]
        size = _block_size(params.offset)
        words = [file.path, str(size), str(params.offset // size)]
        argv = ["/bin/sh", "-c", _WRITE, "sh", *words]
        result = await self._run(argv, file.params, bytes(params.chunk))
        if not result:
            code = result.exit_code
            raise command_error(_reason(result) or f"dd has failed with exit code {code}")
        return wire.Done()

    async def _close(self, params: wire.CloseParams) -> wire.Done:
        if self._open_files.pop(params.handle_id, None) is None:
            return await self._session.call_server(wire.CLOSE, params)
        return wire.Done()

    async def _list(self, params: wire.ListParams) -> wire.ListResult:
        raise Unsupported("fsList", "fs/readDirectory lists the entries without details")

    async def _create(self, params: wire.CreateParams) -> wire.Done:
        argv = ["/bin/sh", "-c", _CREATE, "sh", params.path.native()]
        await self._checked(argv, params, pybase64.b64decode(params.data_base64))
        return wire.Done()

    async def _realpath(self, params: wire.ResolveParams) -> wire.CanonicalizeResult:
        result = await self._checked(["realpath", "-mz", "--", params.path.native()], params)
        return wire.CanonicalizeResult(os.fsdecode(result.stdout.rstrip(b"\0")))

    async def _append(self, params: wire.AppendParams) -> wire.AppendResult:
        """Append; the size afterwards is not known."""
        argv = ["/bin/sh", "-c", _APPEND, "sh", params.path.native()]
        await self._checked(argv, params, pybase64.b64decode(params.data_base64))
        return wire.AppendResult(0)

    async def _rename(self, params: wire.RenameParams) -> wire.Done:
        if not params.replace:
            raise Unsupported("fsRename", "rename with replace=True, after a look at the target")
        names = [params.source_path.native(), params.destination_path.native()]
        await self._checked(["mv", "-fT", "--", *names], params)
        return wire.Done()

    async def _chmod(self, params: wire.ChmodParams) -> wire.Done:
        await self._checked(["chmod", f"{params.mode:o}", "--", params.path.native()], params)
        return wire.Done()

    async def _symlink(self, params: wire.SymlinkParams) -> wire.Done:
        await self._checked(["ln", "-sT", "--", params.target, params.path.native()], params)
        return wire.Done()

    async def _set_times(self, params: wire.SetTimesParams) -> wire.Done:
        times = {
            "-m": _seconds(params.modified_at_ms, params.modified_ns),
            "-a": _seconds(params.accessed_at_ms),
        }
        for flag, time in times.items():
            when = [] if time is None else ["-d", f"@{time}"]
            await self._checked(["touch", flag, *when, "--", params.path.native()], params)
        return wire.Done()

    async def _glob(self, params: wire.GlobParams) -> wire.GlobResult:
        raise Unsupported("fsGlob", "walk the tree with files.walk() and match its paths")

    async def _disk_usage(self, params: wire.DiskUsageParams) -> wire.DiskUsageResult:
        path = params.path.native()
        argv = ["stat", "-f", "-c", "%S %b %f %a", "--", path]
        words = (await self._checked(argv, params)).text.split()
        if len(words) != 4 or not all(word.isdecimal() and len(word) < 20 for word in words):
            raise MalformedAnswer(f"{path}: stat printed {' '.join(words)[:100]!r}")
        size, *blocks = map(int, words)
        return wire.DiskUsageResult(*(size * count for count in blocks))

    def _files(self, params: Confinable) -> Files:
        """The files with the sandbox and the user of a request; they raise errors with paths."""
        from exec_server.client.files import Files  # slow to import

        sandbox = params.sandbox  # type: ignore[attr-defined]  # all of its subclasses have one
        return Files(self._session, self._paths, self._commands, sandbox, params.user)

    async def _edit(self, params: wire.EditParams) -> wire.EditResult:
        from exec_server.patching.edits import Edit, apply_edits  # slow to import

        files, path = self._files(params), params.path.native()
        old = (await files.read(path)).decode("utf-8", "surrogateescape")
        edits = [Edit(edit.old_text, edit.new_text, edit.all) for edit in params.edits]
        new, replacements = apply_edits(old, edits)
        await files.write(path, new.encode("utf-8", "surrogateescape"))
        return wire.EditResult(replacements)

    async def _apply_patch(self, params: wire.ApplyPatchParams) -> wire.ApplyPatchResult:
        from exec_server.patching.patch import named_paths, parse_patch, plan  # slow to import

        files = self._files(params)
        base = posixpath.normpath(params.path.native())
        parsed = parse_patch(params.patch)
        contents: dict[str, bytes] = {}
        for path in named_paths(parsed, base):
            try:
                contents[path] = await files.read(path)
            except NotFound:
                pass
        planned = plan(parsed, base, contents.get)
        modes = [await self._old_mode(change, params) for change in planned]
        for change, mode in zip(planned, modes, strict=True):
            await _make_change(files, change, mode)
        return wire.ApplyPatchResult([_changed_file(change, base) for change in planned])

    async def _old_mode(self, change: PatchedFile, params: wire.ApplyPatchParams) -> int | None:
        """The permission bits of a changed file, if it is to get any."""
        if change.mode is not None or change.renamed_from is None:
            return change.mode
        argv = ["stat", "-L", "-c", "%a", "--", change.renamed_from]
        try:
            word = (await self._checked(argv, params)).text.strip()
        except RpcError as error:
            is_confined = params.sandbox is not None
            raise path_error(error, change.renamed_from, is_confined=is_confined) from None
        if not _OCTAL.fullmatch(word):
            raise MalformedAnswer(f"{change.renamed_from}: stat printed {word[:100]!r}")
        return int(word, 8) & 0o777

    async def _grep(self, params: wire.GrepParams) -> wire.GrepResult:
        filters = [text for text in (params.glob, params.exclude) if text is not None]
        if not all(map(_SIMPLE_FILTER.fullmatch, filters)):
            raise Unsupported("fsGrep", "use a glob without slashes and braces")
        options, search = _line_search(params)
        if params.invert and "-F" not in options:
            raise Unsupported("fsGrepCounts", "invert needs a literal pattern without word")
        metadata = wire.GetMetadataParams(params.path, sandbox=params.sandbox, user=params.user)
        is_directory = (await self._session.call(wire.GET_METADATA, metadata)).is_directory
        path = params.path.native()
        base = f"{path.rstrip('/')}/./" if is_directory else f"{path.rpartition('/')[0]}/"
        words = [*_grep_words(params), *options, "--", base[:-1] if is_directory else path]
        argv = ["/bin/sh", "-c", _GREP, "sh", *words]
        done = await self._run(argv, params, output_limit=2 * GREP_OUTPUT_BYTES)
        if done.stderr:
            raise Unsupported("fsGrep", f"grep on its machine says: {done.error_text.strip()}")
        return _grep_matches(params, search, done.stdout, base)


class _Walk:
    """One walk; each directory is before its entries."""

    def __init__(self, session: ClientSession, params: wire.WalkParams) -> None:
        self._session = session
        self._root = params.path
        self._options = params.options
        self._sandbox = params.sandbox
        self._directories = 0
        self.entries: list[wire.WalkEntry] = []
        self.errors: list[wire.WalkError] = []
        self.is_truncated = False

    async def run(self) -> None:
        unvisited = [(self._root, 0)]
        while unvisited:
            path, depth = unvisited.pop()
            self._directories += 1
            if self._directories > self._options.max_directories:
                self.is_truncated = True
                return
            try:
                below = await self._list(path)
            except RpcError as error:
                if path is self._root:
                    raise
                self.errors.append(wire.WalkError(path.uri, error.message))
                continue
            if len(self.entries) + len(below) > self._options.max_entries:
                self.is_truncated = True
                return
            self.entries += below
            if depth < self._options.max_depth:
                directories = [entry for entry in below if entry.kind == "directory"]
                inner = [(PathUri.from_text(entry.path), depth + 1) for entry in directories]
                unvisited += reversed(inner)

    async def _list(self, path: PathUri) -> list[wire.WalkEntry]:
        params = wire.ReadDirectoryParams(path, sandbox=self._sandbox)
        call = wire.READ_DIRECTORY
        listed = (await self._session.call_server(call, params, is_retryable=True)).entries
        base = path.native().rstrip("/")
        kinds: dict[str, wire.EntryKind] = {
            f"{base}/{entry.file_name}": "directory" if entry.is_directory else "file"
            for entry in listed
            if entry.is_directory or entry.is_file
        }
        if not self._options.follow_directory_symlinks:
            await for_each(list(kinds), lambda each: self._leave_out(each, kinds), ENTRIES_AT_ONCE)
        paths = ((PathUri.from_text(name), kind) for name, kind in sorted(kinds.items()))
        return [wire.WalkEntry(each.uri, kind) for each, kind in paths]

    async def _leave_out(self, path: str, kinds: dict[str, wire.EntryKind]) -> None:
        """Remove an entry that is a symlink, or has vanished."""
        params = wire.GetMetadataParams(PathUri.from_text(path), sandbox=self._sandbox)
        try:
            metadata = await self._session.call_server(wire.GET_METADATA, params, is_retryable=True)
        except RpcError as error:
            self.errors.append(wire.WalkError(params.path.uri, error.message))
            del kinds[path]
        else:
            if metadata.is_symlink:
                del kinds[path]


def _reason(result: Result) -> str:
    """The last part of an error message: the text of the operating system."""
    return result.error_text.strip().rpartition(": ")[2]


def _block(data: bytes, is_last: bool) -> Raw:
    end = b"true" if is_last else b"false"
    return Raw(b'{"chunk":"%b","eof":%b}' % (pybase64.b64encode(data), end))


def _block_size(offset: int) -> int:
    """The largest power of two, up to DD_BYTES, that divides an offset."""
    return min(offset & -offset, DD_BYTES) or DD_BYTES


def _seconds(milliseconds: int | None, nanoseconds: int = 0) -> str | None:
    """A time as a decimal number of seconds; None is the current time."""
    if milliseconds is None:
        return None
    time = milliseconds * 1_000_000 + nanoseconds
    sign, size = "-" if time < 0 else "", abs(time)
    return f"{sign}{size // 1_000_000_000}.{size % 1_000_000_000:09}"


async def _make_change(files: Files, change: PatchedFile, mode: int | None) -> None:
    if change.new is None:
        await files.remove(change.path)
        return
    await files.write(change.path, change.new, parents=change.old is None)
    if mode is not None:
        await files.chmod(change.path, mode)


def _changed_file(change: PatchedFile, base: str) -> wire.ChangedFile:
    path = change.path.removeprefix(f"{base.rstrip('/')}/")
    if change.old is None:
        return wire.ChangedFile(path, "added")
    return wire.ChangedFile(path, "deleted" if change.new is None else "modified")


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
    words += ["-v"] if params.invert else []
    words += [f"--include={params.glob}"] if params.glob is not None else []
    if params.exclude is not None:
        words += [f"--exclude={params.exclude}", f"--exclude-dir={params.exclude}"]
    return words


def _grep_matches(
    params: wire.GrepParams, search: LineMatcher, output: bytes, base: str
) -> wire.GrepResult:
    """The matches in the output of `grep`, in the order of paths and lines."""
    is_cut = len(output) >= GREP_OUTPUT_BYTES
    lines: dict[bytes, dict[int, tuple[int, str]]] = {}  # the column of a match, or 0
    for text in output.split(b"\n")[: -1 if is_cut else None]:
        if (line := _GREP_LINE.fullmatch(text)) is not None:
            whole = line[4].decode("utf-8", "surrogateescape")
            visible = line[4].decode("utf-8", "replace")[:_SHOWN_CHARACTERS].rstrip("\r")
            column = 0
            if line[3] == b":":
                match = search(whole)
                column = 0 if match is None else match.start() + 1
                column = int(not column) if params.invert else column
            lines.setdefault(line[1], {})[int(line[2])] = (column, visible)
    matches = []
    for path in sorted(lines):
        numbered = lines[path]
        name = path.decode("utf-8", "replace").removeprefix(base)
        for number in sorted(number for number, (column, _) in numbered.items() if column):
            first, last = number - params.before, number + params.after
            before = [numbered[n][1] for n in range(first, number) if n in numbered]
            after = [numbered[n][1] for n in range(number + 1, last + 1) if n in numbered]
            matches.append(wire.GrepMatch(name, number, *numbered[number], before, after))
    if params.count_only:
        counts = Counter(match.path for match in matches)
        files = [wire.GrepCount(path, count) for path, count in counts.items()]
        return wire.GrepResult([], is_cut or len(files) > params.limit, files[: params.limit])
    return wire.GrepResult(matches[: params.limit], is_cut or len(matches) > params.limit)
