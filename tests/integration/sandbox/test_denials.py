"""What clients are told about denials that people meet every day."""

from __future__ import annotations

import os
import shutil

import pytest
from tests.support.client import Client
from tests.support.sandbox import Outcome, Stage, interpreter
from tests.support.server_internals import eventually, open_descriptors

NO_NETWORK = "network access is restricted"
READ_ONLY = "no policy entry allows writing here; the closest one is: read /"
_NEEDS_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
_NEEDS_GIT = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def _network(outcome: Outcome) -> str | None:
    """The text of a network denial."""
    assert outcome.denial is not None, outcome
    text: str | None = outcome.denial["text"]
    expected = {"text": text, "path": None, "operation": "network", "rule": NO_NETWORK}
    assert outcome.denial == expected
    return text


# ---- the network ----------------------------------------------------------------------


@_NEEDS_CURL
@pytest.mark.parametrize("terminal", [False, True], ids=["pipes", "terminal"])
def test_curl_without_network(stage: Stage, client: Client, terminal: bool) -> None:
    for url in ("http://example.invalid/", "http://127.0.0.1:9/", "http://[::1]:9/"):
        outcome = stage.shell(client, "WW", f"curl -sS {url}", tty=terminal)
        assert outcome.exit_code in (6, 7)
        assert outcome.denied is False  # its text does not have a phrase of the reference
        text = _network(outcome)
        assert text is not None
        assert text.startswith(f"curl: ({outcome.exit_code})")


@_NEEDS_GIT
def test_git_clone_without_network(stage: Stage, client: Client) -> None:
    outcome = stage.shell(client, "WW", "git clone http://example.invalid/x.git")
    assert outcome.exit_code == 128
    text = _network(outcome)
    assert text is not None
    assert text.startswith("fatal: unable to access")


@_NEEDS_CURL
def test_success_despite_the_refused_network(stage: Stage, client: Client) -> None:
    outcome = stage.shell(client, "WW", "curl -s http://example.invalid/ || echo offline")
    assert (outcome.exit_code, outcome.stdout, outcome.denied) == (0, "offline\n", False)
    assert _network(outcome) is None


def test_a_call_in_a_child_is_known(stage: Stage, client: Client) -> None:
    code = "import socket, sys; sys.exit(socket.socket().fileno())"
    script = f"(setsid {interpreter()} -c '{code}' 2>/dev/null); exit 3"
    outcome = stage.shell(client, "WW", script)
    assert (outcome.exit_code, outcome.denied) == (3, False)
    assert _network(outcome) is None


@pytest.mark.parametrize("name", ["WW", "RO", "MINW"])
def test_prebuilt_and_new_sandboxes_know_it(stage: Stage, client: Client, name: str) -> None:
    argv = [interpreter(), "-S", "-c", "import socket\ntry: socket.socket()\nexcept OSError: pass"]
    for _ in range(3):
        outcome = stage.run(client, name, argv)
        assert (outcome.exit_code, outcome.output) == (0, "")
        _network(outcome)


_QUIET = """
import os, pwd, socket
pwd.getpwuid(0)
# Libraries like urllib3 open one socket of IPv6, once, to learn whether the machine has it.
for family in (socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
    try:
        socket.socket(family, socket.SOCK_RAW)
    except OSError:
        pass
try:
    socket.socket(socket.AF_UNIX).connect('/run/nothing')
except OSError:
    pass
for end in socket.socketpair():
    end.close()
"""


def test_calls_that_every_program_makes_are_no_denial(stage: Stage, client: Client) -> None:
    for argv in ([interpreter(), "-c", _QUIET], ["ls", "-l", "/etc"], ["id"]):
        outcome = stage.run(client, "WW", argv)
        assert (outcome.exit_code, outcome.denial) == (0, None), outcome


def test_an_unresolved_name_is_no_denial_where_the_network_is_allowed(
    stage: Stage, client: Client
) -> None:
    script = "echo 'curl: (6) Could not resolve host: example.com' >&2; exit 6"
    outcome = stage.shell(client, "WWNET", script)
    assert (outcome.exit_code, outcome.denied, outcome.denial) == (6, False, None)
    # The text alone is no denial of a restricted network either.
    outcome = stage.shell(client, "WW", script)
    assert (outcome.exit_code, outcome.denied, outcome.denial) == (6, False, None)


_STORM = """
import ctypes, os
call = ctypes.CDLL(None, use_errno=True).socket
for _ in range(4):
    os.fork()
wrong = sum(call(2, 1, 0) != -1 or ctypes.get_errno() != 1 for _ in range(300))
os._exit(min(wrong, 1))
"""


def test_thousands_of_refused_calls_are_answered_and_reported_once(
    stage: Stage, client: Client
) -> None:
    outcome = stage.run(client, "WW", [interpreter(), "-S", "-c", _STORM])
    assert outcome.exit_code == 0, outcome
    _network(outcome)


def test_a_command_that_is_terminated_leaves_no_descriptor(stage: Stage, client: Client) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may count the descriptors of another process")
    stage.shell(client, "RO", "true")
    before = open_descriptors(stage.server)
    for number in range(20):
        name = f"terminated-{number}"
        params = {
            "processId": name,
            "argv": ["sleep", "60"],
            "cwd": "file:///",
            "env": {"PATH": "/usr/bin:/bin"},
            "tty": False,
            "pipeStdin": False,
            "arg0": None,
            "sandbox": stage.policy("RO"),
        }
        started = client.request("process/start", params)
        ended = client.request("process/terminate", {"processId": name})
        client.answer(started)
        client.answer(ended)
    eventually("descriptors are closed", lambda: open_descriptors(stage.server) <= before + 4)


def test_two_sockets_of_ipv6_are_a_use_of_the_network(stage: Stage, client: Client) -> None:
    code = "import socket\nfor _ in 1, 2:\n try: socket.socket(socket.AF_INET6)\n except OSError: 0"
    outcome = stage.run(client, "WW", [interpreter(), "-S", "-c", code])
    assert (outcome.exit_code, outcome.output) == (0, "")
    _network(outcome)


# ---- files ----------------------------------------------------------------------------


def test_a_denied_write_before_a_success(stage: Stage, client: Client) -> None:
    outcome = stage.shell(client, "WW", "touch /etc/x; echo done")
    assert (outcome.exit_code, outcome.stdout, outcome.denied) == (0, "done\n", False)
    text = "touch: cannot touch '/etc/x': Read-only file system"
    assert outcome.denial == {
        "text": text,
        "path": "/etc/x",
        "operation": "write",
        "rule": READ_ONLY,
    }


def test_a_denied_write_in_the_middle_of_a_terminal(stage: Stage, client: Client) -> None:
    outcome = stage.shell(client, "WW", "echo one; mkdir /etc/x; echo two", tty=True)
    assert (outcome.exit_code, outcome.denied) == (0, False)
    assert outcome.denial is not None
    assert (outcome.denial["path"], outcome.denial["operation"]) == ("/etc/x", "write")


@_NEEDS_GIT
def test_git_init_names_the_protected_directory(stage: Stage, client: Client) -> None:
    outcome = stage.shell(client, "WW", "git init")
    assert outcome.exit_code == 128
    assert outcome.denial is not None
    assert outcome.denial["path"].startswith(f"{stage.ws}/.git/")
    assert outcome.denial["rule"] == f"`.git` below the writable root {stage.ws} is protected"


def test_a_relative_name_in_a_directory_that_the_command_has_entered(
    stage: Stage, client: Client
) -> None:
    outcome = stage.shell(client, "WW", "cd /etc && touch x")
    assert outcome.denial is not None
    assert (outcome.denial["path"], outcome.denial["rule"]) == ("/etc/x", READ_ONLY)


def test_a_move_from_and_to_denied_places(stage: Stage, client: Client) -> None:
    outcome = stage.shell(client, "WW", "mv /etc/hostname /etc/moved")
    assert outcome.denial is not None
    candidates = outcome.denial["candidates"]
    assert [each["path"] for each in candidates] == ["/etc/hostname", "/etc/moved"]
    assert outcome.denial == candidates[0] | {"candidates": candidates}


def test_renaming_a_protected_name(stage: Stage, client: Client) -> None:
    outcome = stage.shell(client, "WW", "mv .git moved")
    assert outcome.exit_code == 1
    assert outcome.denial is not None
    assert (outcome.denial["path"], outcome.denial["operation"]) == (f"{stage.ws}/.git", "write")


def test_a_denied_read_before_a_success(stage: Stage, client: Client) -> None:
    outcome = stage.shell(client, "DENYSUB", "cat sub/s.txt; true")
    assert (outcome.exit_code, outcome.denied) == (0, False)
    rule = f"deny entry {stage.ws}/sub"
    assert outcome.denial is not None
    assert outcome.denial["path"] == f"{stage.ws}/sub/s.txt"
    assert (outcome.denial["operation"], outcome.denial["rule"]) == ("read", rule)


@pytest.mark.parametrize(
    "script",
    [
        "mkdir closed; chmod 000 closed; ls closed/x; cat closed; chmod 700 closed; true",
        f"cp {interpreter()} copy; chmod 600 copy; ./copy; true",
        "echo \"touch: cannot touch '/etc/x': Read-only file system\"",
        "mkdir 'Read-only file system'; ls 'Read-only file system'; true",
        "cat missing; true",
    ],
)
def test_errors_that_the_policy_does_not_explain(stage: Stage, client: Client, script: str) -> None:
    outcome = stage.shell(client, "WW", script)
    assert (outcome.exit_code, outcome.denied, outcome.denial) == (0, False, None), outcome


def test_an_allowed_path_behind_a_link_is_no_denial(stage: Stage, client: Client) -> None:
    (stage.base / "link").symlink_to(stage.ws)
    script = f"mkdir closed; chmod 555 closed; touch {stage.base}/link/closed/x; true"
    outcome = stage.shell(client, "WW", script)
    assert (outcome.exit_code, outcome.denial) == (0, None), outcome
