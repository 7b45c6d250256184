"""Discovery in hostile trees: every answer is bounded, nothing is waited for, nothing leaks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import Client, start_server, uri
from tests.support.sandbox import entry, policy
from tests.support.trees import write_files

_GOOD = "---\nname: good\ndescription: works\n---\n"
_YAML_BOMB = "---\na: &a [x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)},*{chr(97 + n)}]\n" for n in range(20)
)
_MANIFESTS = {
    "deep": "[" * 500_000,
    "digits": '{"name": ' + "9" * 1_000_000 + "}",
    "twice": '{"name": "a", "name": "b"}',
    "text": "no JSON",
    "array": "[]",
    "members": "{" + ",".join(f'"k{n}": 1' for n in range(60_000)) + "}",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Codex home whose skills and plugins are hostile, except one skill."""
    home = tmp_path_factory.mktemp("hostile")
    skills = home / "skills"
    write_files(
        skills,
        {
            "good/SKILL.md": _GOOD,
            "bomb/SKILL.md": f"{_YAML_BOMB}description: bomb\n---\n",
            "endless/SKILL.md": "---\n" + "a: b\n" * 200_000,
            "nested/SKILL.md": "---\ndescription: " + "[" * 60_000 + "\n---\n",
            "itself/SKILL.md": "---\ndescription: &a [*a]\n---\n",
            "binary/SKILL.md": b"---\n\xff\n---\n",
            "large/SKILL.md": b"x" * 1_048_577,
            "metadata/SKILL.md": "---\ndescription: metadata\n---\n",
            "metadata/agents/openai.yaml": "dependencies: &a {tools: [*a, *a]}\n",
            "directory/SKILL.md/inner": "",
            "/".join("d" * 60) + "/SKILL.md": _GOOD,
        },
    )
    (skills / "fifo").mkdir()
    os.mkfifo(skills / "fifo/SKILL.md")
    (skills / "loop").mkdir()
    (skills / "loop/again").symlink_to(skills / "loop")
    (skills / "up").symlink_to(home)
    (skills / "file").mkdir()
    (skills / "file/SKILL.md").symlink_to("/etc/passwd")
    odd = os.fsencode(skills) + b"/\xff\xfe"
    os.mkdir(odd)
    with open(odd + b"/SKILL.md", "w") as file:
        file.write("---\ndescription: odd\n---\n")
    for name, text in _MANIFESTS.items():
        plugin = f"plugins/cache/market/{name}/1.0.0/.codex-plugin/plugin.json"
        write_files(home, {plugin: text})
    return home


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[Client]:
    variables = {"CODEX_HOME": str(root), "HOME": str(root / "nobody")}
    with start_server("ours", env=variables) as server, server.connect() as connected:
        yield connected


def _roots(client: Client, *roots: Path, **members: Any) -> list[dict[str, Any]]:
    listed = [{"id": "r", "path": uri(each), **members} for each in roots]
    found: list[dict[str, Any]] = client.call("capabilityRoots/discoverV1", {"roots": listed})[
        "roots"
    ]
    return found


def test_the_files_of_a_hostile_root(client: Client, root: Path) -> None:
    [found] = _roots(client, root / "skills")
    assert found["error"] is None
    texts = {
        each["instructions"]["path"].rsplit("/", 2)[1]: each["instructions"]["contents"]
        for each in found["skills"]
    }
    assert texts["good"] == _GOOD
    # A name that is no text is not found again, as in the reference.
    assert any("%EF%BF%BD%EF%BF%BD: No such file" in each for each in found["warnings"])
    # Files behind links, too large ones, and what is no regular file or no text, are left out.
    assert texts.keys().isdisjoint({"file", "large", "fifo", "directory", "binary"})
    assert "root:x:" not in str(found)


@pytest.mark.parametrize("name", _MANIFESTS)
def test_manifests(client: Client, root: Path, name: str) -> None:
    [found] = _roots(client, root / f"plugins/cache/market/{name}/1.0.0")
    assert found["plugin"]["manifest"]["contents"] == _MANIFESTS[name]
    assert (found["plugin"]["mcpConfig"], found["plugin"]["appsConfig"]) == (None, None)


def test_what_is_installed(client: Client) -> None:
    found = client.call("capabilities/discoverV2", {"cwd": "file:///"})
    names = {skill["name"] for skill in found["skills"]}
    assert {"good", "metadata"} <= names
    # The others have no header that can be read.
    assert names.isdisjoint({"endless", "itself", "binary", "file"})
    assert [plugin["id"] for plugin in found["plugins"]] == ["members@market"]
    assert found["warnings"]


def test_a_sandbox_decides_what_is_read(client: Client, root: Path) -> None:
    """Discovery sees what a command with the policy sees, also behind links."""
    readable = ("/usr", root / "skills/good", root / "skills/loop")
    sandbox = policy(*(entry(each, "read") for each in readable), cwd="file:///")
    good, hidden = _roots(client, root / "skills/good", root / "plugins", sandbox=sandbox)
    assert [each["instructions"]["contents"] for each in good["skills"]] == [_GOOD]
    assert (hidden["plugin"], hidden["skills"], hidden["namespaceManifests"]) == (None, [], [])
    assert hidden["error"] or hidden["warnings"]
    found = client.call("capabilities/discoverV2", {"cwd": "file:///", "sandbox": sandbox})
    assert {skill["name"] for skill in found["skills"]} <= {"good"}
    assert found["plugins"] == []
