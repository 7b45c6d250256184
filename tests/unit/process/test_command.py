"""The environment of a child: inheritance, patterns, metadata, stripped secrets."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.errors import InvalidParams
from exec_server.host.interpreter import STRIPPED_NAMES
from exec_server.process import command
from exec_server.process.command import child_environment
from exec_server.protocol.decoding import Uuid
from exec_server.protocol.process import EnvPolicy, Metadata

_SERVER = {
    "PATH": "/bin",
    "home": "/h",
    "LC_ALL": "C",
    "LC_TIME": "C",
    "AWS_REGION": "r",
    "MY_KEYS": "k",
    "token": "t",
    "A[b]": "brackets",
}


def _policy(**changes: Any) -> EnvPolicy:
    values: dict[str, Any] = {
        "inherit": "all",
        "ignore_default_excludes": True,
        "exclude": [],
        "set": {},
        "include_only": [],
    }
    return EnvPolicy(**(values | changes))


def _inherited(policy: EnvPolicy, env: dict[str, str] | None = None) -> dict[str, str]:
    return child_environment(env or {}, policy, None, _SERVER)


def test_nothing_is_inherited_without_a_policy() -> None:
    assert child_environment({"A": "1"}, None, None, _SERVER) == {"A": "1"}


@pytest.mark.parametrize(
    ("inherit", "names"),
    [("all", set(_SERVER)), ("none", set()), ("core", {"PATH", "home", "LC_ALL"})],
)
def test_inherit(inherit: str, names: set[str]) -> None:
    assert set(_inherited(_policy(inherit=inherit))) == names


def test_default_excludes() -> None:
    names = set(_inherited(_policy(ignore_default_excludes=False)))
    assert names == set(_SERVER) - {"MY_KEYS", "token"}


@pytest.mark.parametrize(
    ("pattern", "dropped"),
    [
        ("AWS_*", {"AWS_REGION"}),
        ("aws_region", {"AWS_REGION"}),
        ("AWS", set()),
        ("*", set(_SERVER)),
        ("LC_????", {"LC_TIME"}),
        ("LC_???", {"LC_ALL"}),
        ("A[b]", {"A[b]"}),
        ("[A]*", set()),
        ("A.b.", set()),
        ("", set()),
    ],
)
def test_exclude_matches_whole_names_in_any_case(pattern: str, dropped: set[str]) -> None:
    assert set(_SERVER) - set(_inherited(_policy(exclude=[pattern]))) == dropped


def test_set_is_not_excluded_but_filtered_by_include_only() -> None:
    policy = _policy(inherit="none", set={"MY_KEY": "1", "B": "2"}, ignore_default_excludes=False)
    assert _inherited(policy) == {"MY_KEY": "1", "B": "2"}
    policy = _policy(inherit="core", set={"B": "2", "C": "3"}, include_only=["b", "pa?h"])
    assert _inherited(policy) == {"B": "2", "PATH": "/bin"}


def test_own_environment_wins_and_is_not_filtered() -> None:
    policy = _policy(exclude=["*"], include_only=["nothing"], ignore_default_excludes=False)
    env = {"MY_TOKEN": "mine", "PATH": "/mine"}
    assert _inherited(policy, env) == env


def test_metadata_overrides_the_environment() -> None:
    env = {"CODEX_THREAD_ID": "forged", "CODEX_TOOL_CALL_ID": "forged", "codex_tool_call_id": "f"}
    metadata = Metadata(thread_id=Uuid("t"), tool_call_id="c")
    expected = {"CODEX_THREAD_ID": "t", "CODEX_TOOL_CALL_ID": "c"}
    assert child_environment(env, None, metadata, {}) == expected
    assert child_environment(env, None, Metadata(), {}) == {}
    assert child_environment(env, None, None, {}) == {"CODEX_THREAD_ID": "forged"}


@pytest.mark.parametrize("name", sorted(STRIPPED_NAMES))
def test_credentials_are_stripped_whatever_their_source(name: str) -> None:
    server = {name: "s", name.lower(): "s", "A": "1"}
    policy = _policy(set={name: "s", name.title(): "s"})
    env = {name: "s", name.lower(): "s", "B": "2"}
    assert child_environment(env, policy, Metadata(), server) == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("", "", True),
        ("*", "", True),
        ("**", "x", True),
        ("?", "x", True),
        ("?", "xy", False),
        ("a*", "A", True),
        ("a*c", "abc", True),
        ("a*c", "abcd", False),
        ("*a*b*", "xaxbx", True),
        ("*a*b*", "xbxax", False),
        ("*ab?c*c", "abxababxcc", True),
        ("*ab?c*c", "abxabxc", False),
        ("*a*a", "a", False),
        ("a.b", "axb", False),
        ("*[*", "x[y", True),
    ],
)
def test_a_pattern_matches_whole_names(pattern: str, name: str, matches: bool) -> None:
    policy = _policy(inherit="none", set={name: "v"}, include_only=[pattern])
    assert _inherited(policy) == ({name: "v"} if matches else {})


def test_many_stars_take_no_exponential_time() -> None:
    policy = _policy(inherit="none", set={"a" * 1000: "v"}, include_only=["*a" * 400 + "b"])
    assert _inherited(policy) == {}


def test_long_lists_of_patterns_are_matched_in_groups() -> None:
    patterns = [f"*_{number}" for number in range(1000)]
    policy = _policy(inherit="none", set={"a_7": "", "a_999": "", "a_": ""}, include_only=patterns)
    assert _inherited(policy) == {"a_7": "", "a_999": ""}
    assert len(command._expressions(patterns)) > 3
    full = ["a" * (command.PATTERN_CHARACTERS // 2)] * 4
    assert len(command._expressions(full)) == 2


@pytest.mark.parametrize(
    "changes",
    [{"exclude": ["a" * 1025]}, {"include_only": ["a" * 1025]}, {"set": {"a" * 1025: ""}}],
)
def test_long_patterns_and_names_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams, match="of an envPolicy must not exceed 1024 characters"):
        _inherited(_policy(**changes))


def test_patterns_that_would_take_long_to_compare_are_refused() -> None:
    names = {f"n{number:0999}": "" for number in range(100)}
    patterns = [f"*{number:0999}" for number in range(1000)]
    with pytest.raises(InvalidParams, match="are too many to compare"):
        _inherited(_policy(set=names, include_only=patterns))


@pytest.mark.parametrize(("steps", "is_refused"), [(2 * 8, False), (2 * 8 - 1, True)])
def test_names_of_the_server_and_of_the_policy_are_compared(
    steps: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MATCH_STEPS", steps)
    policy = _policy(set={"12345": ""}, exclude=["x"], include_only=["*"])
    try:
        env = child_environment({}, policy, None, {"123": ""})
    except InvalidParams:
        assert is_refused
    else:
        assert not is_refused
        assert env == {"123": "", "12345": ""}


def test_captured_variables_come_between_the_servers_and_those_of_the_request() -> None:
    server = {"BASE": "server", "BOTH": "server"}
    captured = {"BOTH": "captured", "WON": "captured", "A_TOKEN": "t", "NODE_REPL_AUTH_TOKEN": "t"}
    policy = EnvPolicy("all", False, ["DROPPED"], {"SET": "1"}, [])
    found = child_environment({"WON": "request"}, policy, None, server, captured)
    assert found == {"BASE": "server", "BOTH": "captured", "WON": "request", "SET": "1"}
    plain = child_environment({"WON": "request"}, None, None, server, captured)
    assert plain == {"BOTH": "captured", "WON": "request", "A_TOKEN": "t"}
