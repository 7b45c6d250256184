"""What to run: one frozen value, and the rules that make its environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from exec_server.protocol.process import EnvPolicy, Metadata

# Never passed on, whatever the source: credentials of the server or of its starter.
STRIPPED_NAMES = frozenset(
    {
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
        "NODE_REPL_AUTH_TOKEN",
        "OPENAI_FEDERATION_RULE_ID",
        "OPENAI_IDENTITY_TOKEN_FILE",
        "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
        "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE",
    }
)
_THREAD_ID = "CODEX_THREAD_ID"
_TOOL_CALL_ID = "CODEX_TOOL_CALL_ID"
_CORE_NAMES = frozenset(
    {
        "PATH",
        "SHELL",
        "TMPDIR",
        "TEMP",
        "TMP",
        "HOME",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "LOGNAME",
        "USER",
    }
)
_DEFAULT_EXCLUDES = ("*KEY*", "*SECRET*", "*TOKEN*")


@dataclass(frozen=True, slots=True)
class Command:
    """A program with everything its start depends on."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    tty: bool = False
    pipe_stdin: bool = False
    arg0: str | None = None
    tty_size: tuple[int, int] = (24, 80)  # rows and columns


@lru_cache(maxsize=64)  # clients send the same few policies with every command
def _name_pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One expression for all patterns: whole names, any case, only `*` and `?` are special."""
    translated = (
        "".join(".*" if char == "*" else "." if char == "?" else re.escape(char) for char in text)
        for text in patterns
    )
    return re.compile("|".join(translated), re.IGNORECASE | re.DOTALL)


def _without(env: dict[str, str], patterns: Iterable[str]) -> dict[str, str]:
    matches = _name_pattern(tuple(patterns)).fullmatch
    return {name: value for name, value in env.items() if not matches(name)}


def _inherited(policy: EnvPolicy, server_env: Mapping[str, str]) -> dict[str, str]:
    env: dict[str, str] = {}
    if policy.inherit == "all":
        env = dict(server_env)
    elif policy.inherit == "core":
        env = {name: value for name, value in server_env.items() if name.upper() in _CORE_NAMES}
    if not policy.ignore_default_excludes:
        env = _without(env, _DEFAULT_EXCLUDES)
    if policy.exclude:
        env = _without(env, policy.exclude)
    env.update(policy.set)
    if policy.include_only:
        matches = _name_pattern(tuple(policy.include_only)).fullmatch
        env = {name: value for name, value in env.items() if matches(name)}
    return env


def child_environment(
    env: Mapping[str, str],
    policy: EnvPolicy | None,
    metadata: Metadata | None,
    server_env: Mapping[str, str],
) -> dict[str, str]:
    """The environment of a child: inherited by policy, then the request's own, then metadata."""
    result = _inherited(policy, server_env) if policy is not None else {}
    result.update(env)
    for name in [name for name in result if _is_stripped(name)]:
        del result[name]
    if metadata is not None:
        result.pop(_THREAD_ID, None)  # metadata speaks for both names, also by saying nothing
        if metadata.thread_id is not None:
            result[_THREAD_ID] = str(metadata.thread_id)
        if metadata.tool_call_id is not None:
            result[_TOOL_CALL_ID] = metadata.tool_call_id
    return result


def _is_stripped(name: str) -> bool:
    upper = name.upper()
    return upper in STRIPPED_NAMES or upper == _TOOL_CALL_ID
