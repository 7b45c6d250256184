"""The root of a project, its checkout, and trust."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from exec_server.codex.config import (
    MARKERS,
    Checkout,
    Trust,
    chain,
    find_checkout,
    project_root,
    root_markers,
)
from exec_server.errors import InternalError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(os.path.realpath(tmp_path))


def _write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_root_has_a_marker(folder: Path) -> None:
    _write(folder / "p/.git/HEAD")
    (folder / "p/q/.git").mkdir(parents=True)  # without HEAD it is no repository
    _write(folder / "p/q/r/MARK")
    deep = str(folder / "p/q/r/missing")
    assert project_root(deep, [".git"]) == str(folder / "p")
    assert project_root(deep, ["none", "MARK"]) == str(folder / "p/q/r")
    assert project_root(deep, []) == deep


def test_the_chain_leads_down() -> None:
    assert chain("/a", "/a/b/c") == ["/a", "/a/b", "/a/b/c"]
    assert chain("/a", "/a") == ["/a"]
    assert chain("/", "/") == ["/"]


def _worktree(folder: Path, back: str | None) -> Checkout | None:
    _write(folder / "main/.git/HEAD")
    _write(folder / "wt/.git", f"gitdir: {folder}/main/.git/worktrees/wt\n")
    if back is not None:
        _write(folder / "main/.git/worktrees/wt/gitdir", back)
    return find_checkout(str(folder / "wt/sub"))


def test_a_linked_worktree_belongs_to_the_main_checkout(folder: Path) -> None:
    checkout = _worktree(folder, f"{folder}/wt/.git\n")
    assert checkout == Checkout(str(folder / "wt"), str(folder / "main"))
    assert checkout.is_linked
    main = find_checkout(str(folder / "main/x"))
    assert main is not None
    assert not main.is_linked
    assert find_checkout("/") is None


@pytest.mark.parametrize("back", [None, "/elsewhere/.git", "x" * 9000])
def test_a_worktree_that_the_main_checkout_does_not_know_is_its_own(
    back: str | None, folder: Path
) -> None:
    checkout = _worktree(folder, back)
    assert checkout is not None
    assert not checkout.is_linked


@pytest.mark.parametrize(
    "text", ["gitdir: ../main/.git/modules/sub", "no link", "gitdir: /worktrees/x"]
)
def test_other_files_called_git_are_checkouts_of_their_own(text: str, folder: Path) -> None:
    _write(folder / "sub/.git", text)
    assert find_checkout(str(folder / "sub")) == Checkout(*[str(folder / "sub")] * 2)


def test_the_first_entry_decides(folder: Path) -> None:
    (folder / "link").symlink_to("real")
    (folder / "real/sub").mkdir(parents=True)
    real, link = str(folder / "real"), str(folder / "link")

    def trusted(projects: dict[str, str], place: str, checkout: Checkout | None = None) -> bool:
        table = {path: {"trust_level": level} for path, level in projects.items()}
        return Trust(table).is_trusted(place, os.path.dirname(place), checkout)

    assert trusted({real: "trusted"}, f"{real}/sub")
    assert trusted({real: "trusted"}, f"{link}/sub")
    assert trusted({link: "trusted"}, f"{link}/sub")
    assert not trusted({link: "trusted"}, f"{real}/sub")
    assert not trusted({real: "trusted", f"{real}/sub": "untrusted"}, f"{real}/sub")
    assert not trusted({str(folder): "trusted"}, f"{real}/sub")
    checkout = Checkout(real, "/main")
    assert trusted({"/main": "trusted"}, f"{real}/sub", checkout)
    assert not trusted({"/main": "trusted", real: "untrusted"}, f"{real}/sub", checkout)
    assert not Trust({real: {}}).is_trusted(real, real, None)


@pytest.mark.parametrize(
    ("projects", "text"),
    [
        (1, "invalid type: integer `1`, expected a map\nin `projects`\n"),
        ("x", 'invalid type: string "x", expected a map\nin `projects`\n'),
        ([], "invalid type: sequence, expected a map\nin `projects`\n"),
        (
            {"x": True},
            "invalid type: boolean `True`, expected struct ProjectConfig\nin `projects.x`\n",
        ),
        (
            {"x": {"trust_level": "y"}},
            "unknown variant `y`, expected `trusted` or `untrusted`\nin `projects.x.trust_level`\n",
        ),
        (
            {"x": {"trust_level": 1}},
            "invalid type: unit variant, expected string only\nin `projects.x.trust_level`\n",
        ),
    ],
)
def test_invalid_tables(projects: Any, text: str) -> None:
    with pytest.raises(InternalError) as caught:
        Trust(projects)
    assert caught.value.message == text


def test_markers_are_strings() -> None:
    assert list(root_markers({})) == [".git"]
    assert list(root_markers({"project_root_markers": ["a"]})) == ["a"]
    assert len(root_markers({"project_root_markers": ["a"] * MARKERS})) == MARKERS
    with pytest.raises(InternalError, match="at most 64 strings"):
        root_markers({"project_root_markers": ["a"] * (MARKERS + 1)})
    for wrong in ("a", [1], 1):
        with pytest.raises(InternalError, match="must be an array of strings"):
            root_markers({"project_root_markers": wrong})
