"""Discovery: asks a server that does not describe itself what it can do and where it runs.

All probes are sent at once, so they take one round trip. A server that does not know its
directories has a shell that does: one command reads them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from msgspec import Raw

from exec_server.client.engine.messages import decode_as, decode_environment
from exec_server.client.engine.server_features import PROBES, Answer, ServerFeatures, judge
from exec_server.client.engine.start_params import SYSTEM_FIRST
from exec_server.errors import MalformedAnswer, MethodNotFound, RpcError
from exec_server.protocol.paths import PathUri
from exec_server.protocol.process import (
    READ,
    START,
    TERMINATE,
    ProcessId,
    ReadParams,
    ReadResult,
    TerminateParams,
)
from exec_server.protocol.session import INFO, EnvironmentInfo

# Sends a request at once; awaiting gives its result or raises RpcError.
Ask = Callable[[str, object], Awaitable[Raw]]

# Output of the command below: some paths of at most 4096 bytes.
DESCRIPTION_BYTES: Final = 65_536
# Reads until the command is over; each returns with output or after READ_MS.
MAX_READS: Final = 20
READ_MS: Final = 1_000

# The parent of the shell is the server, and its directory is that of commands without one.
_DESCRIBE: Final = SYSTEM_FIRST + (
    'printf "%s\\0" "$(readlink "/proc/$PPID/cwd")" "$HOME" "${TMPDIR:-/tmp}" "${SHELL:-/bin/sh}" '
    '"$(uname -s | tr "[:upper:]" "[:lower:]")"'
)
_PROCESS: Final = ProcessId("exec-server-client-description")
_SHELL: Final = {"name": "sh", "path": "/bin/sh"}
_INHERIT_ALL: Final = {
    "inherit": "all",
    "ignoreDefaultExcludes": True,
    "exclude": [],
    "set": {},
    "includeOnly": [],
}


async def discover(ask: Ask, *, has_sessions: bool) -> tuple[EnvironmentInfo, ServerFeatures]:
    """Ask for the environment and the features; raises RpcError or MalformedAnswer."""
    describing = ask(INFO.name, None)
    probing = [ask(probe.method, probe.params) for probe in PROBES]
    answers = [await _outcome(waiting) for waiting in probing]
    try:
        known = msgspec.json.decode(await describing, type=dict[str, Any])
        defaults: dict[str, Any] = {}
    except MethodNotFound:
        known, defaults = {}, {"shell": _SHELL}
    except msgspec.DecodeError as error:
        raise MalformedAnswer(f"environment: {error}") from None
    info = _environment(defaults, known)
    features = judge(answers, info.capabilities, has_sessions=has_sessions)
    if info.cwd is None or info.user_home_dir is None:
        info = _environment(defaults | await _describe(ask, features), known)
    return info, features


def _environment(defaults: dict[str, Any], known: dict[str, Any]) -> EnvironmentInfo:
    members = {name: value for name, value in known.items() if value is not None}
    return decode_environment(Raw(msgspec.json.encode(defaults | members)))


async def _outcome(waiting: Awaitable[Raw]) -> Answer:
    try:
        return await waiting
    except RpcError as error:
        return error


async def _describe(ask: Ask, features: ServerFeatures) -> dict[str, Any]:
    """The members of an environment that a shell knows; none if there is no shell."""
    params = {
        "processId": _PROCESS,
        "argv": ["/bin/sh", "-c", _DESCRIBE],
        "cwd": "file:///" if features.sends_uris else "/",
        "envPolicy": _INHERIT_ALL,
        "env": {},
        "tty": False,
        "arg0": None,
    }
    try:
        await ask(START.name, params)
        output = await _output(ask)
    except RpcError:
        return {}
    return parse_description(output)


async def _output(ask: Ask) -> bytes:
    """The output of the command, until it is over or takes too long."""
    output = bytearray()
    after = 0
    for _ in range(MAX_READS):
        params = ReadParams(_PROCESS, after, DESCRIPTION_BYTES, READ_MS)
        answer = decode_as(ReadResult, await ask(READ.name, params), f"answer to {READ.name}")
        for chunk in answer.chunks:
            output += chunk.chunk
            after = chunk.seq
        if len(output) > DESCRIPTION_BYTES:
            break
        if answer.closed and not answer.chunks:
            return bytes(output)
    await ask(TERMINATE.name, TerminateParams(_PROCESS))
    return b""


def parse_description(output: bytes) -> dict[str, Any]:
    """The members of an environment in the output of the command; none if it is incomplete."""
    fields = [field.decode(errors="surrogateescape") for field in output.split(b"\0")]
    if len(fields) != 6:
        return {}
    cwd, home, temporary, shell, system, _ = fields
    found: dict[str, Any] = {"platformOs": system}
    paths = {"cwd": cwd, "userHomeDir": home, "tempDir": temporary}
    found |= {name: PathUri.from_text(path).uri for name, path in paths.items() if path[:1] == "/"}
    if shell[:1] == "/":
        found["shell"] = {"name": shell.rpartition("/")[2], "path": shell}
    return found
