"""ExecServerSandboxClient: machines as sandboxes of the OpenAI Agents SDK.

For agents without a sandbox, `openai_agents_tools` has the light tools: a shell and an editor.
"""

from __future__ import annotations

import asyncio
import errno
import io
import stat
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from exec_server.adapters.snapshot_archive import without_special_files
from exec_server.adapters.target import (
    UNREACHABLE,
    configured_files,
    framework_missing,
    make_environment,
    stored_options,
)
from exec_server.client.connect import ConnectOptions
from exec_server.client.environment import Environment
from exec_server.client.exceptions import LinkLoop, ProgramNotFound, Timeout
from exec_server.client.files import Files
from exec_server.client.port_forwarding import PortForward
from exec_server.client.process import Process
from exec_server.errors import ExecServerError, InvalidRequest

_NOT_FOUND: Final = 127
# An archive of a workspace is in memory, as the SDK has it. A larger one is refused.
ARCHIVE_BYTES: Final = 512 * 1_048_576

__all__ = [
    "ExecServerSandboxClient",
    "ExecServerSandboxClientOptions",
    "ExecServerSandboxSession",
    "ExecServerSandboxSessionState",
]


try:
    from agents.sandbox.errors import (
        ExecTimeoutError,
        ExecTransportError,
        InvalidManifestPathError,
        WorkspaceArchiveReadError,
        WorkspaceArchiveWriteError,
        WorkspaceReadNotFoundError,
        WorkspaceStartError,
    )
    from agents.sandbox.files import EntryKind, FileEntry
    from agents.sandbox.manifest import Manifest
    from agents.sandbox.session import (
        BaseSandboxClient,
        BaseSandboxClientOptions,
        BaseSandboxSession,
        Instrumentation,
        SandboxSession,
        SandboxSessionState,
    )
    from agents.sandbox.session.pty_types import (
        PTY_PROCESSES_MAX,
        PtyExecUpdate,
        allocate_pty_process_id,
        clamp_pty_yield_time_ms,
        resolve_pty_write_yield_time_ms,
        truncate_text_by_tokens,
    )
    from agents.sandbox.snapshot import resolve_snapshot
    from agents.sandbox.types import ExecResult, ExposedPortEndpoint, Permissions, User
    from pydantic import ConfigDict

    from exec_server.adapters.stored_machine import StoredMachine
except ImportError as error:
    raise framework_missing("openai-agents", "openai-agents", error) from error

_DEFAULT_ROOT = Manifest().root


class ExecServerSandboxSessionState(SandboxSessionState, StoredMachine):
    """A session as the SDK stores it; the token is not in it."""

    type: Literal["exec_server"] = "exec_server"
    workspace_root_owned: bool = False


class ExecServerSandboxSession(BaseSandboxSession):
    """A directory of a machine; connected from its start to its shutdown."""

    state: ExecServerSandboxSessionState

    def __init__(self, state: ExecServerSandboxSessionState, options: ConnectOptions) -> None:
        self.state = state
        self._options = options
        self._environment: Environment | None = None
        self._terminals: dict[int, tuple[Process, bool]] = {}
        self._forwards: dict[int, PortForward] = {}

    async def _ensure_backend_started(self) -> None:
        environment = await self._connected()
        try:
            exists = await environment.files.exists(self._root)
        except UNREACHABLE as error:
            raise WorkspaceStartError(path=Path(self._root), cause=error) from error
        self._set_start_state_preserved(exists and self.state.workspace_root_ready)

    async def _prepare_backend_workspace(self) -> None:
        try:
            await self._files().mkdir(self._root, parents=True, exist_ok=True)
        except ExecServerError as error:
            raise WorkspaceStartError(path=Path(self._root), cause=error) from error

    async def _shutdown_backend(self) -> None:
        await self.pty_terminate_all()
        environment, self._environment = self._environment, None
        self._forwards.clear()
        if environment is not None:
            await environment.aclose()

    async def running(self) -> bool:
        environment = self._environment
        if environment is None:
            return False
        try:
            return await environment.files.exists(self._root)
        except ExecServerError:
            return False

    async def delete_workspace(self) -> None:
        """Delete the directory, if it is this session's own."""
        if self.state.workspace_root_owned:
            environment = await self._connected()
            await environment.files.remove(self._root, recursive=True, missing_ok=True)
            await self._shutdown_backend()

    async def _connected(self) -> Environment:
        if self._environment is None:
            environment = make_environment(self.state.target, self._options)
            try:
                await environment
            except ExecServerError as error:
                raise WorkspaceStartError(path=Path(self._root), cause=error) from error
            self._environment = environment
        return self._environment

    @property
    def _opened(self) -> Environment:
        if self._environment is None:
            raise ExecTransportError(command=(), message="the session is not started")
        return self._environment

    @property
    def _root(self) -> str:
        return str(self.state.manifest.root)

    async def exec(
        self,
        *command: str | Path,
        timeout: float | None = None,  # noqa: ASYNC109 - of the framework
        shell: bool | list[str] = True,
        user: str | User | None = None,
    ) -> ExecResult:
        argv = self._prepare_exec_command(*command, shell=shell, user=None)
        return await self._run(argv, timeout, user)

    async def _exec_internal(
        self,
        *command: str | Path,
        timeout: float | None = None,  # noqa: ASYNC109 - of the framework
    ) -> ExecResult:
        return await self._run([str(word) for word in command], timeout, None)

    async def _run(
        self, argv: list[str], seconds: float | None, user: str | User | None
    ) -> ExecResult:
        try:
            done = await self._opened.run(
                argv, timeout=seconds, **await self._start_options(user), leave_running=True
            )
        except ProgramNotFound as error:
            return ExecResult(stdout=b"", stderr=f"{error}\n".encode(), exit_code=_NOT_FOUND)
        except Timeout as late:
            raise ExecTimeoutError(command=argv, timeout_s=seconds, cause=late) from late
        except ExecServerError as error:
            raise ExecTransportError(command=argv, cause=error) from error
        return ExecResult(stdout=done.stdout, stderr=done.stderr, exit_code=done.exit_code)

    async def _start_options(self, user: str | User | None) -> dict[str, Any]:
        environment = self.state.manifest.environment
        return {
            "cwd": self._root,
            "env": await environment.resolve(),
            "user": self._user(user),
            "sandbox": self.state.sandbox,
        }

    def _user(self, user: str | User | None) -> str | None:
        name = user.name if isinstance(user, User) else user
        return name or self.state.user

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        if port not in self._forwards:
            self._forwards[port] = await self._opened.forward_port(port)
        return ExposedPortEndpoint(host="127.0.0.1", port=self._forwards[port].port)

    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,  # noqa: ASYNC109 - of the framework
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        argv = self._prepare_exec_command(*command, shell=shell, user=None)
        options = await self._start_options(user)
        try:
            process = await self._opened.start(argv, tty=tty, merge_stderr=not tty, **options)
        except ProgramNotFound as error:
            return PtyExecUpdate(None, f"{error}\n".encode(), _NOT_FOUND, None)
        except ExecServerError as error:
            raise ExecTransportError(command=argv, cause=error) from error
        number = allocate_pty_process_id(set(self._terminals))
        await self._make_room()
        self._terminals[number] = (process, tty)
        wait_ms = 10_000 if yield_time_s is None else int(yield_time_s * 1000)
        try:
            return await self._update(number, clamp_pty_yield_time_ms(wait_ms), max_output_tokens)
        except asyncio.CancelledError:  # the model never learns of the number
            if self._terminals.pop(number, None) is not None:
                await process.aclose()
            raise

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        process, has_input = self._resolve_pty_session_entry(
            pty_processes=self._terminals, session_id=session_id
        )
        if chars and not has_input:
            raise RuntimeError("stdin is not available for this process")
        if chars and process.exit_code is None:
            with _reaching("write_stdin"):
                await process.write(chars.encode())
        self._terminals[session_id] = self._terminals.pop(session_id)  # it was used last
        wait_ms = 250 if yield_time_s is None else int(yield_time_s * 1000)
        wait_ms = resolve_pty_write_yield_time_ms(yield_time_ms=wait_ms, input_empty=not chars)
        return await self._update(session_id, wait_ms, max_output_tokens)

    async def _update(self, number: int, wait_ms: int, max_tokens: int | None) -> PtyExecUpdate:
        """The output of a while; a process that is over is forgotten."""
        process, _ = self._terminals[number]
        try:
            with _reaching("collect"):
                data = await process.collect(wait_ms / 1000)
        except ExecTransportError:
            self._terminals.pop(number, None)
            raise
        text, tokens = truncate_text_by_tokens(data.decode(errors="replace"), max_tokens)
        output = data if tokens is None else text.encode()
        if process.exit_code is None:
            return PtyExecUpdate(number, output, None, tokens)
        del self._terminals[number]
        await process.aclose()
        return PtyExecUpdate(None, output, process.exit_code, tokens)

    async def _make_room(self) -> None:
        """End the terminal that was not used for the longest time, if there are too many."""
        if len(self._terminals) >= PTY_PROCESSES_MAX:
            oldest = next(iter(self._terminals))
            await self._terminals.pop(oldest)[0].aclose()

    async def pty_terminate_all(self) -> None:
        terminals = list(self._terminals.values())
        self._terminals.clear()
        for process, _ in terminals:
            await process.aclose()

    def _files(self, user: str | User | None = None) -> Files:
        files = self._opened.files
        return configured_files(files, self._user(user), self.state.sandbox, self._root)

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        """The path below the root or a granted directory; its links may not lead out of both."""
        policy = self._workspace_path_policy()
        wanted = policy.normalize_sandbox_path(path, for_write=for_write)
        real = f"{await self._realpath(wanted.as_posix())}/"
        roots = [(policy.sandbox_root(), False), *policy.extra_path_grant_rules()]
        for root, is_read_only in roots:
            above = await self._realpath(root.as_posix())
            if real.startswith(f"{above.rstrip('/')}/"):
                if for_write and is_read_only:
                    reason = {"reason": "read_only_extra_path_grant"}
                    raise WorkspaceArchiveWriteError(path=Path(wanted), context=reason)
                return Path(wanted.as_posix())
        context = {"resolved_path": real.rstrip("/")}
        raise InvalidManifestPathError(rel=str(path), reason="escape_root", context=context)

    async def _validate_entry(self, path: Path | str) -> Path:
        """The path of an entry to change whose directory may be changed; a link is the link itself.

        The links of the directory are resolved.
        """
        policy = self._workspace_path_policy()
        wanted = Path(policy.normalize_sandbox_path(path, for_write=True).as_posix())
        parent = await self._validate_path_access(wanted.parent, for_write=True)
        return Path(await self._realpath(parent.as_posix())) / wanted.name

    async def _realpath(self, path: str) -> str:
        with _reaching("realpath", path):
            return await self._opened.files.realpath(path, strict=False)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        target = await self._validate_path_access(path)
        with _reading(target):
            return io.BytesIO(await self._files(user).read(target))

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        target = await self._validate_path_access(path)
        with _reading(target):
            async with self._files().open(target) as file:
                return await file.read(max_bytes)

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        target = await self._validate_path_access(path, for_write=True)
        with _writing(target):
            await self._files(user).write(target, _payload(data), parents=True)

    async def _write_new_file(
        self, path: Path, data: io.IOBase, *, user: str | User | None = None
    ) -> None:
        target = await self._validate_path_access(path, for_write=True)
        try:
            with _writing(target):
                await self._files(user).write(target, _payload(data), parents=True, exclusive=True)
        except WorkspaceArchiveWriteError as error:
            if isinstance(error.__cause__, FileExistsError):  # as the SDK expects it
                raise error.__cause__ from None
            raise

    async def ls(self, path: Path | str, *, user: str | User | None = None) -> list[FileEntry]:
        target = await self._validate_path_access(path)
        with _reading(target):
            found = await self._files(user).list(target)
        entries = []
        for entry in found:
            kind = EntryKind.FILE if entry.is_file else EntryKind.OTHER
            kind = EntryKind.DIRECTORY if entry.is_directory else kind
            kind = EntryKind.SYMLINK if entry.is_symlink else kind
            mode = (entry.mode or 0) | (stat.S_IFDIR if entry.is_directory else 0)
            entries.append(
                FileEntry(
                    path=entry.path,
                    permissions=Permissions.from_mode(mode),
                    owner="",
                    group="",
                    size=entry.size or 0,
                    kind=kind,
                )
            )
        return entries

    async def rm(
        self, path: Path | str, *, recursive: bool = False, user: str | User | None = None
    ) -> None:
        target = await self._validate_path_access(path, for_write=True)
        with _writing(target):
            await self._files(user).remove(target, recursive=recursive, missing_ok=recursive)

    async def mkdir(
        self, path: Path | str, *, parents: bool = False, user: str | User | None = None
    ) -> None:
        target = await self._validate_path_access(path, for_write=True)
        with _writing(target):
            await self._files(user).mkdir(target, parents=parents, exist_ok=parents)

    async def mv(
        self, source: Path | str, destination: Path | str, *, user: str | User | None = None
    ) -> None:
        old = await self._validate_entry(source)
        new = await self._validate_entry(destination)
        with _writing(old):
            if not await _is_file_or_link(self._files(user), str(old)):
                raise OSError(errno.EINVAL, "the source must be a file or a symlink", str(old))
        with _writing(new):
            await self._files(user).rename(old, new)

    async def _remove_workspace_entry_on_resume(self, path: Path) -> None:
        entry = await self._validate_entry(path)
        with _writing(entry):
            await self._files().remove(entry, recursive=True, missing_ok=True)

    async def persist_workspace(self) -> io.IOBase:
        archive = io.BytesIO()
        skipped = [str(path) for path in self._persist_workspace_skip_relpaths()]
        try:
            async with aclosing(self._files().read_tar(self._root, exclude=skipped)) as chunks:
                async for chunk in chunks:
                    archive.write(chunk)
                    if archive.tell() > ARCHIVE_BYTES:
                        raise InvalidRequest(f"the archive exceeds {ARCHIVE_BYTES} bytes")
            return await asyncio.to_thread(without_special_files, archive)
        except (ExecServerError, OSError, tarfile.TarError) as error:
            raise WorkspaceArchiveReadError(path=Path(self._root), cause=error) from error

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        try:
            await self._files().write_tar(_payload(data), self._root)
        except (ExecServerError, OSError) as error:
            raise WorkspaceArchiveWriteError(path=Path(self._root), cause=error) from error


async def _is_file_or_link(files: Files, entry: str) -> bool:
    """Whether an entry, whose directory has no links, is a regular file or any link."""
    if await files.realpath(entry, strict=False) != entry:
        return True
    try:
        return (await files.stat(entry)).is_file
    except LinkLoop:
        return True


def _payload(data: io.IOBase) -> bytes:
    content: bytes | str = data.read()
    return content.encode() if isinstance(content, str) else bytes(content)


@contextmanager
def _reaching(*words: str) -> Iterator[None]:
    """A machine out of reach is an error of the transport, of a command with these words."""
    try:
        yield
    except UNREACHABLE as error:
        raise ExecTransportError(command=words, cause=error) from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Translate the errors of reading a path."""
    try:
        with _reaching("read", str(path)):
            yield
    except ExecTransportError:
        raise
    except FileNotFoundError as error:
        raise WorkspaceReadNotFoundError(path=path, cause=error) from error
    except (ExecServerError, OSError) as error:
        raise WorkspaceArchiveReadError(path=path, cause=error) from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Translate the errors of changing a path."""
    try:
        with _reaching("write", str(path)):
            yield
    except ExecTransportError:
        raise
    except (ExecServerError, OSError) as error:
        raise WorkspaceArchiveWriteError(path=path, cause=error) from error


class ExecServerSandboxClientOptions(BaseSandboxClientOptions, StoredMachine):
    """The machine of a session, which is stored with its state.

    `exposed_ports` are ports of the machine, which are forwarded when the SDK asks for them.
    """

    model_config = ConfigDict(extra="forbid")

    type: Literal["exec_server"] = "exec_server"
    exposed_ports: tuple[int, ...] = ()


class ExecServerSandboxClient(BaseSandboxClient[ExecServerSandboxClientOptions | None]):
    """Makes sessions, each in a directory of its own unless its manifest names one."""

    backend_id = "exec_server"
    supports_default_options = True

    def __init__(self, *, instrumentation: Any = None, dependencies: Any = None) -> None:
        self._instrumentation = instrumentation or Instrumentation()
        self._dependencies = dependencies

    async def create(
        self,
        *,
        snapshot: Any = None,
        manifest: Manifest | None = None,
        options: ExecServerSandboxClientOptions | None = None,
    ) -> SandboxSession:
        settings = options or ExecServerSandboxClientOptions()
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        session_id = uuid.uuid4()
        is_owned = manifest.root == _DEFAULT_ROOT
        if is_owned:
            root = f"/tmp/exec-server-{session_id.hex}"
            manifest = manifest.model_copy(update={"root": root}, deep=True)
        state = ExecServerSandboxSessionState(
            session_id=session_id,
            manifest=manifest,
            snapshot=resolve_snapshot(snapshot, str(session_id)),
            workspace_root_owned=is_owned,
            **settings.model_dump(exclude={"type"}),
        )
        return self._session(state)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Delete the directory of a session, if it is the session's own."""
        inner = session._inner
        if not isinstance(inner, ExecServerSandboxSession):
            raise TypeError("ExecServerSandboxClient.delete expects a session of its own")
        await inner.delete_workspace()
        return session

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        if not isinstance(state, ExecServerSandboxSessionState):
            raise TypeError("ExecServerSandboxClient.resume expects a state of its own sessions")
        state.assert_path_grants_rebound()
        return self._session(state)

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, ExecServerSandboxSessionState)

    def _session(self, state: ExecServerSandboxSessionState) -> SandboxSession:
        inner = ExecServerSandboxSession(state, stored_options(state))
        return self._wrap_session(inner, instrumentation=self._instrumentation)
