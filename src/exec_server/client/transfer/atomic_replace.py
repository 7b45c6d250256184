"""AtomicReplacement: a new content gets its final name when it is complete, and not before.

Blocks go to a temporary file beside the target, which a command renames, or copies if the inode
must stay: a hard link, attributes that another file cannot get, a dangling symlink, a mount point.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Final

from exec_server.client.arguments import decoded
from exec_server.client.commands import SystemCommands
from exec_server.client.exceptions import (
    AlreadyExists,
    NameTooLong,
    NotFound,
    PermissionDenied,
    ReadOnly,
    SandboxDenied,
    command_error,
    path_error,
)
from exec_server.client.transfer.plan import RemoteFiles, run_xargs, temporary_path
from exec_server.errors import ExecServerError, RpcError, Unsupported
from exec_server.protocol.sandbox import Sandbox

# For the removal of a temporary file, or its last step, after a cancellation: both take
# milliseconds, unless the server is unreachable.
CLEAN_UP_SECONDS: Final = 5.0

# The exit codes of a shell whose command cannot be run.
_NO_COMMAND: Final = (126, 127)
_IS_WRITABLE: Final = '[ -w "$1" ]'
_REPLACE: Final = """
links() { ls -ldn "$1" | { read -r mode links rest; echo "$links"; }; }
attributes() { ls -ldn "$1" | { read -r mode links user group rest; echo "$mode $user $group"; }; }
rewrite() { cat < "$1" > "$2" && rm -f "$1" && { [ -z "$3" ] || chmod "$3" "$2"; }; }
if [ -d "$2" ]; then echo "$2: Is a directory" >&2; exit 1; fi
if [ -L "$2" ]; then rewrite "$@"; exit; fi
if [ -e "$2" ]; then
    if [ ! -f "$2" ] || [ "$(links "$2")" != 1 ]; then rewrite "$@"; exit; fi
    cp --attributes-only --preserve=mode,ownership,xattr "$2" "$1" 2> /dev/null ||
        chmod "$(stat -c %a "$2")" "$1" 2> /dev/null
    if [ "$(attributes "$1")" != "$(attributes "$2")" ]; then rewrite "$@"; exit; fi
fi
if [ -n "$3" ]; then chmod "$3" "$1" || exit; fi
mv -fT "$1" "$2" 2> /dev/null || mv -f "$1" "$2" 2> /dev/null || rewrite "$@"
"""

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Future[None]"]


class AtomicReplacement:
    """The temporary file for the new content of one target."""

    def __init__(
        self,
        files: RemoteFiles,
        commands: SystemCommands,
        sandbox: Sandbox | None,
        target: str,
        spawn: Spawn,
    ) -> None:
        """`spawn` starts a task that outlives the caller's cancellation."""
        self._files = files
        self._commands = commands
        self._sandbox = sandbox
        self._target = target
        self._spawn = spawn
        self._is_new = False
        self._part = ""

    async def begin(self) -> str | None:
        """The path of the temporary file; None if the target has to be written itself.

        That is so for targets that cannot be written at all: the server then says why.
        """
        try:
            found = await self._files.stat(self._target)
        except NotFound:
            self._is_new = True
        except (RpcError, SandboxDenied):
            return None
        else:
            if not found.is_file or not await self._is_writable():
                return None
            if found.is_symlink:
                self._target = await self._files.realpath(self._target)
        self._part = temporary_path(self._target, uuid.uuid4().hex[:12])
        return self._part

    async def _is_writable(self) -> bool:
        """Whether the target may be written; renaming would replace a read-only file as well."""
        argv = ["/bin/sh", "-c", _IS_WRITABLE, "sh", self._target]
        try:
            done = await self._commands.run(argv, sandbox=self._sandbox)
        except (RpcError, UnicodeEncodeError):
            return True
        return bool(done) or done.exit_code in _NO_COMMAND

    def may_write_in_place(self, error: ExecServerError) -> bool:
        """Whether the target may be writable although the temporary file cannot be created.

        Not for a full disk: opening the target would truncate it.
        """
        kinds = (PermissionDenied, ReadOnly, NameTooLong, NotFound, SandboxDenied)
        return isinstance(error, kinds)

    async def commit(self) -> None:
        """Put the complete temporary file in place, or remove it; raises RpcError."""
        committing = self._spawn(self._commit())
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            await asyncio.wait([committing], timeout=CLEAN_UP_SECONDS)
            raise

    async def _commit(self) -> None:
        try:
            await replace(
                self._files,
                self._commands,
                self._sandbox,
                (self._part, self._target),
                is_new=self._is_new,
            )
        except BaseException:
            await self.abandon()
            raise

    async def abandon(self) -> None:
        """Remove the temporary file, also if the caller is cancelled meanwhile."""
        removing = self._spawn(self._files.remove(self._part, missing_ok=True))
        await asyncio.wait([removing], timeout=CLEAN_UP_SECONDS)


async def replace(
    files: RemoteFiles,
    commands: SystemCommands,
    sandbox: Sandbox | None,
    paths: tuple[str, str],
    *,
    is_new: bool = False,
    mode: int | None = None,
) -> bool:
    """Put a temporary file in the place of a target; `paths` are both of them.

    The target gets `mode`, or keeps its own. Returns whether it has the mode: without commands
    the server copies the content, and then it has not. `is_new` if there was no target.
    """
    part, target = paths
    if is_new and mode is None:
        try:
            await files.rename(part, target, replace=False)
            return True
        except (AlreadyExists, Unsupported):
            pass  # there is a target now, or a dangling symlink
    arguments = (part, target, "" if mode is None else f"{mode:o}")
    try:
        done = await run_xargs(
            commands, ["-n", "3", "sh", "-c", _REPLACE, "sh"], arguments, sandbox
        )
    except (RpcError, Unsupported):
        done = None
    if done:
        return True
    if done is not None and done.exit_code not in _NO_COMMAND:
        text = decoded(done.stderr).strip().rpartition(": ")[2]
        error = command_error(text or "it cannot be replaced")
        raise path_error(error, target, is_confined=sandbox is not None)
    await files.copy(part, target)
    await files.remove(part, missing_ok=True)
    return False
