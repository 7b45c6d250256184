"""TOML files: limits and faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exec_server.codex import config
from exec_server.codex.config import (
    TEXT_CHARACTERS,
    DocumentTooLarge,
    TomlFault,
    UnreadableFile,
    dump,
    parse,
    read_text,
)

_LONG_KEY = "a key has more than 32 segments"
_LARGE = "integer number overflowed"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a=1\na=2\n", r"Cannot overwrite a value \(at line 2, column 4\)"),
        ("\na = \n", r"Invalid value \(at line 2, column 5\)"),
        (f"x = 1\na = {2**63}\n", _LARGE),
        (f"a = [{-(2**63) - 1}]\n", _LARGE),
        ("a = 0xFFFFFFFFFFFFFFFF\n", _LARGE),
        ("a = " + "9" * 5000, "Exceeds the limit"),
        ("a = 0b" + "1" * 200_000, _LARGE),
        ("a = " + "[" * 81 + "]" * 81, "the document is more than 80 levels deep"),
        ("x = inf\na = 1e999", "floating-point number overflowed"),
        ("a = [-1e999]", "floating-point number overflowed"),
        ("a = " + "[" * 5000, "nested"),
        ("x = 1\n" + "a." * 32 + "b = 1", _LONG_KEY),
        ("x = {" + '"a" . ' * 32 + "b = 1}", _LONG_KEY),
    ],
)
def test_faults(text: str, fault: str) -> None:
    with pytest.raises(TomlFault, match=fault):
        parse(text)


_REVERSE_NAME = ".".join("0123456789abcdef" * 2) + ".ip6.arpa"


@pytest.mark.parametrize(
    "text",
    [
        "a." * 31 + "a = 1",
        f"# {_REVERSE_NAME}\nx = 1",
        f'x = "{_REVERSE_NAME}" # {_REVERSE_NAME}',
        f"x = '{_REVERSE_NAME}'",
        f"x = ['{_REVERSE_NAME}', # {_REVERSE_NAME}\n]",
        f'x = """\n{_REVERSE_NAME} \\""" {_REVERSE_NAME}\n"""',
        f"x = '''\n{_REVERSE_NAME} ''\n'''",
        f'"{_REVERSE_NAME}".a = 1',
    ],
)
def test_dots_of_other_texts_are_none_of_keys(text: str) -> None:
    assert config.parse(text)


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 130_000, '"""' + '\\"""' * 65_000, "a" * 260_000, "'" * 260_000]
)
def test_the_search_for_long_keys_reads_each_character_once(text: str) -> None:
    # A search that begins anew at each character takes minutes.
    with pytest.raises(TomlFault):
        config.parse(text + "." * 40)


def test_documents_of_toml_1_1_are_read_and_written() -> None:
    document = parse(f'a = {{\n  b = 1,\n}}\nc = "\\e"\nbig = {2**63 - 1}\n' + "k." * 30 + "k = 1")
    assert document["a"] == {"b": 1}
    assert parse(dump(document)) == document
    assert dump({"tab": {}}) == "[tab]\n"


def test_nested_arrays_are_written_without_indentation() -> None:
    document = parse(f"a = {'[' * 70}{'1,' * 1000}{']' * 70}")
    text = dump(document)
    assert parse(text) == document
    assert len(text) < 5000


def test_headers_that_repeat_long_keys_are_refused() -> None:
    around = ".".join("k" * 100 for _ in range(31))
    tables = TEXT_CHARACTERS // len(around)
    few = "".join(f"a{n}.b = 1\n" for n in range(tables - 100))
    assert len(dump(parse(f"[{around}]\n{few}"))) < 2 * TEXT_CHARACTERS
    many = "".join(f"a{n}.b = 1\n" for n in range(tables + 1))
    with pytest.raises(DocumentTooLarge):
        dump(parse(f"[{around}]\n{many}"))
    with pytest.raises(DocumentTooLarge):
        dump({"k" * TEXT_CHARACTERS: [{"a": 1}, {"a": 2}]})


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    assert read_text(str(file)) is None
    file.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_text(str(file)) == "a = 1\n"
    assert read_text(f"{file}/below") is None
    file.write_bytes(b"#" * config.FILE_BYTES)
    assert read_text(str(file)) is not None
    for content, reason in [
        (b"#" * (config.FILE_BYTES + 1), f"the file exceeds {config.FILE_BYTES} bytes"),
        (b"a = '\xff'", "invalid utf-8 sequence of 1 bytes from index 5"),
        (b"\xef\xbb\xbfa\xe2\x82", "incomplete utf-8 byte sequence from index 4"),
    ]:
        file.write_bytes(content)
        with pytest.raises(UnreadableFile, match=reason):
            read_text(str(file))


def test_no_file_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableFile, match="pipe` is not a file"):
        read_text(str(tmp_path / "pipe"))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnreadableFile, match="Symbolic link loop"):
        read_text(str(tmp_path / "loop"))
