"""The state that a login shell has after its start-up files: how it is captured and restored.

A capture prints it in sections between marks that no start-up file knows. A later shell reads it
from a descriptor; exported variables are in the environment, so that the request's own win.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

import msgspec

from exec_server.process.command import STATE_DESCRIPTOR

# The output of a capture: functions of all usual frameworks together have less than 1 MiB. A larger
# state is not kept: reading it would take longer than most start-up files.
STATE_BYTES: Final = 4 * 1_048_576
# A longer value is restored by the script: the kernel passes no variable above 128 KiB.
VARIABLE_BYTES: Final = 65_536
# All variables that are not: an eighth of what the kernel passes with the usual stack.
ENVIRONMENT_BYTES: Final = 262_144

# Variables that describe the capturing shell itself, or the start that it was captured for.
_OWN_VARIABLES: Final = frozenset({"PWD", "OLDPWD", "SHLVL", "_", "CODEX_THREAD_ID"})
# Options that a shell has from its command line, and that it refuses to change. Expressions are
# compiled at the first use: most servers capture no state.
_is_own_option = partial(
    re.match,
    r"(?:shopt|set) [-+][suo] (?:login_shell|restricted_shell|login|interactive|monitor|stdin|"
    r"shinstdin|singlecommand|privileged|restricted|zle|onecmd|history|histexpand|notify|vi|"
    r"emacs|noexec|exec)$",
)
_is_name = partial(re.fullmatch, r"[A-Za-z_][A-Za-z0-9_]*")
# The beginning of an alias as dash prints it.
_BARE_ALIAS: Final = r"(?m)^(?=[^\s'\"=]+=')"

# Printed before each section. `command -p env` is found whatever the PATH is; a restricted shell
# may not run it, and prints no further mark. A trap of DEBUG would print into the sections.
_MARK: Final = r"printf '\0%s\0' {mark}"

_BASH_CAPTURE: Final = r"""
if [[ -z ${BASH_ENV-} && -r ~/.bashrc ]]; then
    \builtin . ~/.bashrc >/dev/null 2>&1 </dev/null
fi
\builtin trap - DEBUG
__exec_server_options=$(\builtin set +o); \builtin set +eux
\builtin MARK; \builtin shopt -p
\builtin MARK; \builtin declare -f
\builtin MARK; \builtin alias -p
\builtin MARK; \builtin printf '%s\n' "$__exec_server_options"
\builtin MARK; \builtin command -p env -0 || \builtin exit 1
\builtin MARK; \builtin exit 0
"""
_ZSH_CAPTURE: Final = r"""
if [[ -r ${ZDOTDIR:-$HOME}/.zshrc ]]; then
    builtin . ${ZDOTDIR:-$HOME}/.zshrc >/dev/null 2>&1 </dev/null
fi
builtin trap - DEBUG
__exec_server_options=$(builtin set +o); builtin set +eux
builtin MARK
builtin MARK; builtin typeset -f
builtin MARK; builtin alias -L
builtin MARK; builtin printf '%s\n' "$__exec_server_options"
builtin MARK; command -p env -0 || builtin exit 1
builtin MARK; builtin exit 0
"""
_SH_CAPTURE: Final = r"""
if [ -n "${ENV-}" ] && [ -r "${ENV-}" ]; then . "$ENV" >/dev/null 2>&1 </dev/null; fi
if (trap - DEBUG) 2>/dev/null; then trap - DEBUG; fi
__exec_server_options=$(set +o); set +eux
MARK
MARK; command -v typeset >/dev/null 2>&1 && typeset -f
MARK; alias
MARK; printf '%s\n' "$__exec_server_options"
MARK; command -p env -0 || exit 1
MARK; exit 0
"""


class _Dialect(msgspec.Struct, frozen=True):
    flag: str  # of a shell without start-up files
    capture: str
    prologue: str  # the first line of a restored script


_DIALECTS: Final = {
    "bash": _Dialect("-pc", _BASH_CAPTURE, "set +o privileged"),
    "zsh": _Dialect("-fc", _ZSH_CAPTURE, ":"),
    "sh": _Dialect("-c", _SH_CAPTURE, ":"),
}
SHELLS: Final = frozenset(_DIALECTS)
_SECTIONS: Final = 5


class ShellState(msgspec.Struct, frozen=True):
    """A script that restores a state, and the variables that were exported."""

    script: bytes
    variables: dict[str, str]

    @property
    def size(self) -> int:
        return len(self.script) + sum(len(name) + len(v) for name, v in self.variables.items())


def capture_argv(shell: str, path: str, mark: str) -> list[str]:
    """The login shell with a script that prints its state."""
    printing = _MARK.format(mark=mark)
    return [path, "-lc", _DIALECTS[shell].capture.replace("MARK", printing)]


def restoring_argv(shell: str, argv: list[str]) -> list[str]:
    """The shell of a request `[shell, "-lc", text, …]` without its start-up files."""
    path, _, text, *arguments = argv
    dialect = _DIALECTS[shell]
    failed = "printf 'failed to restore shell snapshot\\n' >&2"
    restore = f"if ! . /dev/fd/{STATE_DESCRIPTOR} >/dev/null; then {failed}; fi"
    return [path, dialect.flag, f"{dialect.prologue}\n{restore}\n{text}", *arguments]


class StateReader:
    """Takes the output of a capture in pieces."""

    def __init__(self, shell: str, mark: str) -> None:
        self._shell = shell
        self._mark = f"\0{mark}\0".encode()
        self._output = bytearray()
        self._marks = 0
        self._searched = 0  # up to here there is no further mark
        self.is_complete = False
        self.is_too_large = False

    def feed(self, piece: bytes) -> None:
        """Take a piece; what follows the last mark is ignored."""
        if self.is_complete or self.is_too_large:
            return
        self._output += piece
        if len(self._output) > STATE_BYTES:
            self.is_too_large = True
            self._output.clear()
            return
        while (offset := self._output.find(self._mark, self._searched)) >= 0:
            self._marks += 1
            self._searched = offset + len(self._mark)
        self._searched = max(self._searched, len(self._output) - len(self._mark) + 1)
        self.is_complete = self._marks > _SECTIONS

    def state(self) -> ShellState:
        """The state, once it is complete."""
        assert self.is_complete
        sections = bytes(self._output).split(self._mark)[1 : _SECTIONS + 1]
        *texts, variables = (each.decode("utf-8", "surrogateescape") for each in sections)
        exported = dict(item.split("=", 1) for item in variables.split("\0") if "=" in item)
        kept = {name: value for name, value in exported.items() if name not in _OWN_VARIABLES}
        small = _small(kept)
        long = {name: value for name, value in kept.items() if name not in small}
        script = _script(self._shell, texts, long)
        return ShellState(script.encode("utf-8", "surrogateescape"), small)


def _small(variables: dict[str, str]) -> dict[str, str]:
    """The variables that the kernel passes to a program."""
    small: dict[str, str] = {}
    size = 0
    for name, value in sorted(variables.items(), key=lambda item: len(item[1])):
        size += len(name) + len(value)
        if len(value) <= VARIABLE_BYTES and size <= ENVIRONMENT_BYTES:
            small[name] = value
    return small


def _script(shell: str, texts: list[str], long: dict[str, str]) -> str:
    """Settings first, because functions may need them to be read; options that can end it last."""
    from shlex import quote  # few clients have shells restored

    settings, functions, aliases, options = texts
    if shell == "sh":
        aliases = re.sub(_BARE_ALIAS, "alias ", aliases)
    exports = [
        f'[ -n "${{{name}+x}}" ] || export {name}={quote(value)}'
        for name, value in long.items()
        if _is_name(name)
    ]
    parts = [
        _without_own(settings),
        functions,
        aliases,
        "\n".join(exports),
        f"exec {STATE_DESCRIPTOR}<&-",
        _without_own(options).strip() or ":",
    ]
    return "\n".join(part for part in parts if part.strip()) + "\n"


def _without_own(options: str) -> str:
    return "\n".join(line for line in options.split("\n") if not _is_own_option(line))
