"""The id of an environment from the name of its machine."""

from __future__ import annotations

import pytest

from exec_server.registry.destination import MAX_CHARACTERS, environment_id


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("build-7", "build-7"),
        ("build-7.example.net", "build-7"),
        ("Tom's laptop", "Tom-s-laptop"),
        ("über", "ber"),
        ("", "machine"),
        ("…", "machine"),
        ("x" * 200, "x" * MAX_CHARACTERS),
    ],
)
def test_an_id_has_only_characters_that_registries_accept(name: str, expected: str) -> None:
    assert environment_id(name) == expected


def test_the_default_is_this_machine() -> None:
    assert environment_id()
