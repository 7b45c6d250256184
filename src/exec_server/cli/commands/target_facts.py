"""The facts about a target that `exec-server info` shows."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from exec_server.cli.commands.connection import error_text
from exec_server.cli.commands.targets import Target
from exec_server.client.arguments import native
from exec_server.client.environment import Environment
from exec_server.errors import ExecServerError
from exec_server.printable import printable
from exec_server.protocol.session import STATUS

# Output of the command that tries the sandbox: the last line is the reason.
MAX_REASON_BYTES: Final = 65_536
# The simplest policy that confines anything: all paths readable, none writable.
_READ_ONLY_SANDBOX: dict[str, Any] = {
    "permissions": {
        "type": "managed",
        "file_system": {
            "type": "restricted",
            "entries": [{"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}],
        },
        "network": "restricted",
    },
    "windowsSandboxLevel": "disabled",
}


async def collect(target: Target, environment: Environment) -> dict[str, Any]:
    info = environment.info
    began = time.perf_counter()
    await environment.call(STATUS, None, is_retryable=True)
    round_trip = time.perf_counter() - began
    flags = msgspec.to_builtins(info.capabilities)
    return {
        "target": target.label,
        "where": target.address,
        "version": info.executor_version,
        "session": environment.session.session_id,
        "platform": info.platform_os,
        "shell": {"name": info.shell.name, "path": info.shell.path},
        "directory": info.cwd and native(info.cwd),
        "home": info.user_home_dir and native(info.user_home_dir),
        "temporary": native(info.temp_dir),
        "roundTripMs": round(round_trip * 1000, 3),
        "sandbox": await _check_sandbox(environment),
        "capabilities": flags,
    }


async def _check_sandbox(environment: Environment) -> dict[str, Any]:
    """Whether the server can confine a command, found out by running one."""
    info = environment.info
    sandbox = _READ_ONLY_SANDBOX | {"cwd": info.cwd or "file:///"}
    try:
        result = await environment.run(
            ["/bin/true"], sandbox=sandbox, timeout=10, output_limit=MAX_REASON_BYTES
        )
    except ExecServerError as error:
        return {"works": False, "reason": error_text(error)}
    if result.exit_code != 0:
        lines = result.error_text.strip().splitlines()
        return {"works": False, "reason": lines[-1] if lines else f"exit {result.exit_code}"}
    return {"works": True, "reason": None}


def as_text(facts: dict[str, Any]) -> str:
    flags: dict[str, bool] = facts["capabilities"]
    sandbox = facts["sandbox"]
    rows = [
        ("target", facts["target"]),
        *([("at", facts["where"])] if facts["where"] != facts["target"] else []),
        ("version", facts["version"] or "unknown"),
        ("session", facts["session"] or "none"),
        ("platform", facts["platform"] or "unknown"),
        ("shell", f"{facts['shell']['name']} ({facts['shell']['path']})"),
        ("directory", facts["directory"] or "unknown"),
        ("home", facts["home"] or "unknown"),
        ("temporary", facts["temporary"]),
        ("round trip", f"{facts['roundTripMs']:.1f} ms"),
        ("sandbox", "works" if sandbox["works"] else f"does not work: {sandbox['reason']}"),
    ]
    lines = [f"{label:12} {printable(value)}" for label, value in rows]
    lines += [
        f"{'capabilities':12} {_one_per_line(name for name, value in flags.items() if value)}",
        f"{'unsupported':12} {_one_per_line(name for name, value in flags.items() if not value)}",
    ]
    return "\n".join([*lines, ""])


def _one_per_line(names: Any) -> str:
    return f"\n{'':12} ".join(names) or "-"
