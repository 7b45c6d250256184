"""The skills and plugins that are installed; every case was seen on the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.trees import DiskFiles, write_files

from exec_server.codex import installed
from exec_server.codex.installed import WARNING, newest
from exec_server.protocol.codex import DiscoverResult, DiscoveryRoot, Skill
from exec_server.protocol.paths import path_to_uri

_HEADER = "---\ndescription: d\n---\n"


def _discover(root: Path, files: dict[str, str | bytes]) -> DiscoverResult:
    (root / "home").mkdir(exist_ok=True)
    write_files(root, files)
    variables = {"CODEX_HOME": str(root / "home"), "HOME": str(root / "user")}
    return installed.discover(variables, DiskFiles())


def _plugin(root: Path, manifest: str, files: dict[str, str | bytes]) -> DiscoverResult:
    place = "home/plugins/cache/m/p/1"
    below = {f"{place}/{name}": content for name, content in files.items()}
    below[f"{place}/.codex-plugin/plugin.json"] = manifest
    return _discover(root, below)


def test_skills_of_both_roots(tmp_path: Path) -> None:
    found = _discover(
        tmp_path,
        {
            "home/skills/b/SKILL.md": "---\nname: n\ndescription: d\n---",
            "home/skills/a/x/SKILL.md": _HEADER,
            "home/skills/broken/SKILL.md": "",
            "user/.agents/skills/c/SKILL.md": _HEADER,
        },
    )
    home = DiscoveryRoot("codex-home-skills", path_to_uri(str(tmp_path / "home/skills")))
    user = DiscoveryRoot("user-agent-skills", path_to_uri(str(tmp_path / "user/.agents/skills")))
    assert found == DiscoverResult(
        [],
        [
            Skill("x", "d", None, f"{home.path}/a/x/SKILL.md", home, None, None),
            Skill("n", "d", None, f"{home.path}/b/SKILL.md", home, None, None),
            Skill("c", "d", None, f"{user.path}/c/SKILL.md", user, None, None),
        ],
        [WARNING],
    )


def test_the_log_names_invalid_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", installed.__name__)
    _plugin(tmp_path, "a secret", {"a\nb/SKILL.md": "a secret"})
    place = path_to_uri(str(tmp_path / "home/plugins/cache/m/p/1"))
    texts = {record.getMessage() for record in caplog.records}
    assert texts == {
        f"a discovery leaves out {place}/{name}: it is not valid"
        for name in (".codex-plugin/plugin.json", "a%0Ab/SKILL.md")
    }


def test_nothing_is_installed(tmp_path: Path) -> None:
    assert _discover(tmp_path, {}) == DiscoverResult([], [], [])


@pytest.mark.parametrize(
    ("manifests", "name"),
    [
        ({"pl/.codex-plugin/plugin.json": '{"name":"own"}'}, "own:s"),
        ({"pl/.codex-plugin/plugin.json": "{}"}, "pl:s"),
        ({"pl/.codex-plugin/plugin.json": "nope"}, "s"),
        ({"pl/.codex-plugin/plugin.json": '{"name":"own","apps":5,"interface":5}'}, "own:s"),
        ({"pl/.codex-plugin/plugin.json": '{"name":5}'}, "s"),
        ({"../.codex-plugin/plugin.json": '{"name":"up"}'}, "up:s"),
    ],
)
def test_the_nearest_plugin_is_the_namespace(
    manifests: dict[str, str], name: str, tmp_path: Path
) -> None:
    (tmp_path / "home/skills").mkdir(parents=True)
    files: dict[str, str | bytes] = {
        f"home/skills/{path}": text for path, text in manifests.items()
    }
    found = _discover(tmp_path, files | {"home/skills/pl/s/SKILL.md": _HEADER})
    assert [skill.name for skill in found.skills] == [name]


def test_a_plugin(tmp_path: Path) -> None:
    found = _plugin(
        tmp_path,
        '{"name":"p","interface":{"displayName":"P"},"mcpServers":{"a":1}}',
        {"any/SKILL.md": _HEADER, "bad/SKILL.md": ""},
    )
    (plugin,) = found.plugins
    assert (plugin.id, plugin.display_name, plugin.version) == ("p@m", "P", "1")
    assert plugin.root == path_to_uri(str(tmp_path / "home/plugins/cache/m/p/1"))
    assert plugin.files.mcp_config is not None
    assert plugin.files.mcp_config.path == plugin.files.manifest.path
    assert plugin.files.mcp_config.contents == '{"a":1}'
    assert [skill.name for skill in plugin.skills] == ["p:any"]
    assert found.warnings == [WARNING]


@pytest.mark.parametrize("member", ["mcpServers", "apps"])
def test_a_file_that_a_plugin_names_and_lacks(member: str, tmp_path: Path) -> None:
    manifest = f'{{"{member}":"./missing.json"}}'
    found = _plugin(tmp_path, manifest, {".mcp.json": "{}", ".app.json": "{}"})
    assert (len(found.plugins), found.warnings) == (1, [WARNING])


def test_links_to_versions_are_none(tmp_path: Path) -> None:
    manifest = ".codex-plugin/plugin.json"
    files: dict[str, str | bytes] = {
        f"home/plugins/cache/m/p/0.9/{manifest}": "{}",
        f"elsewhere/{manifest}": "{}",
        "home/plugins/cache/m/q/x": "",
    }
    write_files(tmp_path, files)
    for place in ("p/1.0", "p/1.1", "q/1.0"):
        (tmp_path / "home/plugins/cache/m" / place).symlink_to(tmp_path / "elsewhere")
    found = _discover(tmp_path, {})
    assert [(plugin.id, plugin.version) for plugin in found.plugins] == [("p@m", "0.9")]


@pytest.mark.parametrize("manifest", ["nope", '{"apps":{}}'])
def test_a_plugin_without_a_valid_manifest_is_none(manifest: str, tmp_path: Path) -> None:
    found = _plugin(tmp_path, manifest, {})
    assert found == DiscoverResult([], [], [WARNING])


@pytest.mark.parametrize("place", [".m/p/1", "m.x/p/1", "m/.p/1", "m/p@x/1", "m/p/sp ace"])
def test_names_that_are_no_plugins(place: str, tmp_path: Path) -> None:
    found = _discover(tmp_path, {f"home/plugins/cache/{place}/.codex-plugin/plugin.json": "{}"})
    assert found == DiscoverResult([], [], [])


def test_plugins_are_sorted_and_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "MAX_PLUGINS", 2)
    names = ("b", "c.x", "A")
    found = _discover(
        tmp_path,
        {f"home/plugins/cache/m/{name}/1/.codex-plugin/plugin.json": "{}" for name in names},
    )
    assert [plugin.id for plugin in found.plugins] == ["A@m", "b@m"]
    assert found.warnings == [WARNING]


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (["1.2.0", "1.10.0"], "1.10.0"),
        (["1.10.0", "1.10.0-beta"], "1.10.0"),
        (["1.0.0-alpha.2", "1.0.0-alpha.10"], "1.0.0-alpha.10"),
        (["1.0.0-1", "1.0.0-a"], "1.0.0-a"),
        (["1.0.0-a", "1.0.0-a.1"], "1.0.0-a.1"),
        (["1.0.0+b", "1.0.0"], "1.0.0+b"),
        (["1.0.0", "1.0.0"], "1.0.0"),
        (["1.10.0", "1.9"], "1.9"),
        (["2.0.0", "abc", "10.0.0"], "abc"),
        (["10", "9"], "9"),
        (["zzz", "local"], "local"),
        (["01.5.0", "1.0.0"], "1.0.0"),
        (["1.2.03", "1.2.3"], "1.2.3"),
        (["1.0.0-01", "1.0.0-1"], "1.0.0-1"),
        (["1.0.0-a..b", "1.0.0"], "1.0.0-a..b"),
    ],
)
def test_the_newest_version(versions: list[str], expected: str) -> None:
    assert newest(versions) == expected
    assert newest(versions[::-1]) == expected
