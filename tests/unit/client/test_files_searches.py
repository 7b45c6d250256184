"""Searches in files with a session and commands that are the test."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exec_server.client import polyfills as module
from exec_server.client.arguments import PathResolver
from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.files import Files
from exec_server.client.results import Found, GrepCount, GrepMatch, Result
from exec_server.errors import InvalidParams, Unsupported
from exec_server.protocol import files as wire
from exec_server.protocol.files import GetMetadataResult
from exec_server.protocol.session import Capabilities

pytestmark = pytest.mark.quick

_MATCH = wire.GrepMatch("f", 2, 1, "x", ["a"], ["b"])


class Searches(Files):
    """Searches of a server whose answers are those of the test."""

    def __init__(
        self, *, extended: bool, output: bytes = b"", stderr: bytes = b"", is_file: bool = False
    ) -> None:
        self.sent: list[Any] = []
        self._output = (output, stderr)
        self._is_file = is_file
        info = SimpleNamespace(
            capabilities=Capabilities(fs_grep=extended),
            user_home_dir=None,
            cwd="file:///w",
            temp_dir="file:///tmp",
        )
        features = ServerFeatures(capabilities=info.capabilities)
        session: Any = SimpleNamespace(
            features=features, call=self._answer, call_polyfill=self._replaced
        )
        commands: Any = SimpleNamespace(run=self._command)
        paths = PathResolver(cast(Any, info))
        self._polyfills = module.Polyfills(session, paths, commands)
        self._missing = features.missing_methods
        super().__init__(session, paths, commands)

    async def _answer(self, call: Any, params: Any, **_: Any) -> Any:
        if call.name in self._missing and call is wire.GREP:
            return await self._replaced(call, params)
        self.sent.append(params)
        if call is wire.GREP:
            return wire.GrepResult([_MATCH], True)
        return GetMetadataResult(not self._is_file, self._is_file, False, 0, 0, 0)

    async def _replaced(self, call: Any, params: Any) -> Any:
        return await self._polyfills.table[call.name](params)

    async def _command(self, argv: list[str], **_: Any) -> Result:
        self.sent.append(argv)
        return Result(tuple(argv), *self._output, 0, 0.0)

    def find(self, *args: Any, **kwargs: Any) -> Found[GrepMatch]:
        return asyncio.run(self.grep(*args, **kwargs))


def test_the_extension_is_a_request() -> None:
    files = Searches(extended=True)
    found = files.find("x", "/r", context=2, after=3, glob="*.py", limit=5)
    assert (found, found.truncated) == ([GrepMatch("f", 2, 1, "x", ("a",), ("b",))], True)
    (params,) = files.sent
    assert (params.before, params.after, params.glob, params.exclude) == (2, 3, "*.py", ".git")
    with pytest.raises(TypeError, match="pattern must be str, not bytes"):
        files.find(b"x")


def test_a_server_that_cannot_count_is_not_asked_to() -> None:
    output = b"/w/./a\x001:x\n/w/./a\x003:x\n/w/./b\x001:x\n"
    files = Searches(extended=True, output=output)
    assert files.find("x", word=True) == [GrepMatch("f", 2, 1, "x", ("a",), ("b",))]
    assert files.sent[-1].pattern == r"(?<!\w)(?:x)(?!\w)"
    files.find("x.", word=True, literal=True)
    assert (files.sent[-1].pattern, files.sent[-1].literal) == (r"(?<!\w)(?:x\.)(?!\w)", False)
    older = Searches(extended=False, output=output)
    counts = asyncio.run(older.grep_count("x", literal=True))
    assert counts == [GrepCount("a", 2), GrepCount("b", 1)]
    assert [match.line for match in older.find("y", literal=True, invert=True)] == [1, 3, 1]
    assert "-v" in older.sent[-1]
    assert older.find("x", literal=True, invert=True) == []
    with pytest.raises(Unsupported, match=r"fsGrepCounts.*literal"):
        older.find("x.", invert=True)


def test_only_simple_filters_are_passed_to_a_command() -> None:
    with pytest.raises(Unsupported, match="fsGrep"):
        Searches(extended=False).find("x", glob="src/*.py")


def test_a_regular_expression_selects_lines_of_a_wider_search() -> None:
    output = b"/w/./a\x001:x1\n/w/./a\x002:x2\xff\n/w/./a\x003:3\n"
    files = Searches(extended=False, output=output)
    found = files.find(r"(?<=x)\d\W\Z", context=1)
    assert found == [GrepMatch("a", 2, 2, "x2\ufffd", ("x1",), ("3",))]
    assert files.sent[-1][-5:] == [
        *("-P", "-e", r"(?:)(?:\d|[\x80-\xff]{1,4})(?:.|[\x80-\xff]{1,4})(?:)", "--", "/w/.")
    ]
    assert files.find("Ä1", literal=True, ignore_case=True) == []
    assert files.sent[-1][-5:-3] == ["-i", "-e"]
    for pattern in ("(", "*"):
        with pytest.raises(InvalidParams, match="not a regular expression"):
            files.find(pattern)


def test_a_client_without_regex_finds_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "regex", None)
    files = Searches(extended=False, output=b"/w/./a\x001:x1\n")
    with pytest.raises(Unsupported, match="install the package regex"):
        files.find("x")
    assert len(files.find("x", literal=True)) == 1


def test_the_output_of_grep_is_read() -> None:
    output = (
        b"/w/./b\x001-one\n/w/./b\x002:a X\r\n/w/./b\x003-three\n--\n"
        b"/w/./a\x007:x\xff\n/w/./a\x008:x\n"
    )
    files = Searches(extended=False, output=output)
    found = files.find("x", literal=True, ignore_case=True, context=1, glob="*")
    assert found == [
        GrepMatch("a", 7, 1, "x\ufffd", (), ("x",)),
        GrepMatch("a", 8, 1, "x", ("x\ufffd",), ()),
        GrepMatch("b", 2, 3, "a X", ("one",), ("three",)),
    ]
    assert not found.truncated
    words = files.sent[-1]
    assert words[-2:] == ["--", "/w/."]
    assert {"-B1", "-A1", "-i", "--include=*", "--exclude-dir=.git"} < set(words)


def test_a_file_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Searches(extended=False, output=b"/w/f\x001:x\n/w/f\x002:x\n", is_file=True)
    found = files.find("x", "f", literal=True, exclude=None, limit=1)
    assert (found, found.truncated) == ([GrepMatch("f", 1, 1, "x")], True)
    assert files.sent[-1][-1] == "/w/f"
    monkeypatch.setattr(module, "GREP_OUTPUT_BYTES", 5)
    found = files.find("x", "f", literal=True)
    assert (len(found), found.truncated) == (2, True)


def test_a_grep_that_lacks_an_option() -> None:
    files = Searches(extended=False, stderr=b"grep: unrecognized option: Z\n")
    with pytest.raises(Unsupported, match="unrecognized option"):
        files.find("x", literal=True)


def test_another_user_searches_by_command() -> None:
    files = Searches(extended=True, output=b"/w/./f\x001:x\n")
    cast(Any, files)._session.call_polyfill = lambda call, params: files._polyfills.table[
        call.name
    ](params)
    cast(Any, files)._user = "nobody"
    assert files.find("x", literal=True) == [GrepMatch("f", 1, 1, "x")]
    metadata, words = files.sent
    assert (metadata.user, words[-1]) == ("nobody", "/w/.")
