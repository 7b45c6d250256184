"""CommandSandbox: starts commands in sandboxes, prebuilt ones where possible."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Final, NamedTuple

import msgspec

from exec_server.errors import ExecServerError, InternalError
from exec_server.host.libc import User
from exec_server.process import tags
from exec_server.process.command import Command, ServerFile
from exec_server.process.orphans import Owner
from exec_server.process.spawn import Child, Streams, check_directory, encode
from exec_server.process.table import LaunchMode
from exec_server.protocol.process import OutputChunk
from exec_server.protocol.sandbox import Denial, Sandbox
from exec_server.sandbox.builder import (
    LEGACY_LANDLOCK,
    SandboxBuilder,
    ViewDependencies,
    build_view,
    host_paths,
    retry_while_stale,
)
from exec_server.sandbox.policy import access, compiler
from exec_server.sandbox.policy.denial import (
    NO_NETWORK,
    Explain,
    entered_directories,
    find_denial,
    is_likely_denied,
)
from exec_server.sandbox.policy.model import MissingName, Policy
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.capabilities import Confinement
from exec_server.sandbox.runtime.disk import HostDisk, scan_policy
from exec_server.sandbox.runtime.launcher import launch, request
from exec_server.sandbox.runtime.placeholders import Placeholder, Placeholders
from exec_server.sandbox.runtime.view import CERTIFICATES, ProcMount, StaleView

log = logging.getLogger(__name__)

# One for each of the policies used last; each is a process of a few MiB.
MAX_PREBUILT: Final = 4
# The longest wait for a build, which takes milliseconds.
BUILD_SECONDS: Final = 0.5
# An active client runs its next command within minutes.
IDLE_SECONDS: Final = 120.0

CleanUp = Callable[[], None]

_BUILD_FOR_USER: Final = messages.BuildRequest("user", None, "enabled", "inherited")


# Prebuilt sandboxes: building namespaces and mounts takes most of the time of a short command, so
# after each start the next init for the same policy is built in the background.
class Init(NamedTuple):
    """An init in its built view, with the state needed to start a command in it."""

    pid: int
    control: messages.ControlSocket
    missing: tuple[MissingName, ...]
    dependencies: ViewDependencies | None

    def is_usable(self) -> bool:
        """Whether the waiting init lives and its view is current."""
        is_current = self.dependencies is not None and self.dependencies.is_current()
        return is_current and not messages.has_ended(self.control)

    def end(self) -> None:
        """End an init without a command, also a stopped one."""
        self.control.resume_child()
        self.close()

    def close(self) -> None:
        """Close the control socket, without which an unused init ends, and the dependencies."""
        self.control.close()
        self.close_dependencies()

    def close_dependencies(self) -> None:
        if self.dependencies is not None:
            self.dependencies.close()


Build = Callable[[Policy], Init]


class PrebuiltPool:
    """Keeps at most one init per policy. Every method may be called from any thread."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._changed = threading.Condition()
        self._prebuilt: OrderedDict[Policy, tuple[Init, float]] = OrderedDict()  # oldest first
        self._thread = ThreadPoolExecutor(1, "prebuilt")
        self._building: set[Policy] = set()  # being built, or queued
        self._awaited: set[Policy] = set()  # policies in _building that a caller waits for
        self._is_closed = False

    def take(self, policy: Policy) -> Init | None:
        """A current init, owned by the caller, or None; one caller waits for a running build."""
        with self._changed:
            if policy in self._building and policy not in self._awaited:
                self._awaited.add(policy)
                self._changed.wait_for(lambda: policy not in self._building, BUILD_SECONDS)
                self._awaited.discard(policy)
            init, _ = self._prebuilt.pop(policy, (None, 0.0))
        if init is not None and not init.is_usable():
            init.end()
            init = None
        return init

    def is_building(self, policy: Policy) -> bool:
        """Whether an init for the policy is being built, because the last one was just taken."""
        with self._changed:
            return policy in self._building

    def prebuild(self, policy: Policy) -> None:
        """Build an init in the background, unless one is being built."""
        with self._changed:
            if self._is_closed or policy in self._building or len(self._building) >= MAX_PREBUILT:
                return
            self._building.add(policy)
            self._thread.submit(self._build_one, policy)

    def _build_one(self, policy: Policy) -> None:
        init = None
        try:
            init = self._build(policy)
        except (OSError, ExecServerError) as error:
            log.info("sandbox: cannot prebuild: %s", error)  # the next command reports it
        dropped = []
        with self._changed:
            self._building.discard(policy)
            if init is not None:
                dropped.append(self._prebuilt.pop(policy, (None, 0.0))[0])
                self._prebuilt[policy] = (init, time.monotonic())
                if self._is_closed or len(self._prebuilt) > MAX_PREBUILT:
                    dropped.append(self._prebuilt.popitem(last=False)[1][0])
            self._changed.notify_all()
        for old in dropped:
            if old is not None:
                old.end()

    def drop_idle(self) -> None:
        """End the inits that were unused for IDLE_SECONDS."""
        oldest = time.monotonic() - IDLE_SECONDS
        with self._changed:
            while self._prebuilt and next(iter(self._prebuilt.values()))[1] < oldest:
                self._prebuilt.popitem(last=False)[1][0].end()

    def close(self) -> None:
        """End all inits."""
        with self._changed:
            self._is_closed = True
            for init, _ in self._prebuilt.values():
                init.end()
            self._prebuilt.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)


class CommandDenials:
    """The denials of one command, from its start to its end.

    `refused` tells what the proxies of the command have refused, None if nothing.
    """

    def __init__(
        self, policy: Policy, cwd: str, refused: Callable[[], str | None] = lambda: None
    ) -> None:
        self.policy = policy
        self._cwd = cwd
        self._refused = refused
        self._entered: tuple[str, ...] = ()
        self._reports: messages.CommandReports | None = None

    def follow(self, reports: messages.CommandReports, argv: Sequence[str] = ()) -> None:
        """Take over the reports of the started command; `find` closes them."""
        self._reports = reports
        self._entered = entered_directories(argv, self._cwd)

    def check(self, exit_code: int, output: list[OutputChunk]) -> tuple[bool, Denial | None]:
        """Whether clients are told of a denial, and the denied operation; called once."""
        is_denied = is_likely_denied(exit_code, output)
        denial = self.find(exit_code, output, partial(access.explain_denial, self.policy))
        if denial is None and is_denied:
            denial = Denial(None, None, None, None)
        if denial is not None:
            log.info("sandbox denied something to a command: %s", denial)
        return is_denied, denial

    def find(self, exit_code: int, output: list[OutputChunk], explain: Explain) -> Denial | None:
        """The denied operation, None if none is known; called once, after the end."""
        is_offline = self.policy.network == "restricted"
        network_rule = None if exit_code == 0 else self._refused()
        if self._is_refused() and is_offline and self.policy.rules is not None:
            network_rule = NO_NETWORK
        return find_denial(
            exit_code,
            output,
            explain,
            cwd=self._cwd,
            is_offline=is_offline,
            network_rule=network_rule,
            entered=self._entered,
        )

    def _is_refused(self) -> bool:
        reports, self._reports = self._reports, None
        if reports is None:
            return False
        with closing(reports):
            reports.read()
        return reports.is_refused


class CommandSandbox:
    """Confines commands. Every method is thread-safe."""

    def __init__(self, builder: SandboxBuilder, placeholders: Placeholders) -> None:
        self._builder = builder
        self._placeholders = placeholders
        self._prebuilt = PrebuiltPool(self._build_init)

    def close(self) -> None:
        self._prebuilt.close()

    def drop_idle(self) -> None:
        self._prebuilt.drop_idle()
        self._placeholders.drop_idle()

    def launch_mode(
        self,
        sandbox: Sandbox,
        cwd: str,
        env: dict[str, str],
        *,
        is_proxied: bool = False,
        read_only: Sequence[str] = (),
        refused: Callable[[], str | None] = lambda: None,
    ) -> LaunchMode:
        """How to start a command in this sandbox; sets PWD in its environment.

        With `is_proxied` its `proxy_ports` are all of the network that it has. `read_only` are
        files of the server, which stay as they are even if the policy makes their place writable.
        `refused` tells what its proxies have refused.
        """
        env["PWD"] = cwd
        paths = host_paths(env.get("TMPDIR"), cwd)
        policy = compiler.compile_policy(sandbox, paths, for_process=True)
        if is_proxied:
            policy = policy or Policy(None, (), "proxied")
            policy = msgspec.structs.replace(policy, network="proxied")
        if policy is None or (policy.rules is None and policy.network == "enabled"):
            return LaunchMode(
                check_denial=lambda code, output: (is_likely_denied(code, output), None)
            )
        if sandbox.use_legacy_landlock:
            raise InternalError(LEGACY_LANDLOCK)
        denials = CommandDenials(_protect(policy, read_only), cwd, refused)
        return LaunchMode(partial(self.spawn, denials), denials.check)

    def spawn(self, denials: CommandDenials, command: Command, owner: Owner) -> Child:
        """Start a confined command; otherwise like process.spawn.spawn. Blocking."""
        encode(command)  # raises for arguments that no program can be given
        check_directory(command.cwd)
        policy = denials.policy
        if policy.rules is not None and command.certificates is not None:
            command = _with_certificates_in_view(command, command.certificates)
        # Files that match a pattern are looked up for each command, so a view cannot be prebuilt.
        prebuild_next = policy.rules is not None and not policy.globs
        streams = Streams.open(command)
        return self.spawn_on(streams, denials, command, owner, prebuild_next=prebuild_next)

    def spawn_on(
        self,
        streams: Streams,
        denials: CommandDenials,
        command: Command,
        owner: Owner,
        *,
        prebuild_next: bool = False,
    ) -> Child:
        """Start a confined command on open streams, and release them. Blocking.

        `denials` learns of refused calls from the started command. With `prebuild_next` a sandbox
        for the next command is built in the background.
        """
        policy = denials.policy
        started = False
        try:
            standard, terminal = standard_streams(command, streams)
            if streams.shell_state is not None:
                standard.append(streams.shell_state)
            program = messages.ExecRequest(
                command.argv,
                command.arg0,
                command.cwd,
                command.env,
                terminal,
                (),
                command.proxy_ports,
                None if command.certificates is None else command.certificates.content,
            )
            # Two builds or starts at a time compete for processors and for locks of the kernel. So
            # the next sandbox is built after this start, unless commands follow each other so fast
            # that they wait for their sandboxes.
            is_urgent = prebuild_next and self._prebuilt.is_building(policy)

            def start() -> Child:
                init = self._take_init(policy, terminal)
                if is_urgent:
                    self._prebuilt.prebuild(policy)
                clean_up, listeners = self._execute(init, program, standard, owner)
                reports = messages.CommandReports(init.control)
                denials.follow(reports, command.argv)
                exit_report = None if policy.rules is None else reports
                stdin, outputs = streams.stdin, streams.outputs
                return Child(init.pid, stdin, outputs, clean_up, listeners, exit_report)

            child = retry_while_stale(start)
            started = True
            if prebuild_next and not is_urgent:
                self._prebuilt.prebuild(policy)
        finally:
            streams.release(started=started)
        return child

    def _take_init(self, policy: Policy, terminal: str | None) -> Init:
        """An init in the view of the policy: a prebuilt or a new one."""
        # The terminal is mounted into an empty root when the view is built.
        if terminal is not None and access.policy_access(policy, "/") is None:
            return self._build_init(policy, terminal)
        return self._prebuilt.take(policy) or self._build_init(policy)

    def _execute(
        self, init: Init, program: messages.ExecRequest, standard: list[int], owner: Owner
    ) -> tuple[CleanUp | None, tuple[int, ...]]:
        """Let an init run the command; returns the clean-up and the sockets that listen for it."""
        held: list[Placeholder] = []
        try:
            try:
                held = self._placeholders.hold(init.missing)
            except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
                raise StaleView(str(error)) from error
            covers = tuple(placeholder.step for placeholder in held)
            program = msgspec.structs.replace(program, placeholders=covers)
            owner.tag = tags.allocate()
            tags.tag_running(init.pid, owner.tag)
            expected = len(program.proxy_ports)
            listeners = request(init.control, program, standard, expected=expected)
        except BaseException:
            self._placeholders.release(held)
            init.close()
            raise
        init.close_dependencies()
        return partial(self._placeholders.release, held) if held else None, listeners

    def _build_init(self, policy: Policy, terminal: str | None = None) -> Init:
        if policy.rules is None:
            unlimited = messages.BuildRequest("init", None, policy.network, "inherited")
            return Init(*self._builder.launch_unlimited(unlimited), (), None)
        disk = HostDisk(sees_placeholders=False)
        denied = scan_policy(policy, disk)
        view = build_view(policy, disk, denied)
        dependencies = ViewDependencies(
            view, self._builder.mounts, self._builder.pins, sees_placeholders=False
        )

        def make_request(confinement: Confinement) -> messages.BuildRequest:
            proc: ProcMount = "private" if confinement.private_proc else "inherited"
            return messages.BuildRequest("init", view, policy.network, proc, terminal=terminal)

        try:
            launched = self._builder.launch(make_request, network=policy.network != "enabled")
            init = Init(*launched, view.missing, dependencies)
        except BaseException:
            dependencies.close()
            raise
        # The layout may have been made while another process changed the disk.
        changed = dependencies.changed_path()
        if changed is not None:
            init.close()
            raise StaleView(f"the disk keeps changing: {changed}")
        return init


def _protect(policy: Policy, read_only: Sequence[str]) -> Policy:
    """A policy without the right to write to these files, those that exist."""
    if policy.rules is None:
        return policy
    rules = policy.rules
    paths = [
        path
        for path in read_only
        if access.rule_access(rules, path) == "write" and os.path.isfile(path)
    ]
    if not paths:
        return policy
    stated = [(rule.path, rule.access) for rule in rules]
    narrowed = access.merge_rules([*stated, *((path, "read") for path in paths)])
    return msgspec.structs.replace(policy, rules=narrowed)


def _with_certificates_in_view(command: Command, file: ServerFile) -> Command:
    """The command with variables that name the copy of the file in its view."""
    env = {
        name: CERTIFICATES if value == file.path else value for name, value in command.env.items()
    }
    return msgspec.structs.replace(command, env=env)


def standard_streams(command: Command, streams: Streams) -> tuple[list[int], str | None]:
    """The descriptors for 0, 1 and 2, and the path of the terminal if they are one."""
    if command.tty:
        (slave,) = streams.child_ends
        return [slave, slave, slave], os.ttyname(slave)
    standard = list(streams.child_ends)
    if not command.pipe_stdin:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        streams.child_ends.append(null)
        standard.insert(0, null)
    if command.merge_stderr:
        standard.append(standard[1])
    return standard, None


class UserCommands:
    """Starts commands as other users of the machine, by the launcher. Thread-safe."""

    def __init__(self, builder: SandboxBuilder) -> None:
        self._builder = builder

    def spawn(self, user: User, command: Command, owner: Owner) -> Child:
        """Start a command as a user; otherwise like process.spawn.spawn. Blocking."""
        encode(command)  # raises for arguments that no program can be given
        request = messages.UserRequest(
            command.argv,
            command.arg0,
            command.cwd,
            command.env,
            user.uid,
            user.gid,
            user.groups,
            command.tty,
        )
        streams = Streams.open(command)
        started = False
        try:
            standard, _ = standard_streams(command, streams)
            pid, control = launch(self._builder.launcher, 0, _BUILD_FOR_USER)
            with control:
                owner.tag = tags.allocate()
                tags.tag_running(pid, owner.tag)
                _execute_as_user(control, request, standard)
            started = True
        finally:
            streams.release(started=started)
        return Child(pid, streams.stdin, streams.outputs)


def _execute_as_user(
    control: messages.ControlSocket, request: messages.UserRequest, standard: list[int]
) -> None:
    """Let the process execute the command; raises OSError if it cannot."""
    is_ready = False
    try:
        messages.send(control, request, standard)
        while True:
            status, _ = messages.receive(control, messages.Status)
            if status.state != "ready":
                number = int(status.reason) if status.reason.isdecimal() else 0
                raise OSError(number, os.strerror(number))
            is_ready = True
    except (ConnectionError, messages.Disconnected) as error:
        if not is_ready:
            raise InternalError(f"the command could not be started: {error}") from error
