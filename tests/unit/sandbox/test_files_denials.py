"""The rule behind the error of a file operation."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from exec_server.errors import NotFound
from exec_server.protocol import files
from exec_server.protocol.files import ConfinableParams
from exec_server.protocol.paths import PathUri
from exec_server.sandbox.files import explain_file_error
from exec_server.sandbox.policy.model import Policy, Rule

DENIED = PermissionError(errno.EACCES, "Permission denied")
READ_ONLY = "no policy entry allows writing here; the closest one is: read /"


def _policy(*rules: Rule) -> Policy:
    return Policy((Rule("/", "read"), *rules), (), "restricted")


def _uri(path: str) -> PathUri:
    return PathUri.from_wire(path)


@pytest.mark.parametrize(
    ("params", "path", "operation"),
    [
        (files.WriteFileParams(_uri("/a"), ""), "/a", "write"),
        (files.CreateDirectoryParams(_uri("/a")), "/a", "write"),
        (files.RemoveParams(_uri("/a")), "/a", "write"),
        (files.OpenParams(files.HandleId("h"), _uri("/a"), "replace"), "/a", "write"),
        (files.CopyParams(_uri("/a"), _uri("/b"), False), "/b", "write"),
        (files.ReadFileParams(_uri("/secret")), "/secret", "read"),
        (files.OpenParams(files.HandleId("h"), _uri("/secret"), "read"), "/secret", "read"),
        (files.CopyParams(_uri("/secret"), _uri("/b"), False), "/secret", "read"),
    ],
)
def test_the_error_of_a_file_operation_names_the_rule(
    params: ConfinableParams, path: str, operation: str
) -> None:
    policy = _policy(Rule("/secret", "deny"))
    rule = "deny entry /secret" if operation == "read" else READ_ONLY
    failure = explain_file_error(policy, params, DENIED)
    assert failure.data == {"sandboxDenial": {"path": path, "operation": operation, "rule": rule}}
    assert failure.message == "Permission denied (os error 13)"


def test_a_link_is_explained_by_its_target(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "link").symlink_to("secret")
    policy = _policy(Rule(f"{tmp_path.resolve()}/secret", "deny"))
    path = f"{tmp_path}/link/file"
    failure = explain_file_error(policy, files.ReadFileParams(_uri(path)), DENIED)
    rule = f"deny entry {tmp_path.resolve()}/secret"
    assert failure.data == {"sandboxDenial": {"path": path, "operation": "read", "rule": rule}}


def test_an_error_without_a_rule_stays_as_it_is() -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory")
    failure = explain_file_error(_policy(), files.ReadFileParams(_uri("/a")), error)
    assert isinstance(failure, NotFound)
    assert failure.data is None
