"""JSON texts, messages, params, paths and policies: the content of messages."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Final

import msgspec
from tests.fuzz.target import Target, as_text, json_bytes
from tests.support.layout_model import Tree

from exec_server.client.engine import messages as client_messages
from exec_server.client.transfer.open_file import _decode_block
from exec_server.errors import (
    ExecServerError,
    InvalidParams,
    InvalidRequest,
    MalformedMessage,
    PatchDoesNotApply,
    RpcError,
)
from exec_server.filesystem.search import GlobPatterns
from exec_server.patching.edits import Edit, apply_edits
from exec_server.patching.patch import parse_patch, plan
from exec_server.protocol import decoding, files, http, jsonrpc, process, session
from exec_server.protocol.decoding import decode as decode_params
from exec_server.protocol.paths import PATH_CHARACTERS, PathUri
from exec_server.sandbox.policy import access
from exec_server.sandbox.policy.compiler import HostPaths, compile_policy
from exec_server.sandbox.policy.layout import Unenforceable, lay_out
from exec_server.sandbox.policy.model import Glob
from exec_server.server.methods import load_all


def _json_text(data: bytes) -> None:
    try:
        value = decoding.parse(data)
    except MalformedMessage:
        return
    text = json.dumps(value)
    assert "Infinity" in text or decoding.parse(text.encode()) == value


def _message(data: bytes) -> None:
    try:
        message = jsonrpc.decode(data)
    except MalformedMessage:
        return
    if isinstance(message, jsonrpc.Request):
        jsonrpc.encode_error(message.id, InvalidParams("x"))
        jsonrpc.encode_result(message.id, b"{}")


def _params(data: bytes) -> None:
    """The params of every method: an object with `method` and `params`."""
    try:
        message = decoding.parse(data)
    except MalformedMessage:
        return
    if isinstance(message, dict):
        method = load_all().get(str(message.get("method")))
        if method is not None:
            for server_cwd in (None, "file:///s"):
                with suppress(RpcError):
                    method.decode_params(message.get("params"), server_cwd)


_RESULTS: Final = (
    *(files.ReadFileResult, files.OpenResult, files.ReadBlockResult, files.GetMetadataResult),
    *(files.ReadDirectoryResult, files.WalkResult, files.WatchMissingResult),
    *(process.StartResult, process.ReadResult, process.WriteResult, process.ListResult),
    *(process.OutputParams, process.ExitedParams, process.ClosedParams),
    *(http.RequestResult, http.BodyDeltaParams, session.EnvironmentStatus),
)


_OUTPUT = {"processId": "p", "seq": 7, "stream": "stdout"}


def _answer(data: bytes) -> None:
    """A message of a server, as the client reads it."""
    try:
        envelope = client_messages.decode(data)
    except MalformedMessage:
        return
    raw = envelope.result if envelope.result is not msgspec.UNSET else envelope.params
    if isinstance(raw, msgspec.Raw):
        for kind in (*_RESULTS, client_messages.InitializeAnswer):
            with suppress(MalformedMessage):
                client_messages.decode_as(kind, raw, "x")
        for decode in (client_messages.decode_environment, _decode_block):
            with suppress(ExecServerError):
                decode(raw)


def _binary_message(data: bytes) -> None:
    """A message with data, as the client reads it; output is what its chunks are together."""
    try:
        envelope = client_messages.decode(data)
        notice = client_messages.find_notice(str(envelope.method))
        if notice is None:
            return
        event = client_messages.decode_params(notice, envelope.params)
    except MalformedMessage:
        return
    if isinstance(event, process.OutputRun):
        chunks = list(process.output_chunks(event))
        assert b"".join(chunk for _, chunk in chunks) == event.chunk
        assert [seq for seq, _ in chunks] == [*range(event.seq, event.last_seq + 1)]


def _path(data: bytes) -> None:
    try:
        path = PathUri.from_wire(as_text(data))
    except InvalidParams:
        return
    if len(path.uri) > PATH_CHARACTERS:
        return  # escapes made it too long to be sent; no file has such a path
    again = PathUri.from_wire(path.uri)
    with suppress(InvalidRequest):
        native = path.native()
        assert native.startswith("/")
        assert (again, again.native()) == (path, native)


_HOST_PATHS: Final = HostPaths(tmpdir="/tmp", minimal=("/usr",), slash_tmp=True, cwd="/w")


_TREE: Final = Tree(
    [
        ("/w/.git", b"gitdir: /w/real\n"),
        ("/w/real", None),
        ("/w/a/b", b"x"),
        ("/w/link", "a"),
        ("/usr", None),
        ("/tmp", None),
    ]
)


def _policy(data: bytes) -> None:
    """A `sandbox` object: decoded, compiled and laid out on a disk in memory."""
    try:
        value = decoding.parse(data)
        holder = decode_params(files.GetMetadataParams, {"path": "file:///w", "sandbox": value})
        assert isinstance(holder, files.GetMetadataParams)
        if holder.sandbox is None:
            return
        for for_process in (False, True):
            policy = compile_policy(holder.sandbox, _HOST_PATHS, for_process=for_process)
            if policy is not None and policy.rules is not None:
                lay_out(policy, _TREE)
    except (MalformedMessage, RpcError, Unenforceable):
        return


def _glob(data: bytes) -> None:
    pattern, _, path = as_text(data).partition("\n")
    glob = Glob("/w", pattern, None)
    try:
        access.check(glob)
    except RpcError:
        return
    access.matches(glob, "/w/" + path[:200])


def _patch(data: bytes) -> None:
    """A patch for a file with the text before the NUL."""
    content, _, text = data.partition(b"\0")
    try:
        for change in plan(parse_patch(as_text(text)), "/w", lambda path: content):
            assert change.path.startswith("/w/")
    except PatchDoesNotApply:
        return


def _edit(data: bytes) -> None:
    text, _, rest = as_text(data).partition("\0")
    old, _, new = rest.partition("\0")
    with suppress(InvalidRequest):
        changed, count = apply_edits(text, [Edit(old, new, all=True)])
        if old in text and "\r\n" not in text:
            assert count == text.count(old)
            assert changed == text.replace(old, new)


def _search_pattern(data: bytes) -> None:
    pattern, _, path = as_text(data).partition("\n")
    with suppress(InvalidParams):
        patterns = GlobPatterns(pattern)
        state = patterns.start()
        for name in path.split("/")[:20]:
            state = patterns.step(state, name)
        patterns.is_match(state)


_SANDBOX: Final = {
    "permissions": {
        "type": "managed",
        "file_system": {
            "type": "restricted",
            "entries": [
                {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
                {"path": {"type": "path", "path": "file:///w/a"}, "access": "write"},
                {"path": {"type": "glob_pattern", "pattern": "/w/**/*.x"}, "access": "deny"},
            ],
            "glob_scan_max_depth": 3,
        },
        "network": "restricted",
    },
    "cwd": "file:///w",
    "workspaceRoots": ["file:///w"],
    "windowsSandboxLevel": "disabled",
}


_START: Final = {
    "processId": "p",
    "argv": ["true"],
    "cwd": "file:///w",
    "env": {"A": "b"},
    "tty": True,
    "ttySize": {"rows": 24, "columns": 80},
    "detach": {"name": "web", "maxLifetimeMs": 1000, "idleTimeoutMs": 1000},
    "sandbox": _SANDBOX,
}


_SEED_PARAMS: Final = {
    "process/start": _START,
    "process/read": {"processId": "p", "afterSeq": 1, "maxBytes": 2, "waitMs": 3},
    "process/write": {"processId": "p", "chunk": "YQ==", "writeId": "w"},
    "process/resize": {"processId": "p", "rows": 24, "columns": 80},
    "process/signal": {"processId": "p", "signal": "SIGTERM"},
    "process/attach": {"processId": "p", "name": "web", "afterSeq": 1},
    "fs/open": {"handleId": "h", "path": "file:///w", "mode": "replace"},
    "fs/writeBlock": {"handleId": "h", "offset": 0, "chunk": "YQ=="},
    "fs/walk": {
        "path": "file:///w",
        "options": {
            "maxDepth": 1,
            "maxDirectories": 2,
            "maxEntries": 3,
            "followDirectorySymlinks": False,
        },
    },
    "fs/watchMissing": {"watchId": 1, "missing": ["file:///w/x"], "present": None},
    "http/request": {
        "method": "GET",
        "url": "http://127.0.0.1/",
        "headers": [{"name": "a", "value": "b"}],
        "requestId": "r",
    },
}


_JSON_WORDS: Final = (b'"', b"{", b"}", b"[", b"]", b":", b",", b"\\u", b"\\ud800", b"1e9", b"null")


TARGETS: Final = (
    Target(
        "json-text", _json_text, (json_bytes(_START), b'{"a":[1,2.5e3,"\\u0061"]}'), _JSON_WORDS
    ),
    Target(
        "jsonrpc",
        _message,
        (
            json_bytes({"id": 1, "method": "process/start", "params": _START}),
            json_bytes({"method": "initialized", "params": {}, "trace": {"traceparent": "x"}}),
            json_bytes({"id": "x", "error": {"code": -32600, "message": "m", "data": None}}),
        ),
        (b'"id"', b'"method"', b'"jsonrpc"', b'"error"', b'"trace"'),
        is_json=True,
    ),
    Target(
        "params",
        _params,
        tuple(
            json_bytes({"method": name, "params": value}) for name, value in _SEED_PARAMS.items()
        ),
        tuple(name.encode() for name in load_all()),
        is_json=True,
    ),
    Target(
        "server-answers",
        _answer,
        (
            json_bytes({"id": 1, "result": {"sessionId": "s", "environmentInfo": {"shell": {}}}}),
            json_bytes({"id": 1, "result": {"chunk": "YQ==", "eof": True}}),
            json_bytes({"id": 1, "error": {"code": 1, "message": "m"}}),
            json_bytes({"method": "process/output", "params": {"processId": "p", "seq": 1}}),
            json_bytes(
                {"id": 1, "result": {"chunks": [{"seq": 1, "stream": "pty", "chunk": "YQ=="}]}}
            ),
        ),
        (b"result", b"params", b"chunk", b"eof"),
        is_json=True,
    ),
    Target(
        "binary-messages",
        _binary_message,
        (
            jsonrpc.head(json_bytes({"method": "process/output", "params": _OUTPUT})) + b"data",
            jsonrpc.head(json_bytes({"method": "process/output", "params": _OUTPUT})) + bytes(9000),
            jsonrpc.head(json_bytes({"id": 1, "result": {"eof": True}})) + b"data",
            jsonrpc.head(json_bytes({"method": "process/closed", "params": _OUTPUT})) + b"data",
        ),
        (b"\0\0\0", b"process/output", b"seq", b"stream", b"stdout"),
    ),
    Target(
        "path-uris",
        _path,
        (b"file:///a/%2e%2e/b", b"/native/path", b"file://host/C:/x", b"file:///%00/bad/path/L2E"),
        (b"file:", b"//", b"%2F", b"%00", b"..", b"\\", b"localhost", b"c:", b"|"),
    ),
    Target(
        "sandbox-policies",
        _policy,
        (
            json_bytes(_SANDBOX),
            json_bytes({"sandboxPolicy": {"type": "read-only"}, "sandboxPolicyCwd": "/"}),
        ),
        (b"special", b"project_roots", b"tmpdir", b"minimal", b"slash_tmp", b"subpath", b"unknown"),
        is_json=True,
    ),
    Target(
        "globs",
        _glob,
        (b"**/*.[!a-z]x{1,2}\na/b.0x", b"a?[b]\na/b"),
        (b"**", b"*", b"?", b"[", b"]", b"{", b"}", b",", b"!", b"\\", b"/", b"\n"),
    ),
    Target(
        "patches",
        _patch,
        (
            b"a\nb\n\0*** Begin Patch\n*** Update File: f\n@@ a\n-b\n+c\n*** End Patch\n",
            b"\0*** Begin Patch\n*** Add File: d/f\n+x\n*** Delete File: g\n*** End Patch",
            b"a\nb\n\0--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
            b"\\ No newline at end of file\n",
            b"a\n\0diff --git a/f b/g\nold mode 100644\nnew mode 100755\n"
            b"rename from f\nrename to g\n",
        ),
        (b"*** Move to: ", b"*** End of File", b"@@", b"--- ", b"+++ ", b"\n", b"\r\n", b"../"),
    ),
    Target("edits", _edit, (b"hello\0ell\0ipp", b"a b\r\nc\0b c\0x"), (b"\0", b"\r\n", b" ")),
    Target(
        "search-patterns",
        _search_pattern,
        (b"**/*.{py,txt}\na/b.py", b"[!a-]*/?\nb/c"),
        (b"**", b"*", b"?", b"[", b"]", b"{", b"}", b",", b"!", b"/", b"\n", b".."),
    ),
)
