"""The files of a capability root; every case was seen on the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.trees import DiskFiles, write_files

from exec_server.codex.bundle import ResponseBudget, discover_root
from exec_server.protocol.codex import (
    CapabilityFile,
    DiscoveredRoot,
    PluginFiles,
    RootParams,
    SkillFiles,
)
from exec_server.protocol.paths import PathUri, path_to_uri

_MANIFEST = ".codex-plugin/plugin.json"


def _discover(path: Path | str, *denied: str) -> DiscoveredRoot:
    root = RootParams("id", PathUri.from_text(str(path)))
    return discover_root(root, DiskFiles(*denied), ResponseBudget())


def _file(path: Path, contents: str) -> CapabilityFile:
    return CapabilityFile(path_to_uri(str(path)), contents)


def test_a_plugin_with_skills_and_nested_plugins(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            _MANIFEST: '{"mcpServers":"./m.json"}',
            ".claude-plugin/plugin.json": "{}",
            "m.json": "m",
            ".mcp.json": "unused",
            ".app.json": "a",
            "s/SKILL.md": "s",
            "s/agents/openai.yaml": "y",
            ".hidden/SKILL.md": "h",
            "x/.cursor-plugin/plugin.json": "unused",
            "x/.claude-plugin/plugin.json": "x",
        },
    )
    manifest = _file(tmp_path / _MANIFEST, '{"mcpServers":"./m.json"}')
    assert _discover(tmp_path) == DiscoveredRoot(
        "id",
        path_to_uri(str(tmp_path)),
        PluginFiles(manifest, _file(tmp_path / "m.json", "m"), _file(tmp_path / ".app.json", "a")),
        [
            SkillFiles(_file(tmp_path / ".hidden/SKILL.md", "h"), None),
            SkillFiles(
                _file(tmp_path / "s/SKILL.md", "s"), _file(tmp_path / "s/agents/openai.yaml", "y")
            ),
        ],
        [manifest, _file(tmp_path / "x/.claude-plugin/plugin.json", "x")],
        [],
        None,
    )


def test_a_manifest_above_gives_the_namespace(tmp_path: Path) -> None:
    write_files(tmp_path, {_MANIFEST: "up", "a/b/SKILL.md": "s"})
    found = _discover(tmp_path / "a/b")
    assert found.plugin is None
    assert found.namespace_manifests == [_file(tmp_path / _MANIFEST, "up")]


def test_a_manifest_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    write_files(tmp_path, {_MANIFEST: b"\xff", ".claude-plugin/plugin.json": "{}"})
    found = _discover(tmp_path)
    assert found.plugin is not None
    assert found.plugin.manifest == _file(tmp_path / ".claude-plugin/plugin.json", "{}")
    assert len(found.warnings) == 1


@pytest.mark.parametrize(
    ("declared", "expected", "fault"),
    [
        ("./m.json", "m.json", None),
        ("././m.json/", "m.json", None),
        ("./a/./b", "a/b", None),
        ("./..x", "..x", None),
        ("./none", None, None),
        ("./a", None, None),
        ("./%6d.json", None, None),
        (None, "default", None),
        (5, "default", None),
        ([], "default", None),
        ("m.json", "default", "path must start with `./`"),
        ("/abs", "default", "path must start with `./`"),
        ("", "default", "path must start with `./`"),
        ("./", "default", "path must remain below the capability root"),
        (".//x", "default", "path must remain below the capability root"),
        ("./a/../m.json", "default", "path must remain below the capability root"),
        ("./m\0", "default", "path must remain below the capability root"),
    ],
)
def test_declared_files(
    declared: Any, expected: str | None, fault: str | None, tmp_path: Path
) -> None:
    text = json.dumps({"mcpServers": declared, "apps": declared})
    files = {_MANIFEST: text, ".mcp.json": "default", ".app.json": "default"}
    write_files(tmp_path, files | {"m.json": "m.json", "a/b": "a/b", "..x": "..x"})
    found = _discover(tmp_path)
    assert found.plugin is not None
    for file in (found.plugin.mcp_config, found.plugin.apps_config):
        assert (None if file is None else file.contents) == expected
    uri = path_to_uri(str(tmp_path / _MANIFEST))
    fields = ("mcpServers", "apps") if fault else ()
    assert found.warnings == [f"ignoring {field} in {uri}: {fault}" for field in fields]


@pytest.mark.parametrize(
    ("manifest", "servers", "apps"),
    [
        ('{"mcpServers":{},"apps":{}}', None, "a"),
        ("nope", "m", "a"),
        ("[]", "m", "a"),
        ('{"mcpServers":"./\\ud800"}', "m", "a"),
        ('{"mcpServers":{"a":"\\ud800"}}', "m", "a"),
        ('{"mcpServers":{},"apps":"./\\ud800"}', "m", "a"),
        ('{"mcpServers":{"a":NaN}}', "m", "a"),
        ('{"mcpServers":{},"mcpServers":{}}', "m", "a"),
        ('{"mcpServers":{},"x":1,"x":2}', None, "a"),
        ("[" * 100_000, "m", "a"),
    ],
)
def test_manifests_that_declare_nothing(
    manifest: str, servers: str | None, apps: str, tmp_path: Path
) -> None:
    write_files(tmp_path, {_MANIFEST: manifest, ".mcp.json": "m", ".app.json": apps})
    plugin = _discover(tmp_path).plugin
    assert plugin is not None
    assert (None if plugin.mcp_config is None else plugin.mcp_config.contents) == servers
    assert plugin.apps_config is not None


def test_roots_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    uri = path_to_uri(str(tmp_path))
    for path, error in {
        str(tmp_path / "file"): f"capability root {uri}/file is not a directory",
        str(tmp_path / "none"): f"failed to inspect capability root {uri}/none: "
        "No such file or directory (os error 2)",
        "file:///C:/x": "failed to inspect capability root file:///C:/x: "
        "'file:///C:/x' is invalid on 'linux'",
    }.items():
        found = _discover(path)
        assert found == DiscoveredRoot("id", found.path, None, [], [], [], error)


class _Denied(DiskFiles):
    """Files of which one directory may not be read."""

    def __init__(self, denied: Path) -> None:
        super().__init__()
        self._directory = denied

    def _check(self, path: PathUri) -> None:
        if Path(path.native()).is_relative_to(self._directory):
            raise PermissionError(13, "Permission denied")

    def metadata(self, path: PathUri) -> Any:
        self._check(path)
        return super().metadata(path)


def test_a_root_that_may_not_be_read_is_empty(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    root = RootParams("id", PathUri.from_text(str(tmp_path / "root")))
    found = discover_root(root, _Denied(tmp_path / "root"), ResponseBudget())
    assert (found.error, found.skills) == (None, [])
    assert found.warnings[0].startswith("failed to scan capability path")


def test_a_root_below_a_directory_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    root = RootParams("id", PathUri.from_text(str(tmp_path / "root")))
    found = discover_root(root, _Denied(tmp_path), ResponseBudget())
    text = f"failed to inspect capability root {root.path}: Permission denied (os error 13)"
    assert (found.error, found.warnings) == (text, [])
