"""What `exec-server exec` imports; its behaviour is tested in integration."""

from __future__ import annotations

import subprocess
import sys

# Each takes milliseconds, and no command on a WebSocket target needs it.
UNNEEDED = (
    "exec_server.client.engine.relay",
    "exec_server.client.engine.stdio",
    "exec_server.client.files",
    "exec_server.client.http",
    "exec_server.patching",
    "exec_server.server",
    "cryptography",
    "http",
    "pathlib",
    "shutil",
    "tempfile",
    "tomllib",
)


def test_unneeded_modules_are_not_imported() -> None:
    code = (
        "import sys; from exec_server.cli.commands import exec_command\n"
        "exec_command.build_parser().parse_words(['ws://h', 'true'])\n"
        "from exec_server.cli.commands import execution\n"
        "print(*sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert set(UNNEEDED) & set(ended.stdout.split()) == set()
