"""Runs `exec-server sandbox` in a workspace, as root or as an ordinary user."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support import barriers
from tests.support.barriers import User
from tests.support.client import DEFAULT_TIMEOUT, scaled, server_command, server_environment
from tests.support.sandbox import PROTECTED, Json, Scratch

# The exit code if the command was not run.
NOT_RUN = 125


class SandboxCommand:
    """Runs `exec-server sandbox` in a workspace."""

    def __init__(self, user: User, scratch: Scratch) -> None:
        self.user: User = user
        self.scratch = scratch
        self.ws = scratch.base / "ws"

    def words(self, *words: str, barrier: str = "none") -> list[str]:
        """The command line as this user."""
        become = barriers.behind_barrier(self.user, barrier)
        return [*become, *server_command("ours"), "sandbox", *words]

    def __call__(
        self, *words: str, barrier: str = "none", **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end."""
        return run_to_end(self.words(*words, barrier=barrier), cwd=self.ws, **options)

    def run(self, policy_name: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command under a policy."""
        return self("run", "--policy", policy_name, "--", *argv, **options)

    @contextlib.contextmanager
    def start(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command line in its own process group, and wait until the command is ready."""
        with subprocess.Popen(
            self.words(*words),
            env=environment(),
            cwd=self.ws,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    pytest.fail(str(process.communicate(timeout=scaled(DEFAULT_TIMEOUT))))
                yield process
            finally:
                process.kill()

    def file(self, value: Json | str) -> str:
        """The path of a file with a policy, which is writable under no policy."""
        path = self.scratch.base / "policy.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    def placeholders(self) -> list[str]:
        """The protected names that exist."""
        return [name for name in PROTECTED if (self.ws / name).exists()]


def environment() -> dict[str, str]:
    """The environment of the test without TMPDIR."""
    return server_environment("ours", {"TMPDIR": None})


def run_to_end(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command line and capture its output."""
    return subprocess.run(
        words,
        env=environment(),
        **{"stdin": None if "input" in options else subprocess.DEVNULL} | options,
        capture_output=True,
        text=True,
        timeout=scaled(DEFAULT_TIMEOUT),
        check=False,
    )
