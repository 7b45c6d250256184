"""The file extensions under policies: the same limits as for every other file operation."""

from __future__ import annotations

import itertools
import os

import pytest
from tests.support.client import Client, RpcFailure, b64, uri
from tests.support.sandbox import PROTECTED, Json, Stage, guarded


def _params(stage: Stage, policy: str, method: str, path: str) -> Json:
    """A request that would create or change a path, which is relative to the base."""
    place = {"path": uri(stage.base / path)}
    root, _, below = path.partition("/")
    added = f"*** Begin Patch\n*** Add File: {below}\n+new\n*** End Patch"
    requests: dict[str, Json] = {
        "fs/append": place | {"dataBase64": b64("new")},
        "fs/rename": {
            "sourcePath": uri(stage.ws / "sub/deep/d.txt"),
            "destinationPath": place["path"],
        },
        "fs/symlink": place | {"target": "/etc"},
        "fs/setTimes": place | {"create": True, "modifiedAtMs": 1000},
        "fs/applyPatch": {"path": uri(stage.base / root), "patch": added},
        "fs/chmod": place | {"mode": 0o777},
        "fs/edit": place | {"edits": [{"oldText": "e", "newText": "x", "all": True}]},
    }
    return requests[method] | {"sandbox": stage.policy(policy)}


def _is_refused(client: Client, method: str, params: Json) -> bool:
    try:
        client.call(method, params)
    except RpcFailure:
        return True
    return False


_MAKERS = ("fs/append", "fs/rename", "fs/symlink", "fs/setTimes", "fs/applyPatch")
_WAYS = (
    "ws/{name}",
    "ws/{name}/inside",
    "ws/sub/../{name}",
    "ws/alias/{name}",
    "ws/dangling{name}",
    "way/{name}",
)


@pytest.mark.parametrize("policy", ["WW", "MINW"])
@pytest.mark.parametrize("method", _MAKERS)
def test_no_way_leads_to_a_protected_name(
    stage: Stage, client: Client, method: str, policy: str
) -> None:
    steps: list[Json] = [{"symlink": [".", "ws/alias"]}, {"symlink": ["ws", "way"]}]
    steps += [{"symlink": [name, f"ws/dangling{name}"]} for name in PROTECTED]
    stage.scratch.apply(steps)
    before = guarded(stage.base)
    for way, name in itertools.product(_WAYS, PROTECTED):
        path = way.format(name=name)
        if method in ("fs/rename", "fs/symlink") and "dangling" in way:
            continue  # these name the link itself, not its target
        assert _is_refused(client, method, _params(stage, policy, method, path)), path
        assert guarded(stage.base) == before, path


@pytest.mark.parametrize("method", [*_MAKERS, "fs/chmod", "fs/edit"])
@pytest.mark.parametrize(
    ("policy", "path"),
    [
        ("RO", "ws/a.txt"),
        ("WW", "outside/o.txt"),
        ("WW", "ws/.git/config"),
        ("RODEEP", "ws/sub/deep/d.txt"),
        ("DENYSUB", "ws/sub/s.txt"),
        ("MINR", "ws/a.txt"),
        ("FILEROOT", "ws/sub/s.txt"),
    ],
)
def test_changes_are_refused(
    stage: Stage, client: Client, method: str, policy: str, path: str
) -> None:
    before = guarded(stage.base, "a.txt", "sub")
    assert _is_refused(client, method, _params(stage, policy, method, path))
    assert guarded(stage.base, "a.txt", "sub") == before


def test_a_protected_entry_is_not_renamed_away(stage: Stage, client: Client) -> None:
    for path in (".git", ".git/config"):
        params = {
            "sourcePath": uri(stage.ws / path),
            "destinationPath": uri(stage.ws / "taken"),
            "sandbox": stage.policy("WW"),
        }
        assert _is_refused(client, "fs/rename", params)
    assert (stage.ws / ".git/config").exists()


def test_a_patch_writes_nothing_if_one_file_is_out_of_reach(stage: Stage, client: Client) -> None:
    patch = "*** Begin Patch\n*** Add File: n\n+x\n*** Add File: .git/n\n+x\n*** End Patch"
    params = {"path": uri(stage.ws), "patch": patch, "sandbox": stage.policy("WW")}
    assert _is_refused(client, "fs/applyPatch", params)
    assert not (stage.ws / "n").exists()


def test_a_denied_file_is_neither_edited_nor_shown(stage: Stage, client: Client) -> None:
    stage.scratch.apply([{"write": ["ws/z.key", "secret"]}])
    edit = {"path": uri(stage.ws / "z.key"), "edits": [{"oldText": "guess", "newText": "x"}]}
    _, message = client.failure("fs/edit", edit | {"sandbox": stage.policy("GLOB")})
    assert "does not occur" not in message  # an oracle for the content
    patch = "*** Begin Patch\n*** Update File: z.key\n@@\n-guess\n+x\n*** End Patch"
    params = {"path": uri(stage.ws), "patch": patch, "sandbox": stage.policy("GLOB")}
    _, message = client.failure("fs/applyPatch", params)
    assert "does not fit" not in message


def test_a_glob_does_not_look_into_denied_directories(stage: Stage, client: Client) -> None:
    params = {"path": uri(stage.ws), "pattern": "**/*.txt", "sandbox": stage.policy("DENYSUB")}
    assert client.call("fs/glob", params) == {"paths": ["a.txt"], "truncated": False}


@pytest.mark.parametrize("directory", ["sub", "sub/deep"])
def test_no_directory_is_renamed_out_of_a_deny_glob(
    stage: Stage, client: Client, directory: str
) -> None:
    stage.scratch.apply([{"write": ["ws/sub/deep/z.key", "secret"]}])
    params = {
        "sourcePath": uri(stage.ws / directory),
        "destinationPath": uri(stage.ws / "pub"),
        "sandbox": stage.policy("GLOB"),
    }
    assert client.failure("fs/rename", params)[1].startswith("Resource busy")
    assert (stage.ws / "sub/deep/z.key").exists()


@pytest.mark.parametrize("policy", ["RO", "WW", "MINW"])
def test_devices_of_the_host_keep_their_modes_and_times(
    stage: Stage, client: Client, policy: str
) -> None:
    before = os.stat("/dev/zero")
    sandbox = {"sandbox": stage.policy(policy)}
    try:
        for method, more in (
            ("fs/chmod", {"mode": 0o666}),
            ("fs/setTimes", {"modifiedAtMs": 5000}),
        ):
            assert _is_refused(client, method, {"path": "file:///dev/zero"} | more | sandbox)
        script = "chmod 0666 /dev/zero; touch -d @7 /dev/zero; echo x > /dev/null && echo written"
        assert stage.shell(client, policy, script).stdout == "written\n"
        after = os.stat("/dev/zero")
        assert (after.st_mode, after.st_mtime, after.st_ctime) == (
            before.st_mode,
            before.st_mtime,
            before.st_ctime,
        )
    finally:
        os.utime("/dev/zero", ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_failed_patch_removes_nothing_that_it_has_not_made(stage: Stage, client: Client) -> None:
    stage.scratch.apply(
        [{"symlink": ["missing", "ws/dangling"]}, {"symlink": ["a.txt", "ws/link"]}]
    )
    for line in ("*** Add File: dangling\n+x", "*** Delete File: link"):
        patch = f"*** Begin Patch\n{line}\n*** Add File: .codex/z\n+x\n*** End Patch"
        params = {"path": uri(stage.ws), "patch": patch, "sandbox": stage.policy("WW")}
        assert _is_refused(client, "fs/applyPatch", params)
        assert os.readlink(stage.ws / "dangling") == "missing"
        assert os.readlink(stage.ws / "link") == "a.txt"
    assert not (stage.ws / "missing").exists()


@pytest.mark.quick
@pytest.mark.parametrize("policy", ["NONE", "WW", "MINW"])
def test_changes_that_are_allowed_work(stage: Stage, client: Client, policy: str) -> None:
    sandbox = {"sandbox": stage.policy(policy)}
    file = {"path": uri(stage.ws / "a.txt")} | sandbox
    assert client.call("fs/append", file | {"dataBase64": b64("!")}) == {"size": 6}
    edits = [{"oldText": "hello", "newText": "bye"}]
    assert client.call("fs/edit", file | {"edits": edits}) == {"replacements": 1}
    assert (stage.ws / "a.txt").read_text() == "bye!"
    assert client.call("fs/chmod", file | {"mode": 0o640}) == {}
    assert client.call("fs/setTimes", file | {"modifiedAtMs": 5000}) == {}
    info = (stage.ws / "a.txt").stat()
    assert (info.st_mode & 0o777, info.st_mtime) == (0o640, 5.0)
    link = {"path": uri(stage.ws / "link"), "target": "a.txt"}
    assert client.call("fs/symlink", link | sandbox) == {}
    rename = {"sourcePath": uri(stage.ws / "link"), "destinationPath": uri(stage.ws / "moved")}
    assert client.call("fs/rename", rename | sandbox) == {}
    patch = "*** Begin Patch\n*** Update File: a.txt\n@@\n-bye!\n+done\n*** End Patch"
    assert client.call("fs/applyPatch", {"path": uri(stage.ws), "patch": patch} | sandbox) == {
        "changes": [{"path": "a.txt", "kind": "modified"}]
    }
    found = client.call("fs/glob", {"path": uri(stage.ws), "pattern": "*"} | sandbox)
    assert {"a.txt", "moved", "sub"} <= set(found["paths"])
    assert client.call("fs/diskUsage", file)["total"] > 0
    assert (stage.ws / "moved").read_text() == "done"
