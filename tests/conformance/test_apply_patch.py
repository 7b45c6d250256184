"""Our patches and the apply_patch of the reference, on the same file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from exec_server.errors import PatchDoesNotApply
from exec_server.patching.patch import parse_patch, plan
from tests.support.client import reference_binary

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(reference_binary() is None, reason="the reference is not installed"),
]

_CLASSES = "class A:\n  def f():\n    pass\n\nclass B:\n  def f():\n    pass\n"
# The text of a file, and the lines of an update.
CASES = {
    "replaced": ("a\nb\nc\n", "@@\n a\n-b\n+x\n c"),
    "below-an-anchor": (_CLASSES, "@@ class B:\n-    pass\n+    return 1"),
    "nested-anchor": (_CLASSES, "@@ class B:\n   def f():\n-    pass\n+    return 1"),
    "two-hunks": ("a\nb\nc\nd\n", "@@\n-a\n+x\n@@\n-d\n+y"),
    "first-of-several": ("x\ny\nx\ny\n", "@@\n x\n-y\n+z"),
    "end-of-file": ("x\nx\n", "@@\n-x\n+y\n*** End of File"),
    "appended": ("a\n", "@@\n+b"),
    "without-a-header": ("a\nb\n", " a\n-b\n+c"),
    "removed-only": ("a\nb\nc\n", "@@\n-b"),
    "spaces-at-the-end": ("a  \nb\n", "@@\n a\n-b\n+c"),
    "everything-removed": ("a\n", "@@\n-a"),
    "empty-context-line": ("a\n\nb\n", "@@\n a\n\n-b\n+c"),
    "missing-line": ("a\n", "@@\n-b\n+c"),
    "missing-anchor": ("a\n", "@@ class X:\n-a\n+c"),
    "below-an-anchor-only": ("a\nb\n", "@@ a\n+new"),
    "stacked-anchors": (_CLASSES, "@@ class B:\n@@   def f():\n-    pass\n+    return 1"),
    "crlf": ("a\r\nb\r\n", "@@\n a\n-b\n+c"),
    "no-final-newline": ("a\nb", "@@\n-a\n+c"),
    "no-prefix": ("a\n", "@@\na\n"),
}
# Cases that end differently, and why.
CHOSEN = {
    "below-an-anchor-only": "the reference appends lines that are to be inserted below an anchor",
    "no-final-newline": "the reference adds a newline at the end of the file",
    "stacked-anchors": "the reference knows one anchor per hunk",
}


def of_reference(folder: Path, text: str, patch: str) -> str | None:
    file = folder / "f"
    file.write_bytes(text.encode())
    home = folder / "home"
    home.mkdir()
    done = subprocess.run(
        [str(reference_binary()), "--codex-run-as-apply-patch", patch],
        cwd=folder,
        env={**os.environ, "CODEX_HOME": str(home)},
        capture_output=True,
        check=False,
        timeout=30,
    )
    return file.read_bytes().decode() if done.returncode == 0 else None


def of_ours(text: str, patch: str) -> str | None:
    try:
        (change,) = plan(parse_patch(patch), "/", {"/f": text.encode()}.get)
    except PatchDoesNotApply:
        return None
    return None if change.new is None else change.new.decode()


@pytest.mark.parametrize("name", CASES)
def test_patch(name: str, tmp_path: Path) -> None:
    text, body = CASES[name]
    patch = f"*** Begin Patch\n*** Update File: f\n{body}\n*** End Patch"
    ours, theirs = of_ours(text, patch), of_reference(tmp_path, text, patch)
    if name in CHOSEN:
        assert ours != theirs, "the reference agrees: remove the case from CHOSEN"
    else:
        assert ours == theirs
