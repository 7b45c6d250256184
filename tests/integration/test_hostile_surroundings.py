"""Whatever a terminal has set, tests pass: a selection of them in the worst one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
# Tests that read variables, widths, modes, a home or a locale. `make test-hostile` runs all.
_SELECTION = (
    "tests/unit/cli/test_table.py",
    "tests/unit/cli/test_targets.py",
    "tests/unit/cli/files",
    "tests/unit/host",
    "tests/unit/client/transfer/test_download_local_tree.py",
    "tests/unit/client/transfer/test_windows_directory.py",
    "tests/unit/process/test_table_reaper.py",
    "tests/unit/test_kernel_machine.py",
    "tests/integration/test_readme.py",
    "tests/integration/test_commands_targets.py",
    "tests/integration/test_terminals.py",
)


@pytest.mark.timeout(120)
def test_the_surroundings_do_not_decide_whether_tests_pass(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not reference"]
    words += ["-n", "2", "--dist", "loadfile"]  # as `make test`: workers inherit what is set
    done = subprocess.run(
        ["sh", "scripts/hostile.sh", *words, *_SELECTION],
        cwd=_ROOT,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
