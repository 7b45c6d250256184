"""The modes of `files.open`, and the options that each of them takes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.memory_session import Scene, in_environment

from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.transfer.open_file import FileAppender, FileReader, FileWriter
from exec_server.client.transfer.opening import parse_mode
from exec_server.client.transfer.text_file import TextReader, TextWriter
from exec_server.errors import Unsupported

KINDS = {
    "rb": FileReader,
    "wb": FileWriter,
    "bx": FileWriter,
    "ab": FileAppender,
    "r": TextReader,
    "tr": TextReader,
    "w": TextWriter,
    "xt": TextWriter,
    "a": TextWriter,
}


@in_environment
async def test_each_mode_has_its_kind_of_file(scene: Scene) -> None:
    open_any: Any = scene.env.files.open
    for mode, kind in KINDS.items():
        assert type(open_any("a", mode)) is kind
    for mode in ("r", "w", "a"):
        assert repr(open_any("a", mode)) == f"<{KINDS[mode].__name__} a, not open>"
    assert repr(open_any("a", "ab")) == "<FileAppender a, not open>"


@pytest.mark.parametrize("mode", ["", "b", "rw", "rr", "rbt", "rU", "q"])
def test_other_modes_are_refused(mode: str) -> None:
    with pytest.raises(ValueError, match="mode must be 'r', 'w', 'a' or 'x' with 'b' or 't', not"):
        parse_mode(mode)


def test_a_file_is_not_read_and_written_at_once() -> None:
    with pytest.raises(ValueError, match=r"mode 'r\+': a file is read or written"):
        parse_mode("r+")


@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        ("rb", {"encoding": "utf-8"}, "mode 'rb' is binary"),
        ("wb", {"errors": "strict"}, "mode 'wb' is binary"),
        ("ab", {"newline": ""}, "mode 'ab' is binary"),
        ("r", {"offset": 1}, "mode 'r' takes no offset"),
        ("wb", {"offset": 1}, "mode 'wb' takes no offset"),
        ("rb", {"in_place": True}, "mode 'rb' takes no in_place"),
        ("w", {"in_place": True}, "mode 'w' takes no in_place"),
        ("r", {"newline": "x"}, "newline must be None, '', "),
        ("a", {"newline": "\n\n"}, "newline must be None, '', "),
    ],
)
def test_options_belong_to_modes(mode: str, options: dict[str, Any], reason: str) -> None:
    @in_environment
    async def test(scene: Scene) -> None:
        open_any: Any = scene.env.files.open
        with pytest.raises(ValueError, match=reason):
            open_any("a", mode, **options)

    test()


@in_environment
async def test_unknown_encodings_are_refused_at_once(scene: Scene) -> None:
    for mode in ("r", "w"):
        with pytest.raises(LookupError, match="klingon"):
            scene.env.files.open("a", mode, encoding="klingon")
        with pytest.raises(LookupError, match="ignor"):
            scene.env.files.open("a", mode, errors="ignor")


@in_environment
async def test_without_blocks_nothing_is_opened_to_write(scene: Scene) -> None:
    scene.env.session.features = ServerFeatures(confines_commands=False)
    confined = scene.env.files.sandboxed("read-only")
    with pytest.raises(Unsupported, match="fileWriteStreaming: write the whole file"):
        confined.open("a", "w")
