"""Entry point of the exec-server command: runs a client command, or the server with a watchdog."""

from __future__ import annotations

import os
import sys

try:
    import gc
    import signal

    from exec_server.cli.commands.routing import route
    from exec_server.cli.commands.table import COMMANDS
    from exec_server.host import module_path, platform, standard_streams
except KeyboardInterrupt:  # Ctrl-C before `main`
    raise SystemExit(130) from None

TYPE_CHECKING = False  # not that of typing: the watchdog is to stay small
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> None:
    """Run the command of sys.argv; does not return."""
    module_path.drop_script_directory()
    _open_missing_streams()
    if not platform.has_commands():
        _refuse(platform.COMMANDS_NEED_POSIX)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Until the command has something to clean up, Ctrl-C ends it without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    name, words = route(sys.argv[1:])
    command = COMMANDS.get(name)
    if command is None or command.is_client:
        _run_client(name, words)
    if not platform.has_server():
        _refuse(platform.SERVER_NEEDS_LINUX)
    _run_server(name, words)


def _run_client(name: str, words: list[str]) -> NoReturn:
    # The collector would examine each imported module several times, which takes a tenth of the
    # start. `run_event_loop` enables it again.
    gc.disable()
    from exec_server.cli.commands.dispatch import run

    _exit(run(name, words))


def _open_missing_streams() -> None:
    try:
        standard_streams.open_missing()
    except OSError as error:
        if sys.stderr is not None:
            print(f"Error: cannot open {os.devnull}: {error.strerror}", file=sys.stderr)
        os._exit(1)


def _refuse(reason: str) -> NoReturn:
    print(f"Error: {reason}", file=sys.stderr)
    _exit(1)


def _run_server(name: str, words: list[str]) -> NoReturn:
    gc.disable()  # as for a client; `server_run` enables it again
    module_path.freeze()
    from exec_server.cli import watchdog
    from exec_server.host import libc
    from exec_server.host.secret_variables import STRIPPED_NAMES
    from exec_server.process import descendants
    from exec_server.registry.secrets import SECRET_NAMES

    libc.hide_memory()  # before a child can look, for the watchdog too, which is forked below
    # Root may read the environment block of every process, so it must not hold a secret when the
    # first child is started.
    libc.erase_environment_values(STRIPPED_NAMES | SECRET_NAMES)
    libc.close_inherited_descriptors_on_exec()
    # A SIGCHLD that the parent process ignores is inherited, and the kernel would reap children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    dog = watchdog.start()
    # Imported after the fork, to keep the watchdog small.
    if name == "sandbox":
        from exec_server.cli.sandbox_command import run

        gc.enable()
        dog.wait_until_ready()
        code = run(words, dog.register_cleanup)
    else:
        if name == "up":
            from exec_server.cli.up_command import up

            code = up(words, dog)
        else:
            from exec_server.cli.serve_command import serve

            code = serve(words if name == "serve" else [name, *words], dog)
        dog.wait_until_ready()  # its parent must not change while it looks around
    descendants.kill_all_descendants(spared=dog.pid)  # orphans that have removed their tag
    _exit(code)


def _exit(code: int) -> NoReturn:
    if not standard_streams.flush() and code == 0:
        code = 1
    # Not sys.exit, which would wait for threads that hang, for example on a dead disk.
    os._exit(code)
