"""Checks that all dependencies have wheels for each system on which the client runs.

usage: check_wheels.py

Asks the package index through pip, without downloading the wheels. If the index does not answer,
one line says so and the exit code is 0.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
INDEX = "https://pypi.org/simple/ada-url/"
ANSWER_SECONDS = 10.0
# pip waits for the network most of the time.
AT_ONCE = 4

# The names of a system for people, for markers and for wheels.
SYSTEMS = (
    ("macOS on arm64", "darwin", ("macosx_12_0_arm64",)),
    ("macOS on x86-64", "darwin", ("macosx_12_0_x86_64",)),
    ("Windows on x86-64", "win32", ("win_amd64",)),
    ("Alpine (musl) on x86-64", "linux", ("musllinux_1_2_x86_64", "musllinux_1_1_x86_64")),
    ("Alpine (musl) on arm64", "linux", ("musllinux_1_2_aarch64", "musllinux_1_1_aarch64")),
)


def main() -> int:
    if not _index_answers():
        print("wheels: the package index does not answer; not checked")
        return 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    pythons = [line.removeprefix(prefix) for line in project["classifiers"] if prefix in line]
    cases = list(product(SYSTEMS, pythons))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        errors = list(threads.map(lambda case: _missing(project["dependencies"], *case), cases))
    for ((name, _, _), python), error in zip(cases, errors, strict=True):
        if error:
            print(f"{name}, Python {python}: {error}", file=sys.stderr)
    if any(errors):
        return 1
    names = ", ".join(name for name, _, _ in SYSTEMS)
    print(f"wheels: all dependencies have them for {names}; Python {', '.join(pythons)}")
    return 0


def _index_answers() -> bool:
    try:
        with urllib.request.urlopen(INDEX, timeout=ANSWER_SECONDS) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _missing(dependencies: list[str], system: tuple[str, str, tuple[str, ...]], python: str) -> str:
    """The message of pip about dependencies without a wheel; empty if there are none."""
    _, platform, tags = system
    with tempfile.TemporaryDirectory() as target:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"),
                *("--ignore-installed", "--only-binary=:all:", "--python-version", python),
                *(f"--platform={tag}" for tag in tags),
                *("--target", target),
                *_needed(dependencies, platform, python),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if ended.returncode == 0:
        return ""
    lines = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
    return " ".join(lines) or ended.stderr


def _needed(dependencies: list[str], platform: str, python: str) -> list[str]:
    """The requirements of a system. pip would read their markers for the system it runs on."""
    environment = {"sys_platform": platform, "python_version": python}
    needed = []
    for text in dependencies:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            needed.append(f"{requirement.name}{requirement.specifier}")
    return needed


if __name__ == "__main__":
    sys.exit(main())
