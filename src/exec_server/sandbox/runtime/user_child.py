"""A command of another user, in a process that the launcher has forked.

The process becomes one of the user before it enters the directory and executes the program, so
that the rights of the user apply to both. Nothing confines it otherwise.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import termios
from typing import Final, NoReturn

from exec_server.host import users
from exec_server.process import command as process_command
from exec_server.process.command import Command
from exec_server.process.spawn import encode
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.messages import Status, UserRequest

_SKIPPED_IN_SEARCH: Final = (FileNotFoundError, NotADirectoryError, PermissionError)
_FAILED: Final = 70


def run(control: socket.socket) -> NoReturn:
    """Execute the command of the next request.

    Sends a Status when the command is to be executed. The end of the socket, which closes on exec,
    then tells that it is; another Status has the number of the error.
    """
    request, descriptors = messages.receive(control, UserRequest)
    control.set_inheritable(False)
    try:
        _prepare(request, descriptors)
        messages.send(control, Status("ready"), [])
        _execute(request)
    except OSError as error:
        messages.send(control, Status("failed", str(error.errno)), [])
        os._exit(_FAILED)


def _prepare(request: UserRequest, descriptors: list[int]) -> None:
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    user = users.User("", request.uid, request.gid, request.groups, "", "")
    if request.has_terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        users.own_terminal(0, user)
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            pass  # SIGKILL, SIGSTOP, and signals that libc reserves
    users.become(user)
    os.chdir(request.cwd)


def _execute(request: UserRequest) -> NoReturn:
    """Execute the first candidate that the kernel accepts; raises OSError as execvp would."""
    command = Command(request.argv, request.cwd, request.env, False, False, request.arg0)
    argv, env = encode(command)
    variables = dict(item.split(b"=", 1) for item in env)
    failure: OSError = FileNotFoundError(2, os.strerror(2))
    paths = process_command.candidates(command)
    for path in paths:
        if len(paths) > 1 and not os.path.exists(path):
            continue  # also what lies in a directory of PATH that the user may not enter
        try:
            os.execve(path, argv, variables)
        except _SKIPPED_IN_SEARCH as error:
            if isinstance(error, PermissionError):
                failure = error
    raise failure
