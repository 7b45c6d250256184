"""Changes of files as the client sees them: both APIs, reconnecting, policies, many changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.client_targets import ClientTarget

from exec_server import Environment, FileChange, FileWatch, NotFound, SandboxDenied, Unsupported
from exec_server import sync as blocking


async def _until(changes: FileWatch, path: str) -> list[FileChange]:
    """The changes up to the creation of a path."""
    seen = []
    async for change in changes:
        seen.append(change)
        if change == FileChange(path, "created"):
            return seen
    raise AssertionError(f"the watch ended before {path}")


def test_changes_below_a_directory(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        if not env.capabilities.fs_watch:
            with pytest.raises(Unsupported, match="fsWatch"):
                env.files.watch(tmp_path)
            return
        async with env.files.watch(tmp_path, recursive=True) as changes:
            await env.files.write(tmp_path / "a/b/c", b"x", parents=True)
            assert {change.path for change in await _until(changes, "a/b/c")} >= {"a", "a/b"}
            await env.files.remove(tmp_path / "a", recursive=True)
            await env.files.mkdir(tmp_path / "end")
            deleted = {each.path for each in await _until(changes, "end") if each.kind == "deleted"}
            assert "a" in deleted
            shutil.rmtree(tmp_path)
            assert {change.path async for change in changes} == {"end"}
        with pytest.raises(NotFound):
            await anext(env.files.watch(tmp_path / "missing"))

    there.play(scene)


def test_a_policy_hides_changes(ours: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    entries = [
        {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
        {"path": {"type": "path", "path": f"file://{tmp_path}/secret"}, "access": "deny"},
        {"path": {"type": "glob_pattern", "pattern": f"{tmp_path}/**/*.key"}, "access": "deny"},
    ]
    sandbox = {
        "windowsSandboxLevel": "disabled",
        "permissions": {
            "type": "managed",
            "file_system": {"type": "restricted", "entries": entries},
            "network": "restricted",
        },
    }

    async def scene(env: Environment) -> None:
        files = env.files.sandboxed(sandbox)
        async with files.watch(tmp_path, recursive=True) as changes:
            for name in ("secret/a", "b.key", "c"):
                (tmp_path / name).touch()
            (tmp_path / "sub").mkdir()
            assert {change.path for change in await _until(changes, "sub")} <= {"c", "sub"}
            (tmp_path / "sub").rename(tmp_path / "secret/sub")
            (tmp_path / "secret/sub/d").touch()
            (tmp_path / "zend").touch()
            seen = {change.path for change in await _until(changes, "zend")}
            assert {"sub", "zend"} <= seen <= {"c", "sub", "zend"}
        for hidden in ("secret", "secret/missing"):
            with pytest.raises(SandboxDenied):
                await anext(files.watch(tmp_path / hidden))

    ours.play(scene)


def test_without_async(ours: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with blocking.connect(ours.url) as env, env.files.watch(tmp_path / "d") as changes:
        (tmp_path / "d/a").touch()
        assert next(iter(changes)) == FileChange("a", "created")
        changes.close()
        assert list(changes) == []
    with blocking.connect(ours.url) as env:
        changes = env.files.watch(tmp_path / "d")  # begins at once
        env.files.write(tmp_path / "d" / "b", b"")
        assert next(iter(changes)) == FileChange("b", "created")
        changes.close()
        assert not changes.is_open
