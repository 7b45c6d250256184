"""Published versions of Codex in the cache, where npm puts them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.older_servers import cache, older_binary

# The oldest that asks its server for confinement, one of each generation, and the newest.
GENERATIONS = (
    *("0.121.0", "0.123.0", "0.124.0", "0.125.0", "0.129.0", "0.133.0", "0.141.0"),
    *("0.144.6", "0.145.0", "0.153.4", "0.166.0", "0.169.0"),
)
# One of the oldest, one that polls and confines its commands itself, one that the server confines.
FEW = ("0.123.0", "0.133.0", "0.144.6")


def install(version: str) -> Path:
    """The program of a version, installed if it is not there; raises OSError if npm fails."""
    if (found := older_binary(version)) is not None:
        return found
    cache().mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete: others may look for it meanwhile.
    made = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=cache()))
    try:
        words = ["npm", "install", "--no-fund", "--no-audit", "--loglevel=error"]
        words += ["--prefix", str(made), f"@openai/codex@{version}"]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"npm cannot install {version}: {done.stderr.strip()[-300:]}")
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            made.rename(cache() / version)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    found = older_binary(version)
    assert found is not None, f"the package of {version} has no program"
    return found


@contextlib.contextmanager
def as_reference(program: Path) -> Iterator[None]:
    """Let the support of the tests take this program for the reference."""
    before = os.environ.get("EXEC_SERVER_REFERENCE")
    os.environ["EXEC_SERVER_REFERENCE"] = str(program)
    try:
        yield
    finally:
        if before is None:
            del os.environ["EXEC_SERVER_REFERENCE"]
        else:
            os.environ["EXEC_SERVER_REFERENCE"] = before
