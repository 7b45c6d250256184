"""A machine as a server of the Model Context Protocol: its commands and files as tools.

Schemas have no union types, which some clients refuse: an empty text is a missing one. Only
ToolError reaches the model; any other exception is a defect, which stays on stderr.
"""

from __future__ import annotations

import asyncio
import functools
import posixpath
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, ParamSpec

from exec_server import __version__
from exec_server.adapters.mcp_commands import (
    CommandSessions,
    Report,
    diff_texts,
    found_path,
    join_found,
    select_lines,
)
from exec_server.adapters.mcp_resources import CommandResources
from exec_server.adapters.target import framework_missing
from exec_server.client.arguments import AnySandbox, PathResolver, sandbox_object
from exec_server.client.environment import Environment
from exec_server.client.results import Entry
from exec_server.errors import ExecServerError, InvalidParams
from exec_server.patching.edits import Edit, apply_edits

try:
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.exceptions import ResourceError, ToolError
    from mcp_types import ToolAnnotations
    from pydantic import BaseModel, Field
except ImportError as error:
    raise framework_missing("mcp", "mcp", error) from error

P = ParamSpec("P")
Reconnect = Callable[[], Awaitable[None]]
Notes = Callable[[], str]

# Text of a file that is read as a whole to find its lines; a larger one is refused.
FILE_BYTES: Final = 16 * 1_048_576
# Files that are read at the same time, so that many calls at once do not fill the memory. Further
# ones wait.
MAX_READS: Final = 4
# A file as a resource: its bytes are in the answer, and a model reads no more.
RESOURCE_BYTES: Final = 4 * 1_048_576
# Lines around a match of a search.
MAX_CONTEXT: Final = 20
# Results of one search; a model reads no more.
MAX_FOUND: Final = 500

_INSTRUCTIONS: Final = """\
These tools run commands and change files on another machine ({os}), not on yours. Relative paths
start at {cwd}.{mode}"""

Path = Annotated[str, Field(description="absolute, or relative to the working directory")]
Tokens = Annotated[int, Field(description="longer output has its middle left out")]
Wait = Annotated[int, Field(description="milliseconds to wait for the end, at most 60000")]
SessionId = Annotated[int, Field(description="the number that exec_command has returned")]


class TextEdit(BaseModel):
    """One replacement in a file."""

    old_text: str = Field(description="text that occurs exactly once in the file")
    new_text: str = Field(description="text that replaces it")


class FileTools:
    """The tools that read and change files."""

    def __init__(
        self, environment: Environment, cwd: str, sandbox: AnySandbox | None = None
    ) -> None:
        files = environment.files
        self._files = files if sandbox is None else files.sandboxed(sandbox)
        self._cwd = cwd
        self._reading = asyncio.Semaphore(MAX_READS)

    def path(self, path: str) -> str:
        """A path of the model; `~` is left to the client."""
        return path if path.startswith("~") else posixpath.join(self._cwd, path)

    async def read_file(
        self,
        path: Path,
        offset: Annotated[int, Field(description="first line, counted from 1")] = 1,
        limit: Annotated[int, Field(description="number of lines")] = 2000,
    ) -> str:
        """Read lines of a text file."""
        async with self._reading:
            text = await self._text(path)
            return await asyncio.to_thread(select_lines, text, offset, limit)

    async def write_file(self, path: Path, content: str) -> str:
        """Write a file, in the place of an old one; missing directories are created."""
        data = _encoded(content)
        await self._files.write(self.path(path), data, parents=True)
        return f"{path}: {len(data)} bytes written"

    async def edit_file(
        self,
        path: Path,
        edits: list[TextEdit],
        dry_run: Annotated[bool, Field(description="show the change, but do not make it")] = False,
    ) -> str:
        """Replace texts of a file, one after the other: all of them, or none. Returns a diff."""
        changes = [Edit(edit.old_text, edit.new_text) for edit in edits]
        async with self._reading:
            old = await self._text(path)
            diff = await asyncio.to_thread(_diff_after, old, changes, path)
        if not dry_run:
            await self._files.edit(self.path(path), [(edit.old, edit.new) for edit in changes])
        return select_lines(diff, 1, 2000)

    async def list_directory(self, path: Path = ".") -> str:
        """List the entries of a directory, with the sizes of files."""
        entries = sorted(await self._files.list(self.path(path)), key=lambda each: each.name)
        return select_lines("".join(map(_entry_line, entries)), 1, MAX_FOUND) or "[empty]"

    async def glob(
        self,
        pattern: Annotated[str, Field(description="such as src/**/*.{ts,tsx}")],
        path: Path = ".",
    ) -> str:
        """Find files by their paths below a directory; prints paths for read_file."""
        found = await self._files.glob(pattern, self.path(path), limit=MAX_FOUND)
        return join_found([found_path(path, name) for name in found], is_cut=found.truncated)

    async def grep(
        self,
        pattern: Annotated[str, Field(description="a regular expression")],
        path: Annotated[str, Field(description="a directory or a file")] = ".",
        glob: Annotated[str, Field(description="search only such files, as *.py")] = "",
        ignore_case: bool = False,
        literal: Annotated[bool, Field(description="the pattern is a plain text")] = False,
        context: Annotated[int, Field(description="lines around each match, at most 20")] = 0,
    ) -> str:
        """Search the contents of files; prints PATH:LINE:TEXT."""
        found = await self._files.grep(
            pattern,
            self.path(path),
            literal=literal,
            ignore_case=ignore_case,
            glob=glob or None,
            context=min(max(context, 0), MAX_CONTEXT),
            limit=MAX_FOUND,
        )
        folder = await self._searched_folder(path, [match.path for match in found])
        lines = []
        for match in found:
            name = found_path(folder, match.path)
            around = (*match.before, match.text, *match.after)
            for number, text in enumerate(around, match.line - len(match.before)):
                mark = ":" if number == match.line else "-"
                lines.append(f"{name}{mark}{number}{mark}{text}")
        return join_found(lines, is_cut=found.truncated)

    async def _searched_folder(self, path: str, names: list[str]) -> str:
        """The directory of the names that a search has found; `path` may be the file itself."""
        name = posixpath.basename(path)
        if name not in names or (await self._files.stat(self.path(path))).is_directory:
            return path
        return posixpath.dirname(path)

    async def apply_patch(
        self,
        patch: Annotated[str, Field(description="*** Begin Patch …, or a unified diff")],
        workdir: Annotated[str, Field(description="the directory of its paths")] = ".",
    ) -> str:
        """Apply a patch of Codex's format or a unified diff: all of it, or nothing."""
        _encoded(patch)
        changed = await self._files.apply_patch(patch, self.path(workdir))
        return "\n".join(f"{each.kind} {each.path}" for each in changed) or "nothing has changed"

    async def read_resource(self, path: str) -> str | bytes:
        """A file of the machine, as a text if it is one."""
        async with self._reading:
            data = await self._files.read(f"/{path}", limit=RESOURCE_BYTES)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    async def _text(self, path: str) -> str:
        data = await self._files.read(self.path(path), limit=FILE_BYTES)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise InvalidParams(f"{path} is not a text in UTF-8 ({len(data)} bytes)") from None


class CommandTools:
    """The tools that run commands."""

    def __init__(
        self, sessions: CommandSessions, files: FileTools, shell: str, resources: CommandResources
    ) -> None:
        self._sessions = sessions
        self._files = files
        self._shell = shell
        self._resources = resources

    async def exec_command(
        self,
        ctx: Context,
        cmd: Annotated[str, Field(description="a text for the shell")],
        workdir: Annotated[str, Field(description="default: the working directory")] = "",
        shell: Annotated[str, Field(description="default: the shell of the user")] = "",
        login: Annotated[bool, Field(description="as a login shell")] = False,
        tty: Annotated[bool, Field(description="in a terminal, for write_stdin")] = False,
        yield_time_ms: Wait = 10_000,
        max_output_tokens: Tokens = 10_000,
    ) -> str:
        """Run a command. If it has not ended in time, it goes on in the background.

        Then wait_command waits for its end; do other things until then, if there are any: the
        next result of any tool says if it has ended meanwhile.
        """
        _encoded(cmd)
        known = set(self._sessions.background())
        result = await self._sessions.run(
            [shell or self._shell, "-lc" if login else "-c", cmd],
            workdir=self._files.path(workdir),
            tty=tty,
            wait_ms=yield_time_ms,
            tokens=max_output_tokens,
            report=_report(ctx),
        )
        if set(self._sessions.background()) - known:
            await self._resources.announce(ctx)
        return result

    async def wait_command(
        self,
        ctx: Context,
        session_id: Annotated[
            int, Field(description="the number that exec_command has returned; 0: whichever ends")
        ] = 0,
        timeout_ms: Annotated[
            int, Field(description="milliseconds to wait at most, up to 600000")
        ] = 50_000,
        max_output_tokens: Tokens = 10_000,
    ) -> str:
        """Wait until a command in the background ends: at once, without polling."""
        return await self._sessions.wait_for_end(
            session_id, wait_ms=timeout_ms, tokens=max_output_tokens, report=_report(ctx)
        )

    async def write_stdin(
        self,
        ctx: Context,
        session_id: SessionId,
        chars: Annotated[
            str, Field(description="text to type; \\u0003 interrupts; empty: only wait")
        ] = "",
        yield_time_ms: Wait = 1_000,
        max_output_tokens: Tokens = 10_000,
    ) -> str:
        """Type into the terminal of a command (tty=true), or wait for more of its output."""
        _encoded(chars)
        return await self._sessions.write(
            session_id, chars, wait_ms=yield_time_ms, tokens=max_output_tokens, report=_report(ctx)
        )

    async def kill_process(self, session_id: SessionId) -> str:
        """End a command and its children."""
        return await self._sessions.kill(session_id)

    async def list_processes(self) -> str:
        """List the commands of exec_command that run, and the last ones that have ended."""
        return self._sessions.list()

    async def read_output(
        self,
        session_id: SessionId,
        offset: Annotated[int, Field(description="first byte")] = 0,
        max_output_tokens: Tokens = 10_000,
    ) -> str:
        """Read output of a command again, such as a part that was left out."""
        return self._sessions.read(session_id, offset, max_output_tokens)


_READING: Final = {
    "read_file": "Read a file",
    "list_directory": "List a directory",
    "glob": "Find files",
    "grep": "Search files",
}
_CHANGING: Final = {
    "write_file": "Write a file",
    "edit_file": "Edit a file",
    "apply_patch": "Apply a patch",
}
_COMMANDS: Final = {
    "exec_command": "Run a command",
    "write_stdin": "Type into a command",
    "kill_process": "End a command",
}
_LOOKING: Final = {
    "list_processes": "List commands",
    "read_output": "Read output",
    "wait_command": "Wait for a command",
}


class _Server(MCPServer):
    """A server whose resources have the type of their content: the SDK has one for a template."""

    commands: CommandResources | None = None

    async def list_resources(self) -> list[Any]:
        files: list[Any] = await super().list_resources()
        return files if self.commands is None else files + self.commands.list()

    async def read_resource(self, uri: Any, context: Any = None) -> Any:
        contents = await super().read_resource(uri, context)
        if isinstance(contents, list):
            for each in contents:
                if isinstance(each.content, bytes):
                    each.mime_type = "application/octet-stream"
        return contents


def build_server(
    environment: Environment,
    sessions: CommandSessions,
    cwd: str,
    sandbox: AnySandbox | None = None,
    *,
    is_read_only: bool = False,
) -> MCPServer:
    """The server with its tools; one that is read-only has those alone that read files."""
    mode = " Nothing can be changed." if is_read_only else ""
    if sandbox is not None:
        mode += " A sandbox confines commands and files."
    resources = CommandResources(sessions)
    server = _Server(
        "exec-server",
        title="exec-server",
        instructions=_INSTRUCTIONS.format(os=environment.info.platform_os, cwd=cwd, mode=mode),
        version=__version__,
        log_level="WARNING",
        subscriptions=resources.bus,
    )
    files = FileTools(environment, cwd, sandbox)
    reconnect = environment.reconnect
    _add_resources(server, files, reconnect)
    add = functools.partial(_add, server, sessions.notes)
    add(files, _READING, reconnect, readOnlyHint=True, openWorldHint=False)
    if not is_read_only:
        server.commands = resources
        resources.add_to(server)
        commands = CommandTools(sessions, files, environment.info.shell.path, resources)
        add(commands, _COMMANDS, reconnect, readOnlyHint=False, destructiveHint=True)
        add(commands, _LOOKING, None, readOnlyHint=True, openWorldHint=False)
        hints = {"readOnlyHint": False, "destructiveHint": True, "openWorldHint": False}
        add(files, _CHANGING, reconnect, **hints)
    return server


def confined(
    environment: Environment, sandbox: AnySandbox | None, cwd: str | None
) -> tuple[AnySandbox | None, str]:
    """The whole sandbox object and the working directory.

    A name would mean the directory of each command, which the model chooses.
    """
    paths = PathResolver(environment.info)
    directory = paths.absolute(cwd or ".")
    return sandbox_object(sandbox, paths, directory), directory


def _add(
    server: MCPServer,
    notes: Notes,
    tools: object,
    titles: dict[str, str],
    reconnect: Reconnect | None,
    **hints: bool,
) -> None:
    for name, title in titles.items():
        annotations = ToolAnnotations(title=title, **hints)
        tool = server.tool(name=name, title=title, annotations=annotations, structured_output=False)
        tool(_translated(getattr(tools, name), reconnect, notes))


def _add_resources(server: MCPServer, files: FileTools, reconnect: Reconnect) -> None:
    """Each file as a resource."""

    async def read(path: str) -> str | bytes:
        if ".." in path.split("/"):
            # A client that compares URIs by their beginnings would be led to other files.
            raise ResourceError("the path of a resource has no `..`")
        try:
            await reconnect()
            return await files.read_resource(path)
        except ExecServerError as error:
            raise ResourceError(str(error)) from None

    server.resource("file:///{+path}", name="file", title="A file of the machine")(read)


def _translated(
    tool: Callable[P, Awaitable[str]], reconnect: Reconnect | None, notes: Notes
) -> Callable[P, Awaitable[str | list[str]]]:
    """The tool with errors that the model may read, and a new session if the old one is lost.

    Commands that have ended meanwhile are a text of their own beside the result.
    """

    @functools.wraps(tool)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> str | list[str]:
        try:
            if reconnect is not None:
                await reconnect()
            result = await tool(*args, **kwargs)
            ended = notes()
            return [result, ended] if ended else result
        except ExecServerError as error:
            raise ToolError(str(error)) from None

    return wrapper


def _report(ctx: Context) -> Report:
    async def report(seconds: float, size: int) -> None:
        await ctx.report_progress(seconds, None, f"{size} bytes of output")

    return report


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidParams("the text has a surrogate, which UTF-8 cannot encode") from None


def _entry_line(entry: Entry) -> str:
    name = f"{entry.name}/" if entry.is_directory else entry.name
    link = f" -> {entry.link_target}" if entry.is_symlink else ""
    size = f"\t{entry.size}" if entry.is_file and entry.size is not None else ""
    return f"{name}{link}{size}\n"


def _diff_after(old: str, edits: list[Edit], path: str) -> str:
    """The diff of some edits; raises InvalidParams or PatchDoesNotApply."""
    for edit in edits:
        _encoded(edit.new)
    new, _ = apply_edits(old, edits)
    return diff_texts(old, new, path)
