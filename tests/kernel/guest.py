"""The first process of the virtual machine: mounts file systems, runs pytest, reports its status.

It begins on the initial ramfs. With the root `tmpfs` it copies everything into a tmpfs, which
becomes the root, and begins again there; with `ramfs` the initial ramfs stays the root, as on many
microVMs, and the kernel refuses to move it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Final

SETTINGS: Final = "/exec-server-test.json"
PROJECT: Final = "/srv/exec-server"
INIT: Final = f"#!/usr/bin/python3 -P\nimport sys\nsys.path[:0] = ['{PROJECT}', '{PROJECT}/src']\n"
INIT_CALL: Final = "from tests.kernel import guest\nguest.main()\n"
# The last line for the host, with the exit status.
CLOSING: Final = "exec-server-kernel: status"
_NEW_ROOT: Final = "/new-root"
_MOUNTS: Final = (
    ("proc", "/proc", "nosuid,nodev,noexec"),
    ("sysfs", "/sys", "nosuid,nodev,noexec"),
    ("devtmpfs", "/dev", "nosuid,mode=755"),
    ("devpts", "/dev/pts", "nosuid,noexec,mode=620,gid=5,ptmxmode=666"),
    ("tmpfs", "/dev/shm", "nosuid,nodev,mode=1777"),
    ("cgroup2", "/sys/fs/cgroup", "nosuid,nodev,noexec"),
)
_LINKS: Final = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_USERS: Final = {"root": 0, "ordinary": 1000}


def main() -> None:
    """Run the tests of the settings and power the machine off; a failure is reported too."""
    settings = json.loads(Path(SETTINGS).read_text())
    if settings["root"] == "tmpfs" and not Path(_NEW_ROOT).exists():
        _move_into_tmpfs()
    status = 1
    try:
        _set_up()
        status = max([_run_tests(user, settings) for user in settings["users"]])
    except BaseException:
        traceback.print_exc()
    print(f"\n{CLOSING} {status}", flush=True)
    subprocess.run(["sync"], check=False)
    Path("/proc/sysrq-trigger").write_text("o")
    signal.pause()


def _move_into_tmpfs() -> None:
    os.mkdir(_NEW_ROOT)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=75%", "tmpfs", _NEW_ROOT], check=True)
    subprocess.run(["cp", "-ax", "/.", f"{_NEW_ROOT}/"], check=True)
    os.execv("/sbin/switch_root", ["switch_root", _NEW_ROOT, "/init"])


def _set_up() -> None:
    """What a Debian machine has when its services are started."""
    for kind, path, options in _MOUNTS:
        os.makedirs(path, exist_ok=True)
        subprocess.run(["mount", "-t", kind, "-o", options, kind, path], check=True)
    for name, target in _LINKS.items():
        os.symlink(target, f"/dev/{name}")
    for path in ("/tmp", "/var/tmp"):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o1777)
    os.chown("/home/tester", _USERS["ordinary"], _USERS["ordinary"])
    os.chmod("/root", 0o700)
    from exec_server.sandbox.runtime import child

    child.bring_up()


def _run_tests(user: str, settings: dict[str, Any]) -> int:
    """Run pytest as a user; orphans are reaped meanwhile, which tests wait for."""
    uid = _USERS[user]
    kernel = os.uname()
    print(f"== Linux {kernel.release}, root on {settings['root']}, as {user}", flush=True)
    words = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *settings["tests"]]
    home = "/root" if uid == 0 else "/home/tester"
    env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "LANG": "C.UTF-8",
        "PYTHONPATH": f"{PROJECT}:{PROJECT}/src",
        "HYPOTHESIS_STORAGE_DIRECTORY": f"{home}/.hypothesis",
        **settings["env"],
    }
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(PROJECT)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        if uid != 0:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        os.execve(words[0], words, env)
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status) & 0xFF
