"""Every flag of an extension that the server reports: its feature is used once, on the wire.

The flags of the reference are in docs/protocol.md, each with the test that shows it.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.client import Client, b64, start_server, survivors, uri
from tests.support.older_servers import HANDSHAKES

from exec_server.protocol.session import Capabilities

_SH = "/bin/sh"
Probe = Callable[[Client, Path], None]


def _start(client: Client, script: str, **members: Any) -> dict[str, Any]:
    params = {"processId": "p", "argv": [_SH, "-c", script], "cwd": "file:///", "env": {}}
    started: dict[str, Any] = client.call("process/start", params | {"tty": False} | members)
    return started


def _close_stdin(client: Client, folder: Path) -> None:
    _start(client, "cat; echo end", pipeStdin=True)
    assert client.call("process/closeStdin", {"processId": "p"}) == {}
    assert client.collect("p").stdout == b"end\n"


def _resize(client: Client, folder: Path) -> None:
    size = {"rows": 20, "columns": 30}
    _start(client, "read x; stty size", tty=True, ttySize=size)
    assert client.call("process/resize", {"processId": "p", "rows": 21, "columns": 31}) == {}
    client.write("p", b"\n", "w")
    assert b"21 31" in client.collect("p").output["pty"]


def _signals(client: Client, folder: Path) -> None:
    _start(
        client, "trap 'echo got; exit 3' USR1; echo ready; while :; do read x; done", pipeStdin=True
    )
    client.wait_for(lambda notice: notice["method"] == "process/output")
    assert client.call("process/signal", {"processId": "p", "signal": "SIGUSR1"}) == {}
    client.write("p", b"\n", "w")
    assert client.collect("p").exit_code == 3


def _list(client: Client, folder: Path) -> None:
    _start(client, "cat", pipeStdin=True)
    [listed] = client.call("process/list", {})["processes"]
    assert listed["processId"] == "p"


def _merge_stderr(client: Client, folder: Path) -> None:
    _start(client, "echo a; echo b >&2; echo c", mergeStderr=True)
    assert client.collect("p").output == {"stdout": b"a\nb\nc\n"}


def _read_loss(client: Client, folder: Path) -> None:
    _start(client, "head -c 20000000 /dev/zero")
    client.collect("p")
    read = client.call("process/read", {"processId": "p", "afterSeq": 0})
    assert read["firstSeq"] > 1
    assert read["lostBytes"] > 0


def _flow_control(client: Client, folder: Path) -> None:
    _start(client, "read x; echo $x", pipeStdin=True)
    assert client.call("process/setFlow", {"processId": "p", "flow": "pause"}) == {}
    client.write("p", b"1\n", "w")
    assert client.call("process/setFlow", {"processId": "p", "flow": "send"}) == {}
    assert client.collect("p").stdout == b"1\n"


def _detach(client: Client, folder: Path) -> None:
    name = _start(client, "sleep 600", detach={})["name"]
    assert [each["name"] for each in client.call("process/listDetached", {})["processes"]] == [name]
    assert client.call("process/terminate", {"processId": "p"}) == {"running": True}


def _pid(client: Client, folder: Path) -> None:
    pid = _start(client, "echo $$", reportPid=True)["pid"]
    assert client.collect("p").stdout == f"{pid}\n".encode()


def _terminate_exited(client: Client, folder: Path) -> None:
    _start(client, "setsid sleep 600 > /dev/null 2>&1 & echo $!")
    pid = int(client.collect("p").stdout)
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    client.call("process/terminate", {"processId": "p"})
    assert survivors({pid: started}) == []


def _session_close(client: Client, folder: Path) -> None:
    _start(client, "setsid sleep 600 > /dev/null 2>&1 & echo $!")
    pid = int(client.collect("p").stdout)
    assert client.call("session/close") == {}
    assert not Path(f"/proc/{pid}").exists()


def _session_retention(client: Client, folder: Path) -> None:
    params = {"clientName": "c", "sessionRetentionSeconds": 600}
    with start_server("ours") as server, server.connect(initialize=False) as other:
        assert other.call("initialize", params)["sessionRetentionSeconds"] == 600


def _append(client: Client, folder: Path) -> None:
    params = {"path": uri(folder / "file"), "dataBase64": b64("+")}
    assert client.call("fs/append", params) == {"size": 6}


def _apply_patch(client: Client, folder: Path) -> None:
    patch = "--- a/file\n+++ b/file\n@@ -1 +1 @@\n-hello\n\\ No newline at end of file\n+new\n"
    client.call("fs/applyPatch", {"path": uri(folder), "patch": patch})
    assert (folder / "file").read_text() == "new\n"


def _chmod(client: Client, folder: Path) -> None:
    client.call("fs/chmod", {"path": uri(folder / "file"), "mode": 0o604})
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o604


def _create(client: Client, folder: Path) -> None:
    client.call("fs/create", {"path": uri(folder / "new"), "dataBase64": b64("x")})
    assert client.failure("fs/create", {"path": uri(folder / "new"), "dataBase64": ""})


def _disk_usage(client: Client, folder: Path) -> None:
    assert client.call("fs/diskUsage", {"path": uri(folder)})["total"] > 0


def _edit(client: Client, folder: Path) -> None:
    edit = {"oldText": "ell", "newText": "ipp"}
    client.call("fs/edit", {"path": uri(folder / "file"), "edits": [edit]})
    assert (folder / "file").read_text() == "hippo"


def _glob(client: Client, folder: Path) -> None:
    assert client.call("fs/glob", {"path": uri(folder), "pattern": "f*"})["paths"] == ["file"]


def _grep(client: Client, folder: Path) -> None:
    found = client.call("fs/grep", {"path": uri(folder), "pattern": "h.l+o"})
    assert "hello" in str(found)


def _list_directory(client: Client, folder: Path) -> None:
    [entry] = client.call("fs/list", {"path": uri(folder)})["entries"]
    assert (entry["fileName"], entry["isFile"]) == ("file", True)


def _grep_counts(client: Client, folder: Path) -> None:
    params = {"path": uri(folder), "pattern": "x", "invert": True, "countOnly": True}
    found = client.call("fs/grep", params)
    assert found == {"matches": [], "truncated": False, "counts": [{"path": "file", "count": 1}]}


def _list_owners(client: Client, folder: Path) -> None:
    [entry] = client.call("fs/list", {"path": uri(folder), "owners": True})["entries"]
    assert entry["owner"] == pwd.getpwuid(os.getuid()).pw_name


def _rename(client: Client, folder: Path) -> None:
    places = {"sourcePath": uri(folder / "file"), "destinationPath": uri(folder / "other")}
    client.call("fs/rename", places)
    assert (folder / "other").read_text() == "hello"


def _resolve(client: Client, folder: Path) -> None:
    (folder / "link").symlink_to(folder)
    found = client.call("fs/resolve", {"path": uri(folder / "link/missing")})
    assert found["path"] == uri(folder.resolve() / "missing")


def _set_times(client: Client, folder: Path) -> None:
    client.call("fs/setTimes", {"path": uri(folder / "file"), "modifiedAtMs": 1000})
    assert (folder / "file").stat().st_mtime == 1


def _symlink(client: Client, folder: Path) -> None:
    client.call("fs/symlink", {"path": uri(folder / "link"), "target": "file"})
    assert os.readlink(folder / "link") == "file"


def _watch(client: Client, folder: Path) -> None:
    client.call("fs/watch", {"watchId": 1, "path": uri(folder)})
    (folder / "new").touch()
    changed = client.wait_for(lambda notice: notice["method"] == "fs/changed")
    assert "new" in str(changed["params"]["changes"])


def _ports(client: Client, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert client.call("port/probe", {"port": port})["accepts"]
    assert not client.call("port/probe", {"port": port})["accepts"]


def _other_users(client: Client, folder: Path) -> None:
    assert client.run(["/usr/bin/id", "-un"], user="nobody").stdout == b"nobody\n"


_PROBES: dict[str, Probe] = {
    "processCloseStdin": _close_stdin,
    "processResize": _resize,
    "processSignals": _signals,
    "processList": _list,
    "processMergeStderr": _merge_stderr,
    "processReadLoss": _read_loss,
    "processFlowControl": _flow_control,
    "processDetach": _detach,
    "processPid": _pid,
    "processTerminateExited": _terminate_exited,
    "sessionClose": _session_close,
    "sessionRetention": _session_retention,
    "fsAppend": _append,
    "fsApplyPatch": _apply_patch,
    "fsChmod": _chmod,
    "fsCreate": _create,
    "fsDiskUsage": _disk_usage,
    "fsEdit": _edit,
    "fsGlob": _glob,
    "fsGrep": _grep,
    "fsGrepCounts": _grep_counts,
    "fsList": _list_directory,
    "fsListOwners": _list_owners,
    "fsRename": _rename,
    "fsResolve": _resolve,
    "fsSetTimes": _set_times,
    "fsSymlink": _symlink,
    "fsWatch": _watch,
    "portForward": _ports,
    "otherUsers": _other_users,
}


# Their messages are no JSON: test_binary_messages shows them.
_SHOWN_ELSEWHERE = {"fsBinary", "processBinary"}


def test_every_extension_that_is_reported_has_a_probe(client: Client) -> None:
    newest = json.loads(HANDSHAKES.read_text())["0.169.0"]["initialize"]["result"]
    reference = newest["environmentInfo"]["capabilities"]
    ours = client.environment_info["capabilities"]
    assert ours.keys() == set(msgspec.to_builtins(Capabilities()))
    reported = {name for name, is_true in ours.items() if is_true}
    assert reported - reference.keys() <= _PROBES.keys() | _SHOWN_ELSEWHERE
    # What the reference reports on Linux is reported here.
    assert {name: ours[name] for name in reference} == reference


@pytest.mark.parametrize("flag", _PROBES)
def test_the_feature_of_a_flag(client: Client, tmp_path: Path, flag: str) -> None:
    if not client.environment_info["capabilities"][flag]:
        pytest.skip("the server does not report it")
    (tmp_path / "file").write_text("hello")
    _PROBES[flag](client, tmp_path)
