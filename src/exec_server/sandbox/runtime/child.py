"""The main function of a confined process, called right after the fork.

The process receives one BuildRequest from the server, confines itself, and sends a Status.
Then it is either an init (pid 1 of a command's namespace) or a file worker (see `worker`). Any
failure ends the process: its last Status holds the reason, and no command has run.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple, NoReturn, TypeVar

import msgspec

from exec_server.errors import ExecServerError, InternalError, os_error_text
from exec_server.host import libc
from exec_server.process import command as process_command
from exec_server.process.command import STATE_DESCRIPTOR, Command
from exec_server.process.spawn import Streams, encode, spawn_first
from exec_server.sandbox.policy.model import Step, View
from exec_server.sandbox.policy.restrictions import Restrictions, choose_restrictions
from exec_server.sandbox.runtime import (
    confine,
    kernel,
    loopback,
    messages,
    user_child,
    view,
    worker,
)
from exec_server.sandbox.runtime.messages import BuildRequest, ExecRequest, Status, UserRequest
from exec_server.sandbox.runtime.refusals import RefusalListener
from exec_server.sandbox.runtime.reports import Reporter, end_namespace

_STREAMS: Final = (0, 1, 2)
# The exit code of the reference if the command cannot be executed in the sandbox.
_CANNOT_EXECUTE: Final = 101
_BROKEN: Final = 70
T = TypeVar("T")
# Read in the launcher: in a new user namespace the kernel returns the overflow ids.
_USER: Final = os.geteuid()
_GROUP: Final = os.getegid()


def warm_up() -> None:
    """Fill caches in the launcher that every forked process would otherwise fill itself.

    Building msgspec codecs takes longer than everything else in a short-lived process.
    """
    confine.prepare_filters()
    kernel.landlock_version()
    step = Step("read", "/", True, 0, 0)
    view_of_root = View(False, (step,), (), (), ())
    samples: list[msgspec.Struct] = [
        BuildRequest("init", view_of_root, "restricted", "private"),
        ExecRequest(["true"], None, "/", {"PATH": "/bin"}, None, (step,)),
        UserRequest(["true"], None, "/", {"PATH": "/bin"}, 1, 1, (1,), False),
        Status("ready"),
    ]
    for sample in samples:
        messages.warm_up(sample)
    worker.warm_up()
    _resolve(ExecRequest(["true"], None, "/", {"PATH": "/bin"}, None, ()))


def main(descriptor: int, namespaces: int) -> NoReturn:
    """Receive a BuildRequest from the socket and serve in its role; never returns."""
    try:
        _close_all_but(descriptor)
        _leave_log()
        with socket.socket(fileno=descriptor) as control:
            request, _ = messages.receive(control, BuildRequest)
            if request.role == "user":
                messages.send(control, Status("ready"), [])
                user_child.run(control)
            built = _report_status(control, lambda: _build(request, namespaces))
            if request.role == "worker":
                worker.serve(control)
                os._exit(0)
            _run_command(request, control, built)
    except (messages.Disconnected, ConnectionError):
        os._exit(0)  # an unused init, or the server was killed
    except BaseException:
        # The server has been told what it can be told; no command has run, or it has ended.
        os._exit(_BROKEN)


def _report_status(
    control: socket.socket, act: Callable[[], T], listeners: Sequence[socket.socket] = ()
) -> T:
    """Call `act` and send its Status with the `listeners`; a failure ends the process."""
    try:
        result = act()
    except view.StaleView as error:
        status = Status("stale", str(error))
    except (OSError, ExecServerError) as error:
        status = Status("failed", str(error))
    except Exception:
        status = Status("failed", "internal error", messages.defect_text())
    else:
        messages.send(control, Status("ready"), [each.fileno() for each in listeners])
        for listener in listeners:
            listener.close()
        return result
    messages.send(control, status, [])
    os._exit(_BROKEN)


def _close_all_but(kept: int) -> None:
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _leave_log() -> None:
    """Replace stderr, the log of the server, with the /dev/null that is stdout.

    /proc/self/fd leads to an open file whatever the view of this process is.
    """
    os.dup2(1, 2)


class _Built(NamedTuple):
    """The state of a built init that its command needs."""

    restrictions: Restrictions
    terminals: int | None  # see view.Built
    ruleset: int | None  # see confine.command_ruleset


def _build(request: BuildRequest, namespaces: int) -> _Built:
    """Build the view and drop the privileges that the role does not need."""
    terminals = ruleset = None
    choose = partial(
        choose_restrictions,
        request.view,
        request.network,
        user_namespace=bool(namespaces & kernel.CLONE_NEWUSER),
        private_proc=request.proc == "private",
        landlock=kernel.landlock_version(),
    )
    restrictions = choose()
    libc.name_process(b"exec-worker" if request.role == "worker" else b"exec-init")
    if namespaces & kernel.CLONE_NEWUSER:
        with _naming_failure("map the user into a user namespace"):
            _map_user()
    if request.network == "proxied":
        with _naming_failure("use the loopback interface"):
            loopback.bring_up()
    if request.view is not None:
        is_command = request.role == "init"
        with _naming_failure("build the view of the file system"):
            terminals, top, covers_host = view.build(
                request.view,
                proc=request.proc,
                terminal=request.terminal,
                with_scratch=is_command,
                with_top=is_command and restrictions.file_rights,
            )
        restrictions = choose(covers_host=covers_host)
        if is_command and restrictions.file_rights:
            assert top is not None
            with _naming_failure("limit changes of files"):
                ruleset = confine.command_ruleset(request.network, request.view, top)
        if top is not None:
            os.close(top)
    try:
        kernel.leave_keyring()
    except OSError:
        pass  # a kernel without keys, or an outer filter that refuses the call
    if request.role == "worker":
        assert request.view is not None
        worker.install_checks(request.view, request.globs)
        with _naming_failure("drop privileges"):
            confine.confine_worker(request.view)
    elif request.view is not None or request.network == "proxied":
        with _naming_failure("drop privileges"):
            kernel.drop_bounding_set()
    kernel.die_with_parent()
    return _Built(restrictions, terminals, ruleset)


@contextmanager
def _naming_failure(action: str) -> Iterator[None]:
    """Add the failed action to the error of the kernel."""
    try:
        yield
    except OSError as error:
        raise confine.NotConfined(f"cannot {action}: {os_error_text(error)}") from error


def _map_user() -> None:
    """Map the ids of this user and group to themselves; all others are unmapped."""
    maps = {
        "setgroups": "deny",
        "uid_map": f"{_USER} {_USER} 1",
        "gid_map": f"{_GROUP} {_GROUP} 1",
    }
    # Only root can open these files of a hidden process. So this one, which has inherited that
    # from the launcher, can be traced by its user while they are opened, but not afterwards.
    libc.show_memory()
    try:
        opened = [os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC) for name in maps]
    finally:
        libc.hide_memory()
    for descriptor, text in zip(opened, maps.values(), strict=True):
        os.write(descriptor, text.encode())
        os.close(descriptor)


# ---- the init of a command ------------------------------------------------------------


def _run_command(build: BuildRequest, control: socket.socket, built: _Built) -> NoReturn:
    """Wait for an ExecRequest, run its command, and exit with the command's exit code."""
    request, received = messages.receive(control, ExecRequest)
    control.set_inheritable(False)  # not for the command
    descriptors, state = received[:3], next(iter(received[3:]), None)
    if state is not None:
        os.set_inheritable(state, False)  # the command has it under another number
    listeners: list[socket.socket] = []

    def limit() -> int | None:
        with _naming_failure("listen for the command"):
            listeners.extend(loopback.listen(request.proxy_ports))
        return _confine(build, request, descriptors, built)

    if build.view is None:
        _report_status(control, limit, listeners)
        control.close()
        _replace_self(request, state)

    def start() -> tuple[int | OSError | InternalError, int | None]:
        listener = limit()
        return _spawn(request, state), listener

    # Sent only once the command runs: an earlier signal to its process group would reach only
    # this init, and the first process of a pid namespace ignores signals.
    leader, listener = _report_status(control, start, listeners)
    if not isinstance(leader, int):
        _exit_not_executable(request, leader)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)  # the command's streams end with the command
    reporter = Reporter(control)
    if listener is None:
        status = _wait_for(leader)
    else:
        status = RefusalListener(listener, reporter).wait_for(leader)
    code = libc.exit_code(status)
    if end_namespace():
        reporter.report_exit(code)
    os._exit(code)


def _confine(
    build: BuildRequest, request: ExecRequest, descriptors: list[int], built: _Built
) -> int | None:
    """The last steps of confinement, which depend on the command; returns the listener."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request.terminal is not None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if built.terminals is not None:
            view.add_terminal(built.terminals, request.terminal)
    if built.terminals is not None:
        os.close(built.terminals)
    with _naming_failure("build the view of the file system"):
        view.mount_read_only(request.placeholders)
        if build.view is not None and request.certificates is not None:
            view.add_certificates(request.certificates)
    try:
        os.chdir(request.cwd)
    except OSError:
        os.chdir("/")  # the directory is not visible in the view
    if build.view is not None:
        confine.check_streams(_STREAMS, has_file_rights=built.ruleset is not None)
    with _naming_failure("drop privileges"):
        if built.ruleset is not None:
            confine.allow_open_files(built.ruleset, _STREAMS)
        listener = confine.confine_command(
            build.network, build.view, built.restrictions, built.ruleset
        )
    kernel.die_with_parent()
    return listener


def _wait_for(leader: int) -> int:
    """Reap children until the command has ended."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == leader:
            return status


def _spawn(request: ExecRequest, state: int | None) -> int | OSError | InternalError:
    """The pid of the command, or the error of executing it, which is the command's failure."""
    try:
        argv, env, paths = _resolve(request)
        return spawn_first(paths, argv, env, ".", Streams.inherited(state))
    except (OSError, InternalError) as error:
        return error


def _replace_self(request: ExecRequest, state: int | None) -> NoReturn:
    """Execute the command in this process: there is no pid namespace that needs an init."""
    if state is not None:
        os.dup2(state, STATE_DESCRIPTOR)
        os.set_inheritable(STATE_DESCRIPTOR, True)  # also if the numbers are the same
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            pass  # SIGKILL, SIGSTOP, and signals that libc reserves
    try:
        argv, env, paths = _resolve(request)
        failure: OSError = FileNotFoundError(2, os.strerror(2))
        variables = dict(item.split(b"=", 1) for item in env)
        for path in paths:
            try:
                os.execve(path, argv, variables)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                failure = error
        raise failure
    except (OSError, InternalError) as error:
        _exit_not_executable(request, error)


def _resolve(request: ExecRequest) -> tuple[list[bytes], list[bytes], list[str]]:
    command = Command(request.argv, os.getcwd(), request.env, False, False, request.arg0)
    argv, env = encode(command)
    return argv, env, process_command.candidates(command)


def _exit_not_executable(request: ExecRequest, error: OSError | InternalError) -> NoReturn:
    text = os_error_text(error) if isinstance(error, OSError) else error.message
    message = f"exec-server sandbox: cannot execute {request.argv[0]}: {text}\n"
    os.write(2, message.encode("utf-8", "replace"))
    os._exit(_CANNOT_EXECUTE)
