"""The commands for people as subprocesses: run to their end, or watched while they run."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.client import descendants, scaled, server_command, server_environment, survivors
from tests.support.server_internals import eventually

Ended = subprocess.CompletedProcess[bytes]


def client_environment(config: Path | None, extra: dict[str, str] | None = None) -> dict[str, str]:
    """Variables of a client that finds targets.toml in this directory, and no other."""
    where = "/nonexistent" if config is None else str(config.parent)
    return server_environment("ours", {"XDG_CONFIG_HOME": where, **(extra or {})})


def run_client(
    *words: str,
    config: Path | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    **options: object,
) -> Ended:
    """Run a client to its end; without `input` its stdin is /dev/null."""
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [*server_command("ours"), *words],
        env=client_environment(config, env),
        cwd=cwd,
        capture_output=True,
        timeout=scaled(30),
        check=False,
        **options,
    )


@contextlib.contextmanager
def start_client(*words: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A client that runs; killed at last with all that it has started."""
    usual: dict[str, object] = {"stdin": subprocess.DEVNULL, "env": client_environment(None)}
    usual |= dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(  # type: ignore[call-overload]
        [*server_command("ours"), *words],
        process_group=0,  # as a shell does it: only then can it be stopped
        **(usual | options),
    )
    try:
        yield process
    finally:
        family = descendants(process.pid)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        assert not survivors(family)


def stderr_text(ended: Ended) -> str:
    """The text on stderr."""
    return ended.stderr.decode()


def next_line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line of its stdout, once it is there."""
    assert process.stdout is not None
    return process.stdout.readline()


def wait_gone(pid: int) -> None:
    """Wait until there is no such process, not even a zombie."""
    eventually(f"process {pid} is gone", lambda: not Path(f"/proc/{pid}").exists())
