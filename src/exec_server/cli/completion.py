"""Completion scripts for bash, zsh and fish, generated from the argument parsers.

Hand-written because shtab has no fish and no remote paths, and argcomplete starts the program for
flags too.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from exec_server.cli.errors import EXIT_FAILURE, CommandError, UsageError
from exec_server.cli.parser import CommandParser
from exec_server.cli.streams import print_text
from exec_server.cli.table import (
    ALL_PATHS,
    COMMAND,
    COMMANDS,
    DETACHED,
    REMOTE_PATHS,
    TARGETS,
    CommandRow,
)
from exec_server.cli.targets import RemotePath, join_path, parse_remote_path
from exec_server.client.targets import find_target
from exec_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from exec_server.client.environment import Environment
    from exec_server.client.results import Entry


SHELLS: Final = ("bash", "zsh", "fish")
_LIST_NAMES: Final = "exec-server targets --names 2>/dev/null"
_LIST_PATHS: Final = "exec-server complete-path"
_LIST_DETACHED: Final = "exec-server complete-name"
# The time for connection and listing: a shell waits for it, with a key pressed.
COMPLETION_SECONDS: Final = 2.0
# More names than this do not help while typing.
MAX_PATHS: Final = 500


@dataclass(frozen=True)
class _Flag:
    names: tuple[str, ...]
    help: str
    value: str | None  # the metavar; None for a flag without a value
    choices: tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        """Whether the value is a local file, or one of `choices`."""
        return self.value in ("FILE", "PATH", "POLICY")


def script(shell: str) -> str:
    """The script for one of SHELLS."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _visible() -> dict[str, CommandRow]:
    return {name: command for name, command in COMMANDS.items() if command.is_visible}


def _with_operands(operands: str) -> list[str]:
    """The names of the commands that take these operands."""
    return [command.name for command in COMMANDS.values() if command.operands == operands]


def _flags(command: str) -> list[_Flag]:
    return list(_parser_flags(COMMANDS[command].build_parser()))


def _suggestions(metavar: str) -> tuple[str, ...]:
    """Values of a flag that the parser does not list, because others are valid too."""
    if metavar == "POLICY":
        return ("read-only", "workspace-write")
    if metavar == "SIGNAL":
        from exec_server.client.exceptions import SIGNALS

        return tuple(SIGNALS.values())
    return ()


def _parser_flags(parser: argparse.ArgumentParser) -> Iterator[_Flag]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from (flag for flag in _parser_flags(each) if flag.names[0] != "-h")
        elif action.option_strings and action.help != argparse.SUPPRESS:
            metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            choices = tuple(str(choice) for choice in action.choices or _suggestions(metavar))
            yield _Flag(
                tuple(action.option_strings),
                (action.help or "").partition(" (")[0],
                None if action.nargs == 0 else metavar,
                choices,
            )


def _flags_by_command() -> dict[str, list[_Flag]]:
    return {command: _flags(command) for command in _visible()}


def _named_flags() -> list[tuple[str, _Flag]]:
    """All flags by COMMAND.NAME: `-n` has a value for some commands, and none for others."""
    return [
        (f"{command}.{name}", flag)
        for command, flags in _flags_by_command().items()
        for flag in flags
        for name in sorted(flag.names)
    ]


def _case(command: str) -> str:
    """The pattern that matches the variable `command` of the scripts."""
    # The server is also started by flags alone.
    return f"first|{command}" if command == "serve" else command


def _choices() -> dict[str, _Flag]:
    return {name: flag for name, flag in _named_flags() if flag.choices}


def _shared() -> dict[str, str]:
    every = _named_flags()
    return {
        "files": _pattern(name for name, flag in every if flag.is_file and not flag.choices),
        "values": _pattern(
            name
            for name, flag in every
            if flag.value is not None and not flag.is_file and not flag.choices
        ),
        "valued": _pattern(
            name
            for command in _with_operands(DETACHED)
            for flag in _flags(command)
            if flag.value is not None
            for name in flag.names
        ),
        "target_commands": "|".join(_with_operands(TARGETS)),
        "detached_commands": "|".join(_with_operands(DETACHED)),
        "path_commands": "|".join(_with_operands(REMOTE_PATHS)),
        "copy_commands": "|".join(_with_operands(ALL_PATHS)),
        "help_commands": "|".join(_with_operands(COMMAND)),
        "list_names": _LIST_NAMES,
        "list_paths": _LIST_PATHS,
        "list_detached": _LIST_DETACHED,
    }


def _words(flags: list[_Flag]) -> str:
    return " ".join(name for flag in flags for name in flag.names)


def _pattern(names: Iterator[str]) -> str:
    return "|".join(sorted(set(names)))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_BASH: Final = r"""# bash completion for exec-server; generated by `exec-server completion bash`
_exec_server_reply() {{ mapfile -t COMPREPLY < <(compgen "$@" -- "$cur"); }}
_exec_server_word() {{
    # Set `word` to the word before the cursor without its quoting, `quote` to an open quotation
    # mark, and `kept` to the part of the word that bash does not replace: a colon and some other
    # characters begin a new word for it.
    local line="${{COMP_LINE:0:COMP_POINT}}" char i
    word= quote= kept=
    for ((i = 0; i < ${{#line}}; i++)); do
        char="${{line:i:1}}"
        if [[ $char == \\ && $quote != \' ]]; then ((i++)); word+="${{line:i:1}}"
        elif [[ -n $quote && $char == "$quote" ]]; then quote= kept="$word"
        elif [[ -n $quote ]]; then word+="$char"
        elif [[ $char == [\"\'] ]]; then quote="$char" kept="$word"
        elif [[ $char == [[:space:]] ]]; then word= kept=
        else
            word+="$char"
            [[ $COMP_WORDBREAKS == *"$char"* ]] && kept="$word"
        fi
    done
}}
_exec_server_escape() {{
    case $quote in
        \') sed "s/'/'\\\\''/g" ;;
        \") sed 's/["$`\]/\\&/g' ;;
        *) sed 's/[][[:space:]"'\''\$`&();<>|*?#!{{}}]/\\&/g' ;;
    esac
}}
_exec_server_paths() {{
    local word quote kept
    _exec_server_word
    [[ $word == *:* ]] || return 1
    mapfile -t COMPREPLY < <({list_paths} "$word" 2>/dev/null)
    COMPREPLY=("${{COMPREPLY[@]#"$kept"}}")
    ((${{#COMPREPLY[@]}})) &&
        mapfile -t COMPREPLY < <(printf '%s\n' "${{COMPREPLY[@]}}" | _exec_server_escape)
    compopt -o nospace
}}
_exec_server_detached() {{
    # The words by spaces: a colon in a URL begins a new one in COMP_WORDS.
    local line="${{COMP_LINE:0:COMP_POINT}}" word target=
    local -a typed
    read -ra typed <<< "$line"
    [[ $line == *[[:space:]] ]] || unset 'typed[-1]'
    for ((i = 2; i < ${{#typed[@]}}; i++)); do
        case ${{typed[i]}} in
            {valued}) ((i++)) ;;
            -*) ;;
            *) target="${{typed[i]}}"; break ;;
        esac
    done
    [[ -n $target ]] || return 1
    _exec_server_reply -W "$({list_detached} "$target" 2>/dev/null)"
}}
_exec_server_complete() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" i flags
    local command="${{COMP_WORDS[1]}}"
    COMPREPLY=()
    ((COMP_CWORD == 1)) && command=first || {{ [[ $command == -* ]] && command=serve; }}
    for ((i = 2; i < COMP_CWORD; i++)); do
        [[ $command == exec && ${{COMP_WORDS[i]}} == -- ]] && return
    done
    case $command.$prev in
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
        first|{help_commands}) _exec_server_reply -W {commands} ;;
        {target_commands}) _exec_server_reply -W "$({list_names})" ;;
        {detached_commands}) _exec_server_detached || _exec_server_reply -W "$({list_names})" ;;
        {path_commands})
            _exec_server_paths && return
            compopt -o nospace; _exec_server_reply -S : -W "$({list_names})" ;;
        {copy_commands})
            _exec_server_paths && return
            _exec_server_reply -S : -W "$({list_names})"
            if ((${{#COMPREPLY[@]}})); then compopt -o nospace
            else compopt -o filenames; _exec_server_reply -f; fi ;;
        completion) _exec_server_reply -W {shells} ;;
        sandbox) ((COMP_CWORD == 2)) && _exec_server_reply -W 'check run' ;;
        targets)
            if ((COMP_CWORD == 2)); then _exec_server_reply -W 'add remove'
            else _exec_server_reply -W "$({list_names})"; fi ;;
    esac
}}
complete -F _exec_server_complete exec-server
"""


def _bash() -> str:
    return _BASH.format(
        **_shared(),
        choices="".join(
            f"        {name}) {'compopt -o filenames; ' if flag.is_file else ''}"
            f"_exec_server_reply {'-f ' if flag.is_file else ''}-W '{' '.join(flag.choices)}'; "
            "return ;;\n"
            for name, flag in _choices().items()
        ),
        flags="".join(
            f"            {_case(command)}) flags='{_words(flags)}' ;;\n"
            for command, flags in _flags_by_command().items()
        ),
        commands=_quoted(" ".join(_visible())),
        shells=_quoted(" ".join(SHELLS)),
    )


_ZSH: Final = """\
#compdef exec-server
# zsh completion for exec-server; generated by `exec-server completion zsh`
_exec_server_paths() {{
    [[ $PREFIX == *:* ]] || return 1
    local -a paths
    paths=(${{(f)"$({list_paths} "${{(Q)PREFIX}}" 2>/dev/null)"}})
    compadd -S '' -a paths
    return 0
}}
_exec_server_detached() {{
    local -a found
    local i
    for ((i = 3; i < CURRENT; i++)); do
        case $words[i] in
            ({valued}) ((i++)) ;;
            (-*) ;;
            (*) found=(${{(f)"$({list_detached} "${{(Q)words[i]}}" 2>/dev/null)"}})
                compadd -a found
                return 0 ;;
        esac
    done
    return 1
}}
_exec_server() {{
    local -a commands names flags
    local command=$words[2]
    ((CURRENT == 2)) && command=first || {{ [[ $command == -* ]] && command=serve }}
    [[ $command == exec ]] && ((${{words[(i)--]}} < CURRENT)) && return 1
    case $command.$words[CURRENT-1] in
        ({files}) _files; return ;;
{choices}        ({values}) return 1 ;;
    esac
    if [[ $PREFIX == -* ]]; then
        case $command in
{flags}        esac
        _describe -o flag flags
        return
    fi
    names=(${{(f)"$({list_names})"}})
    case $command in
        first|{help_commands}) commands=({commands}); _describe command commands ;;
        ({target_commands}) compadd -a names ;;
        ({detached_commands}) _exec_server_detached || compadd -a names ;;
        ({path_commands}) _exec_server_paths || compadd -S : -a names ;;
        ({copy_commands}) _exec_server_paths || {{ compadd -S : -a names; _files }} ;;
        completion) compadd {shells} ;;
        sandbox) ((CURRENT == 3)) && compadd check run ;;
        targets) if ((CURRENT == 3)); then compadd add remove; else compadd -a names; fi ;;
    esac
}}
compdef _exec_server exec-server
"""


def _zsh() -> str:
    return _ZSH.format(
        **_shared(),
        choices="".join(
            f"        ({name}) compadd {' '.join(flag.choices)}; "
            f"{'_files; ' if flag.is_file else ''}return ;;\n"
            for name, flag in _choices().items()
        ),
        flags="".join(
            f"            {_case(command)}) flags=({_described(flags)}) ;;\n"
            for command, flags in _flags_by_command().items()
        ),
        commands=" ".join(_quoted(f"{each.name}:{each.summary}") for each in _visible().values()),
        shells=" ".join(SHELLS),
    )


def _described(flags: list[_Flag]) -> str:
    return " ".join(
        _quoted(f"{name}:{flag.help.replace(':', ' ')}") for flag in flags for name in flag.names
    )


def _fish() -> str:
    seen = "__fish_seen_subcommand_from"
    path = f"({_LIST_NAMES.replace('2>', '2> ')} | string replace -r '$' ':')"
    lines = [
        "# fish completion for exec-server; generated by `exec-server completion fish`",
        "complete -c exec-server -f",
        "function __exec_server_before_dashes; not contains -- -- (commandline -opc); end",
        "function __exec_server_paths; set -l typed (commandline -ct)",
        # Inside of quotation marks, or after a backslash, the word is not complete.
        "    set -l word (string unescape -- $typed)",
        "    or set word (string replace -r '^[\"\\']' '' -- $typed)",
        f"    string match -q '*:*' -- $word; and {_LIST_PATHS} $word 2> /dev/null; end",
        "function __exec_server_detached; set -l skip 0",
        "    for word in (commandline -opc)[3..-1]",
        "        if test $skip = 1; set skip 0; continue; end",
        f"        if contains -- $word {_shared()['valued'].replace('|', ' ')}; set skip 1",
        f"        else if not string match -q -- '-*' $word; {_LIST_DETACHED} $word 2> /dev/null",
        "            return 0; end; end; return 1; end",
        *(
            f"complete -c exec-server -n __fish_use_subcommand -a {each.name} "
            f"-d {_fish_quoted(each.summary)}"
            for each in _visible().values()
        ),
        *(
            _fish_flag(f"{seen} {command}", flag)
            for command, flags in _flags_by_command().items()
            for flag in flags
        ),
        *(_fish_flag("__fish_use_subcommand", flag) for flag in _flags("serve")),
        *(
            f"complete -c exec-server -n '{seen} {command}; and __exec_server_before_dashes' "
            f"-a '({_LIST_NAMES.replace('2>', '2> ')})'"
            for command in _with_operands(TARGETS)
        ),
        *(
            f"complete -c exec-server -n '{seen} {command}' "
            f"-a '(__exec_server_detached; or {_LIST_NAMES.replace('2>', '2> ')})'"
            for command in _with_operands(DETACHED)
        ),
        *(
            f"complete -c exec-server -n '{seen} {command}' -a {_fish_quoted(path)}\n"
            f"complete -c exec-server -n '{seen} {command}' -a '(__exec_server_paths)'"
            for command in (*_with_operands(REMOTE_PATHS), *_with_operands(ALL_PATHS))
        ),
        *(f"complete -c exec-server -n '{seen} {name}' -F" for name in _with_operands(ALL_PATHS)),
        *(
            f"complete -c exec-server -n '{seen} {name}' -a '{' '.join(_visible())}'"
            for name in _with_operands(COMMAND)
        ),
        f"complete -c exec-server -n '{seen} completion' -a '{' '.join(SHELLS)}'",
        f"complete -c exec-server -n '{seen} sandbox' -a 'check run'",
        f"complete -c exec-server -n '{seen} targets; and not {seen} add remove' -a 'add remove'",
        f"complete -c exec-server -n '{seen} targets; and {seen} remove' "
        f"-a '({_LIST_NAMES.replace('2>', '2> ')})'",
    ]
    return "\n".join(lines) + "\n"


def _fish_flag(condition: str, flag: _Flag) -> str:
    names = " ".join(
        f"-l {name.removeprefix('--')}" if name.startswith("--") else f"-s {name[1:]}"
        for name in flag.names
    )
    value = ""
    if flag.value is not None:
        value = " -r -F" if flag.is_file else " -x"
    if flag.choices:
        value += f" -a '{' '.join(flag.choices)}'"
    described = _fish_quoted(flag.help)
    return f"complete -c exec-server -n '{condition}' {names}{value} -d {described}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_DESCRIPTION: Final = """\
Print a script with which a shell completes commands, flags and names of targets:

  bash   source <(exec-server completion bash)                 in ~/.bashrc
  zsh    source <(exec-server completion zsh)                  in ~/.zshrc, after compinit
  fish   exec-server completion fish > ~/.config/fish/completions/exec-server.fish
"""
_EPILOG: Final = """\
examples:
  exec-server completion fish | source             for this fish only
  exec-server completion bash | less               read the script first
"""


def build_parser() -> CommandParser:
    parser = CommandParser("completion", _DESCRIPTION, _EPILOG)
    parser.add_argument("shell", choices=SHELLS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    print_text(script(arguments.shell))
    return 0


_PATH_DESCRIPTION: Final = """\
Print the paths of a target that begin with TARGET:PATH, one on each line, directories with a
slash. The completion scripts call it.
"""


def build_path_parser() -> CommandParser:
    parser = CommandParser("complete-path", _PATH_DESCRIPTION)
    parser.add_argument("word", metavar="TARGET:PATH")
    return parser


def run_path(arguments: argparse.Namespace) -> int:
    try:
        remote = parse_remote_path(arguments.word)
    except (StartupError, UsageError):
        return EXIT_FAILURE
    if remote is None or remote.path is None:
        return EXIT_FAILURE
    directory = _split(remote.path)[0] or "."

    async def list_paths(environment: Environment) -> list[str]:
        return matching(remote, await environment.files.list(directory))

    return _print_words(remote.target, list_paths)


def _print_words(name: str, list_words: Callable[[Environment], Awaitable[list[str]]]) -> int:
    """Ask a target for words; returns the exit code. A shell would show errors: none is printed."""
    try:
        target = find_target(name)
    except StartupError:
        return EXIT_FAILURE
    if target.argv is not None:
        # A program such as ssh could ask for a password; it has no detached commands either.
        return EXIT_FAILURE

    import asyncio

    from exec_server.cli.connection import open_environment, run_until_signal
    from exec_server.errors import ExecServerError

    async def work() -> int:
        try:
            async with (
                asyncio.timeout(COMPLETION_SECONDS),
                open_environment(target, on_status=lambda _: None) as environment,
            ):
                words = await list_words(environment)
        except (CommandError, UsageError, ExecServerError, TimeoutError):
            return EXIT_FAILURE
        print_text("".join(f"{word}\n" for word in words))
        return 0

    return run_until_signal(work)


def _split(path: str) -> tuple[str, str]:
    """The directory with its slash, and the beginning of a name."""
    directory, slash, name = path.rpartition("/")
    if not slash and name.startswith("~"):
        return "~/", ""
    return directory + slash, name


def matching(remote: RemotePath, entries: list[Entry]) -> list[str]:
    """The entries of the directory of a word that continue it, as words."""
    directory, beginning = _split(remote.path or "")
    matches = [
        join_path(remote.target, f"{directory}{entry.name}{'/' if entry.is_directory else ''}")
        for entry in entries
        if entry.name.startswith(beginning)
        and (beginning or not entry.name.startswith("."))
        and entry.name.isprintable()
    ]
    return sorted(matches)[:MAX_PATHS]


_NAME_DESCRIPTION: Final = """\
Print the names of the detached commands of a target, one on each line. The completion scripts
call it.
"""


def build_name_parser() -> CommandParser:
    parser = CommandParser("complete-name", _NAME_DESCRIPTION)
    parser.add_argument("target", metavar="TARGET")
    return parser


def run_name(arguments: argparse.Namespace) -> int:
    async def list_names(environment: Environment) -> list[str]:
        listed = await environment.detached_processes()
        return sorted(each.name for each in listed if _is_name(each.name))

    return _print_words(arguments.target, list_names)


def _is_name(text: str) -> bool:
    """Whether a server could have accepted this name; a shell must not see any other text."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is not None
