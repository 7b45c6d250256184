"""ProcessLaunch: the start of one command, with its environment, its network and its sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from exec_server.errors import InvalidRequest
from exec_server.host import libc
from exec_server.process.command import Command, ServerFile, child_environment
from exec_server.process.orphans import Owner
from exec_server.process.process import DenialCheck
from exec_server.process.spawn import Child, spawn
from exec_server.process.table import LaunchMode
from exec_server.protocol.network import DECISION, POLICY_REQUEST, DecisionParams, PolicyParams
from exec_server.protocol.process import OutputChunk, StartParams
from exec_server.protocol.sandbox import Denial
from exec_server.server.context import ServerContext
from exec_server.server.session import Session

if TYPE_CHECKING:
    from exec_server.proxy.process_proxy import PortBridge, ProcessProxy


# Ports of the client's own proxies that a process in a network namespace can reach. A client has
# one or two; with more the start is refused.
MAX_BRIDGED_PORTS = 8


class NetworkController:
    """Reports decisions to the client of a session, and asks it."""

    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    def report(self, decision: DecisionParams) -> None:
        """Send a decision; one that the connection cannot take now is dropped."""
        if self._session.is_writable:
            self._session.notify(DECISION, decision)

    async def ask(self, question: PolicyParams) -> object:
        return await self._session.ask(POLICY_REQUEST, question)


class ProcessLaunch:
    """Completes a command in the thread that starts it: environment and sandbox may take long."""

    __slots__ = (
        *("_captured", "_certificates", "_check_denial", "_network", "_params", "_server"),
        "_session",
    )

    def __init__(
        self,
        server: ServerContext,
        session: Session,
        params: StartParams,
        captured: Mapping[str, str] | None = None,  # variables of a captured shell
    ) -> None:
        self._captured = captured
        self._server = server
        self._session = session
        self._params = params
        self._check_denial: DenialCheck | None = None
        self._network: ProcessProxy | PortBridge | None = None
        self._certificates: ServerFile | None = None

    @property
    def mode(self) -> LaunchMode:
        """How a process table starts the command."""
        params = self._params
        may_have_network = params.network_proxy is not None or params.enforce_managed_network
        return LaunchMode(
            self._spawn,
            None if params.sandbox is None else self._check,
            self._close_network if may_have_network else None,
        )

    def _spawn(self, command: Command, owner: Owner) -> Child:
        """Start the command. Blocking; raises RpcError for an invalid policy."""
        params, server = self._params, self._server
        env = child_environment(
            params.env, params.env_policy, params.metadata, server.variables, self._captured
        )
        if params.tty:
            env.setdefault("SHELL", server.login_shell)
        ports = self._open_network(env)
        launch_mode = LaunchMode()
        if params.user is not None:
            user = libc.find_user(params.user)
            env |= _user_variables(user, params.env)
            launch_mode = LaunchMode(partial(server.sandboxes.user_commands.spawn, user))
        if params.sandbox is not None:
            path = None if server.proxies is None else server.proxies.certificate_path
            launch_mode = server.sandboxes.commands.launch_mode(
                *(params.sandbox, command.cwd, env),
                is_proxied=bool(ports),
                refused=self._refusal,
                read_only=() if path is None else (path,),  # no confined command may change it
            )
        self._check_denial = launch_mode.check_denial
        completed = replace(command, env=env, proxy_ports=ports, certificates=self._certificates)
        child = (launch_mode.spawn or spawn)(completed, owner)
        if self._network is not None:
            self._network.adopt(child.listeners)
            self._network.open_soon()
        return child

    def _check(self, code: int, output: list[OutputChunk]) -> tuple[bool, Denial | None]:
        """The check of the sandbox; only after `_spawn`."""
        assert self._check_denial is not None
        return self._check_denial(code, output)

    def _refusal(self) -> str | None:
        """What the proxies of the command have refused."""
        return None if self._network is None else self._network.refusal

    def _open_network(self, env: dict[str, str]) -> tuple[int, ...]:
        """Prepare the process's proxies, and set its variables.

        Returns the ports of a process that must reach nothing else: it gets a network namespace, in
        which all ports are free. Any `sandbox` object counts, also one without limits.
        """
        params = self._params
        is_enforced = params.enforce_managed_network and params.sandbox is not None
        if params.network_proxy is None and not is_enforced:
            return ()
        # Imported here: most servers start no proxy.
        from exec_server.proxy.process_proxy import PortBridge, ProcessProxy

        ports = self._bridged_ports(env) if params.network_proxy is None else ()
        resources = self._server.proxies
        assert resources is not None
        if params.network_proxy is None:
            self._network = PortBridge(ports, resources)
            return ports
        controller = NetworkController(self._session)
        proxy = ProcessProxy(params.network_proxy, params.process_id, controller, resources)
        self._network = proxy
        masked = proxy.mask(env)
        if proxy.certificates is not None:
            self._certificates = ServerFile(*proxy.certificates)
        env.clear()
        env.update(masked)
        env.update(proxy.namespace_variables() if is_enforced else proxy.listen())
        return proxy.namespace_ports if is_enforced else ()

    def _bridged_ports(self, env: dict[str, str]) -> tuple[int, ...]:
        """The ports of the client's own proxies; raises InvalidRequest if there are none."""
        from exec_server.proxy.process_proxy import named_ports

        ports = named_ports(env)
        if self._params.managed_network is not None:
            ports &= set(self._params.managed_network.loopback_ports)
        if not 0 < len(ports) <= MAX_BRIDGED_PORTS:
            raise InvalidRequest(
                "managed proxy mode requires proxy environment variables: enforceManagedNetwork "
                "needs a networkProxy, or variables that name a port of managedNetwork"
            )
        return tuple(sorted(ports))

    def _close_network(self) -> None:
        if self._network is not None:
            self._network.close()


def _user_variables(user: libc.User, requested: Mapping[str, str]) -> dict[str, str]:
    """The variables that name a user, except those of the request."""
    own = {"HOME": user.home, "LOGNAME": user.name, "SHELL": user.shell, "USER": user.name}
    return {name: value for name, value in own.items() if name not in requested}
