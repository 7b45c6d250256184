"""The main function of a confined process, called right after the fork.

It receives one BuildRequest, confines itself, sends a Status, and is an init (pid 1 of a command's
namespace) or a file worker. Any failure ends it before a command has run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple, NoReturn, TypeVar

import msgspec

from exec_server.errors import ExecServerError, InternalError, os_error_text
from exec_server.host import libc
from exec_server.process.command import STATE_DESCRIPTOR, Command, candidates
from exec_server.process.spawn import Streams, encode, spawn_first
from exec_server.sandbox.policy.model import Restrictions, Step, View, choose_restrictions
from exec_server.sandbox.runtime import confine, kernel, messages, view, worker

# The ioctl that sets the flags of an interface, and struct ifreq for it.
_SET_FLAGS: Final = 0x8914
_REQUEST: Final = struct.Struct("16sH22x")
_UP_AND_RUNNING: Final = 0x41
_ADDRESS: Final = "127.0.0.1"
# Connections that the server has not accepted yet; the kernel makes others wait.
_BACKLOG: Final = 128

# ioctls of the listener, equal on all architectures of the filter.
_RECEIVE: Final = 0xC050_2100
_SEND: Final = 0xC018_2101
_NOTIFICATION_BYTES: Final = 80
_NOTIFICATION: Final = struct.Struct("=QI20xQ8xQ")  # id, thread, first and third argument
_RESPONSE: Final = struct.Struct("=QqiI")  # id, value, negated error number, flags
_SIGNAL_BYTES: Final = 128

_SKIPPED_IN_SEARCH: Final = (FileNotFoundError, NotADirectoryError, PermissionError)

_STREAMS: Final = (0, 1, 2)
# The exit code of the reference if the command cannot be executed in the sandbox.
_CANNOT_EXECUTE: Final = 101
_BROKEN: Final = 70
T = TypeVar("T")
# Read in the launcher: in a new user namespace the kernel returns the overflow ids.
_USER: Final = os.geteuid()
_GROUP: Final = os.getegid()


# A socket belongs to the namespace in which it was created. So the init of a command binds the
# ports, and the server accepts from them: no process has to carry bytes between the two.
def bring_up() -> None:
    """Make the loopback interface of this namespace work; raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_FLAGS, _REQUEST.pack(b"lo", _UP_AND_RUNNING))


def listen(ports: Sequence[int]) -> list[socket.socket]:
    """Listening sockets on ports of this namespace, which the caller closes; raises OSError."""
    listeners: list[socket.socket] = []
    try:
        for port in ports:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.bind((_ADDRESS, port))
            listener.listen(_BACKLOG)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


class RefusalListener:
    """Answers refused calls, and reports the first one: a command gains nothing by repeating.

    A command without network waits for the init when it opens a socket of the internet, and gets
    EPERM, the error of all refused calls. So the denial is known, whatever the command prints.
    Other calls do not reach the listener: a refused `connect` to a unix socket is part of every
    user look-up. A single socket of IPv6 without a protocol is not reported: libraries like urllib3
    open one when they are loaded, to learn whether the machine has IPv6.
    """

    def __init__(self, descriptor: int, reporter: messages.Reporter) -> None:
        self._descriptor = descriptor
        self._reporter = reporter
        self._probing = 0  # the thread that has opened the last socket of IPv6

    def wait_for(self, leader: int) -> int:
        """Answer calls and reap children until the leader has ended; returns its wait status."""
        children = libc.child_signal_descriptor()
        poll = select.poll()
        poll.register(children, select.POLLIN)
        poll.register(self._descriptor, select.POLLIN)
        while True:
            # Also before the first wait: the leader may have ended before SIGCHLD was blocked.
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == leader:
                    return ended[1]
            for descriptor, _ in poll.poll():
                if descriptor == self._descriptor:
                    self._answer()
                else:
                    os.read(children, _SIGNAL_BYTES)

    def _answer(self) -> None:
        """Refuse the call that has waited longest."""
        notification = bytearray(_NOTIFICATION_BYTES)
        with suppress(OSError):  # the caller was killed, or a signal has interrupted its call
            fcntl.ioctl(self._descriptor, _RECEIVE, notification)
            number, thread, *arguments = _NOTIFICATION.unpack_from(notification)
            family, protocol = (argument & 0xFFFF_FFFF for argument in arguments)
            # Before the answer, so that the server knows it before the command can end.
            may_be_probe = family == socket.AF_INET6 and not protocol
            if not may_be_probe or thread == self._probing:
                self._reporter.report_refusal()
            self._probing = thread
            fcntl.ioctl(self._descriptor, _SEND, _RESPONSE.pack(number, 0, -errno.EPERM, 0))


# The process becomes one of the user before it enters the directory and executes the program, so
# that the rights of the user apply to both. Nothing confines it otherwise.
def run(control: socket.socket) -> NoReturn:
    """Execute the command of the next request.

    Sends a Status when the command is to be executed. The end of the socket, which closes on exec,
    then tells that it is; another Status has the number of the error.
    """
    request, descriptors = messages.receive(control, messages.UserRequest)
    control.set_inheritable(False)
    try:
        _prepare(request, descriptors)
        messages.send(control, messages.Status("ready"), [])
        _execute(request)
    except OSError as error:
        messages.send(control, messages.Status("failed", str(error.errno)), [])
        os._exit(_BROKEN)


def _prepare(request: messages.UserRequest, descriptors: list[int]) -> None:
    _begin_session(descriptors)
    user = libc.User("", request.uid, request.gid, request.groups, "", "")
    if request.has_terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        libc.own_terminal(0, user)
    _reset_signals()
    libc.become(user)
    os.chdir(request.cwd)


def _begin_session(descriptors: list[int]) -> None:
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _reset_signals() -> None:
    for number in range(1, 65):
        with suppress(OSError, ValueError):  # SIGKILL, SIGSTOP, and signals that libc reserves
            signal.signal(number, signal.SIG_DFL)


def _execute(request: messages.UserRequest) -> NoReturn:
    """Execute the first candidate that the kernel accepts; raises OSError as execvp would."""
    argv, env, paths = _resolve(request, request.cwd)
    variables = dict(item.split(b"=", 1) for item in env)
    failure: OSError = FileNotFoundError(2, os.strerror(2))
    for path in paths:
        if len(paths) > 1 and not os.path.exists(path):
            continue  # also what lies in a directory of PATH that the user may not enter
        try:
            os.execve(path, argv, variables)
        except _SKIPPED_IN_SEARCH as error:
            if isinstance(error, PermissionError):
                failure = error
    raise failure


def warm_up() -> None:
    """Fill caches for all forked processes: building msgspec codecs takes longer than the rest."""
    confine.prepare_filters()
    kernel.landlock_version()
    step = Step("read", "/", True, 0, 0)
    view_of_root = View(False, (step,), (), (), ())
    samples: list[msgspec.Struct] = [
        messages.BuildRequest("init", view_of_root, "restricted", "private"),
        messages.ExecRequest(["true"], None, "/", {"PATH": "/bin"}, None, (step,)),
        messages.UserRequest(["true"], None, "/", {"PATH": "/bin"}, 1, 1, (1,), False),
        messages.Status("ready"),
    ]
    for sample in samples:
        messages.warm_up(sample)
    worker.warm_up()
    _resolve(messages.ExecRequest(["true"], None, "/", {"PATH": "/bin"}, None, ()), "/")


def main(descriptor: int, namespaces: int) -> NoReturn:
    """Receive a BuildRequest from the socket and serve in its role; never returns."""
    try:
        _close_all_but(descriptor)
        _leave_log()
        with socket.socket(fileno=descriptor) as control:
            request, _ = messages.receive(control, messages.BuildRequest)
            if request.role == "user":
                messages.send(control, messages.Status("ready"), [])
                run(control)
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
        status = messages.Status("stale", str(error))
    except (OSError, ExecServerError) as error:
        status = messages.Status("failed", str(error))
    except Exception:
        status = messages.Status("failed", "internal error", messages.defect_text())
    else:
        messages.send(control, messages.Status("ready"), [each.fileno() for each in listeners])
        for listener in listeners:
            listener.close()
        return result
    messages.send(control, status, [])
    os._exit(_BROKEN)


def _close_all_but(kept: int) -> None:
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _leave_log() -> None:
    """Replace stderr, the log of the server, with the /dev/null that is stdout, in any view."""
    os.dup2(1, 2)


class _Built(NamedTuple):
    """The state of a built init that its command needs."""

    restrictions: Restrictions
    terminals: int | None  # see view.Built
    ruleset: int | None  # see confine.command_ruleset


def _build(request: messages.BuildRequest, namespaces: int) -> _Built:
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
            bring_up()
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
    with suppress(OSError):  # a kernel without keys, or an outer filter that refuses the call
        kernel.leave_keyring()
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
    try:
        yield
    except OSError as error:
        raise confine.NotConfined(f"cannot {action}: {os_error_text(error)}") from error


def _map_user() -> None:
    """Map the ids of this user and group to themselves; all others are unmapped."""
    maps = {"setgroups": "deny", "uid_map": f"{_USER} {_USER} 1", "gid_map": f"{_GROUP} {_GROUP} 1"}
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


def _run_command(build: messages.BuildRequest, control: socket.socket, built: _Built) -> NoReturn:
    request, received = messages.receive(control, messages.ExecRequest)
    control.set_inheritable(False)  # not for the command
    descriptors, state = received[:3], next(iter(received[3:]), None)
    if state is not None:
        os.set_inheritable(state, False)  # the command has it under another number
    listeners: list[socket.socket] = []

    def limit() -> int | None:
        with _naming_failure("listen for the command"):
            listeners.extend(listen(request.proxy_ports))
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
    reporter = messages.Reporter(control)
    if listener is None:
        status = _wait_for(leader)
    else:
        status = RefusalListener(listener, reporter).wait_for(leader)
    code = libc.exit_code(status)
    if messages.end_namespace():
        reporter.report_exit(code)
    os._exit(code)


def _confine(
    build: messages.BuildRequest,
    request: messages.ExecRequest,
    descriptors: list[int],
    built: _Built,
) -> int | None:
    """The last steps of confinement, which depend on the command; returns the listener."""
    _begin_session(descriptors)
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
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == leader:
            return status


def _spawn(request: messages.ExecRequest, state: int | None) -> int | OSError | InternalError:
    """The pid of the command, or the error of executing it, which is the command's failure."""
    try:
        argv, env, paths = _resolve(request, os.getcwd())
        return spawn_first(paths, argv, env, ".", Streams.inherited(state))
    except (OSError, InternalError) as error:
        return error


def _replace_self(request: messages.ExecRequest, state: int | None) -> NoReturn:
    """Execute the command in this process: there is no pid namespace that needs an init."""
    if state is not None:
        os.dup2(state, STATE_DESCRIPTOR)
        os.set_inheritable(STATE_DESCRIPTOR, True)  # also if the numbers are the same
    _reset_signals()
    try:
        argv, env, paths = _resolve(request, os.getcwd())
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


def _resolve(
    request: messages.ExecRequest | messages.UserRequest, cwd: str
) -> tuple[list[bytes], list[bytes], list[str]]:
    """The arguments and the environment of a command, and the paths of its program to try."""
    command = Command(request.argv, cwd, request.env, False, False, request.arg0)
    argv, env = encode(command)
    return argv, env, candidates(command)


def _exit_not_executable(request: messages.ExecRequest, error: OSError | InternalError) -> NoReturn:
    text = os_error_text(error) if isinstance(error, OSError) else error.message
    message = f"exec-server sandbox: cannot execute {request.argv[0]}: {text}\n"
    os.write(2, message.encode("utf-8", "replace"))
    os._exit(_CANNOT_EXECUTE)
