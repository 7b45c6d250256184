"""`exec-server version`."""

from __future__ import annotations

from pathlib import Path

import pytest

from exec_server import __version__
from exec_server.cli import help as command
from exec_server.cli import main

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The top of a checkout, whose package is in src."""
    monkeypatch.setattr(command, "__file__", str(tmp_path / "src/exec_server/cli/help.py"))
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _printed(capfd: pytest.CaptureFixture[str]) -> str:
    assert main.run_client("version", []) == 0
    return capfd.readouterr().out.removeprefix(f"exec-server {__version__}")


def test_an_installed_package_has_no_commit(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _printed(capfd) == "\n"


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"HEAD": COMMIT}, " (commit 0123456789ab)\n"),
        ({"HEAD": "ref: refs/heads/x\n", "refs/heads/x": COMMIT}, " (commit 0123456789ab)\n"),
        (
            {"HEAD": "ref: refs/heads/x\n", "packed-refs": f"# pack-refs\n{COMMIT} refs/heads/x\n"},
            " (commit 0123456789ab)\n",
        ),
        ({"HEAD": "ref: refs/heads/x\n", "packed-refs": f"{COMMIT} refs/heads/y\n"}, "\n"),
        ({"HEAD": "ref: refs/heads/.invalid\n"}, "\n"),  # as with reftable
        ({"HEAD": "\x1b"}, "\n"),
    ],
)
def test_the_commit_of_a_checkout(
    files: dict[str, str], end: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        _write(root / ".git" / name, text)
    assert _printed(capfd) == end


def test_the_commit_of_a_worktree(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _write(root / ".git", "gitdir: main/worktrees/w\n")
    _write(root / "main/worktrees/w/HEAD", "ref: refs/heads/w\n")
    _write(root / "main/worktrees/w/commondir", "../..\n")
    _write(root / "main/refs/heads/w", f"{COMMIT}\n")
    assert _printed(capfd) == " (commit 0123456789ab)\n"
