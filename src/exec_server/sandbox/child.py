"""The life of a confined process, from its first instruction after the fork to its end.

It takes one order from the server, becomes what the order says, and reports. Until it has
reported it is our own code in a fresh namespace; afterwards it is either an init (pid 1 of a
command's namespace) or a file worker (see `worker`). Whatever goes wrong ends the process:
its last report says why, and nothing has run.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, TypeVar

import msgspec

from exec_server.core import lookup, system
from exec_server.core.command import Command
from exec_server.core.spawn import Streams, encoded, spawn_first
from exec_server.errors import ExecServerError, InternalError, os_error_text
from exec_server.sandbox import confine, kernel, orders, view, worker
from exec_server.sandbox.orders import Order, Program, Report
from exec_server.sandbox.plan import Step, View

_RLIMIT_LOCKS: Final = 10  # the tag of core.descendants
# The reference's exit code when the program cannot be executed inside.
_CANNOT_EXECUTE: Final = 101
_BROKEN: Final = 70
T = TypeVar("T")
# Found out in the launcher: in a new user namespace the kernel would say nobody.
_USER: Final = os.geteuid()
_GROUP: Final = os.getegid()


def rehearse() -> None:
    """Do once, in the launcher, what every process forked from it would do at its first use.

    Codecs study the types they are given; that takes longer than all else in a short life.
    """
    confine.prepare_filters()
    step = Step("read", "/", True, 0, 0)
    view_of_all = View(False, (step,), (), (), ())
    samples: list[msgspec.Struct] = [
        Order("init", view_of_all, "restricted", "own"),
        Program(["true"], None, "/", {"PATH": "/bin"}, None, 0, (step,)),
        Report("ready"),
    ]
    for sample in samples:
        orders.rehearse(sample)
    worker.rehearse()
    _resolved(Program(["true"], None, "/", {"PATH": "/bin"}, None, 0, ()))


def live(descriptor: int, namespaces: int) -> NoReturn:
    """Take an order from the socket and carry it out; never returns."""
    try:
        _close_all_but(descriptor)
        with socket.socket(fileno=descriptor) as control:
            order, _ = orders.receive(control, Order)
            terminals = _reporting(control, lambda: _become(order, namespaces))
            if order.role == "worker":
                worker.serve(control)
                os._exit(0)
            _run(order, control, terminals)
    except orders.Disconnected:
        os._exit(0)  # an init that was not needed
    except BaseException:
        # Nobody is there to hear more; what was to be confined has not run.
        sys.excepthook(*sys.exc_info())
        os._exit(_BROKEN)


def _reporting(control: socket.socket, act: Callable[[], T]) -> T:
    """Do something and report how it went; after a failure there is nothing left to do."""
    try:
        result = act()
    except view.StaleView as error:
        report = Report("stale", str(error))
    except (OSError, ExecServerError) as error:
        report = Report("failed", str(error))
    else:
        orders.send(control, Report("ready"), [])
        return result
    orders.send(control, report, [])
    os._exit(_BROKEN)


def _close_all_but(kept: int) -> None:
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _become(order: Order, namespaces: int) -> int | None:
    """Enter the view, and give up everything that the role does not need.

    Returns what view.build does.
    """
    terminals = None
    system.name_process(b"exec-worker" if order.role == "worker" else b"exec-init")
    if namespaces & kernel.NEW_USER:
        with _doing("map the user into a user namespace"):
            _map_own_user()
    if order.view is not None:
        with _doing("build the view of the file system"):
            with_scratch = order.role == "init"
            terminals = view.build(
                order.view, proc=order.proc, terminal=order.terminal, with_scratch=with_scratch
            )
    system.hide_memory()
    try:
        kernel.leave_keyring()
    except OSError:
        pass  # a kernel without keys, or a filter around us that refuses the call
    if order.role == "worker":
        assert order.view is not None
        worker.prepare(order.view, order.globs)
        with _doing("drop privileges"):
            confine.confine_worker(order.view)
    elif order.view is not None:
        with _doing("drop privileges"):
            kernel.drop_bounding_set()
    kernel.die_with_parent()
    return terminals


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Say what failed when the kernel says why."""
    try:
        yield
    except OSError as error:
        raise confine.NotConfined(f"cannot {what}: {os_error_text(error)}") from error


def _carry_tag(tag: int) -> None:
    try:
        hard = resource.getrlimit(_RLIMIT_LOCKS)[1]
        resource.setrlimit(_RLIMIT_LOCKS, (tag, hard))
    except (OSError, ValueError):
        pass  # as for commands that are not confined: see core.descendants.tag_late


def _map_own_user() -> None:
    """Keep the numbers of our user and group; all others are nobody's here."""
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_USER} {_USER} 1")
    _write("/proc/self/gid_map", f"{_GROUP} {_GROUP} 1")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.write(descriptor, text.encode())
    os.close(descriptor)


# ---- the init of a command ------------------------------------------------------------


def _run(order: Order, control: socket.socket, terminals: int | None) -> NoReturn:
    """Wait for the program, start it on our standard streams, and end like it."""
    program, descriptors = orders.receive(control, Program)
    control.set_inheritable(False)  # the command has no business with it
    if order.view is None:
        _reporting(control, lambda: _confine(order, program, descriptors, terminals))
        control.close()
        _replace_self(program)

    def begin() -> int | OSError | InternalError:
        _confine(order, program, descriptors, terminals)
        return _start(program)

    # Reported only when the command is there: a signal that came before would find its group
    # with nobody but us in it, and the first process of a namespace ignores signals.
    leader = _reporting(control, begin)
    control.close()
    if not isinstance(leader, int):
        _cannot_execute(program, leader)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)  # the command's streams end with the command
    os._exit(_wait_for(leader))


def _confine(order: Order, program: Program, descriptors: list[int], terminals: int | None) -> None:
    """The last steps, for which the program has to be known."""
    _carry_tag(program.tag)
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if program.terminal is not None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if terminals is not None:
            view.add_terminal(terminals, program.terminal)
    if terminals is not None:
        os.close(terminals)
    with _doing("build the view of the file system"):
        view.cover(program.covers)
    try:
        os.chdir(program.cwd)
    except OSError:
        os.chdir("/")  # not visible from inside
    with _doing("drop privileges"):
        confine.confine_command(order.network, order.view)
    kernel.die_with_parent()


def _wait_for(leader: int) -> int:
    """Reap everybody until the command has ended; the kernel then ends the rest with us."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == leader:
            return system.exit_code(status)


def _start(program: Program) -> int | OSError | InternalError:
    """The number of the command, or why it cannot be executed, which is no failure of ours."""
    try:
        argv, env, paths = _resolved(program)
        return spawn_first(paths, argv, env, ".", Streams.inherited())
    except (OSError, InternalError) as error:
        return error


def _replace_self(program: Program) -> NoReturn:
    """Without a namespace to look after, this process becomes the command."""
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            pass  # not to be changed by anybody
    try:
        argv, env, paths = _resolved(program)
        refusal: OSError = FileNotFoundError(2, os.strerror(2))
        variables = dict(item.split(b"=", 1) for item in env)
        for path in paths:
            try:
                os.execve(path, argv, variables)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                refusal = error
        raise refusal
    except (OSError, InternalError) as error:
        _cannot_execute(program, error)


def _resolved(program: Program) -> tuple[list[bytes], list[bytes], list[str]]:
    command = Command(program.argv, os.getcwd(), program.env, False, False, program.arg0)
    argv, env = encoded(command)
    return argv, env, lookup.candidates(command)


def _cannot_execute(program: Program, error: OSError | InternalError) -> NoReturn:
    text = os_error_text(error) if isinstance(error, OSError) else error.message
    message = f"exec-server sandbox: cannot execute {program.argv[0]}: {text}\n"
    os.write(2, message.encode("utf-8", "replace"))
    os._exit(_CANNOT_EXECUTE)
