"""Manifests of plugins; every case was seen on the reference."""

from __future__ import annotations

import pytest

from exec_server.codex.bundle import Manifest, ManifestFault, parse_manifest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", Manifest("dir", "dir", None)),
        ('{"name":""}', Manifest("dir", "dir", None)),
        ('{"name":" a  b "}', Manifest(" a  b ", " a  b ", None)),
        ('{"name":"n","interface":{"displayName":" D  E "}}', Manifest("n", "D  E", None)),
        ('{"name":"n","interface":{"displayName":null}}', Manifest("n", "n", None)),
        ('{"interface":null,"apps":null,"version":5}', Manifest("dir", "dir", None)),
        ('{"mcpServers":"./x","apps":"./y"}', Manifest("dir", "dir", None, True, True)),
        (
            ' { "mcpServers" : {"z": {"a": [1, 2.50]} } }',
            Manifest("dir", "dir", '{"z":{"a":[1,2.50]}}'),
        ),
    ],
)
def test_manifests(text: str, expected: Manifest) -> None:
    assert parse_manifest(text, "dir") == expected


@pytest.mark.parametrize(
    "text",
    [
        "nope",
        "[]",
        "5",
        '{"name":null}',
        '{"name":5}',
        '{"apps":{}}',
        '{"interface":5}',
        '{"interface":{"displayName":5}}',
        '{"name":"a","name":"b"}',
        '{"x":NaN}',
        '{"mcpServers":{"a":"\\ud800"}}',
        '{"mcpServers":"./\\ud800"}',
        '{"apps":"./\\ud800"}',
        '{"name":"\\ud800"}',
        '{"interface":{"displayName":"\\udc00"}}',
        '{"\\ud800":1}',
        "[" * 100_000,
    ],
)
def test_faults(text: str) -> None:
    with pytest.raises(ManifestFault):
        parse_manifest(text, "dir")


def test_members_that_are_not_looked_at_may_be_anything() -> None:
    text = '{"name":"a","x":"\\ud800","y":1e999,"z":1,"z":2,"interface":{"x":"\\ud800"}}'
    assert parse_manifest(text, "dir").name == "a"
