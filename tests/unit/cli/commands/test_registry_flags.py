"""The flags and verbs of `exec-server registry`."""

from __future__ import annotations

import shlex

import pytest

from exec_server.cli.commands import registry_command, registry_flags


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000)],
)
def test_lifetimes(text: str, expected: int) -> None:
    assert registry_flags.lifetime(text) == expected


@pytest.mark.parametrize("text", ["", "0", "1w", "-1", "d", "1.5h"])
def test_other_texts_are_no_lifetimes(text: str) -> None:
    with pytest.raises(ValueError):
        registry_flags.lifetime(text)


@pytest.mark.parametrize("name", registry_flags.VERBS)
def test_the_examples_of_a_verb_can_be_parsed(name: str) -> None:
    for example in registry_flags.VERBS[name].examples:
        words = [*name.split(), *shlex.split(example)]
        arguments = registry_command.build_parser().parse_words(words)
        assert arguments.words[: len(name.split())] == name.split()
        registry_flags.check_verb(arguments, name)
