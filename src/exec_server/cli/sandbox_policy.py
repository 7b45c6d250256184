"""The policy of `exec-server sandbox run`: loaded from its name or file, compiled, described.

The policy is decoded and compiled with the code that the server uses for a client's request, so
`run` shows why a request was denied.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from exec_server.cli.commands.errors import UsageError
from exec_server.cli.commands.policy_file import (
    needs_surroundings,
    read_policy,
    with_surroundings,
)
from exec_server.errors import RpcError
from exec_server.host.secret_variables import REGISTRY_NAMES, STRIPPED_NAMES
from exec_server.process.command import Command
from exec_server.protocol import decoding, presets
from exec_server.protocol.paths import path_to_uri
from exec_server.protocol.sandbox import Confinable, Sandbox
from exec_server.sandbox.policy import compiler
from exec_server.sandbox.policy.access import join
from exec_server.sandbox.policy.layout import lay_out, resolve_globs
from exec_server.sandbox.policy.model import Policy
from exec_server.sandbox.runtime import glob_scan
from exec_server.sandbox.runtime.disk import HostDisk


class _SandboxParams(Confinable, frozen=True):
    """Request params with only a `sandbox`, so that it is decoded as in a request."""

    sandbox: Sandbox


@dataclass(frozen=True)
class ConfinedCommand:
    """A command and its compiled policy; None for a policy without any limits."""

    command: Command
    policy: Policy | None


def prepare_command(arguments: argparse.Namespace, argv: list[str]) -> ConfinedCommand:
    """Build the command and compile its policy; raises UsageError."""
    if not argv and not arguments.show:
        raise UsageError("no command; write `exec-server sandbox run --policy POLICY -- COMMAND`")
    cwd = _directory("--cwd", arguments.cwd or os.getcwd())
    hidden = STRIPPED_NAMES | REGISTRY_NAMES
    env = {name: value for name, value in os.environ.items() if name.upper() not in hidden}
    env["PWD"] = cwd
    sandbox = _load_sandbox(arguments, cwd)
    minimal = tuple(path for path in compiler.MINIMAL_PATHS if os.path.exists(path))
    host_paths = compiler.HostPaths(env.get("TMPDIR"), minimal, os.path.isdir("/tmp"), cwd)
    try:
        policy = compiler.compile_policy(sandbox, host_paths, for_process=True)
    except RpcError as error:
        raise UsageError(f"{arguments.policy}: {error.message}") from error
    if policy == Policy(None, (), "enabled"):
        policy = None
    # With `pipe_stdin` the command gets all three descriptors from the given streams.
    return ConfinedCommand(Command(argv, cwd, env, pipe_stdin=True), policy)


def _directory(flag: str, path: str) -> str:
    if not os.path.isdir(path):
        raise UsageError(f"{flag}: {path} is not a directory")
    return os.path.abspath(path)


def _load_sandbox(arguments: argparse.Namespace, cwd: str) -> Sandbox:
    """Decode the `sandbox` object that the arguments describe, as in a request."""
    name = arguments.policy
    roots = [_directory("--root", root) for root in arguments.root or [cwd]]
    cwd_uri, root_uris = path_to_uri(cwd), [path_to_uri(root) for root in roots]
    if name in presets.PRESETS:
        if arguments.root and name == "read-only":
            raise UsageError("--root has no effect with --policy read-only")
        value: object = presets.preset(
            name, cwd=cwd_uri, roots=root_uris, network=arguments.network
        )
    else:
        value = read_policy("--policy", name)
        if arguments.network:
            raise UsageError(
                "--network has no effect with a policy FILE: set `network` in the file"
            )
        if needs_surroundings(value):
            value = with_surroundings(value, cwd_uri, root_uris)
        elif arguments.root:
            raise UsageError("--root has no effect with a FILE that holds a whole `sandbox` object")
    try:
        sandbox = decoding.decode(_SandboxParams, {"sandbox": value}).sandbox
    except RpcError as error:
        raise UsageError(f"{name}: {error.message}") from error
    if sandbox.use_legacy_landlock:
        raise UsageError(f"{name}: useLegacyLandlock is not supported: it would confine less")
    return sandbox


def describe_view(policy: Policy | None) -> str:
    """The view of a command: one line for each mount, missing name and pattern."""
    if policy is None:
        return "files      no limits\nnetwork    no limits\n"
    lines = []
    if policy.rules is None:
        lines.append("files      no limits")
    else:
        disk = HostDisk(sees_placeholders=False)
        patterns = resolve_globs(policy, disk)
        view = lay_out(policy, disk, glob_scan.scan_policy(policy, disk))
        rest = "only the following" if view.is_empty else "everything read-only, except"
        lines.append(f"files      {rest} (/dev and /proc are private)")
        lines += [f"{step.kind:<11}{step.path}" for step in view.steps]
        lines += [f"link       {link.path} -> {link.target}" for link in view.links]
        lines += [f"missing    {join(name.path, name.name)}" for name in view.missing]
        lines += [f"deny glob  {join(glob.root, glob.pattern)}" for glob in patterns]
    lines.append(f"network    {policy.network}")
    return "\n".join(lines) + "\n"
