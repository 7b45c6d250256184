"""Replays the recorded exchanges of the specification, when they are at hand.

EXEC_SERVER_SPEC names the folder; by default it is looked for beside the repository.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.replay import Replay, Rules
from tests.conformance.scene import place
from tests.support.client import Server, start_server, start_stdio

_REPOSITORY = Path(__file__).resolve().parents[2]
_SPEC = Path(os.environ.get("EXEC_SERVER_SPEC", _REPOSITORY.parent / "shared" / "spec"))
TRANSCRIPTS = _SPEC / "transcripts"

pytestmark = pytest.mark.skipif(
    not TRANSCRIPTS.is_dir(), reason=f"no transcripts in {TRANSCRIPTS} (set EXEC_SERVER_SPEC)"
)

# The recorded server's environment, as far as children could see it.
_ENVIRONMENT = {
    "HOME": "/opt/demo-home",
    "LANG": "C.UTF-8",
    "DEMO_EMPTY": "",
    "DEMO_HEADER_VALUE": "tok123",
    "OPENAI_API_KEY": "x",
}

# The files each transcript takes for granted, below its root.
_FILES: dict[str, dict[str, Any]] = {
    "06": {"basic/": None},
    "07": {"starterr/noexec": "x", "starterr/nobang": {"text": "echo\n", "mode": "755"}},
    "08": {"env/": None},
    "09": {"paging/": None},
    "10": {"poll/": None},
    "11": {"stdin/": None},
    "12": {"pty/": None},
    "13": {"ptydiff/": None},
    "14": {"signal/": None},
    "15": {"term/": None},
    "16": {"late/": None},
    "17": {"dup/": None},
    "18": {"resume/h": "handle"},
    "23": {
        "rw/fifo": {"fifo": True},
        "rw/loop1": {"link": "loop2"},
        "rw/loop2": {"link": "loop1"},
        "rw/link": {"link": "a.txt"},
    },
    "24": {
        "nofollow/a": "A",
        "nofollow/link": {"link": "a"},
        "nofollow/dir/f": "F",
        "nofollow/dlink": {"link": "dir"},
        "nofollow/fifo": {"fifo": True},
    },
    "25": {
        "uris/a.txt": "A",
        "uris/dir/": None,
        "uris/back%5Cslash": "K",
        "uris/sp%20ace%2525%C3%A9.txt": "S",
        "uris/bad%FF.txt": "B",
    },
    "26": {
        "dirs/file": {"text": "abc", "mtime": 1700000000.123},
        "dirs/alink": {"link": "a"},
        "dirs/dangling": {"link": "nowhere"},
        "dirs/fifo": {"fifo": True},
    },
    "27": {"rm/f": "x", "rm/dir/inner": "x", "rm/dlink": {"link": "dir"}},
    "28": {
        "cp/src": "x",
        "cp/x/": None,
        "cp/tree/f": "x",
        "cp/tree/q/": None,
        "cp/tree/l": {"link": "f"},
        "cp/tree/fifo": {"fifo": True},
    },
    "29": {
        "walk/.dot": "",
        "walk/.hid/x/f": "",
        "walk/B": "",
        "walk/a/": None,
        "walk/b/c/d/": None,
        "walk/b/c/f2": "",
        "walk/b/f1": "",
        "walk/b/up": {"link": ".."},
        "walk/bad%FF": "",
        "walk/blink": {"link": "b"},
        "walk/z.txt": "",
    },
    "30": {"handles/a": {"hex": bytes(range(256)).hex()}},
    "31": {"whandles/old": "old content"},
    "32": {"watch/present": "x"},
}

_FLAGS = {"22": ["--concurrent-requests", "2"]}


def _age_file(root: Path) -> None:
    os.utime(root / "dirs/file", (-5, -5))


def _make_file_g(root: Path) -> None:
    (root / "rm/g").touch()


def _let_lines_pass(_: Path) -> None:
    time.sleep(0.9)


# What happened between two recorded steps without a line of its own.
_HOOKS: dict[str, dict[tuple[int, Any], Callable[[Path], None]]] = {
    "18": {(2, "connected"): _let_lines_pass},
    "26": {(0, 22): _age_file},
    "27": {(0, 10): _make_file_g},
}


def _sorted_environment(data: bytes) -> bytes:
    """Varying output of `env`: its order, the login shell, names only this test set."""
    text = re.sub(rb"(?m)^(CODEX_HOME|PYTHONPATH)=.*\n", b"", data)
    text = re.sub(rb"SHELL=/(usr/)?bin/\w+", b"SHELL=login-shell", text)
    return b"".join(sorted(text.splitlines(keepends=True)))


_OUTPUT = {"08": _sorted_environment}

# By choice ours differs from the recording here. A step that is skipped is not sent at
# all; the cases marked `ours` check what our server does instead.
_NATIVE_PATH = "native absolute paths are accepted"
_WRITE_ID = "writeId is optional"
_PTY_CWD = "a missing cwd is an error with a PTY as well, not silently HOME"
_PTY_ARG0 = "arg0 names the child with a PTY as well, it does not replace the program"
_OUR_SKIPPED_STEPS: dict[str, dict[int, str]] = {
    "07": {11: _NATIVE_PATH},
    "11": {8: _WRITE_ID},
    "13": {2: _PTY_CWD, 3: _PTY_ARG0, 4: _PTY_ARG0},
    "25": {30: _NATIVE_PATH},
    "42": {2: _NATIVE_PATH, 4: _WRITE_ID},
}
# An unknown notification is answered with id -1 and the connection kept.
_OUR_KEPT_CONNECTIONS = {"05": frozenset({1, 2})}
# A PTY process that dies by a signal says which one, as a pipe process does.
_OUR_EXIT_CODES: dict[str, dict[str, int]] = {
    "12": {"sleep": 130},
    "13": {"sig9": 137, "sig15": 143},
    "14": {"sltty": 130},
    "15": {"tty": 137},
    "42": {"proc-1": 137},
}
# Capabilities that the recorded server did not know: docs/protocol.md, "Extensions".
OUR_EXTENSIONS = frozenset(
    {
        "sessionClose",
        "sessionRetention",
        "processBinary",
        "processCloseStdin",
        "processResize",
        "processSignals",
        "processList",
        "processMergeStderr",
        "processReadLoss",
        "processFlowControl",
        "processDetach",
        "processPid",
        "processTerminateExited",
        "fsAppend",
        "fsApplyPatch",
        "fsBinary",
        "fsChmod",
        "fsCreate",
        "fsDiskUsage",
        "fsEdit",
        "fsGlob",
        "fsGrep",
        "fsGrepCounts",
        "fsList",
        "fsListOwners",
        "fsRename",
        "fsResolve",
        "fsSetTimes",
        "fsSymlink",
        "fsWatch",
        "portForward",
        "otherUsers",
    }
)

_NUMBERS = [*(f"{n:02}" for n in range(1, 20)), *(str(n) for n in range(22, 33)), "42"]


def _load(number: str) -> list[dict[str, Any]]:
    """The entries of the transcript with this number."""
    (path,) = TRANSCRIPTS.glob(f"{number}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _rules(number: str, kind: str) -> Rules:
    rules = Rules(hooks=_HOOKS.get(number, {}))
    if number in _OUTPUT:
        rules.normalize_output = _OUTPUT[number]
    if kind == "reference":
        return rules
    return dataclasses.replace(
        rules,
        skipped_ids=frozenset(_OUR_SKIPPED_STEPS.get(number, {})),
        extensions=OUR_EXTENSIONS,
        exit_codes=_OUR_EXIT_CODES.get(number, {}),
        kept_connections=_OUR_KEPT_CONNECTIONS.get(number, frozenset()),
    )


def replay(number: str, kind: str, root: Path) -> None:
    """Plays one transcript on a server of its own whose working directory is `root`."""
    place(root, _FILES.get(number, {}))
    with start_server(kind, *_FLAGS.get(number, []), env=_ENVIRONMENT, cwd=root) as server:
        Replay(server, root, _rules(number, kind), None).play(_load(number))


@pytest.mark.parametrize("number", _NUMBERS)
def test_transcript(number: str, kind: str, folder: Path) -> None:
    replay(number, kind, folder)


@pytest.mark.quick
def test_stdio_transcript(kind: str, folder: Path) -> None:
    with start_stdio(kind, env=_ENVIRONMENT, cwd=folder) as (server, client):
        Replay(server, folder, _rules("44", kind), client).play(_load("44"))


def test_large_output_summary(kind: str, folder: Path) -> None:
    """Transcript 43 is a summary; the numbers that depend on chunk sizes are ranges."""
    (summary,) = [entry for entry in _load("43") if entry.get("event") == "summary"]
    with start_server(kind, cwd=folder) as server, server.connect() as client:
        script = f"head -c {summary['totalBytes']} /dev/zero"
        run = client.run(["/bin/sh", "-c", script], process_id="big")
        assert len(run.stdout) == summary["totalBytes"]
        read = client.call("process/read", {"processId": "big"})
        sizes = [len(base64.b64decode(chunk["chunk"])) for chunk in read["chunks"]]
        assert max(sizes) <= summary["maxChunk"]
        # Ours keeps more of recent output, for clients that ask for it.
        most = 16 * 1048576 if kind == "ours" else 1048576
        assert 1048576 - summary["maxChunk"] <= sum(sizes) <= most
        first = read["chunks"][0]["seq"]
        page = client.call("process/read", {"processId": "big", "maxBytes": 1})
        assert (page["chunks"][0]["seq"], page["nextSeq"]) == (first, first + 1)


@pytest.fixture(scope="module")
def token_server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("super-secret-token\n")
    with start_server(kind, "--ws-auth", "capability-token", "--ws-token-file", str(token)) as s:
        yield s


def _handshakes() -> list[Any]:
    path = TRANSCRIPTS / "http_handshakes.jsonl"
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [pytest.param(line, id=line["case"]) for line in lines]


@pytest.mark.parametrize("recorded", _handshakes())
def test_handshake(recorded: dict[str, Any], server: Server, token_server: Server) -> None:
    target = token_server if recorded["case"].startswith("cap-") else server
    reply = target.http(recorded["request"].encode())
    assert (reply.status, reply.body.decode()) == (recorded["status"], recorded["body"])
    for line in recorded["responseHead"].split("\r\n")[1:]:
        name, value = line.split(": ", 1)
        if name != "date":
            assert (reply.header(name) or "").lower() == value.lower(), name
