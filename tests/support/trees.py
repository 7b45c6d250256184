"""Trees of files for tests of transfers: files of every kind, and their comparison."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from exec_server.client.transfer.plan import SMALL_BYTES


def tree(top: Path) -> dict[str, tuple[str, object, object]]:
    """Everything below a directory: kind, permissions, and content or target."""
    found: dict[str, tuple[str, object, object]] = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        kind = stat.filemode(status.st_mode)[0]
        mode = None if kind == "l" else stat.S_IMODE(status.st_mode)
        found[str(path.relative_to(top))] = (kind, mode, content)
    return found


def make_tree(top: Path) -> None:
    """One of everything that a tree may have."""
    (top / "empty").mkdir(parents=True)
    (top / "deep" / "er" / "est").mkdir(parents=True)
    (top / "deep" / "er" / "est" / "file").write_bytes(b"deep")
    (top / "none").write_bytes(b"")
    (top / "script").write_text("#!/bin/sh\necho hi\n")
    (top / "script").chmod(0o755)
    (top / "secret").write_text("s")
    (top / "secret").chmod(0o600)
    (top / "ünï cödé \n'\"$").write_text("strange")
    (top / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"bytes")
    (top / "large").write_bytes(os.urandom(SMALL_BYTES + 12_345))
    (top / "link").symlink_to("script")
    (top / "nowhere").symlink_to("no/such/file")
    (top / "dirlink").symlink_to("deep")
    for number in range(50):
        (top / "deep" / f"{number}").write_text(str(number))
    (top / "closed").mkdir()
    (top / "closed" / "inside").write_text("x")
    (top / "closed").chmod(0o555)
