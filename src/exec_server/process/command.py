"""Command: a frozen description of a start, and the rules for its environment."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from exec_server.errors import InternalError, InvalidParams
from exec_server.host.interpreter import STRIPPED_NAMES
from exec_server.protocol.process import EnvPolicy, Metadata

_THREAD_ID = "CODEX_THREAD_ID"
_TOOL_CALL_ID = "CODEX_TOOL_CALL_ID"
_STRIPPED = STRIPPED_NAMES | {_TOOL_CALL_ID}
_CORE_NAMES = frozenset(
    {
        *("PATH", "SHELL", "TMPDIR", "TEMP", "TMP", "HOME", "LANG", "LC_ALL", "LC_CTYPE"),
        *("LOGNAME", "USER"),
    }
)
# A name or a pattern of an `envPolicy`: real ones have a few dozen. Longer ones are refused.
PATTERN_CHARACTERS = 1024
# The characters of all names times those of all patterns: the time to match them is proportional,
# and below a second at this limit. Above it the request is refused.
MATCH_STEPS = 64 * 1_048_576

# The descriptor of the state in a shell that restores it. One digit: dash closes no other.
STATE_DESCRIPTOR = 9

_DEFAULT_EXCLUDES = ("*KEY*", "*SECRET*", "*TOKEN*")
_DEFAULT_PATH = "/usr/local/bin:/bin:/usr/bin"


class ServerFile(msgspec.Struct, frozen=True):
    """A server file that variables name by path: a command with its own view reads a copy in it."""

    path: str
    content: bytes


class Command(msgspec.Struct, frozen=True):
    """A program with everything its start depends on."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    tty: bool = False
    pipe_stdin: bool = False
    arg0: str | None = None
    tty_size: tuple[int, int] = (24, 80)  # rows and columns
    # Ports of its own network namespace that the server listens on.
    proxy_ports: tuple[int, ...] = ()
    merge_stderr: bool = False  # into stdout
    # Read by the program from STATE_DESCRIPTOR; None: it has no such descriptor.
    shell_state: bytes | None = None
    certificates: ServerFile | None = None  # that it trusts


def _expressions(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """Whole names, any case, only `*` and `?` special; short: other threads wait for a match."""
    groups: list[list[str]] = [[]]
    size = 0
    for pattern in patterns:
        if size + len(pattern) > PATTERN_CHARACTERS:
            groups.append([])
            size = 0
        groups[-1].append(pattern)
        size += len(pattern)
    return [_compiled(tuple(group)) for group in groups]


@lru_cache(maxsize=64)  # clients send the same few policies with every command
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(_expression, patterns)), re.IGNORECASE | re.DOTALL)


def _expression(pattern: str) -> str:
    """A pattern as an expression whose cost is at most that of comparing each two characters."""
    first, *others = (
        "".join("." if character == "?" else re.escape(character) for character in text)
        for text in pattern.split("*")
    )
    if not others:
        return first
    # The first match of each text between two stars is as good as any later one, so the group
    # is atomic: without that, many stars take exponential time.
    between = "".join(f"(?>.*?{text})" for text in others[:-1])
    return f"{first}{between}.*{others[-1]}"


def _check_cost(policy: EnvPolicy, server_env: Mapping[str, str]) -> None:
    patterns = (*policy.exclude, *policy.include_only)
    if max(map(len, (*patterns, *policy.set)), default=0) > PATTERN_CHARACTERS:
        text = f"must not exceed {PATTERN_CHARACTERS} characters"
        raise InvalidParams(f"names and patterns of an envPolicy {text}")
    names = sum(map(len, server_env)) + sum(map(len, policy.set))
    if names * sum(map(len, patterns)) > MATCH_STEPS:
        raise InvalidParams("the patterns and variables of an envPolicy are too many to compare")


def _matching(env: Mapping[str, str], patterns: Sequence[str]) -> list[str]:
    expressions = _expressions(patterns) if patterns else []
    return [name for name in env if any(each.fullmatch(name) for each in expressions)]


def _inherited(policy: EnvPolicy, server_env: Mapping[str, str]) -> dict[str, str]:
    _check_cost(policy, server_env)
    env: dict[str, str] = {}
    if policy.inherit == "all":
        env = dict(server_env)
    elif policy.inherit == "core":
        env = {name: value for name, value in server_env.items() if name.upper() in _CORE_NAMES}
    for patterns in (() if policy.ignore_default_excludes else _DEFAULT_EXCLUDES, policy.exclude):
        for name in _matching(env, patterns):
            del env[name]
    env.update(policy.set)
    if policy.include_only:
        env = {name: env[name] for name in _matching(env, policy.include_only)}
    return env


def child_environment(
    env: Mapping[str, str],
    policy: EnvPolicy | None,
    metadata: Metadata | None,
    server_env: Mapping[str, str],
    captured: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a child: inherited by policy, then of the request, then metadata.

    `captured` variables of a shell come before those of the request, filtered by the policy.
    """
    result = {} if policy is None else _inherited(policy, server_env)
    if captured is not None and policy is not None:
        captured = _inherited(msgspec.structs.replace(policy, inherit="all"), captured)
    result.update(captured or {})
    result.update(env)
    for name in [name for name in result if name.upper() in _STRIPPED]:
        del result[name]
    if metadata is not None:
        result.pop(_THREAD_ID, None)  # metadata without a thread id removes it too
        if metadata.thread_id is not None:
            result[_THREAD_ID] = str(metadata.thread_id)
        if metadata.tool_call_id is not None:
            result[_TOOL_CALL_ID] = metadata.tool_call_id
    return result


def candidates(command: Command) -> list[str]:
    """Paths of the program to try in order, by the PATH and directory of the child.

    Raises InternalError when the program of a terminal is not found, as the reference does.
    """
    program = command.argv[0]
    if command.tty:
        return _terminal_candidates(program, command.cwd, command.env)
    if not program:
        raise InternalError("missing program for pipe spawn")
    if "/" in program:
        return [program]
    return [
        os.path.join(directory, program)
        for directory in command.env.get("PATH", _DEFAULT_PATH).split(":")
    ]


def _terminal_candidates(program: str, cwd: str, env: Mapping[str, str]) -> list[str]:
    if not program:
        raise InternalError("missing program for PTY spawn")
    if program.startswith("/"):
        return [program]
    if program.startswith(("./", "../")):
        path = os.path.join(cwd, program)
        reason = _reason_against(path, missing="it does not exist")
        if reason is not None:
            raise InternalError(f"Unable to spawn {path} because {reason}")
        return [path]
    return [_find_on_path(program, cwd, env)]


def _find_on_path(program: str, cwd: str, env: Mapping[str, str]) -> str:
    lines = [f"Unable to spawn {program} because:"]
    if "PATH" not in env:
        lines.append("Unable to resolve the PATH")
        raise InternalError("\n".join(lines))
    for directory in env["PATH"].split(":"):
        path = os.path.join(cwd, directory, program)
        reason = _reason_against(path, missing="")
        if reason is None:
            return path
        if reason:
            lines.append(f"{path} exists but {reason.removeprefix('it ')}.")
    lines.append(f'No viable candidates found in PATH "{env["PATH"]}"')
    raise InternalError("\n".join(lines))


def _reason_against(path: str, *, missing: str) -> str | None:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return missing
    if stat.S_ISDIR(mode):
        return "it is a directory"
    if not os.access(path, os.X_OK):
        return "it is not executable"
    return None
