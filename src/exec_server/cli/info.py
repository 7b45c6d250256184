"""`exec-server info`: version, directories, shell and capabilities of a target."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any, Final

from exec_server.cli.parser import CommandParser
from exec_server.cli.streams import json_text, print_text
from exec_server.cli.targets import TargetParser, chosen_target, with_access_flags
from exec_server.errors import printable

if TYPE_CHECKING:
    from exec_server.client.environment import Environment
    from exec_server.client.targets import Target

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

_DESCRIPTION: Final = """\
Show version, directories, shell and capabilities of a target, and whether its sandbox works.
"""
_EPILOG: Final = """\
examples:
  exec-server info build
  exec-server info --json ws://127.0.0.1:7700 | python3 -m json.tool
"""


def build_parser() -> CommandParser:
    parser = TargetParser("info", _DESCRIPTION, _EPILOG)
    parser.add_argument("target", metavar="TARGET", nargs="?")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return with_access_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    target = chosen_target(arguments)

    from exec_server.cli.connection import open_environment, run_until_signal

    async def work() -> int:
        async with open_environment(target) as environment:
            facts = await collect(target, environment)
        print_text(json_text(facts) if arguments.json else as_text(facts))
        return 0

    return run_until_signal(work)


async def collect(target: Target, environment: Environment) -> dict[str, Any]:
    """Ask a target for everything that `info` prints."""
    import msgspec

    from exec_server.client.arguments import native
    from exec_server.protocol.session import STATUS

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
    from exec_server.cli.connection import error_text
    from exec_server.errors import ExecServerError

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
