"""The rules of a policy behind the failures of file operations and commands."""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from typing import Literal

from exec_server.errors import RpcError, rpc_error_from_os
from exec_server.printable import lossy
from exec_server.protocol import files
from exec_server.protocol.files import ConfinableParams
from exec_server.protocol.process import OutputChunk
from exec_server.protocol.sandbox import Denial
from exec_server.sandbox.policy.access import explain_denial
from exec_server.sandbox.policy.denial import Explain, find_denial, is_likely_denied
from exec_server.sandbox.policy.model import Policy
from exec_server.sandbox.runtime.messages import CommandReports

log = logging.getLogger(__name__)

Operation = Literal["read", "write"]

# Params of operations that change the path.
_WRITES = (
    files.WriteFileParams
    | files.CreateDirectoryParams
    | files.RemoveParams
    | files.AppendParams
    | files.ChmodParams
    | files.SymlinkParams
    | files.SetTimesParams
    | files.EditParams
    | files.ApplyPatchParams
)


class DenialExplainer:
    """Explains failures under one policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def file_error(self, params: ConfinableParams, error: OSError) -> RpcError:
        """The error of a file operation, with the rule that denied the operation. Blocking."""
        failure = rpc_error_from_os(error)
        for path, operation in _accessed_paths(params):
            rule = self._rule(path, operation) or self._rule(os.path.realpath(path), operation)
            if rule is not None:
                log.info("sandbox denied to %s %s: %s (%s)", operation, path, rule, error.strerror)
                denial = {"path": lossy(path), "operation": operation, "rule": lossy(rule)}
                failure.data = {"sandboxDenial": denial}
                break
        return failure

    def _rule(self, path: str, operation: Operation) -> str | None:
        return explain_denial(self._policy, path, operation)


class CommandDenials:
    """The denials of one command, from its start to its end."""

    def __init__(self, policy: Policy, cwd: str) -> None:
        self._policy = policy
        self._cwd = cwd
        self._reports: CommandReports | None = None

    def follow(self, reports: CommandReports) -> None:
        """Take over the reports of the started command; `find` closes them."""
        self._reports = reports

    def check(self, exit_code: int, output: list[OutputChunk]) -> tuple[bool, Denial | None]:
        """Whether clients are told of a denial, and the denied operation; called once."""
        is_denied = is_likely_denied(exit_code, output)
        denial = self.find(exit_code, output, partial(explain_denial, self._policy))
        if denial is None and is_denied:
            denial = Denial(None, None, None, None)
        if denial is not None:
            log.info("sandbox denied something to a command: %s", denial)
        return is_denied, denial

    def find(self, exit_code: int, output: list[OutputChunk], explain: Explain) -> Denial | None:
        """The denied operation, None if none is known; called once, after the end."""
        return find_denial(
            exit_code,
            output,
            explain,
            cwd=self._cwd,
            is_offline=self._policy.network == "restricted",
            is_network_refused=self._is_refused(),
        )

    def _is_refused(self) -> bool:
        """Whether a refused network call was reported; closes the reports."""
        reports, self._reports = self._reports, None
        if reports is None:
            return False
        with contextlib.closing(reports):
            reports.read()
        has_listener = self._policy.network == "restricted" and self._policy.rules is not None
        return reports.is_refused and has_listener


def _accessed_paths(params: ConfinableParams) -> list[tuple[str, Operation]]:
    """The paths of a file operation and their accesses."""
    if isinstance(params, files.CopyParams | files.RenameParams):
        source, destination = params.source_path.native(), params.destination_path.native()
        is_copy = isinstance(params, files.CopyParams)
        return [(source, "read" if is_copy else "write"), (destination, "write")]
    writes = isinstance(params, _WRITES) or (
        isinstance(params, files.OpenParams) and params.mode != "read"
    )
    return [(params.path.native(), "write" if writes else "read")]
