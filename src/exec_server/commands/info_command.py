"""`exec-server info`: what a target is, where it works, and what it can do."""

from __future__ import annotations

import argparse
import time
from typing import Any

import msgspec

from exec_server.client.environment import Environment
from exec_server.client.places import native
from exec_server.commands.arguments import access
from exec_server.commands.connection import connected, reason, run_to_end
from exec_server.commands.printing import print_text
from exec_server.commands.targets import Target, find_target
from exec_server.errors import ExecServerError
from exec_server.protocol.session import STATUS

# The plainest policy that confines anything: all can be read, nothing written.
_READ_ONLY: dict[str, Any] = {
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


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments say; returns the exit code."""
    target = find_target(arguments.target, access(arguments))

    async def work() -> int:
        async with connected(target) as environment:
            facts = await _facts(target, environment)
        print_text(_as_json(facts) if arguments.json else _as_text(facts))
        return 0

    return run_to_end(work)


async def _facts(target: Target, environment: Environment) -> dict[str, Any]:
    info = environment.info
    began = time.perf_counter()
    await environment.call(STATUS, None, is_retryable=True)
    round_trip = time.perf_counter() - began
    flags = msgspec.to_builtins(info.capabilities)
    return {
        "target": target.label,
        "where": target.whereabouts,
        "version": info.executor_version,
        "session": environment.session.session_id,
        "platform": info.platform_os,
        "shell": {"name": info.shell.name, "path": info.shell.path},
        "directory": info.cwd and native(info.cwd),
        "home": info.user_home_dir and native(info.user_home_dir),
        "temporary": native(info.temp_dir),
        "roundTripMs": round(round_trip * 1000, 3),
        "sandbox": await _try_sandbox(environment),
        "capabilities": flags,
    }


async def _try_sandbox(environment: Environment) -> dict[str, Any]:
    """Whether a command can be confined there: nothing but trying tells."""
    info = environment.info
    sandbox = _READ_ONLY | {"cwd": info.cwd or "file:///"}
    try:
        result = await environment.run(["/bin/true"], sandbox=sandbox, timeout=10)
    except ExecServerError as error:
        return {"works": False, "reason": reason(error)}
    if result.exit_code != 0:
        lines = result.error_text.strip().splitlines()
        return {"works": False, "reason": lines[-1] if lines else f"exit {result.exit_code}"}
    return {"works": True, "reason": None}


def _as_json(facts: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(facts)).decode() + "\n"


def _as_text(facts: dict[str, Any]) -> str:
    flags: dict[str, bool] = facts["capabilities"]
    sandbox = facts["sandbox"]
    rows = [
        ("target", facts["target"]),
        *([("at", facts["where"])] if facts["where"] != facts["target"] else []),
        ("version", facts["version"] or "unknown"),
        ("session", facts["session"]),
        ("platform", facts["platform"] or "unknown"),
        ("shell", f"{facts['shell']['name']} ({facts['shell']['path']})"),
        ("directory", facts["directory"] or "unknown"),
        ("home", facts["home"] or "unknown"),
        ("temporary", facts["temporary"]),
        ("round trip", f"{facts['roundTripMs']:.1f} ms"),
        ("sandbox", "works" if sandbox["works"] else f"does not work: {sandbox['reason']}"),
        ("can", _listed(name for name, value in flags.items() if value)),
        ("cannot", _listed(name for name, value in flags.items() if not value)),
    ]
    return "".join(f"{label:11} {value}\n" for label, value in rows)


def _listed(names: Any) -> str:
    return f"\n{'':11} ".join(names) or "-"
