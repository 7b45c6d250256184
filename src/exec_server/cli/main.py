"""Entry point of the exec-server command: runs a client command, or the server with a watchdog."""

from __future__ import annotations

import os
import sys

try:
    import gc
    import signal
    from typing import NoReturn

    from exec_server.cli.table import COMMANDS, route, unknown_command
    from exec_server.host import interpreter
except KeyboardInterrupt:  # Ctrl-C before `main`
    raise SystemExit(130) from None

TYPE_CHECKING = False
if TYPE_CHECKING:
    from exec_server.cli.table import CommandRow


def main() -> None:
    """Run the command of sys.argv; does not return."""
    interpreter.start_again_in_utf8()
    interpreter.drop_script_directory()
    _open_missing_streams()
    if not interpreter.has_commands():
        _refuse(interpreter.COMMANDS_NEED_POSIX)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Until the command has something to clean up, Ctrl-C ends it without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    name, words = route(sys.argv[1:])
    command = COMMANDS.get(name)
    if command is None or command.is_client:
        _start_client(name, words)
    if not interpreter.has_server():
        _refuse(interpreter.SERVER_NEEDS_LINUX)
    _run_server(name, words)


def _start_client(name: str, words: list[str]) -> NoReturn:
    # The collector would examine each imported module several times, which takes a tenth of the
    # start. `run_event_loop` enables it again.
    gc.disable()
    # Not for a short command: ctypes takes longer to import than the command runs on the server.
    if name not in ("exec", "shell") and interpreter.has_server():
        from exec_server.host import libc  # of Linux

        libc.keep_freed_memory()
    _exit(run_client(name, words))


def run_client(name: str, words: list[str]) -> int:
    """Run a client's command and return its exit code. Only defects print a traceback."""
    from exec_server.cli import errors
    from exec_server.cli.streams import print_error

    command = COMMANDS.get(name)
    if command is None:
        hint = "For more information, try 'exec-server --help'."
        print_error(f"Error: {_unknown(name, words)}\n\n{hint}")
        return errors.EXIT_USAGE
    try:
        # Each command is imported only when it runs, so that shell completion starts fast.
        return command.run(command.build_parser().parse_words(words))
    except SystemExit as end:  # argparse: --help and usage errors
        return end.code if isinstance(end.code, int) else errors.EXIT_FAILURE
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # an edge: Python must not print what a server wrote
        text, code = _describe(error, command)
        print_error(f"Error: {text}")
        return code


def _unknown(name: str, words: list[str]) -> str:
    """What was probably meant by a word that is no command."""
    import shlex
    import shutil

    from exec_server.client.targets import find_target
    from exec_server.errors import StartupError

    try:
        target = find_target(name)
    except StartupError as error:
        if "did you mean" in str(error):  # an address without its scheme, or with another one
            return str(error)
    else:
        shown = target.address if ":" in name else name  # without secrets
        meant = shlex.join(["exec-server", "exec" if words else "shell", shown, *words])
        return f"`{shown}` is a target, not a command; did you mean `{meant}`?"
    text = unknown_command(name)
    if "?" in text or shutil.which(name) is None:
        return text
    return f"{text}; to run it on a target: exec-server exec TARGET {name} …"


def _describe(error: Exception, command: CommandRow) -> tuple[str, int]:
    """The text and the exit code for an error of a client's command."""
    from exec_server.cli.errors import EXIT_USAGE, CommandError, LostConnection, UsageError
    from exec_server.errors import (
        ConnectFailed,
        ConnectionLost,
        ExecServerError,
        RegistryError,
        SessionLost,
        StartupError,
        printable,
    )

    is_usage = isinstance(error, StartupError) and command.is_about_targets
    if is_usage or isinstance(error, UsageError):
        text = f"{error}\n\nFor more information, try 'exec-server {command.name} -h'."
        return text, EXIT_USAGE
    lost = (LostConnection, ConnectFailed, ConnectionLost, SessionLost, RegistryError)
    code = command.connection_code if isinstance(error, lost) else command.failure_code
    if isinstance(error, CommandError):
        return str(error), code if error.exit_code is None else error.exit_code
    if isinstance(error, ExecServerError):
        return printable(str(error)), code
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error), code
    import traceback

    return f"this is a defect of exec-server\n{traceback.format_exc()}", code


def _open_missing_streams() -> None:
    try:
        interpreter.open_missing()
    except OSError as error:
        if sys.stderr is not None:
            print(f"Error: cannot open {os.devnull}: {error.strerror}", file=sys.stderr)
        os._exit(1)


def _refuse(reason: str) -> NoReturn:
    print(f"Error: {reason}", file=sys.stderr)
    _exit(1)


def _run_server(name: str, words: list[str]) -> NoReturn:
    gc.disable()  # as for a client; `serve.run` enables it again
    interpreter.freeze()
    from exec_server.cli.serve.watchdog import start_watchdog
    from exec_server.host import libc
    from exec_server.process import descendants

    libc.hide_memory()  # before a child can look, for the watchdog too, which is forked below
    # Root may read the environment block of every process, so it must not hold a secret when the
    # first child is started.
    libc.erase_environment_values(interpreter.STRIPPED_NAMES | interpreter.SECRET_NAMES)
    libc.close_inherited_descriptors_on_exec()
    # A SIGCHLD that the parent process ignores is inherited, and the kernel would reap children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    watchdog = start_watchdog()
    # Imported after the fork, to keep the watchdog small.
    if name == "sandbox":
        from exec_server.cli.sandbox.command import run

        gc.enable()
        watchdog.wait_until_ready()
        code = run(words, watchdog.register_cleanup)
    else:
        if name == "up":
            from exec_server.cli.serve.up import up

            code = up(words, watchdog)
        else:
            from exec_server.cli.serve.command import serve

            code = serve(words if name == "serve" else [name, *words], watchdog)
        watchdog.wait_until_ready()  # its parent must not change while it looks around
    descendants.kill_all_descendants(spared=watchdog.pid)  # orphans that have removed their tag
    _exit(code)


def _exit(code: int) -> NoReturn:
    if not interpreter.flush() and code == 0:
        code = 1
    # Not sys.exit, which would wait for threads that hang, for example on a dead disk.
    os._exit(code)
