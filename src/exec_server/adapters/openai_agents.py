"""ExecServerSandboxClient: machines as sandboxes of the OpenAI Agents SDK.

For agents without a sandbox, `openai_agents_tools` has the light tools: a shell and an editor.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

from exec_server.adapters.openai_agents_session import (
    ExecServerSandboxSession,
    ExecServerSandboxSessionState,
)
from exec_server.adapters.target import framework_missing, stored_options

try:
    from agents.sandbox.manifest import Manifest
    from agents.sandbox.session import (
        BaseSandboxClient,
        BaseSandboxClientOptions,
        Instrumentation,
        SandboxSession,
        SandboxSessionState,
    )
    from agents.sandbox.snapshot import resolve_snapshot
    from pydantic import ConfigDict

    from exec_server.adapters.stored_machine import StoredMachine
except ImportError as error:
    raise framework_missing("openai-agents", "openai-agents", error) from error

__all__ = [
    "ExecServerSandboxClient",
    "ExecServerSandboxClientOptions",
    "ExecServerSandboxSession",
    "ExecServerSandboxSessionState",
]

_DEFAULT_ROOT = Manifest().root


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
