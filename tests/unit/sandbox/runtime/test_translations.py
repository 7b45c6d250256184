"""The language of a command, with catalogues of the tests."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from exec_server.sandbox.policy.error_texts import ENGLISH
from exec_server.sandbox.runtime import translations
from exec_server.sandbox.runtime.translations import error_texts

_LINE = "touch: /etc/x: {}"


def _catalogue(entries: Mapping[str, str]) -> bytes:
    """A file of `msgfmt`."""
    messages = {"": "Content-Type: text/plain; charset=UTF-8\n", **entries}
    keys = sorted(messages)
    start = 28 + 16 * len(keys)
    tables, data = b"", b""
    for texts in (keys, [messages[key] for key in keys]):
        for text in texts:
            tables += struct.pack("<II", len(text.encode()), start + len(data))
            data += text.encode() + b"\0"
    header = struct.pack("<7I", 0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 0)
    return header + tables + data


@pytest.fixture(autouse=True)
def catalogues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with the languages xx, xx_YY and zz, of which zz is damaged."""
    for language, content in (
        ("xx", _catalogue({os.strerror(errno.EROFS): "nur lesbar"})),
        ("xx_YY", _catalogue({os.strerror(errno.EROFS): "nur zu lesen"})),
        ("zz", _catalogue({})[:40]),
    ):
        folder = tmp_path / language / "LC_MESSAGES"
        folder.mkdir(parents=True)
        (folder / "libc.mo").write_bytes(content)
    monkeypatch.setattr(translations, "_CATALOGUES", str(tmp_path))
    translations._translated.cache_clear()
    yield tmp_path
    translations._translated.cache_clear()


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"LANG": "xx"}, "nur lesbar"),
        ({"LANG": "xx_ZZ.UTF-8"}, "nur lesbar"),
        ({"LANG": "xx_YY.utf8"}, "nur zu lesen"),
        ({"LANG": "C", "LC_MESSAGES": "xx"}, "nur lesbar"),
        ({"LANG": "C", "LC_MESSAGES": "C", "LC_ALL": "xx"}, "nur lesbar"),
        ({"LANG": "en_GB.UTF-8", "LANGUAGE": "qq:xx:en"}, "nur lesbar"),
        ({"LANG": "xx", "LC_ALL": ""}, "nur lesbar"),
    ],
)
def test_the_language_of_a_command(env: dict[str, str], text: str) -> None:
    texts = error_texts(env)
    assert texts.find(_LINE.format(text)) == (15, errno.EROFS)
    assert texts.find(_LINE.format("Read-only file system")) == (15, errno.EROFS)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"LANG": ""},
        {"LANG": "C.UTF-8", "LANGUAGE": "xx"},
        {"LANG": "xx", "LC_ALL": "C"},
        {"LANG": "en_US.UTF-8"},
        {"LANG": "xx", "LANGUAGE": "en:xx"},
        {"LANG": "qq"},
        {"LANG": "zz"},
        {"LANG": "../xx"},
        {"LANG": "xx/../xx"},
        {"LANG": "x" * 100_000},
        {"LANG": "en", "LANGUAGE": ":" * 100 + "xx"},
    ],
)
def test_other_commands_are_english(env: dict[str, str]) -> None:
    assert error_texts(env) is ENGLISH


def test_catalogues_are_read_once(catalogues: Path) -> None:
    first = error_texts({"LANG": "xx"})
    (catalogues / "xx" / "LC_MESSAGES" / "libc.mo").unlink()
    assert error_texts({"LANG": "xx"}) is first
    for number in range(1000):
        error_texts({"LANG": "q" + chr(97 + number % 26) + chr(97 + number // 26)})
    assert translations._translated.cache_info().currsize == translations._CACHED
