"""StartParamsBuilder: the params of `process/start` for a command.

Where a server lacks a feature, a shell on its machine replaces it:

- closing a pipe: `head` passes on exactly the bytes of the input, then the command reads the end
  of a pipe;
- a pipe: the input is in the arguments of the shell, in base64;
- the initial size of a terminal: `stty` sets it before the command starts;
- one pipe for both streams: the shell redirects stderr.

With the shell, a program that does not exist is not an error of the start: the exit code is 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pybase64
from msgspec.structs import replace

from exec_server.client.arguments import (
    AnyNetworkProxy,
    AnySandbox,
    environment_dict,
    network_proxy_object,
    sandbox_object,
    tty_size,
    user_text,
)
from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.paths import AnyPath, PathResolver
from exec_server.errors import Unsupported
from exec_server.protocol.process import EnvPolicy, ProcessId, StartParams

# Inherit the whole environment of the server.
INHERIT_ALL: Final = EnvPolicy(
    inherit="all", ignore_default_excludes=True, exclude=[], set={}, include_only=[]
)
# The default TERM. Servers set none, and many programs refuse to run in a terminal without one.
DEFAULT_TERM: Final = "xterm-256color"
# The default PATH on servers that pass on no environment: that of most systems.
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The beginning of a script that the client runs for itself: the directories that only root can
# write come first, because those of a project may hold a program of any name. The others follow,
# for machines that have their programs elsewhere. Not /usr/local/bin: some systems give it to a
# user.
SYSTEM_FIRST: Final = "PATH=/usr/sbin:/usr/bin:/sbin:/bin${PATH:+:$PATH}; export PATH; "
# Input in arguments. Linux limits one to 128 KiB and all to 2 MiB by default, with the environment;
# base64 makes four bytes of three.
ARGUMENT_CHARACTERS: Final = 96_000
ARGUMENT_INPUT_BYTES: Final = 1_048_576

_NO_PIPE: Final = "use run(input=...), or a terminal"
_WITH_INPUT: Final = f'n=$1; shift; ({SYSTEM_FIRST}exec head -c "$n") | exec "$@"'
_MERGED: Final = 'exec "$@" 2>&1'
_WITH_ARGUMENTS: Final = f"""
n=$1; shift
{{ for piece; do [ "$n" -gt 0 ] || break; printf %s "$piece"; n=$((n - 1)); done; }} |
    ({SYSTEM_FIRST}exec base64 -d) | {{ shift "$n"; exec "$@"; }}
"""
_WITH_SIZE: Final = f'({SYSTEM_FIRST}exec stty rows "$1" columns "$2"); shift 2; exec "$@"'


class StartParamsBuilder:
    """Builds the params of starts for one server."""

    def __init__(self, paths: PathResolver, features: ServerFeatures) -> None:
        self._paths = paths
        self._features = features

    def build(
        self,
        argv: list[str],
        *,
        cwd: AnyPath | None,
        env: Mapping[str, AnyPath] | None,
        clean_env: bool,
        tty: bool,
        sandbox: AnySandbox | None,
        size: tuple[int, int] | None = None,
        stdin: bool = False,
        data: bytes | None = None,
        merge_stderr: bool = False,
        user: str | int | None = None,
        network_proxy: AnyNetworkProxy | None = None,
    ) -> StartParams:
        """The params of a start, with an empty id; `data` is the whole input of the command.

        If they open no pipe for the data, they contain it.
        """
        if not isinstance(stdin, bool):
            kind = type(stdin).__name__
            raise TypeError(f"stdin must be a bool, not {kind}: send data with write()")
        if size is not None and not tty:
            raise TypeError("size is the size of a terminal: it needs tty=True")
        capabilities = self._features.capabilities
        params = StartParams(
            process_id=ProcessId(""),
            argv=argv,
            cwd=self._paths.uri(self._paths.cwd if cwd is None else cwd, "cwd"),
            env_policy=None if clean_env else INHERIT_ALL,
            env=self._defaults(tty=tty, clean_env=clean_env) | environment_dict(env),
            tty=tty,
            pipe_stdin=data is not None or (stdin and not tty),
            sandbox=self._features.command_sandbox(sandbox_object(sandbox, self._paths, cwd)),
            enforce_managed_network=network_proxy is not None and sandbox is not None,
            network_proxy=network_proxy_object(network_proxy, capabilities),
            tty_size=None if size is None else tty_size(size),
            report_pid=capabilities.process_pid,
            merge_stderr=merge_stderr and not tty,
            user=user_text(capabilities, user),
        )
        return _adapted(params, data, self._features)

    def _defaults(self, *, tty: bool, clean_env: bool) -> dict[str, str]:
        """Variables that the server does not set."""
        found = {"TERM": DEFAULT_TERM} if tty else {}
        if not (clean_env or self._features.has_environment_policies):
            found |= {"PATH": DEFAULT_PATH, "HOME": self._paths.home or "/"}
        return found


# ---- shells that replace features -----------------------------------------------------


def _adapted(params: StartParams, data: bytes | None, features: ServerFeatures) -> StartParams:
    """The params with a shell around the command for each feature that the server lacks."""
    capabilities = features.capabilities
    if params.merge_stderr and not capabilities.process_merge_stderr:
        params = _in_shell(params, _MERGED)
    if params.pipe_stdin and not features.has_stdin_pipes:
        if data is None:
            raise Unsupported("pipeStdin in process/start", _NO_PIPE)
        pieces = _pieces(data)
        params = _in_shell(params, _WITH_ARGUMENTS, str(len(pieces)), *pieces)
        params = replace(params, pipe_stdin=False)
    elif data is not None and not capabilities.process_close_stdin:
        params = _in_shell(params, _WITH_INPUT, str(len(data)))
    if (size := params.tty_size) is not None and not capabilities.process_resize:
        params = _in_shell(params, _WITH_SIZE, str(size.rows), str(size.columns))
        params = replace(params, tty_size=None)
    return params


def _in_shell(params: StartParams, script: str, *words: str) -> StartParams:
    """The command as the last arguments of a script, after `words`."""
    return replace(params, argv=["/bin/sh", "-c", script, "sh", *words, *params.argv])


def _pieces(data: bytes) -> list[str]:
    """Input as arguments; raises Unsupported if it is too large."""
    if len(data) > ARGUMENT_INPUT_BYTES:
        limit = f"input may have {ARGUMENT_INPUT_BYTES} bytes; write a file and redirect it instead"
        raise Unsupported("pipeStdin in process/start", limit)
    text = pybase64.b64encode_as_string(data)
    starts = range(0, len(text), ARGUMENT_CHARACTERS)
    return [text[start : start + ARGUMENT_CHARACTERS] for start in starts]
