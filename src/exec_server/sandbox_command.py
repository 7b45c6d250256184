"""`exec-server sandbox`: asks what this machine can confine, or runs a command by hand.

People use `run` to understand what a client's command was denied, so it goes the same way: the
policy is decoded, compiled and enforced by what the server uses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
from dataclasses import dataclass
from types import FrameType
from typing import Final, Literal

from exec_server import sandbox_check
from exec_server.arguments import build_sandbox_parser
from exec_server.core import descendants, system
from exec_server.core.command import STRIPPED_NAMES, Command
from exec_server.core.lookup import candidates
from exec_server.core.spawn import Child, Streams, encoded, spawn_first
from exec_server.errors import MalformedMessage, RpcError, os_error_text
from exec_server.protocol import jsontext, presets, wire
from exec_server.protocol.paths import path_to_uri
from exec_server.protocol.process import Chunk
from exec_server.protocol.sandbox import Confinable, Denial, Sandbox
from exec_server.sandbox import globs, policy
from exec_server.sandbox.denial import find
from exec_server.sandbox.disk import HostDisk
from exec_server.sandbox.layout import lay_out, real_globs
from exec_server.sandbox.placeholders import Remember
from exec_server.sandbox.plan import Policy
from exec_server.sandbox.sandboxes import Sandboxes

_MISTAKEN: Final = 2
# As `docker run` and `timeout` do, so that it is not taken for the command's own.
_NOT_RUN: Final = 125
_CANNOT_EXECUTE: Final = 101  # see sandbox.child
# A policy has some hundred bytes for each entry; more than this is another file by mistake.
MAX_POLICY_BYTES: Final = 1_048_576
# What a denial is looked for in: as much as the server keeps, the end of it.
KEPT_BYTES: Final = 1_048_576
# Begins each line that is ours among the command's own.
_SPEAKER: Final = "exec-server"
_COPY_BYTES: Final = 65_536
_PASSED_ON: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH),
)


class _Mistake(Exception):
    """The arguments, or the file they name, are wrong."""


class _Document(Confinable, frozen=True):
    """A policy as a request has it, so that it is read as in a request."""

    sandbox: Sandbox


@dataclass(frozen=True)
class _Job:
    """A command, and what its policy means here; None: it asks for no limits at all."""

    command: Command
    policy: Policy | None


def run(words: list[str], remember: Remember) -> int:
    """Do what the arguments after `sandbox` say; returns the exit code.

    `remember` is told of what has to be removed should this process be killed.
    """
    signals = _Signals()
    mark = words.index("--") if "--" in words else len(words)
    try:
        arguments, unknown = build_sandbox_parser().parse_known_args(words[:mark])
        if unknown:
            hint = "; the command comes after `--`" if arguments.action == "run" else ""
            raise _Mistake(f"unexpected argument `{unknown[0]}`{hint}")
        if arguments.action == "check":
            if words[mark:]:
                raise _Mistake("`check` takes no command")
            return _check(arguments)
        job = _job(arguments, words[mark + 1 :])
        if arguments.show:
            _print(1, _shown(job))
            return 0
        return _run(job, remember, signals)
    except SystemExit as end:  # argparse: --help and mistakes; a signal before the command
        return end.code if isinstance(end.code, int) else 1
    except _Mistake as mistake:
        _print(2, f"Error: {mistake}\n\nFor more information, try '--help'.\n")
        return _MISTAKEN
    except RpcError as error:
        _print(2, f"Error: {error.message}\n")
        return _NOT_RUN
    except OSError as error:
        _print(2, f"Error: {os_error_text(error)}\n")
        return _NOT_RUN


def _check(arguments: argparse.Namespace) -> int:
    report = sandbox_check.examine()
    _print(1, sandbox_check.as_json(report) if arguments.json else sandbox_check.text(report))
    return 1 if report.refused else 0


def _print(descriptor: int, text: str) -> None:
    """Write at once, names as their bytes; nobody may be listening any more."""
    try:
        _write(descriptor, os.fsencode(text))
    except OSError:
        pass


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it. Blocking; raises OSError."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # somebody who shares it has made it so
            select.select([], [descriptor], [])


# ---- what to run, and under which policy ----------------------------------------------


def _job(arguments: argparse.Namespace, argv: list[str]) -> _Job:
    if not argv and not arguments.show:
        raise _Mistake(
            "the command is missing: `exec-server sandbox run --policy POLICY -- COMMAND`"
        )
    cwd = _directory("--cwd", arguments.cwd or os.getcwd())
    env = {name: value for name, value in os.environ.items() if name not in STRIPPED_NAMES}
    env["PWD"] = cwd
    sandbox = _sandbox(arguments, cwd)
    minimal = tuple(path for path in policy.MINIMAL_PATHS if os.path.exists(path))
    surroundings = policy.Surroundings(env.get("TMPDIR"), minimal, os.path.isdir("/tmp"), cwd)
    try:
        compiled = policy.compile_policy(sandbox, surroundings, for_process=True)
    except RpcError as error:
        raise _Mistake(f"{arguments.policy}: {error.message}") from error
    if compiled == Policy(None, (), "enabled"):
        compiled = None
    # With `pipe_stdin` all three descriptors are taken from the streams given.
    return _Job(Command(argv, cwd, env, pipe_stdin=True), compiled)


def _directory(flag: str, path: str) -> str:
    if not os.path.isdir(path):
        raise _Mistake(f"{flag}: {path} is not a directory")
    return os.path.abspath(path)


def _sandbox(arguments: argparse.Namespace, cwd: str) -> Sandbox:
    """The policy that the arguments name, decoded as if a client had sent it."""
    name = arguments.policy
    roots = [_directory("--root", root) for root in arguments.root or [cwd]]
    here, there = path_to_uri(cwd), [path_to_uri(root) for root in roots]
    if name in presets.PRESETS:
        if arguments.root and name == "read-only":
            raise _Mistake("--root has no meaning with --policy read-only")
        value: object = presets.preset(name, cwd=here, roots=there, network=arguments.network)
    else:
        value = _from_file(name)
        if arguments.network:
            raise _Mistake("--network has no meaning with a FILE, which says it itself")
        if isinstance(value, dict) and "type" in value and "permissions" not in value:
            value = presets.surroundings(here, there) | {"permissions": value}
        elif arguments.root:
            raise _Mistake("--root has no meaning with a FILE that is a whole `sandbox` object")
    try:
        sandbox = wire.decode(_Document, {"sandbox": value}).sandbox
    except RpcError as error:
        raise _Mistake(f"{name}: {error.message}") from error
    if sandbox.use_legacy_landlock:
        raise _Mistake(f"{name}: useLegacyLandlock is not supported: it would confine less")
    return sandbox


def _from_file(path: str) -> object:
    """The `sandbox` object, or the permissions, in a file; whole params have one inside."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_POLICY_BYTES + 1)
    except FileNotFoundError:
        raise _Mistake(
            f"--policy: there is no file {path}; the policies with a name are read-only and "
            "workspace-write"
        ) from None
    except OSError as error:
        raise _Mistake(f"--policy: {path}: {os_error_text(error)}") from None
    if len(data) > MAX_POLICY_BYTES:
        raise _Mistake(f"--policy: {path} has more than {MAX_POLICY_BYTES} bytes")
    try:
        value = jsontext.parse(data)
    except MalformedMessage as error:
        raise _Mistake(f"{path}: {error}") from None
    if isinstance(value, dict) and "permissions" not in value and "sandbox" in value:
        return value["sandbox"]
    return value


# ---- showing --------------------------------------------------------------------------


def _shown(job: _Job) -> str:
    """What the command would see: one line for each mount, missing name and pattern."""
    compiled = job.policy
    if compiled is None:
        return "files      no limits\nnetwork    no limits\n"
    lines = []
    if compiled.rules is None:
        lines.append("files      no limits")
    else:
        disk = HostDisk(sees_placeholders=False)
        patterns = real_globs(compiled, disk)
        view = lay_out(compiled, disk, globs.scan(patterns))
        rest = "nothing but the following" if view.is_empty else "everything, read-only, but"
        lines.append(f"files      {rest} (/dev and /proc are private)")
        lines += [f"{step.kind:<11}{step.path}" for step in view.steps]
        lines += [f"link       {link.path} -> {link.target}" for link in view.links]
        lines += [f"missing    {policy.join(name.path, name.name)}" for name in view.missing]
        lines += [f"deny glob  {policy.join(glob.root, glob.pattern)}" for glob in patterns]
    lines.append(f"network    {compiled.network}")
    return "\n".join(lines) + "\n"


# ---- running --------------------------------------------------------------------------


class _Signals:
    """Passes signals on to the command.

    Before there is one they end this process, except for the first that comes while it is being
    started: by then the command may be there and have said so, only we do not know it yet.
    """

    def __init__(self) -> None:
        self.group: int | None = None
        self.is_starting = False
        self._due: int | None = None
        self._is_pause_due = False
        for number in (*_PASSED_ON, signal.SIGTSTP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                is_pause = number == signal.SIGTSTP
                signal.signal(number, self._pause if is_pause else self._pass_on)

    def started(self, group: int) -> None:
        """There is a command now; it gets what has come for it meanwhile."""
        self.group = group
        if self._due is not None:
            self._send(self._due)
        if self._is_pause_due:
            self._pause()

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if self.group is not None:
            self._send(number)
        elif self.is_starting and self._due is None:
            self._due = number
        elif number != signal.SIGWINCH:
            raise SystemExit(128 + number)

    def _pause(self, *_: object) -> None:
        """Stop the command with us: it is in a session of its own, so the terminal does not."""
        if self.group is None:
            self._is_pause_due = True
            return
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        if self.group is not None:
            try:
                os.killpg(self.group, number)
            except OSError:
                pass  # it has just ended


def _run(job: _Job, remember: Remember, signals: _Signals) -> int:
    system.hide_memory()
    system.become_subreaper()
    tags = descendants.TagPool().for_session()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    theirs = [os.dup(0), os.dup(1), writer]
    streams = Streams([reader], theirs, None, (), list(enumerate(theirs)))
    signals.is_starting = True
    if job.policy is None:
        _print(2, f"{_SPEAKER}: this policy asks for no limits; the command runs unconfined\n")
        child = _spawn_unconfined(streams, job.command, tags.take())
    else:
        sandboxes = Sandboxes(os.environ, remember)
        with contextlib.closing(sandboxes):
            child = sandboxes.spawn_on(streams, job.policy, job.command, tags.take())
    signals.started(child.pid)
    stderr = _Copy(reader, 2)
    _follow(child.pid, stderr)
    descendants.kill_carriers(tags.all, ())
    stderr.finish()
    signals.group = None  # the number is free for others once the child is reaped
    code = system.exit_code(os.waitpid(child.pid, 0)[1])
    if child.clean_up is not None:
        child.clean_up()
    if job.policy is not None:
        _print(2, _explanation(job, job.policy, code, bytes(stderr.kept)))
    return code


def _spawn_unconfined(streams: Streams, command: Command, tag: int) -> Child:
    argv, env = encoded(command)
    try:
        with descendants.tagged(tag):
            pid = spawn_first(candidates(command), argv, env, command.cwd, streams)
    except OSError as error:
        _print(2, f"{_SPEAKER}: cannot execute {command.argv[0]}: {os_error_text(error)}\n")
        raise SystemExit(_CANNOT_EXECUTE) from error
    streams.release(started=True)
    return Child(pid, None, ())


def _follow(pid: int, stderr: _Copy) -> None:
    """Pass on what the command writes to stderr until it has ended; it is not reaped yet."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(stderr.reader, select.POLLIN)
    while ended not in [descriptor for descriptor, _ in poll.poll()]:
        if not stderr.pass_on():
            poll.unregister(stderr.reader)
            stderr.close()
    os.close(ended)
    # Where there is no pid namespace, which would end with its first process.
    descendants.kill_tree(pid)


class _Copy:
    """Passes on what is written to a pipe, and keeps the end of it."""

    def __init__(self, reader: int, target: int) -> None:
        self.reader = reader
        self.kept = bytearray()
        self._target = target
        self._is_open = True

    def pass_on(self) -> bool:
        """Pass on what is there; False if nothing is, or nobody is listening."""
        try:
            data = os.read(self.reader, _COPY_BYTES)
            self.kept += data
            del self.kept[:-KEPT_BYTES]
            _write(self._target, data)
        except OSError:
            return False
        return bool(data)

    def finish(self) -> None:
        """Pass on what is left, without waiting for more."""
        if self._is_open:
            os.set_blocking(self.reader, False)
            while self.pass_on():
                pass
            self.close()

    def close(self) -> None:
        """From now on the command finds nobody listening either."""
        self._is_open = False
        os.close(self.reader)


# ---- explaining -----------------------------------------------------------------------


def _explanation(job: _Job, compiled: Policy, code: int, said: bytes) -> str:
    """One or two lines about what was denied; empty if nothing was."""

    def explain(path: str, operation: Literal["read", "write"]) -> str | None:
        return policy.explain(compiled, path, operation) or policy.explain(
            compiled, os.path.realpath(path), operation
        )

    is_offline = compiled.network == "restricted"
    chunks = [Chunk(1, "stderr", said)]
    denial = find(code, chunks, explain, cwd=job.command.cwd, is_offline=is_offline)
    if denial is None or (denial.text is None and denial.rule is None):
        return ""
    if denial.rule is None:
        if code == _CANNOT_EXECUTE:
            return ""  # there is no such program, inside or outside
        return f"{_SPEAKER}: no rule of the policy is known to be behind this: {denial.text}\n"
    return f"{_SPEAKER}: denied: {_denied(denial)}\n{_SPEAKER}: {denial.rule}\n"


def _denied(denial: Denial) -> str:
    if denial.operation == "network":
        return "to use the network"
    if denial.operation == "syscall" or denial.path is None:
        return "a system call"
    return f"to {denial.operation} {denial.path}"
