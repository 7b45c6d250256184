"""The difference of two reference versions: what is read, masked and compared."""

from __future__ import annotations

from typing import Any, cast

import pytest
from scripts.reference_difference import (
    SHOWN_CHARACTERS,
    answer,
    difference,
    flattened,
    main,
    masked,
    options,
    outcomes,
    stable,
    subcommands,
)
from tests.support.client import Client, RpcFailure

_HELP = """\
Run the server

Usage: codex exec-server [OPTIONS] [COMMAND]

Commands:
  forward  Register a server
  help     Print this message

Options:
  -c, --config <key=value>
          Override a value.

          Examples: `-c a=b`

      --strict-config
          Error out
  -h, --help  Print help

See also:
  the manual
"""


def test_options_have_their_descriptions() -> None:
    assert options(_HELP) == {
        "--config": "<key=value> Override a value. Examples: `-c a=b`",
        "--strict-config": "Error out",
        "--help": "Print help",
    }


@pytest.mark.parametrize(("text", "names"), [(_HELP, ["forward"]), ("Usage: x\n", [])])
def test_subcommands_of_a_help_text(text: str, names: list[str]) -> None:
    assert subcommands(text) == names


def test_members_are_flattened_to_their_paths() -> None:
    value = {"a": {"b": True, "c": [1, {"d": None}]}, "e": "x"}
    assert flattened(value) == {"a.b": "true", "a.c": '[1, {"d": null}]', "e": '"x"'}


def test_texts_lose_what_differs_in_each_run() -> None:
    text = "/f/x of 5a0b1c2d-0000-4111-8222-333344445555 at 127.0.0.1:4711, main.rs:12:5"
    assert masked(text, "/f") == "{dir}/x of {id} at {address}, main.rs"
    assert masked("<Scratch at 0x7f6adf2ac440>", "/f") == "<Scratch at 0x>"


def test_an_error_is_an_answer_too() -> None:
    class Lacking:
        def call(self, method: str, params: Any) -> Any:
            if method == "known":
                return {"params": params}
            raise RpcFailure(-32601, f"{method} is unknown")

    client = cast(Client, Lacking())
    assert answer(client, "known", {"a": 1}) == {"params": {"a": 1}}
    assert answer(client, "other") == [-32601, "other is unknown"]


def test_only_what_was_observed_each_time_is_compared() -> None:
    assert stable([{"a": "1", "b": "2"}]) == ({"a": "1", "b": "2"}, set())
    old = stable([{"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2"}, {"a": "1"}])
    assert old == ({"a": "1"}, {"b", "c"})
    new = ({"a": "1", "b": "9", "d": "4"}, {"d"})
    ending = "compared: 1; not compared, because they vary: 3"
    assert difference(old, new) == [ending]


def test_a_difference_says_what_is_gone_new_or_other() -> None:
    long = "x" * SHOWN_CHARACTERS
    old = ({"gone": "1", "other": "a\nb", "same": "s"}, set[str]())
    new = ({"new": long + "y", "other": "c", "same": "s"}, set[str]())
    assert difference(old, new) == [
        "- gone: 1",
        f"+ new: {long}…",
        "! other",
        "    old: a b",
        "    new: c",
        "compared: 2; not compared, because they vary: 0",
    ]


def test_outcomes_of_a_report() -> None:
    report = """<testsuites><testsuite>
        <testcase classname="tests.a" name="one"/>
        <testcase classname="tests.a" name="two"><skipped message="no"/></testcase>
        <testcase classname="tests.a" name="three">
            <failure message="in /tmp/pytest-of-me/x: 127.0.0.1:99">lines</failure></testcase>
        <testcase classname="tests.a" name="four"><error message="e"/></testcase>
    </testsuite></testsuites>"""
    assert outcomes(report) == {
        "tests.a::one": "passed",
        "tests.a::two": "skipped",
        "tests.a::three": "failure: in /tmp/pytest/x: {address}",
        "tests.a::four": "error: e",
    }


def test_a_program_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/no/such/program", "/no/other"]) == 1
    assert capsys.readouterr().err == "/no/such/program is neither a version nor a program\n"
