"""scripts/setup-venv.sh explains what a machine lacks; `make run` passes nothing of its own on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def _setup(python: str, venv: Path) -> tuple[int, str]:
    """Run the script; returns its exit code and its standard error."""
    done = subprocess.run(
        ["sh", "scripts/setup-venv.sh", python, str(venv), "."],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_machine_without_a_recent_python_gets_the_fix(tmp_path: Path) -> None:
    code, text = _setup("", tmp_path / "venv")
    assert code == 1
    assert "exec-server needs Python 3.11 or newer, and none was found" in text
    assert "make run PYTHON=" in text
    assert not (tmp_path / "venv").exists()


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    code, text = _setup("/nonexistent", tmp_path / "venv")
    assert code == 1
    assert text.startswith("PYTHON=/nonexistent does not run.")


def test_an_old_interpreter_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\ncase $2 in *sys.exit*) exit 1 ;; esac\necho 3.9\n")
    python.chmod(0o755)
    code, text = _setup(str(python), tmp_path / "venv")
    assert code == 1
    assert f"{python} is Python 3.9" in text
    assert not (tmp_path / "venv").exists()


def test_a_python_without_venv_gets_the_fix(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\ncase $2 in *ensurepip*) exit 1 ;; esac\necho 3.11\n")
    python.chmod(0o755)
    code, text = _setup(str(python), tmp_path / "venv")
    assert code == 1
    assert f"{python} has no venv module" in text
    assert "apt-get install python3-venv or python3.11-venv" in text


def test_commands_of_make_run_do_not_see_make(tmp_path: Path) -> None:
    program = tmp_path / "bin/exec-server"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "arguments: $*"\nenv\n')
    program.chmod(0o755)
    (tmp_path / "run-installed").touch()
    words = ["make", "run", "-k", f"VENV={tmp_path}", "PORT=7711", "PYTHON=/bin/false"]
    variables = os.environ | {"MAKELEVEL": "2", "KEPT": "1"}
    done = subprocess.run(
        words, cwd=_ROOT, env=variables, capture_output=True, text=True, check=True
    )
    _, mark, told = done.stdout.partition("arguments: --listen ws://127.0.0.1:7711\n")
    names = {line.partition("=")[0] for line in told.splitlines()}
    assert mark, done.stdout
    assert "KEPT" in names
    assert not {name for name in names if name.startswith("M")}
    assert not names & {"PORT", "VENV", "PYTHON"}
