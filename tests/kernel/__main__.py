"""Runs tests of the sandbox in a virtual machine with a kernel of Debian.

The default is everything of the sandbox. Other arguments are arguments of pytest: files, -k, -x.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.kernel import machine, packages

_PROJECT: Final = Path(__file__).resolve().parents[2]
# What depends on the kernel.
_TESTS: Final = (
    "tests/conformance/test_sandbox_cases.py",
    "tests/integration/sandbox",
    "tests/unit/sandbox/runtime",
    "tests/unit/sandbox/policy/test_seccomp.py",
)
# Timing means nothing in an emulated machine.
_ALWAYS: Final = ("-q", "--color=no", "-rfE", "-m", "not measured and not reference")
_SCALE: Final = 10
_MINUTES: Final = 120


def main() -> int:
    """Build what is missing, boot, and return the status of the tests."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the machine is ended
    parser = argparse.ArgumentParser(prog="python -m tests.kernel", description=__doc__)
    parser.add_argument(
        "--kernel", default=packages.RELEASE, metavar="RELEASE", help="Debian release of the kernel"
    )
    parser.add_argument(
        "--root",
        choices=["tmpfs", "ramfs"],
        default="tmpfs",
        help="root file system: a tmpfs, or the initial ramfs",
    )
    parser.add_argument("--user", choices=["root", "ordinary", "both"], default="both")
    # kvm is there in many virtual machines that cannot use it, so nothing is guessed.
    parser.add_argument("--accel", default="tcg", help="accelerator of qemu: tcg emulates, kvm")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="time for everything")
    parser.add_argument(
        "--skip-missing", action="store_true", help="succeed where the machine cannot be made"
    )
    parser.add_argument("--build", action="store_true", help="only fetch and make what is missing")
    arguments, tests = parser.parse_known_args()
    try:
        return _run(arguments, tests)
    except packages.Unavailable as problem:
        print(f"no tests in a virtual machine: {problem}", file=sys.stderr)
        return 0 if arguments.skip_missing else 1


def _run(arguments: argparse.Namespace, tests: list[str]) -> int:
    if platform.machine() != "x86_64":
        raise packages.Unavailable(f"the kernel is for x86_64, this is {platform.machine()}")
    if shutil.which(machine.QEMU) is None:
        raise packages.Unavailable(f"{machine.QEMU} is not installed (qemu-system-x86)")
    began = time.monotonic()
    kernel = packages.kernel(arguments.kernel)
    root = packages.root(Path(sys.executable), _PROJECT)
    if arguments.build:
        return 0
    users = ["root", "ordinary"] if arguments.user == "both" else [arguments.user]
    has_paths = any(word.partition("::")[0].startswith("tests/") for word in tests)
    words = [*_ALWAYS, *tests, *(() if has_paths else _TESTS)]
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder, "image")
        env = {"EXEC_SERVER_TEST_TIMEOUT_SCALE": str(_SCALE), "PYTEST_TIMEOUT": str(60 * _SCALE)}
        settings = {"root": arguments.root, "users": users, "tests": words, "env": env}
        machine.write_image(root, _PROJECT, settings, image)
        print(f"{kernel.name}: made in {time.monotonic() - began:.0f} s", flush=True)
        status = machine.boot(
            kernel, image, accel=arguments.accel, seconds=arguments.minutes * 60, output=sys.stdout
        )
    print(f"{kernel.name}: {time.monotonic() - began:.0f} s, status {status}")
    return status


if __name__ == "__main__":
    sys.exit(main())
