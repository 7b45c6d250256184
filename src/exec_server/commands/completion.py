"""Scripts that make shells complete commands, flags and names of targets.

They are made from the parsers, so a new flag is completed without anybody thinking of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from exec_server.arguments import build_parser, build_sandbox_parser
from exec_server.commands.arguments import PARSERS, SHELLS, SUMMARIES

# Commands by what their operands are: targets, paths on them, or these and local ones.
_TARGET: Final = ("exec", "info")
_PLACE: Final = ("ls", "cat", "rm")
_SERVER: Final = ""  # no command: the server itself
_NAMES: Final = "exec-server targets --names 2>/dev/null"


@dataclass(frozen=True)
class _Flag:
    names: tuple[str, ...]
    help: str
    value: str | None  # metavar, or None if it takes none
    choices: tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        return self.value in ("FILE", "PATH")


def script(shell: str) -> str:
    """The script for one of SHELLS."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _flags(command: str) -> list[_Flag]:
    """The flags of a command, from its parser."""
    if command == "sandbox":
        return list(_sandbox_flags())
    return list(_read(PARSERS[command]() if command else build_parser()))


def _read(parser: argparse.ArgumentParser) -> Iterator[_Flag]:
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            takes_none = action.nargs == 0
            metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            choices = tuple(str(choice) for choice in action.choices or ())
            yield _Flag(
                tuple(action.option_strings),
                (action.help or "").partition(" (")[0],
                None if takes_none else metavar,
                choices,
            )


def _sandbox_flags() -> Iterator[_Flag]:
    for action in build_sandbox_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for parser in action.choices.values():
                yield from (flag for flag in _read(parser) if flag.names[0] != "-h")


def _commands() -> dict[str, str]:
    return {**SUMMARIES, "sandbox": "check or try out confinement on this machine"}


def _flags_by_command() -> dict[str, list[_Flag]]:
    return {command: _flags(command) for command in (*_commands(), _SERVER)}


def _all_flags() -> list[_Flag]:
    return [flag for flags in _flags_by_command().values() for flag in flags]


def _case(command: str) -> str:
    """What the variable `command` of the scripts is for it."""
    return command or "first|server"


def _choices() -> dict[str, tuple[str, ...]]:
    """The flags whose values are known, with these."""
    return {
        name: flag.choices for flag in _all_flags() if flag.choices for name in sorted(flag.names)
    }


def _shared() -> dict[str, str]:
    """What the templates for bash and zsh have in common."""
    every = _all_flags()
    return {
        "files": _pattern(name for flag in every if flag.is_file for name in flag.names),
        "values": _pattern(
            name
            for flag in every
            if flag.value is not None and not flag.is_file and not flag.choices
            for name in flag.names
        ),
        "targets": "|".join(_TARGET),
        "places": "|".join(_PLACE),
        "names": _NAMES,
    }


def _words(flags: list[_Flag]) -> str:
    return " ".join(name for flag in flags for name in flag.names)


def _pattern(names: Iterator[str]) -> str:
    return "|".join(sorted(set(names)))


def _quoted(text: str) -> str:
    """In single quotes, for bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


# ---- bash -----------------------------------------------------------------------------

_BASH: Final = """\
# bash completion for exec-server; made by `exec-server completion bash`
_exec_server_reply() {{ mapfile -t COMPREPLY < <(compgen "$@" -- "$cur"); }}
_exec_server_complete() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" i flags
    local command="${{COMP_WORDS[1]}}"
    COMPREPLY=()
    ((COMP_CWORD == 1)) && command=first || {{ [[ $command == -* ]] && command=server; }}
    for ((i = 2; i < COMP_CWORD; i++)); do
        [[ $command == exec && ${{COMP_WORDS[i]}} == -- ]] && return
    done
    case $prev in
        {files}) compopt -o filenames; _exec_server_reply -f; return ;;
{choices}        {values}) return ;;
    esac
    if [[ $cur == -* ]]; then
        case $command in
{flags}        esac
        _exec_server_reply -W "$flags"
        return
    fi
    case $command in
        first) _exec_server_reply -W {commands} ;;
        {targets}) _exec_server_reply -W "$({names})" ;;
        {places}) compopt -o nospace; _exec_server_reply -S : -W "$({names})" ;;
        cp)
            _exec_server_reply -S : -W "$({names})"
            if ((${{#COMPREPLY[@]}})); then compopt -o nospace
            else compopt -o filenames; _exec_server_reply -f; fi ;;
        completion) _exec_server_reply -W {shells} ;;
        sandbox) ((COMP_CWORD == 2)) && _exec_server_reply -W 'check run' ;;
    esac
}}
complete -F _exec_server_complete exec-server
"""


def _bash() -> str:
    return _BASH.format(
        **_shared(),
        choices="".join(
            f"        {name}) _exec_server_reply -W '{' '.join(values)}'; return ;;\n"
            for name, values in _choices().items()
        ),
        flags="".join(
            f"            {_case(command)}) flags='{_words(flags)}' ;;\n"
            for command, flags in _flags_by_command().items()
        ),
        commands=_quoted(" ".join(_commands())),
        shells=_quoted(" ".join(SHELLS)),
    )


# ---- zsh ------------------------------------------------------------------------------

_ZSH: Final = """\
#compdef exec-server
# zsh completion for exec-server; made by `exec-server completion zsh`
_exec_server() {{
    local -a commands names flags
    local command=$words[2]
    ((CURRENT == 2)) && command=first || {{ [[ $command == -* ]] && command=server }}
    [[ $command == exec ]] && ((${{words[(i)--]}} < CURRENT)) && return 1
    case $words[CURRENT-1] in
        ({files}) _files; return ;;
{choices}        ({values}) return 1 ;;
    esac
    if [[ $PREFIX == -* ]]; then
        case $command in
{flags}        esac
        _describe -o flag flags
        return
    fi
    names=(${{(f)"$({names})"}})
    case $command in
        first) commands=({commands}); _describe command commands ;;
        ({targets}) compadd -a names ;;
        ({places}) compadd -S : -a names ;;
        cp) compadd -S : -a names; _files ;;
        completion) compadd {shells} ;;
        sandbox) ((CURRENT == 3)) && compadd check run ;;
    esac
}}
compdef _exec_server exec-server
"""


def _zsh() -> str:
    return _ZSH.format(
        **_shared(),
        choices="".join(
            f"        ({name}) compadd {' '.join(values)}; return ;;\n"
            for name, values in _choices().items()
        ),
        flags="".join(
            f"            {_case(command)}) flags=({_described(flags)}) ;;\n"
            for command, flags in _flags_by_command().items()
        ),
        commands=" ".join(_quoted(f"{name}:{text}") for name, text in _commands().items()),
        shells=" ".join(SHELLS),
    )


def _described(flags: list[_Flag]) -> str:
    return " ".join(
        _quoted(f"{name}:{flag.help.replace(':', ' ')}") for flag in flags for name in flag.names
    )


# ---- fish -----------------------------------------------------------------------------


def _fish() -> str:
    seen = "__fish_seen_subcommand_from"
    place = f"({_NAMES.replace('2>', '2> ')} | string replace -r '$' ':')"
    lines = [
        "# fish completion for exec-server; made by `exec-server completion fish`",
        "complete -c exec-server -f",
        "function __exec_server_is_ours; not contains -- -- (commandline -opc); end",
        *(
            f"complete -c exec-server -n __fish_use_subcommand -a {name} -d {_fish_quoted(text)}"
            for name, text in _commands().items()
        ),
        *(
            _fish_flag(f"{seen} {command}" if command else "__fish_use_subcommand", flag)
            for command, flags in _flags_by_command().items()
            for flag in flags
        ),
        *(
            f"complete -c exec-server -n '{seen} {command}; and __exec_server_is_ours' "
            f"-a '({_NAMES.replace('2>', '2> ')})'"
            for command in _TARGET
        ),
        *(
            f"complete -c exec-server -n '{seen} {command}' -a {_fish_quoted(place)}"
            for command in (*_PLACE, "cp")
        ),
        f"complete -c exec-server -n '{seen} cp' -F",
        f"complete -c exec-server -n '{seen} completion' -a '{' '.join(SHELLS)}'",
        f"complete -c exec-server -n '{seen} sandbox' -a 'check run'",
    ]
    return "\n".join(lines) + "\n"


def _fish_flag(condition: str, flag: _Flag) -> str:
    names = " ".join(
        f"-l {name.removeprefix('--')}" if name.startswith("--") else f"-s {name[1:]}"
        for name in flag.names
    )
    value = ""
    if flag.is_file:
        value = " -r -F"
    elif flag.choices:
        value = f" -x -a '{' '.join(flag.choices)}'"
    elif flag.value is not None:
        value = " -x"
    described = _fish_quoted(flag.help)
    return f"complete -c exec-server -n '{condition}' {names}{value} -d {described}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
