"""`exec-server sandbox run`: compiles a policy as the server does, and runs a command in it."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import signal
import stat
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Final, Literal

from exec_server.cli.errors import UsageError
from exec_server.cli.start_options import needs_surroundings, read_policy, with_surroundings
from exec_server.cli.streams import denial_lines, write_all
from exec_server.errors import RpcError, os_error_text, printable
from exec_server.host import libc
from exec_server.host.interpreter import REGISTRY_NAMES, STRIPPED_NAMES
from exec_server.process import descendants, tags
from exec_server.process.command import Command, candidates
from exec_server.process.orphans import Orphans, Owner
from exec_server.process.spawn import Child, Streams, encode, spawn_first
from exec_server.protocol import decoding
from exec_server.protocol.paths import PathUri, path_to_uri
from exec_server.protocol.process import OutputChunk
from exec_server.protocol.sandbox import (
    NO_MXC,
    PRESETS,
    Confinable,
    Sandbox,
    check_process_paths,
    preset,
)
from exec_server.sandbox.commands import CommandDenials
from exec_server.sandbox.policy import compiler
from exec_server.sandbox.policy.access import explain_denial, join
from exec_server.sandbox.policy.layout import lay_out, resolve_globs
from exec_server.sandbox.policy.model import Policy
from exec_server.sandbox.runtime.disk import HostDisk, scan_policy
from exec_server.sandbox.runtime.placeholders import RegisterCleanup
from exec_server.sandbox.sandboxes import Sandboxes

EXIT_CANNOT_EXECUTE: Final = 101  # see sandbox.runtime.child
# A denial is searched for in the last bytes of stderr, as many as the server retains.
KEPT_BYTES: Final = 1_048_576
# Distinguishes messages of exec-server from the command's own stderr.
_PREFIX: Final = "exec-server"
_COPY_BYTES: Final = 65_536
_FORWARDED: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH),
)


class _SandboxParams(Confinable, frozen=True):
    """Request params with only a `sandbox`, so that it is decoded as in a request."""

    sandbox: Sandbox


@dataclass(frozen=True)
class ConfinedCommand:
    """A command and its compiled policy; None for a policy without any limits."""

    command: Command
    policy: Policy | None


def prepare_command(arguments: argparse.Namespace, argv: list[str]) -> ConfinedCommand:
    """Build the command and compile its policy; raises UsageError."""
    if not argv and not arguments.show:
        raise UsageError("no command; write `exec-server sandbox run --policy POLICY -- COMMAND`")
    cwd = _directory("--cwd", arguments.cwd or os.getcwd())
    hidden = STRIPPED_NAMES | REGISTRY_NAMES
    env = {name: value for name, value in os.environ.items() if name.upper() not in hidden}
    env["PWD"] = cwd
    sandbox = _load_sandbox(arguments, cwd)
    minimal = tuple(path for path in compiler.MINIMAL_PATHS if os.path.exists(path))
    host_paths = compiler.HostPaths(env.get("TMPDIR"), minimal, os.path.isdir("/tmp"), cwd)
    try:
        check_process_paths(sandbox, PathUri.from_text(cwd))
        policy = compiler.compile_policy(sandbox, host_paths, for_process=True)
    except RpcError as error:
        raise UsageError(f"{arguments.policy}: {error.message}") from error
    if policy == Policy(None, (), "enabled"):
        policy = None
    # With `pipe_stdin` the command gets all three descriptors from the given streams.
    return ConfinedCommand(Command(argv, cwd, env, pipe_stdin=True), policy)


def _directory(flag: str, path: str) -> str:
    if not os.path.isdir(path):
        raise UsageError(f"{flag}: {path} is not a directory")
    return os.path.abspath(path)


def _load_sandbox(arguments: argparse.Namespace, cwd: str) -> Sandbox:
    """Decode the `sandbox` object that the arguments describe, as in a request."""
    name = arguments.policy
    roots = [_directory("--root", root) for root in arguments.root or [cwd]]
    cwd_uri, root_uris = path_to_uri(cwd), [path_to_uri(root) for root in roots]
    if name in PRESETS:
        if arguments.root and name == "read-only":
            raise UsageError("--root has no effect with --policy read-only")
        value: object = preset(name, cwd=cwd_uri, roots=root_uris, network=arguments.network)
    else:
        value = read_policy("--policy", name)
        if arguments.network:
            raise UsageError(
                "--network has no effect with a policy FILE: set `network` in the file"
            )
        if needs_surroundings(value):
            value = with_surroundings(value, cwd_uri, root_uris)
        elif arguments.root:
            raise UsageError("--root has no effect with a FILE that holds a whole `sandbox` object")
    try:
        sandbox = decoding.decode(_SandboxParams, {"sandbox": value}).sandbox
    except RpcError as error:
        raise UsageError(f"{name}: {error.message}") from error
    if sandbox.use_legacy_landlock:
        raise UsageError(f"{name}: useLegacyLandlock is not supported: it would confine less")
    if sandbox.windows_sandbox_level == "mxc":
        raise UsageError(f"{name}: {NO_MXC}")
    return sandbox


def describe_view(policy: Policy | None) -> str:
    """The view of a command: one line for each mount, missing name and pattern."""
    if policy is None:
        return "files      no limits\nnetwork    no limits\n"
    lines = []
    if policy.rules is None:
        lines.append("files      no limits")
    else:
        disk = HostDisk(sees_placeholders=False)
        patterns = resolve_globs(policy, disk)
        view = lay_out(policy, disk, scan_policy(policy, disk))
        scope = "only the following" if view.is_empty else "everything read-only, except"
        lines.append(f"files      {scope} (/dev and /proc are private)")
        lines += [f"{step.kind:<11}{step.path}" for step in view.steps]
        lines += [f"link       {link.path} -> {link.target}" for link in view.links]
        lines += [f"missing    {join(name.path, name.name)}" for name in view.missing]
        lines += [f"deny glob  {join(glob.root, glob.pattern)}" for glob in patterns]
    lines.append(f"network    {policy.network}")
    return "\n".join(lines) + "\n"


def print_to(descriptor: int, text: str) -> None:
    """Print without buffering, file names as their bytes; ignores a closed descriptor."""
    with contextlib.suppress(OSError):
        write_all(descriptor, os.fsencode(text))


class ForegroundSignals:
    """Forwards signals to the command.

    Before the command is started, a signal ends this process. The first signal during the start is
    kept for the command, which may already run and print output.
    """

    def __init__(self) -> None:
        self.group: int | None = None
        self.is_starting = False
        self._pending_signal: int | None = None
        self._is_stop_pending = False
        for number in (*_FORWARDED, signal.SIGTSTP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                is_stop = number == signal.SIGTSTP
                signal.signal(number, self._stop if is_stop else self._forward)

    def started(self, group: int) -> None:
        """Set the process group of the command, and send it the pending signals."""
        self.group = group
        if self._pending_signal is not None:
            self._send(self._pending_signal)
        if self._is_stop_pending:
            self._stop()

    def _forward(self, number: int, _: FrameType | None) -> None:
        if self.group is not None:
            self._send(number)
        elif self.is_starting and self._pending_signal is None:
            self._pending_signal = number
        elif number != signal.SIGWINCH:
            raise SystemExit(128 + number)

    def _stop(self, *_: object) -> None:
        """Stop command and client: the terminal cannot stop the command's own session."""
        if self.group is None:
            self._is_stop_pending = True
            return
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        if self.group is not None:
            try:
                os.killpg(self.group, number)
            except OSError:
                pass  # the command has just ended


def run_confined(
    confined: ConfinedCommand, register_cleanup: RegisterCleanup, signals: ForegroundSignals
) -> int:
    """Run the command to its end; returns its exit code."""
    libc.become_subreaper()
    owner = Owner(None)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    stdin, feed = _open_stdin(is_confined=confined.policy is not None)
    child_ends = [stdin, os.dup(1), writer]
    streams = Streams([reader], child_ends, None, (), list(enumerate(child_ends)))
    signals.is_starting = True
    if confined.policy is None:
        print_to(2, f"{_PREFIX}: the policy has no limits; the command runs unconfined\n")
        child = _spawn_unconfined(streams, confined.command, owner)
    else:
        denials = CommandDenials(confined.policy, confined.command.cwd)
        sandboxes = Sandboxes(os.environ, register_cleanup)
        with contextlib.closing(sandboxes):
            child = sandboxes.commands.spawn_on(streams, denials, confined.command, owner)
    signals.started(child.pid)
    if feed is not None:
        threading.Thread(target=_copy_stdin, args=(feed,), daemon=True).start()
    stderr = _StderrCopy(reader)
    _wait_for_exit(child.pid, stderr)
    Orphans().kill(lambda _: True)
    stderr.finish()
    signals.group = None  # the kernel may reuse the number once the child is reaped
    code = libc.exit_code(os.waitpid(child.pid, 0)[1])
    if child.clean_up is not None:
        child.clean_up()
    if confined.policy is not None:
        print_to(2, describe_denial(denials, confined.policy, code, bytes(stderr.kept)))
    return code


def _open_stdin(*, is_confined: bool) -> tuple[int, int | None]:
    """Stdin for the command, and the end of a pipe to copy it to if the command must not have it.

    A file that is open for reading can be opened again for writing, through /proc/self/fd, for any
    policy: its mount is one of the host.
    """
    is_read_only = fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    if is_confined and is_read_only and stat.S_ISREG(os.fstat(0).st_mode):
        return os.pipe2(os.O_CLOEXEC)
    return os.dup(0), None


def _copy_stdin(feed: int) -> None:
    with contextlib.suppress(OSError):  # the command has closed its end, or the file has an error
        while data := os.read(0, _COPY_BYTES):
            write_all(feed, data)
    os.close(feed)


def _spawn_unconfined(streams: Streams, command: Command, owner: Owner) -> Child:
    argv, env = encode(command)
    try:
        with tags.Tagged() as owner.tag:
            pid = spawn_first(candidates(command), argv, env, command.cwd, streams)
    except OSError as error:
        print_to(2, f"{_PREFIX}: cannot execute {command.argv[0]}: {os_error_text(error)}\n")
        raise SystemExit(EXIT_CANNOT_EXECUTE) from error
    streams.release(started=True)
    return Child(pid, None, ())


def _wait_for_exit(pid: int, stderr: _StderrCopy) -> None:
    """Copy stderr until the command exits; does not reap it."""
    exited = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(exited, select.POLLIN)
    poll.register(stderr.reader, select.POLLIN)
    while exited not in [descriptor for descriptor, _ in poll.poll()]:
        if not stderr.copy_available():
            poll.unregister(stderr.reader)
            stderr.close()
    os.close(exited)
    # Without a pid namespace, the command's children outlive it.
    descendants.kill_tree(pid)


class _StderrCopy:
    """Copies a pipe to stderr and keeps the last bytes."""

    def __init__(self, reader: int) -> None:
        self.reader = reader
        self.kept = bytearray()
        self._is_open = True

    def copy_available(self) -> bool:
        """Copy the bytes in the pipe; False at its end, or if stderr is closed."""
        try:
            data = os.read(self.reader, _COPY_BYTES)
            self.kept += data
            del self.kept[:-KEPT_BYTES]
            write_all(2, data)
        except OSError:
            return False
        return bool(data)

    def finish(self) -> None:
        """Copy the rest without waiting for more."""
        if self._is_open:
            os.set_blocking(self.reader, False)
            while self.copy_available():
                pass
            self.close()

    def close(self) -> None:
        """Close the pipe: further writes of the command fail with EPIPE."""
        self._is_open = False
        os.close(self.reader)


def describe_denial(denials: CommandDenials, policy: Policy, code: int, stderr: bytes) -> str:
    """A few lines about a denied access; empty if none is found."""

    def explain(path: str, operation: Literal["read", "write"]) -> str | None:
        return explain_denial(policy, path, operation) or explain_denial(
            policy, os.path.realpath(path), operation
        )

    denial = denials.find(code, [OutputChunk(1, "stderr", stderr)], explain)
    if denial is None or (denial.text is None and denial.rule is None):
        return ""
    if denial.rule is None and not denial.candidates:
        if code == EXIT_CANNOT_EXECUTE:
            return ""  # the program does not exist, with or without the sandbox
        line = printable(denial.text or "")
        return f"{_PREFIX}: no rule of the policy explains this error: {line}\n"
    return "".join(f"{_PREFIX}: {printable(line)}\n" for line in denial_lines(denial))
