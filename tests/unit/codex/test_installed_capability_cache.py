"""Kept answers of discovery: they end with any change, and with time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.trees import DiskFiles, write_files

from exec_server.codex import installed
from exec_server.codex.installed import CapabilityCache, TreeListener
from exec_server.filesystem.inotify import Inotify

_HEADER = "---\ndescription: d\n---\n"


class Scene:
    """A cache, and the machine whose skills it keeps."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "home").mkdir()
        self.cache = CapabilityCache()
        self.inotify = Inotify(lambda function: function())
        self.variables = {"CODEX_HOME": str(root / "home"), "HOME": str(root / "user")}

    def discover(self, key: bytes = b"") -> bool:
        """Read, and keep the answer if all changes are noticed."""
        listener = TreeListener()
        text, is_watched = installed.discover_cached(
            self.variables, DiskFiles(), self.inotify, listener
        )
        if is_watched:
            self.cache.put(key, text, listener, self.inotify)
        return is_watched

    def kept(self, key: bytes = b"") -> list[str] | None:
        """The names of the skills in the kept answer."""
        text = self.cache.get(key, self.inotify)
        if text is None:
            return None
        return [skill["name"] for skill in json.loads(text)["skills"]]


def play(tmp_path: Path, scene: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        stage = Scene(tmp_path)
        try:
            await scene(stage)
        finally:
            stage.inotify.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "changed",
    [
        "home/skills/a/SKILL.md",
        "home/skills/b/SKILL.md",
        "home/skills/a/deep/er/x",
        "user/.agents/skills/c/SKILL.md",
        "home/plugins/x",
    ],
)
def test_a_change_ends_an_answer(changed: str, tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        write_files(tmp_path, {"home/skills/a/SKILL.md": _HEADER})
        assert stage.kept() is None
        assert stage.discover()
        assert stage.kept() == ["a"]
        write_files(tmp_path, {"home/other": "", "elsewhere": ""})
        assert stage.kept() == ["a"]
        write_files(tmp_path, {changed: _HEADER})
        assert stage.kept() is None
        assert stage.discover()
        assert stage.kept() is not None

    play(tmp_path, scene)


def test_lost_events_end_an_answer() -> None:
    listener = TreeListener()
    listener.on_overflow()
    assert listener.is_changed


def test_an_answer_ends_with_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Scene) -> None:
        stage.discover()
        assert stage.kept() == []
        monkeypatch.setattr(installed, "MAX_AGE_SECONDS", -1.0)
        assert stage.kept() is None

    play(tmp_path, scene)


def test_answers_are_few_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Scene) -> None:
        for number in range(installed.MAX_ANSWERS):
            stage.discover(b"%d" % number)
        stage.discover(b"0")  # replaces the first one
        assert stage.kept(b"1") == []
        stage.discover(b"further")
        assert stage.kept(b"2") is None
        assert stage.kept(b"1") == []
        monkeypatch.setattr(installed, "ANSWER_BYTES", 1)
        stage.discover(b"long")
        assert stage.kept(b"long") is None

    play(tmp_path, scene)


def test_a_tree_that_cannot_be_watched_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Scene) -> None:
        (tmp_path / "home/skills/a").mkdir(parents=True)

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(stage.inotify, "listen", fail)
            assert not stage.discover()
        with monkeypatch.context() as patch:
            patch.setattr(installed, "is_unreliable", lambda _: True)
            assert not stage.discover()
        assert stage.discover()

    play(tmp_path, scene)
