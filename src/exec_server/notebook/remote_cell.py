"""run_cell: one cell or line on a target, from its arguments to its Result."""

from __future__ import annotations

import argparse
import codecs
import sys
import threading
from collections import deque
from collections.abc import Iterable, MutableMapping
from typing import Any, Final, TextIO

from exec_server import sync
from exec_server.cli.connection import describe_error, error_text, make_dialer
from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.start_options import command_sandbox, command_variables, load_policy
from exec_server.cli.targets import chosen_target
from exec_server.client.commands import OutputLimit
from exec_server.client.environment import Environment
from exec_server.client.exceptions import CommandFailed, Timeout
from exec_server.client.process import OUTPUT_BYTES
from exec_server.client.results import Chunk, Result
from exec_server.client.targets import Target
from exec_server.errors import ConnectionLost, ExecServerError, SessionLost, StartupError, printable
from exec_server.sync.environment import run_streamed

# Output that a cell shows from its beginning. A notebook stores what it shows, and a browser
# becomes slow; the end of longer output follows when the command has ended.
SHOWN_BYTES: Final = 1_048_576
END_BYTES: Final = 16_384

_DECODER: Final = codecs.getincrementaldecoder("utf-8")

# More machines than a notebook works with; each has a thread and a connection.
MAX_OPEN: Final = 32

# Output in the result of an error, if no variable holds all of it.
FAILURE_BYTES: Final = 16_384


# IPython prints no traceback: it would show the magic's code, and the fault is in the command.
class _Brief(BaseException):
    def _render_traceback_(self) -> list[str]:
        """The lines that IPython prints instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class RemoteError(_Brief, ExecServerError):
    """The command was not run, or its end is unknown."""

    def __str__(self) -> str:
        return printable(str(self.args[0]), keep="\n")


class RemoteCommandFailed(_Brief, CommandFailed):
    """The command had an exit code other than 0; its output is in the cell, or in `result`."""

    def __str__(self) -> str:
        result = self.result
        is_denied = result.sandbox_denied or result.sandbox_denial is not None
        denied = ", denied by its sandbox" if is_denied else ""
        return f"exit code {result.exit_code} after {result.duration:.1f} s{denied}"


class RemoteTimeout(_Brief, Timeout):
    """The command was killed after its timeout."""

    def __str__(self) -> str:
        if self.was_sent and self.is_killed:
            return f"killed after {self.seconds:g} s"
        return super().__str__()


class RemoteInterrupt(_Brief, KeyboardInterrupt):
    """The user has interrupted the kernel."""

    def __str__(self) -> str:
        return "the command was killed"


class CellOutput:
    """Writes chunks to two text files as they are, colours included; `finish` writes the end.

    Shows the output of a command in a cell while it arrives. No I/O of its own.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._files = {"stdout": stdout, "stderr": stderr}
        self._decoders = {name: _DECODER("replace") for name in self._files}
        self._last = "stdout"
        self._shown = 0
        self._end: deque[tuple[str, bytes]] = deque()
        self._end_bytes = 0
        self._left_out = 0

    def show(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            name = "stderr" if chunk.stream == "stderr" else "stdout"
            room = SHOWN_BYTES - self._shown
            self._write(name, chunk.data[:room])
            if len(chunk.data) > room:
                self._keep(name, chunk.data[room:])
        self._files[self._last].flush()

    def finish(self) -> None:
        """Write the end of longer output, and incomplete characters."""
        if self._left_out:
            self._files["stderr"].write(f"\n[… {self._left_out:,} bytes not shown …]\n")
            self._last = "stderr"
        for name, data in self._end:
            self._write(name, data)
        for name, decoder in self._decoders.items():
            if rest := decoder.decode(b"", final=True):
                self._files[name].write(rest)
        for file in self._files.values():
            file.flush()

    def _write(self, name: str, data: bytes) -> None:
        self._shown += len(data)
        if text := self._decoders[name].decode(data):
            if name != self._last:  # the order of the streams is that of their flushes
                self._files[self._last].flush()
                self._last = name
            self._files[name].write(text)

    def _keep(self, name: str, data: bytes) -> None:
        self._end.append((name, data))
        self._end_bytes += len(data)
        while self._end_bytes > END_BYTES:
            first_name, first = self._end.popleft()
            surplus = min(self._end_bytes - END_BYTES, len(first))
            self._end_bytes -= surplus
            self._left_out += surplus
            if surplus < len(first):
                self._end.appendleft((first_name, first[surplus:]))
                break


# Connections: the environments of a notebook, one for each target, open between its cells.
class NotebookConnections:
    """Opens environments at their first use, and again if their session was lost."""

    def __init__(self) -> None:
        self._open: dict[Target, sync.Environment] = {}
        # Guards `_open`: kernels may run cells of one notebook in several threads (subshells).
        self._lock = threading.Lock()

    @property
    def labels(self) -> list[str]:
        """The TARGETs that are connected."""
        return sorted({target.label for target in self._open})

    def get(self, target: Target) -> sync.Environment:
        """The environment of a target; raises UsageError or RemoteError."""
        try:
            with self._lock:
                return self._opened(target)
        except RemoteError:
            raise
        except StartupError as error:
            raise RemoteError(f"{target.label}: {error}") from None
        except ExecServerError as error:
            raise RemoteError(describe_error(error, target)) from None

    def _opened(self, target: Target) -> sync.Environment:
        found = self._open.get(target)
        if found is not None and found.is_open:
            found.reconnect()
            return found
        if found is None and len(self._open) >= MAX_OPEN:
            raise RemoteError(f"{MAX_OPEN} targets are connected: close some by %remote_close")
        self._open[target] = sync.Environment(
            lambda: Environment(make_dialer(target, _print_line)),
            has_children=target.argv is not None,
        )
        return self._open[target]

    def close(self, labels: list[str]) -> list[str]:
        """Close the connections to these targets, or all; returns the names of the closed ones."""
        with self._lock:
            closed = [each for each in self._open if not labels or each.label in labels]
            environments = [self._open.pop(target) for target in closed]
        for environment in environments:
            environment.close()
        return sorted({target.label for target in closed})


def _print_line(line: str) -> None:
    """Show a line that a stdio target has written to its stderr."""
    print(printable(line), file=sys.stderr)


def run_cell(
    arguments: argparse.Namespace,
    text: str,
    connections: NotebookConnections,
    names: MutableMapping[str, Any],
) -> None:
    """Run a text for the shell; `names` are the variables of the notebook.

    All errors are brief ones: RemoteError, RemoteCommandFailed, RemoteTimeout, RemoteInterrupt.
    """
    try:
        target = chosen_target(arguments)
        try:
            _run(arguments, text, connections.get(target), names)
        except (ConnectionLost, SessionLost) as error:
            raise RemoteError(describe_error(error, target)) from None
        except (RemoteError, RemoteCommandFailed, RemoteTimeout):
            raise
        except ExecServerError as error:
            raise RemoteError(f"{target.label}: {error_text(error)}") from None
    except (StartupError, UsageError, CommandError) as error:
        raise RemoteError(str(error)) from None
    except KeyboardInterrupt:
        raise RemoteInterrupt from None


def _run(
    arguments: argparse.Namespace, text: str, env: sync.Environment, names: MutableMapping[str, Any]
) -> None:
    argv = [arguments.shell, "-c", text]
    policy = load_policy("--sandbox", arguments.sandbox)
    sandbox = command_sandbox(policy, arguments.cwd, env.info)
    variables = command_variables(arguments.env, tty=arguments.tty)
    if arguments.tty:
        variables["TERM"] = "xterm-256color"  # notebooks show its colours
    if arguments.background:
        names[arguments.out] = env.start(
            argv,
            cwd=arguments.cwd,
            env=variables,
            tty=arguments.tty,
            user=arguments.user,
            sandbox=sandbox,
        )
        return
    output = CellOutput(sys.stdout, sys.stderr)

    def show(chunks: list[Chunk]) -> None:
        if not arguments.quiet:
            output.show(chunks)

    keeps_all = arguments.out is not None
    try:
        result = run_streamed(
            env,
            argv,
            show,
            cwd=arguments.cwd,
            env=variables,
            tty=arguments.tty,
            user=arguments.user,
            sandbox=sandbox,
            timeout=arguments.timeout,
            output_limit=OUTPUT_BYTES if keeps_all else OutputLimit(tail=FAILURE_BYTES),
        )
    except Timeout as late:
        _store(arguments, late.result, names)
        raise RemoteTimeout(
            late.seconds, late.result, is_killed=late.is_killed, was_sent=late.was_sent
        ) from None
    finally:
        output.finish()
    _store(arguments, result, names)
    if result.exit_code and not arguments.no_raise:
        raise RemoteCommandFailed(result)


def _store(arguments: argparse.Namespace, result: Result, names: MutableMapping[str, Any]) -> None:
    names["_exit_code"] = result.exit_code  # as `!command` does
    if arguments.out is not None:
        names[arguments.out] = result
