"""Remote paths for completion; a real server is asked in integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from exec_server.cli.commands import dispatch
from exec_server.cli.commands.complete_path_command import MAX_PATHS, matching
from exec_server.cli.commands.targets import RemotePath
from exec_server.client.results import Entry

ENTRIES = [
    Entry("/d/bin", True, False),
    Entry("/d/.hidden", False, True),
    Entry("/d/beta", False, True),
    Entry("/d/a\nb", False, True),
]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("", ["t:beta", "t:bin/"]),
        ("b", ["t:beta", "t:bin/"]),
        ("/d/bi", ["t:/d/bin/"]),
        ("x/.h", ["t:x/.hidden"]),
        ("~", ["t:~/beta", "t:~/bin/"]),
        ("~/be", ["t:~/beta"]),
        ("/d/zz", []),
    ],
)
def test_entries_continue_the_word(path: str, found: list[str]) -> None:
    assert matching(RemotePath("t", path), ENTRIES) == found


def test_the_number_of_paths_is_limited() -> None:
    entries = [Entry(f"/d/{number}", False, True) for number in range(MAX_PATHS + 1)]
    assert len(matching(RemotePath("t", ""), entries)) == MAX_PATHS


@pytest.mark.parametrize(
    "word",
    ["./local", "nobody:/etc", "ws://127.0.0.1:1", "ws://127.0.0.1:1:/etc", "stdio:cat:/etc"],
)
def test_errors_are_silent(
    word: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert dispatch.run("complete-path", [word]) == 1
    assert capfd.readouterr() == ("", "")
