"""Boots a root in qemu, with our sources added, and passes its console on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TextIO

from tests.kernel import archive, guest
from tests.kernel.packages import Root, Unavailable

QEMU: Final = "qemu-system-x86_64"
_PROCESSORS: Final = 2
_MEMORY: Final = "4G"  # the root is in memory, in the mode tmpfs twice
_CLOSING: Final = re.compile(rf"{re.escape(guest.CLOSING)} (\d+)\s*$")
# The kernel of the guest says little, and a panic ends the machine.
_KERNEL_ARGUMENTS: Final = "console=ttyS0 quiet panic=-1 rdinit=/init"


def write_image(root: Root, project: Path, settings: Mapping[str, object], image: Path) -> None:
    """Write the initial ramfs: the root, the current sources, and what the guest is to do."""
    with tempfile.TemporaryDirectory() as temporary:
        added = Path(temporary)
        sources = added / guest.PROJECT.strip("/")
        _copy_sources(project, sources)
        root.compile(sources / "src", f"{guest.PROJECT}/src")
        root.compile(sources / "tests/support", f"{guest.PROJECT}/tests/support")
        (added / "init").write_text(guest.INIT + guest.INIT_CALL)
        (added / "init").chmod(0o755)
        (added / guest.SETTINGS.strip("/")).write_text(json.dumps(settings))
        added.chmod(0o755)
        with image.open("wb") as target:
            with root.image.open("rb") as base:
                shutil.copyfileobj(base, target)
            archive.add_tree(target, added)
            archive.add_end(target)


def _copy_sources(project: Path, target: Path) -> None:
    """Copy what git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=project, check=True, capture_output=True).stdout
    for name in listed.decode().split("\0"):
        source = project / name
        if name and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
            # Other users read the sources too.
            (target / name).chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def boot(kernel: Path, image: Path, *, accel: str, seconds: float, output: TextIO) -> int:
    """Run the machine to its end; returns the status that the guest reports, or 1."""
    words = [QEMU, "-accel", accel, "-cpu", "max"]
    words += ["-smp", str(_PROCESSORS), "-m", _MEMORY, "-nodefaults", "-display", "none"]
    words += ["-serial", "stdio", "-no-reboot", "-kernel", str(kernel), "-initrd", str(image)]
    words += ["-append", _KERNEL_ARGUMENTS]
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, errors="replace"
        )
    except FileNotFoundError as error:
        raise Unavailable(f"{QEMU} is not installed") from error
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        with process.stdout:
            status = pass_on(process.stdout, output)
        process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
    if status is None:
        reason = "was stopped after its time" if process.returncode == -signal.SIGKILL else "ended"
        print(f"the virtual machine {reason} without a status of its tests", file=output)
        return 1
    return status


def pass_on(lines: Iterable[str], output: TextIO) -> int | None:
    """Write the lines of a console; returns the status in its closing line, None without one."""
    status = None
    for line in lines:
        closing = _CLOSING.match(line)
        if closing is None:
            output.write(line.rstrip("\r\n") + "\n")
            output.flush()
        else:
            status = int(closing[1])
    return status
