"""What is said about the denials of real programs: their output, as it was recorded."""

from __future__ import annotations

from functools import partial

import pytest

from exec_server.protocol.process import OutputChunk
from exec_server.protocol.sandbox import Denial
from exec_server.sandbox.policy.access import explain_denial
from exec_server.sandbox.policy.denial import (
    COMMAND_CHARACTERS,
    ENTERED_DIRECTORIES,
    entered_directories,
    find_denial,
)
from exec_server.sandbox.policy.model import Policy, Rule

POLICY = Policy(
    (Rule("/", "read"), Rule("/tmp", "write"), Rule("/ws", "write"), Rule("/ws/secret", "deny")),
    (),
    "restricted",
)
READ_ONLY = "no policy entry allows writing here; the closest one is: read /"
GIT = "`.git` below the writable root /ws is protected"
NO_NETWORK = "network access is restricted"

# What the denial says: the operation and its path, or the network.
NETWORK = "network"


def _found(
    output: str, *, refused: bool = False, code: int = 1, entered: tuple[str, ...] = ()
) -> Denial | None:
    return find_denial(
        code,
        [OutputChunk(1, "stderr", output.encode())],
        partial(explain_denial, POLICY),
        cwd="/ws",
        is_offline=True,
        network_rule=NO_NETWORK if refused else None,
        entered=entered,
    )


def _said(denial: Denial) -> str:
    if denial.operation == "network":
        assert (denial.path, denial.rule) == (None, NO_NETWORK)
        return NETWORK
    return f"{denial.operation} {denial.path}"


# ---- one path ---------------------------------------------------------------------------

FILES = [
    # Copies: the source is only read.
    (
        "fatal: cannot copy '/usr/share/git-core/templates/description' to "
        "'/ws/.git/description': Read-only file system",
        "write /ws/.git/description",
    ),
    ("Error: EROFS: read-only file system, copyfile '/etc/passwd' -> '/etc/x'", "write /etc/x"),
    # The target of a symbolic link is not touched, and may be relative to the link.
    ("Error: EROFS: read-only file system, symlink '/usr/lib' -> '/etc/x'", "write /etc/x"),
    (
        "npm error rofs EROFS: read-only file system, symlink '../../../var/tmp/a' -> "
        "'/usr/lib/node_modules/x'",
        "write /usr/lib/node_modules/x",
    ),
    ("symlink /usr/lib /etc/x: read-only file system", "write /etc/x"),
    (
        'rsync: [generator] symlink "/etc/x" -> "/usr/y" failed: Read-only file system (30)',
        "write /etc/x",
    ),
    ("ln: failed to create hard link '/etc/b' => '/usr/a': Read-only file system", "write /etc/b"),
    ("cp: cannot create symbolic link '/etc/b' to '/usr/a': Read-only file system", "write /etc/b"),
    # A move of which the policy allows one half.
    ("OSError: [Errno 30] Read-only file system: '/ws/a' -> '/etc/x'", "write /etc/x"),
    (
        "mv: inter-device move failed: 'a' to '/etc/b'; unable to remove target: "
        "Read-only file system",
        "write /etc/b",
    ),
    # Other words in quotes, and places in programs.
    (
        "fatal: cannot lock ref 'refs/heads/wt': Unable to create '/ws/.git/refs/heads/wt.lock': "
        "Read-only file system",
        "write /ws/.git/refs/heads/wt.lock",
    ),
    (
        "PHP Warning:  fopen(/etc/x): Failed to open stream: Read-only file system in "
        "/usr/share/php/t.php on line 3",
        "write /etc/x",
    ),
    ("cannot: Read-only file system at /usr/bin/tool line 1.", "write None"),
    (
        "patch: **** Can't create temporary file /etc/hostname.ogeCps : Read-only file system",
        "write /etc/hostname.ogeCps",
    ),
    (
        'error: couldn\'t create a temp dir: Read-only file system (os error 30) at path "/usr/r"',
        "write /usr/r",
    ),
    ("cp: cannot open 'secret/key' for reading: Permission denied", "read /ws/secret/key"),
    (
        "checkdir:  cannot create extraction directory: /etc/zz\n           Read-only file system",
        "write /etc/zz",
    ),
    # A relative name of another directory: `cd /etc; echo > x`, `tar -C /etc`.
    ("sh: 1: cannot create x: Read-only file system", "write None"),
    ("tar: f: Cannot open: Read-only file system", "write None"),
    # The progress of a terminal before the error.
    ("copying /usr/a\r 50%\rtouch: cannot touch '/etc/b': Read-only file system\r", "write /etc/b"),
]


@pytest.mark.parametrize(("output", "said"), FILES)
def test_the_path_that_was_denied_is_named(output: str, said: str) -> None:
    denial = _found(f"starting\n{output}\n")
    assert denial is not None
    assert (_said(denial), denial.candidates) == (said, ())
    expected = GIT if "/.git" in said else "deny entry /ws/secret" if "read" in said else READ_ONLY
    assert denial.rule == (None if "None" in said else expected)
    assert denial.text is not None
    assert "\r" not in denial.text


# ---- names of other directories -----------------------------------------------------------

ENTERED = [
    (["sh", "-c", "cd /etc; echo > x"], ["/etc"]),
    (["bash", "-lc", "set -e\ncd sub && (cd '../other' && make)"], ["/ws/sub", "/ws/other"]),
    (["tar", "-C", "/etc", "-xf", "a.tar"], ["/etc"]),
    (["git", "-C", "sub", "commit"], ["/ws/sub"]),
    (["sh", "-c", "cd; cd -; cd $HOME; cd ~; abcd /etc; cd -- /usr"], ["/usr"]),
    (["sh", "-c", "".join(f"cd /{number};" for number in range(9))], ["/5", "/6", "/7", "/8"]),
    (["sh", "-c", ":" * COMMAND_CHARACTERS + "; cd /etc"], []),
]


@pytest.mark.parametrize(("argv", "directories"), ENTERED)
def test_the_directories_that_a_command_enters(argv: list[str], directories: list[str]) -> None:
    assert list(entered_directories(argv, "/ws")) == directories
    assert len(directories) <= ENTERED_DIRECTORIES


@pytest.mark.parametrize(
    ("line", "entered", "said"),
    [
        ("sh: 1: cannot create x: Read-only file system", ["/etc"], ["write /etc/x"]),
        ("sh: 1: cannot create x: Read-only file system", ["/ws/sub"], ["write None"]),
        ("touch: cannot touch 'x': Read-only file system", ["/etc", "/ws/sub"], ["write /etc/x"]),
        (
            "rm: cannot remove '.git/HEAD': Read-only file system",
            ["/ws/sub"],
            ["write /ws/.git/HEAD"],
        ),
        (
            "touch: cannot touch 'x': Read-only file system",
            ["/etc", "/usr"],
            ["write /usr/x", "write /etc/x"],
        ),
        ("cat: key: Permission denied", ["/ws/secret"], ["read /ws/secret/key"]),
        ("cat: /ws/secret/key: Permission denied", ["/etc"], ["read /ws/secret/key"]),
    ],
)
def test_a_relative_name_is_tried_where_the_command_has_been(
    line: str, entered: list[str], said: list[str]
) -> None:
    denial = _found(line, entered=tuple(entered))
    assert denial is not None
    assert [_said(each) for each in denial.candidates or (denial,)] == said


# ---- the network ------------------------------------------------------------------------

_TRACEBACK = """Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/usr/lib/python3.11/socket.py", line 851, in create_connection
    raise exceptions[0]
  File "/usr/lib/python3.11/socket.py", line 232, in __init__
    _socket.socket.__init__(self, family, type, proto, fileno)
    ~~~~~~~~~~~~~~~~~~~~~~~^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
PermissionError: [Errno 1] Operation not permitted
"""
_GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/usr/lib/python3.11/asyncio/base_events.py", line 950, in _connect_sock
  |     sock = socket.socket(family=family, type=type_, proto=proto)
  | PermissionError: [Errno 1] Operation not permitted
  +------------------------------------
"""
_NODE = """node:events:497
      throw er; // Unhandled 'error' event
      ^

Error: connect EPERM 1.2.3.4:80 - Local (undefined:undefined)
    at internalConnect (node:net:1104:16)
    at node:net:1297:9
    at process.processTicksAndRejections (node:internal/process/task_queues:82:21)
Emitted 'error' event on Socket instance at:
    at emitErrorNT (node:internal/streams/destroy:170:8)
    at process.processTicksAndRejections (node:internal/process/task_queues:82:21) {
  errno: -1,
  code: 'EPERM',
  syscall: 'connect',
  address: '1.2.3.4',
  port: 80
}

Node.js v20.20.2
"""
_FETCH = """TypeError: fetch failed
    at node:internal/deps/undici/undici:13510:13
  [cause]: Error: getaddrinfo EAI_AGAIN example.com
      at GetAddrInfoReqWrap.onlookupall [as oncomplete] (node:dns:122:26) {
    errno: -3001,
    code: 'EAI_AGAIN',
    syscall: 'getaddrinfo',
    hostname: 'example.com'
  }
}
"""
_JAVA = """Exception in thread "main" java.net.SocketException: Operation not permitted
\tat java.base/java.net.Socket.createImpl(Socket.java:533)
\tat java.base/java.net.Socket.<init>(Socket.java:287)
\tat A.main(A.java:1)
"""
_CARGO = """warning: spurious network error (1 try remaining): [6] Could not resolve hostname
error: failed to get `serde` as a dependency of package `a v0.1.0 (/ws)`

Caused by:
  failed to download from `https://index.crates.io/config.json`

Caused by:
  [6] Could not resolve hostname (Could not resolve host: index.crates.io)
"""
_CURL = (
    "  % Total    % Received % Xferd  Average Speed   Time    Time     Time  Current\n\r"
    "  0     0    0     0    0     0      0      0 --:--:-- --:--:-- --:--:--     0"
    "curl: (6) Could not resolve host: example.com\n"
)
_BASH = (
    "bash: line 1: example.com: Temporary failure in name resolution\n"
    "bash: line 1: /dev/tcp/example.com/80: Invalid argument\n"
)
NETWORKS = [
    (_TRACEBACK, "PermissionError: [Errno 1] Operation not permitted"),
    (_GROUP, "| PermissionError: [Errno 1] Operation not permitted"),
    (_NODE, "Error: connect EPERM 1.2.3.4:80 - Local (undefined:undefined)"),
    (_FETCH, "[cause]: Error: getaddrinfo EAI_AGAIN example.com"),
    (_JAVA, 'Exception in thread "main" java.net.SocketException: Operation not permitted'),
    (_CARGO, "[6] Could not resolve hostname (Could not resolve host: index.crates.io)"),
    (_CURL, "curl: (6) Could not resolve host: example.com"),
    (_BASH, "bash: line 1: example.com: Temporary failure in name resolution"),
    (
        "ssh: Could not resolve hostname github.com: Temporary failure in name resolution\n"
        "fatal: Could not read from remote repository.\n\n"
        "Please make sure you have the correct access rights\nand the repository exists.\n",
        "ssh: Could not resolve hostname github.com: Temporary failure in name resolution",
    ),
]


@pytest.mark.parametrize(("output", "text"), NETWORKS)
def test_a_refused_network_is_told_in_the_words_of_the_error(output: str, text: str) -> None:
    assert _found(output, refused=True) == Denial(text, None, "network", NO_NETWORK)


@pytest.mark.parametrize(
    "line",
    [
        "error connecting to /tmp/tmux-0/default (Operation not permitted)",
        "permission denied while trying to connect to the Docker daemon socket at "
        'unix:///var/run/docker.sock: Get "http://%2Fvar%2Frun%2Fdocker.sock/v1.50/info": '
        "dial unix /var/run/docker.sock: connect: operation not permitted",
        'connection to server on socket "/run/postgresql/.s" failed: Operation not permitted',
    ],
)
def test_a_refused_unix_socket_is_one_of_the_network(line: str) -> None:
    denial = _found(line)
    assert denial is not None
    assert _said(denial) == NETWORK


@pytest.mark.parametrize(
    "line",
    [
        "chown: changing ownership of '/ws/network/socket': Operation not permitted",
        "strace: test_ptrace_get_syscall_info: PTRACE_TRACEME: Operation not permitted",
        "unshare: unshare failed: Operation not permitted",
    ],
)
def test_other_refused_calls_are_neither_the_network_nor_a_path(line: str) -> None:
    denial = _found(line)
    assert denial is not None
    assert denial.rule is None
    assert denial.path in (None, "/ws/network/socket")


# ---- several candidates -----------------------------------------------------------------

_PIP = """WARNING: Retrying (Retry(total=0, connect=None)) after connection broken
ERROR: Exception:
Traceback (most recent call last):
  File "/usr/lib/python3/dist-packages/pip/_internal/utils/misc.py", line 106, in ensure_dir
    os.makedirs(path)
"""
_APT = (
    "W: chown to _apt:root of directory /var/lib/apt/lists/partial failed - "
    "SetupAPTPartialDirectory (30: Read-only file system)\n" + "W: Problem unlinking the file\n" * 9
)
CANDIDATES = [
    (
        "mv: cannot move '/etc/a' to '/etc/b': Read-only file system",
        False,
        ["write /etc/a", "write /etc/b"],
    ),
    (
        "mv: cannot move 'secret' to '/etc/b': Device or resource busy",
        False,
        ["write /ws/secret", "write /etc/b"],
    ),
    # Python says the same for a rename, a link and a symbolic link, which leaves the first alone.
    (
        "OSError: [Errno 30] Read-only file system: '/etc/a' -> '/etc/b'",
        False,
        ["write /etc/b", "write /etc/a"],
    ),
    ("rename /etc/a /etc/b: read-only file system", False, ["write /etc/a", "write /etc/b"]),
    # The kernel has refused the network, and no message tells which refusal ended the command.
    (_APT, True, ["write /var/lib/apt/lists/partial", NETWORK]),
    ("OSError: [Errno 30] Read-only file system: 'RECORD'", True, ["write None", NETWORK]),
    # The last message tells it.
    (f"{_PIP}OSError: [Errno 30] Read-only file system: '/opt/x'", True, ["write /opt/x"]),
    (
        f"{_PIP}PermissionError: [Errno 13] Permission denied: '/ws/secret'",
        True,
        ["read /ws/secret"],
    ),
    (f"{_APT}E: Could not resolve host", True, [NETWORK]),
]


@pytest.mark.parametrize(("output", "refused", "said"), CANDIDATES)
def test_several_denials_are_candidates_unless_one_is_certain(
    output: str, refused: bool, said: list[str]
) -> None:
    denial = _found(output, refused=refused)
    assert denial is not None
    first, *others = denial.candidates or (denial,)
    assert [_said(each) for each in (first, *others)] == said
    assert (_said(denial), denial.text, denial.rule) == (said[0], first.text, first.rule)
    assert all(not each.candidates for each in denial.candidates)
    assert len(denial.candidates) != 1


def test_an_unexplained_error_of_a_success_is_no_candidate() -> None:
    line = "OSError: [Errno 30] Read-only file system: 'RECORD'"
    assert _found(line, refused=True, code=0) == Denial(None, None, "network", NO_NETWORK)
