"""Layers of configuration, also those of the system, which no other test may write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from exec_server.codex import config
from exec_server.errors import InternalError
from exec_server.protocol.codex import LayerStack, ReadConfigParams, ReadConfigResult
from exec_server.protocol.paths import PathUri, path_to_uri

_REQUIREMENTS = ["x", "allowed_approval_policies", "allowed_approvals_reviewers"]


class Machine:
    """A folder with the files of a machine; texts may name it as {dir}."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("etc", "home", "user", "p"):
            (root / name).mkdir()

    def write(self, **files: str) -> None:
        for name, text in files.items():
            path = self.root / name.replace("__", "/").replace("_toml", ".toml")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("{dir}", str(self.root)))

    def read(self, *keys: str, cwd: str = "p") -> ReadConfigResult:
        paths = [[key] for key in (*_REQUIREMENTS, "allowed_sandbox_modes")]
        params = ReadConfigParams(
            PathUri.from_text(f"{self.root}/{cwd}"), [[key] for key in keys], paths
        )
        variables = {"HOME": f"{self.root}/user", "CODEX_HOME": f"{self.root}/home"}
        return config.read(params, variables, f"{self.root}/etc")

    def layers(self, stack: LayerStack) -> list[tuple[str, dict[str, Any]]]:
        """The sources without the folder, and the documents."""
        for layer in stack.layers:
            path = layer.source.rpartition("(")[2].rstrip(")")
            assert layer.base_dir == path_to_uri(os.path.dirname(path))
        return [
            (layer.source.replace(f"{self.root}/", ""), config.parse(layer.toml))
            for layer in stack.layers
        ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(Path(os.path.realpath(tmp_path)))


def test_layers_from_the_system_to_the_managed_one(machine: Machine) -> None:
    machine.write(
        etc__config_toml="a = 1\nproject_root_markers = ['MARK']\n",
        home__config_toml="a = 2\n[projects.'{dir}/p']\ntrust_level = 'trusted'",
        p__MARK="",
        p___codex__config_toml="",
        etc__managed_config_toml="a = 4\n",
    )
    (machine.root / "p/.codex").mkdir()
    (machine.root / "p/.codex/config.toml").write_text("a = 3\nnotify = []\n")
    result = machine.read("a", "notify")
    assert machine.layers(result.config) == [
        ("system (etc/config.toml)", {"a": 1}),
        ("user (home/config.toml)", {"a": 2}),
        ("project (p/.codex/config.toml)", {"a": 3}),
        ("legacy managed_config.toml (etc/managed_config.toml)", {"a": 4}),
    ]
    assert result.config.cloud_insertion_index == 1
    assert result.codex_home_dir == path_to_uri(f"{machine.root}/home")
    assert result.user_home_dir == path_to_uri(f"{machine.root}/user")
    assert machine.read("notify").config == LayerStack([], 0)


def test_a_managed_layer_takes_trust_away(machine: Machine) -> None:
    machine.write(
        home__config_toml="[projects.'{dir}/p']\ntrust_level = 'trusted'",
        etc__managed_config_toml="[projects.'{dir}/p']\ntrust_level = 'untrusted'",
    )
    (machine.root / "p/.codex").mkdir()
    (machine.root / "p/.codex/config.toml").write_text("a = [ # broken, and ignored")
    assert machine.read("a").config.layers == []


def test_the_codex_home_is_no_project(machine: Machine) -> None:
    machine.write(home__config_toml="a = 1\n[projects.'{dir}/p']\ntrust_level = 'trusted'")
    (machine.root / "p/.codex").symlink_to("../home")
    assert len(machine.read("a").config.layers) == 1


@pytest.mark.parametrize(
    ("managed", "expected"),
    [
        ("approval_policy = 'never'", {"allowed_approval_policies": ["never"]}),
        ("sandbox_mode = 'read-only'", {"allowed_sandbox_modes": ["read-only"]}),
        (
            "sandbox_mode = 'workspace-write'",
            {"allowed_sandbox_modes": ["read-only", "workspace-write"]},
        ),
        ("approvals_reviewer = 'user'", {"allowed_approvals_reviewers": ["user"]}),
        (
            "approvals_reviewer = 'guardian_subagent'",
            {"allowed_approvals_reviewers": ["auto_review", "user"]},
        ),
    ],
)
def test_requirements(managed: str, expected: dict[str, Any], machine: Machine) -> None:
    machine.write(etc__managed_config_toml=managed)
    implied = ("etc/managed_config.toml", expected)
    result = machine.read("a")
    assert machine.layers(result.requirements) == [implied]
    assert result.requirements.cloud_insertion_index == 0
    machine.write(etc__requirements_toml="x = 1")
    result = machine.read("a")
    assert machine.layers(result.requirements) == [("etc/requirements.toml", {"x": 1}), implied]
    assert result.requirements.cloud_insertion_index == 1


_DUPLICATE = "Cannot overwrite a value (at end of document)"


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("etc__config_toml", "a = 1\na = 2", f"{{dir}}/etc/config.toml: {_DUPLICATE}"),
        (
            "etc__requirements_toml",
            "a = 1\na = 2",
            "failed to parse requirements layer {dir}/etc/requirements.toml: " + _DUPLICATE,
        ),
        (
            "etc__managed_config_toml",
            "sandbox_mode = 'x'",
            "Failed to parse config requirements as TOML: "
            "sandbox_mode: expected one of read-only, workspace-write, danger-full-access",
        ),
    ],
)
def test_faults(file: str, text: str, error: str, machine: Machine) -> None:
    machine.write(**{file: text})
    with pytest.raises(InternalError) as caught:
        machine.read("a")
    text = f"failed to load executor-local config: {error.replace('{dir}', str(machine.root))}"
    assert caught.value.message == text


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("etc/requirements.toml", "requirements file"),
        ("home/config.toml", "config file"),
        ("p/.codex/config.toml", "project config file"),
    ],
)
def test_what_is_no_file_is_not_read(file: str, what: str, machine: Machine) -> None:
    machine.write(etc__config_toml="[projects.'{dir}/p']\ntrust_level = 'trusted'")
    (machine.root / file).mkdir(parents=True)
    path = f"{machine.root}/{file}"
    with pytest.raises(InternalError) as caught:
        machine.read("a")
    text = f"Failed to read {what} {path}: path `{path}` is not a file"
    assert caught.value.message == f"failed to load executor-local config: {text}"


def _trusted(machine: Machine, depth: int, text: str) -> str:
    """A project with a file in each of so many directories; returns the lowest."""
    trust = "[projects.'{dir}/p']\ntrust_level = 'trusted'"
    machine.write(**{"home/config.toml": trust, "p/.git/HEAD": ""})
    directory = "p"
    for _ in range(depth):
        directory += "/d"
        machine.write(**{f"{directory}/.codex/config.toml": text})
    return directory


def test_all_files_together_are_limited(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = _trusted(machine, 3, "a = 1\n" + "#" * 1000)
    monkeypatch.setattr(config, "FILES_BYTES", 3200)
    assert len(machine.read("a", cwd=lowest).config.layers) == 3
    monkeypatch.setattr(config, "FILES_BYTES", 3000)
    with pytest.raises(InternalError) as caught:
        machine.read("a", cwd=lowest)
    path = f"{machine.root}/{lowest}/.codex/config.toml"
    assert caught.value.message == (
        f"failed to load executor-local config: Failed to read project config file {path}: all "
        "files together exceed 3000 bytes"
    )


def test_the_answer_is_limited(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = _trusted(machine, 3, "a = 'xxxxxxxx'\n")
    monkeypatch.setattr(config, "ANSWER_CHARACTERS", 40)
    with pytest.raises(InternalError, match="the layers exceed 40 characters"):
        machine.read("a", cwd=lowest)
    assert machine.read("b", cwd=lowest).config.layers == []
    monkeypatch.setattr(config, "TEXT_CHARACTERS", 3)
    machine.write(**{f"{lowest}/.codex/config.toml": "[long]\n"})
    with pytest.raises(InternalError, match=r"config\.toml are nested too often"):
        machine.read("long", cwd=lowest)


def test_a_missing_home_has_words_of_its_own(machine: Machine) -> None:
    (machine.root / "home").rmdir()
    with pytest.raises(InternalError, match="failed to find Codex home: CODEX_HOME points to"):
        machine.read("a")


def test_hooks_of_a_linked_worktree_are_those_of_the_main_checkout(machine: Machine) -> None:
    root = machine.root
    machine.write(home__config_toml="[projects.'{dir}/p']\ntrust_level = 'trusted'")
    for name, text in {
        "p/.git/HEAD": "",
        "p/.git/worktrees/wt/gitdir": f"{root}/wt/.git",
        "p/sub/.codex/config.toml": "a = 1\n[hooks]\nh = 'main'",
        "wt/.git": f"gitdir: {root}/p/.git/worktrees/wt",
        "wt/sub/.codex/config.toml": "a = 2\n[hooks]\nh = 'own'",
        "wt/empty/.codex/x": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert machine.layers(machine.read("a", "hooks", cwd="wt/sub").config) == [
        ("project (wt/sub/.codex/config.toml)", {"a": 2}),
        ("project (p/sub/.codex/config.toml)", {"hooks": {"h": "main"}}),
    ]
    assert machine.read("a", "hooks", cwd="wt/empty").config.layers == []
