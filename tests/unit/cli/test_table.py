"""Every command of the table: its module, its parser and its help."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from exec_server.cli.parser import ArgumentParser, CommandParser
from exec_server.cli.table import COMMANDS, CommandRow
from exec_server.cli.targets import parse_remote_path

CLIENTS = [command for command in COMMANDS.values() if command.is_client]


def _name(command: CommandRow) -> str:
    return command.name


@pytest.mark.parametrize("command", COMMANDS.values(), ids=_name)
def test_every_command_has_a_parser_and_a_summary(command: CommandRow) -> None:
    parser = command.build_parser()
    assert isinstance(parser, CommandParser if command.is_client else ArgumentParser)
    assert parser.prog == f"exec-server {command.name}"
    assert command.summary[0].islower()
    assert not command.summary.endswith(".")


@pytest.mark.parametrize("command", CLIENTS, ids=_name)
def test_every_client_command_can_be_run(command: CommandRow) -> None:
    assert callable(command.run)


@pytest.mark.parametrize("command", CLIENTS, ids=_name)
def test_help_teaches_by_examples_that_parse(command: CommandRow) -> None:
    parser = command.build_parser()
    text = parser.format_help()
    assert max(map(len, text.splitlines())) <= 100
    part = text.partition("examples:")[2]
    examples = re.findall(rf"exec-server {command.name} (.*)$", part, re.MULTILINE)
    if command.is_visible:
        assert len(examples) >= 2
    for example in examples:
        words = shlex.split(re.split(r"   +|[|<]", example)[0])
        arguments = parser.parse_words(words)
        for path in getattr(arguments, "paths", ()) if command.name not in ("cp", "put") else ():
            assert parse_remote_path(path) is not None


def test_parsers_are_built_without_the_client() -> None:
    """Completion scripts, help and wrong arguments need none of the slow modules."""
    code = (
        "import sys; from exec_server.cli.table import COMMANDS\n"
        "for each in COMMANDS.values(): each.build_parser()\n"
        "slow = {'asyncio', 'ssl', 'msgspec', 'exec_server.client.engine'}\n"
        "slow.add('exec_server.protocol')\n"
        "print(*sorted(slow & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert ended.stdout == "\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tail -n +2 b:f", {"lines": (2, 0)}),
        ("tail -n +0 b:f", {"lines": (1, 0)}),
        ("tail -n 2 b:f", {"lines": (None, 2)}),
        ("tail -5 b:f", {"lines": (None, 5)}),
        ("tail -F b:f", {"follow": True}),
        ("ls", {"paths": [":"]}),
        ("ls -l :/a b:", {"paths": [":/a", "b:"]}),
        ("ps --json", {"target": None}),
        ("shell", {"target": None}),
        ("info :", {"target": ":"}),
        ("logs : web", {"target": ":", "name": "web"}),
        ("kill : web", {"target": ":", "names": ["web"]}),
        ("port : 3000", {"target": ":", "ports": ["3000"]}),
        ("ls -lh b:", {"long": True, "human_readable": True}),
        ("ls -la1 b:", {"long": True, "all": True, "human_readable": False}),
        ("grep -rnHE x b:", {"pattern": "x", "paths": ["b:"]}),
        ("cp -a d b:", {"archive": True, "paths": ["d", "b:"]}),
        ("cp -R d b:", {"recursive": True}),
        ("rm -R b:d", {"recursive": True}),
        ("mv -f b:d b:e", {"no_clobber": False}),
        ("mv -n b:d b:e", {"no_clobber": True}),
        ("logs --tail 3 b web", {"lines": 3}),
        ("exec -w /src b make", {"cwd": "/src"}),
        ("exec --workdir /src b make", {"cwd": "/src"}),
    ],
)
def test_habits_of_other_programs(line: str, expected: dict[str, object]) -> None:
    name, *words = line.split()
    arguments = vars(COMMANDS[name].build_parser().parse_words(words))
    assert expected.items() <= arguments.items()


def test_help_of_ls_without_operands(capsys: pytest.CaptureFixture[str]) -> None:
    parser = COMMANDS["ls"].build_parser()
    for words in (["-h"], ["--help"], ["--help", "b:"]):
        with pytest.raises(SystemExit) as ended:
            parser.parse_words(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith("usage: exec-server ls")
