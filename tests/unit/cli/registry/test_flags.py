"""The flags of `exec-server registry`, and the database that they name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from exec_server.cli.errors import UsageError
from exec_server.cli.registry import command, flags
from exec_server.cli.registry.command import build_parser
from exec_server.cli.registry.flags import data_directory, database_url, hide_password


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000)],
)
def test_lifetimes(text: str, expected: int) -> None:
    assert flags.lifetime(text) == expected


@pytest.mark.parametrize("text", ["", "0", "1w", "-1", "d", "1.5h"])
def test_other_texts_are_no_lifetimes(text: str) -> None:
    with pytest.raises(ValueError):
        flags.lifetime(text)


@pytest.mark.parametrize("name", flags.VERBS)
def test_the_examples_of_a_verb_can_be_parsed(name: str) -> None:
    for example in flags.VERBS[name].examples:
        words = [*name.split(), *shlex.split(example)]
        arguments = command.build_parser().parse_words(words)
        assert arguments.words[: len(name.split())] == name.split()
        flags.check_verb(arguments, name)


def test_the_directory_of_the_flag_or_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parser = build_parser()
    assert data_directory(parser.parse_words(["--data", "/x"])) == Path("/x")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert data_directory(parser.parse_words([])) == Path("/data/exec-server/registry")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    directory = data_directory(parser.parse_words([]))
    assert directory == Path("/home/me/.local/share/exec-server/registry")


def test_the_url_of_the_flag_or_of_a_file(tmp_path: Path) -> None:
    parser = build_parser()
    assert database_url(parser.parse_words([])) is None
    assert database_url(parser.parse_words(["--database", "postgresql://x"])) == "postgresql://x"
    file = tmp_path / "url"
    file.write_text("postgresql://secret@x\n")
    words = ["--database-url-file", str(file)]
    assert database_url(parser.parse_words(words)) == "postgresql://secret@x"
    with pytest.raises(UsageError, match="begins with postgresql://") as refused:
        database_url(parser.parse_words(["--database", "mysql://secret@x"]))
    assert "secret" not in str(refused.value)
    with pytest.raises(UsageError, match="--database-url-file"):
        database_url(parser.parse_words(["--database-url-file", str(tmp_path / "none")]))


def test_a_password_that_cannot_be_erased_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = build_parser()
    monkeypatch.setattr(flags, "_erase_argument", lambda _: False)
    for words in ([], ["--database", "postgresql://user@host/name"]):
        hide_password(parser.parse_words(words))
    for url in ("postgresql://user:secret@host/name", "postgresql://host/name?password=secret"):
        with pytest.raises(UsageError, match="--database-url-file") as refused:
            hide_password(parser.parse_words(["--database", url]))
        assert "secret" not in str(refused.value)
