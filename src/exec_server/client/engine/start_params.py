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

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import pybase64

from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.paths import AnyPath, PathResolver, decoded
from exec_server.errors import InvalidParams, Unsupported
from exec_server.protocol.decoding import Params, decode
from exec_server.protocol.network import NetworkProxy, ProxySettings
from exec_server.protocol.presets import PRESETS, PresetName, preset
from exec_server.protocol.process import EnvPolicy, ProcessId, StartParams, TtySize
from exec_server.protocol.sandbox import Sandbox
from exec_server.protocol.session import Capabilities

# The name of a preset policy, or a `sandbox` object of the protocol.
AnySandbox = PresetName | Sandbox | Mapping[str, Any]
# A `networkProxy` object of the protocol, whose `proxy` may leave out what is in PROXY_DEFAULTS.
AnyNetworkProxy = NetworkProxy | Mapping[str, Any]
PROXY_DEFAULTS: Final[Mapping[str, Any]] = {
    "enabled": True,
    "enableSocks5": True,
    "enableSocks5Udp": False,
    "allowUpstreamProxy": False,
    "allowLocalBinding": False,
    "dangerouslyAllowAllUnixSockets": False,
    "mode": "full",
}

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
# Rows and columns of a terminal: the kernel keeps them in 16 bits.
MAX_TTY_SIZE: Final = 65_535

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
        capabilities = self._features.capabilities
        if not isinstance(stdin, bool):
            kind = type(stdin).__name__
            raise TypeError(f"stdin must be a bool, not {kind}: send data with write()")
        user = user_text(capabilities, user)
        if size is not None and not tty:
            raise TypeError("size is the size of a terminal: it needs tty=True")
        if merge_stderr and not tty and not capabilities.process_merge_stderr:
            argv = ["/bin/sh", "-c", _MERGED, "sh", *argv]
        is_pipe = stdin and not tty
        if data is not None and not self._features.has_stdin_pipes:
            pieces = _pieces(data)
            argv = ["/bin/sh", "-c", _WITH_ARGUMENTS, "sh", str(len(pieces)), *pieces, *argv]
        elif is_pipe and not self._features.has_stdin_pipes:
            raise Unsupported("pipeStdin in process/start", _NO_PIPE)
        elif data is not None:
            is_pipe = True
            if not capabilities.process_close_stdin:
                argv = ["/bin/sh", "-c", _WITH_INPUT, "sh", str(len(data)), *argv]
        tty_size = None if size is None else _tty_size(size)
        if tty_size is not None and not capabilities.process_resize:
            rows, columns = str(tty_size.rows), str(tty_size.columns)
            argv = ["/bin/sh", "-c", _WITH_SIZE, "sh", rows, columns, *argv]
            tty_size = None
        return StartParams(
            process_id=ProcessId(""),
            argv=argv,
            cwd=self._paths.uri(self._paths.cwd if cwd is None else cwd, "cwd"),
            env_policy=None if clean_env else INHERIT_ALL,
            env=self._defaults(tty=tty, clean_env=clean_env) | _environment(env),
            tty=tty,
            pipe_stdin=is_pipe,
            sandbox=self._features.command_sandbox(sandbox_object(sandbox, self._paths, cwd)),
            enforce_managed_network=network_proxy is not None and sandbox is not None,
            network_proxy=network_proxy_object(network_proxy, capabilities),
            tty_size=tty_size,
            report_pid=capabilities.process_pid,
            merge_stderr=merge_stderr and not tty,
            user=user,
        )

    def _defaults(self, *, tty: bool, clean_env: bool) -> dict[str, str]:
        """Variables that the server does not set."""
        found = {"TERM": DEFAULT_TERM} if tty else {}
        if not (clean_env or self._features.has_environment_policies):
            found |= {"PATH": DEFAULT_PATH, "HOME": self._paths.home or "/"}
        return found


def user_text(capabilities: Capabilities, user: str | int | None) -> str | None:
    """The name or number of a user as text; raises Unsupported if the server cannot act as one."""
    if user is None:
        return None
    if not isinstance(user, str | int) or isinstance(user, bool):
        raise TypeError(f"user must be a name or a number, not {type(user).__name__}")
    if not capabilities.other_users:
        raise Unsupported("otherUsers", "it needs the rights of root, or runs as this user itself")
    return str(user)


def sandbox_object(
    sandbox: AnySandbox | None, paths: PathResolver, cwd: AnyPath | None = None
) -> Sandbox | None:
    """The `sandbox` object of a request; the workspace of a preset is `cwd`."""
    if isinstance(sandbox, str):
        if sandbox not in PRESETS:
            raise InvalidParams(f"unknown sandbox {sandbox!r}: use one of {', '.join(PRESETS)}")
        workspace = str(paths.uri(paths.cwd if cwd is None else cwd, "cwd"))
        sandbox = preset(sandbox, cwd=workspace, roots=[workspace])
    # msgspec encodes a mapping without looking at its members.
    return cast(Sandbox | None, sandbox)


def network_proxy_object(
    given: AnyNetworkProxy | None, capabilities: Capabilities
) -> NetworkProxy | None:
    """The `networkProxy` of a start; raises InvalidParams, Unsupported for rules without effect."""
    if given is None:
        return None
    launch = given if isinstance(given, NetworkProxy) else _network_proxy(given)
    rules, has = launch.proxy, capabilities
    missing = {
        "networkProxyLaunch": not has.network_proxy_launch,
        "networkProxyReviewDomains": rules.review_domains and not has.network_proxy_review_domains,
        "credentialMasking": rules.credential_masking and not has.credential_masking,
        "credentialMaskingCustomProviders": rules.credential_providers
        and not has.credential_masking_custom_providers,
    }
    for capability, is_missing in missing.items():
        if is_missing:
            raise Unsupported(capability, "it would run the command without these rules")
    return launch


def _network_proxy(given: Mapping[str, Any]) -> NetworkProxy:
    rules = given.get("proxy") if isinstance(given, Mapping) else None
    if not isinstance(rules, Mapping):
        raise InvalidParams('network_proxy must be like {"proxy": {"domains": {"a.b": "allow"}}}')
    _check_members(given, NetworkProxy, "network_proxy")
    _check_members(rules, ProxySettings, "the proxy of network_proxy")
    return decode(NetworkProxy, {**given, "proxy": {**PROXY_DEFAULTS, **rules}})


def _check_members(given: Mapping[str, Any], kind: type[Params], name: str) -> None:
    """Raise InvalidParams for an unknown member: servers ignore it, and so the rule that it has."""
    known = kind.__struct_encode_fields__
    for member in given:
        if member not in known:
            raise InvalidParams(f"{name} has no {member!r}, only {', '.join(known)}")


def argv_list(argv: Iterable[AnyPath]) -> list[str]:
    """The words of a command as texts; raises TypeError, and InvalidParams if there are none."""
    if isinstance(argv, str | bytes | os.PathLike):
        raise TypeError("argv is a list of words; for a text of a shell use env.shell(text)")
    words = [_text(word, f"argv[{number}]") for number, word in enumerate(argv)]
    if not words:
        raise InvalidParams("argv must not be empty")
    return words


def input_bytes(data: bytes | None) -> bytes | None:
    """The input of a command, None if there is none; raises TypeError if it is no bytes."""
    if data is not None and not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"input must be bytes, not {type(data).__name__}")
    return bytes(data) if data else None


def _pieces(data: bytes) -> list[str]:
    """Input as arguments; raises Unsupported if it is too large."""
    if len(data) > ARGUMENT_INPUT_BYTES:
        limit = f"input may have {ARGUMENT_INPUT_BYTES} bytes; write a file and redirect it instead"
        raise Unsupported("pipeStdin in process/start", limit)
    text = pybase64.b64encode_as_string(data)
    starts = range(0, len(text), ARGUMENT_CHARACTERS)
    return [text[start : start + ARGUMENT_CHARACTERS] for start in starts]


def check_seconds(seconds: float | None) -> None:
    """Raise TypeError for a timeout that is no number, and ValueError for one below 0."""
    check_number(seconds)
    if seconds is not None and not seconds >= 0:  # NaN is not, either
        raise ValueError(f"timeout must be at least 0 seconds, not {seconds:g}")


def check_number(seconds: float | None, name: str = "timeout") -> None:
    """Raise TypeError for a time that is no number, before anything is done."""
    if seconds is not None and not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {type(seconds).__name__}")


def _environment(env: Mapping[str, AnyPath] | None) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        kind = type(env).__name__
        raise TypeError(f'env must be a mapping like {{"NAME": "value"}}, not {kind}')
    found = {
        _text(name, "a name in env"): _text(value, f"env[{name!r}]") for name, value in env.items()
    }
    for name in found:
        if not name or "=" in name:
            raise ValueError(f"env has the name {name!r}: a name is not empty and has no =")
    return found


def _text(value: AnyPath, name: str) -> str:
    """A text or path as text; raises TypeError for others."""
    try:
        return decoded(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name} must be str, bytes or a path, not {kind}") from None


def _tty_size(size: tuple[int, int]) -> TtySize:
    match size:
        case (int(rows), int(columns)) if 0 < rows <= MAX_TTY_SIZE and 0 < columns <= MAX_TTY_SIZE:
            return TtySize(rows, columns)
    limits = f"each from 1 to {MAX_TTY_SIZE}"
    raise InvalidParams(f"size must be rows and columns, {limits}, not {size!r}")
