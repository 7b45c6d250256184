"""Builds the manual pages into the wheel, from the argument parsers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface):
    """Writes the pages below build/man, and adds them to share/man of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        # The parsers import nothing outside of the standard library.
        sys.path.insert(0, str(Path(self.root, "src")))
        from exec_server.cli.help import pages

        folder = Path(self.root, "build", "man")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pages().items():
            (folder / name).write_text(text)
            build_data["shared_data"][str(folder / name)] = f"share/man/man1/{name}"
