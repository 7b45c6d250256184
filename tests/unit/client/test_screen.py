"""The screen of a terminal: sequences of real programs, and of hostile ones."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import random
import sys
from typing import Any, cast

import pytest

pytest.importorskip("pyte")

from exec_server.client import screen as screen_module
from exec_server.client.engine.session import ClientSession
from exec_server.client.results import Screen
from exec_server.client.screen import Renderer, TerminalScreen
from exec_server.errors import InvalidRequest, ProcessLost
from exec_server.protocol.decoding import Base64
from exec_server.protocol.process import OutputChunk, ProcessId, ReadParams, ReadResult

SIZE = (4, 10)


def show(data: str | bytes, size: tuple[int, int] = SIZE) -> Screen:
    return Renderer(*size).show(data.encode() if isinstance(data, str) else data, size)


def text(data: str | bytes) -> str:
    return str(show(data))


def test_a_screen_is_a_value() -> None:
    screen = show("one\r\n\x1b[3;4Htwo\x1b]0;a title\x07\x1b]2;the title\x1b\\")
    assert screen == Screen(("one", "", "   two", ""), (2, 6), SIZE, "the title")
    assert (screen.text, str(screen)) == ("one\n\n   two",) * 2
    assert show("x" * 10).cursor == (0, 9)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("abcdefghijKL", "abcdefghij\nKL"),
        ("\x1b[?7labcdefghijKL", "abcdefghiL"),
        ("1\r\n2\r\n3\r\n4\r\n5", "2\n3\n4\n5"),
        ("abc\x1b[2D\x1b[Px\x1b[K", "ax"),
        ("ab\x1b[1;1H\x1b[4hX\x1b[4lY", "XYb"),
        ("a\x1b[5bc", "aaaaaac"),
        ("1\r\n2\r\n3\r\n4\x1b[S", "2\n3\n4"),
        ("1\r\n2\x1b[T!", "\n1!\n2"),
        ("1\r\n2\r\n3\r\n4\x1b[2;3r\x1b[Sx", "x\n3\n\n4"),
        ("1\r\n2\x1b[1;1H\x1b[L0", "0\n1\n2"),
        ("main\x1b[?1049h\x1b[Hother", "other"),
        ("main\x1b[?1049hother\x1b[?1049l!", "main!"),
        ("\x1b(0lqk\x1b(B q \x1b)0\x0ex\x0fx", "┌─┐ q │x"),
        ("日本\x1b[1;5He\u0301\u200d!", "日本é!"),
        ("a\x1b[31;1mb\x1b[38:2::1:2:3mc\x1b[>4;2m\x1b[?25l\x1b[ q\x1b=\x1b%Gd", "abcd"),
        ("a\x1bPhidden\x1b\\b\x1b_hidden\x1b\\c\x1b]8;;http://x\x07d", "abcd"),
        ("a\tb\bc\x00\x7f\x1b7\x1b[4;4Hd\x1b8e", "a       ce\n\n\n   d"),
        ("abc\x1bcd", "d"),
        ("\x1b[2;3Habc\x1b[2;4H\x1b[1J\x1b[9J\x1b[9K\x1b[2g", "\n    c"),
        ("\x1b#8\x1b[2;1H\x1b[J", "EEEEEEEEEE"),
        ("\x1b[2;2H\x1bMa\x1bEb\x1bDc", " a\nb\n c"),
        (b"caf\xc3\xa9 \xff\x9b", "café \ufffd\ufffd"),
        ("\x9b2Jx", "2Jx"),
    ],
)
def test_sequences(data: str | bytes, shown: str) -> None:
    assert text(data) == shown


def test_output_may_end_anywhere() -> None:
    data = "a日\x1b[2;3Hb\x1b]0;title\x07\x1b(0q\x1b(B\x1b[?1049h\x1b[1;2Hc\x1b[?1049ld".encode()
    terminal = Renderer(*SIZE)
    for index in range(len(data)):
        screen = terminal.show(data[index : index + 1], SIZE)
    assert screen == show(data)


def test_a_new_size() -> None:
    terminal = Renderer(4, 10)
    terminal.show(b"1\r\n2\r\n3\r\n4 and more", (4, 10))
    assert terminal.show(b"", (2, 5)) == Screen(("3", "4 and"), (1, 4), (2, 5))
    screen = terminal.show(b"\x1b[?1049hx", (3, 6))
    assert (screen.size, len(screen.lines)) == ((3, 6), 3)
    assert str(terminal.show(b"\x1b[?1049l", (3, 6))) == "3\n4 and"


STARTS = ["\x1b[", "\x1b]", "\x1bP", "\x1b", "?", ";", "1", "3", "9" * 20, "0", "h", "l", "m"]
FINALS = list("@ABCDEFGHJKLMPSTX`abdefgrsutncpq")
WHOLE = ["\x1b[?1049h", "\x1b[?1049l", "\x1b[?6h", "\x1b[?3h", "\x1b[?5h", "\x1b[4h", "\x1b#8"]
WHOLE += ["\x1b\\", "\x1bc", "\x1bM", "\x1b(0", "\x1b)0", "\x1b7", "\x1b8", "\x9b", "\a", "text "]
TEXTS = ["\n", "\r", "\b", "\t", "\x0e", "\x0f", "\0", "\x7f", "é", "日", "e\u0301", "\u200d", "👩"]
PARTS = [*STARTS, *FINALS, *WHOLE, *TEXTS]


@pytest.mark.parametrize("seed", range(40))
def test_random_sequences_do_no_harm(seed: int) -> None:
    choose = random.Random(seed)
    size = (choose.randint(1, 8), choose.randint(1, 20))
    terminal = Renderer(*size)
    for _ in range(5):
        data = "".join(choose.choice(PARTS) for _ in range(choose.randint(0, 200))).encode()
        cut = choose.randint(0, len(data))
        terminal.show(data[:cut] + b"\xff" * choose.randint(0, 1), size)
        size = (choose.randint(1, 8), choose.randint(1, 20))
        screen = terminal.show(data[cut:], size)
        assert (screen.size, len(screen.lines)) == (size, size[0])
        assert 0 <= screen.cursor[0] < size[0]
        assert 0 <= screen.cursor[1] < size[1]


@pytest.mark.parametrize(
    "flood",
    [
        *("\x1b[2J", "\x1b[9999L", "\x1b[9999S", "\x1b[H\x1b[9999T", "x\x1b[99999b", "\x1b#8"),
        *("\n", "\x1b[4h\x1b[Hx", "\x1b7", "\x1bc", "\x1b[9999@", "日", "\x1b[?1049h\x1b[?1049l"),
    ],
)
def test_work_is_bounded(flood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in characters that pyte draws, and calls."""
    monkeypatch.setattr(screen_module, "WORK_CELLS", 20_000)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and "pyte" in frame.f_code.co_filename

    terminal = Renderer(20, 50)
    sys.setprofile(count)
    try:
        screen = terminal.show(
            (flood * 50_000 + "\x1b[H\x1b[2J\x1b[?1049l\x1b[4lend").encode(), (20, 50)
        )
    finally:
        sys.setprofile(None)
    assert (screen.is_complete, screen.lines[0]) == (False, "end")
    assert calls < 60_000
    assert len(terminal._shown.savepoints) <= screen_module.SAVED_CURSORS


def test_tab_stops_are_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_module, "WORK_CELLS", 10_000)
    for columns, is_complete in ((40, True), (640, False)):  # each column may be a tab stop
        assert show(b"\t" * 5000, (4, columns)).is_complete is is_complete


@pytest.mark.parametrize(
    ("flood", "size"),
    [
        (b"\x1b[9999b", (200, 1)),  # each character moves all lines
        (b"x" * 1000, (200, 1)),
        (b"\x1b[4h\x1b[H\x1b[9999b", (20, 200)),  # each one moves the rest of its line
        (b"\x1b[0;4h\x1b[9999b", (1, 200)),
    ],
)
def test_characters_that_move_others_are_work(
    flood: bytes, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen_module, "WORK_CELLS", 10_000)
    assert not show(flood, size).is_complete
    assert show(b"\x1b[4l" + b"x" * size[1], size).is_complete


def test_sequences_without_an_end_are_dropped() -> None:
    terminal = Renderer(*SIZE)
    for start in ("\x1b]0;", "\x1bP", "\x1b["):
        terminal.show(start.encode() + b"1" * screen_module.HELD_CHARACTERS, SIZE)
        assert terminal._held == ""
    title = "t" * (screen_module.TITLE_CHARACTERS + 1)
    screen = terminal.show(f"\x1bc\x1b]0;{title}\x07ok".encode(), SIZE)
    assert (len(screen.title), str(screen)) == (screen_module.TITLE_CHARACTERS, "ok")


# ---- the output that the server retains -----------------------------------------------


class FakeSession:
    """Answers `process/read`."""

    def __init__(self, *answers: ReadResult | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []

    async def call(self, call: Any, params: ReadParams, *, is_retryable: bool) -> ReadResult:
        assert is_retryable
        assert params.after_seq is not None
        self.asked.append(params.after_seq)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer(next_seq: int, *chunks: tuple[int, bytes], lost: int | None = None) -> ReadResult:
    output = [OutputChunk(seq, "pty", Base64(data)) for seq, data in chunks]
    return ReadResult(output, next_seq, False, None, False, None, False, lost_bytes=lost)


def screens(session: FakeSession, count: int, size: tuple[int, int] = SIZE) -> list[Screen]:
    async def scene() -> list[Screen]:
        reader = TerminalScreen(cast(ClientSession, session), ProcessId("p"))
        return [await reader.update(size) for _ in range(count)]

    return asyncio.run(scene())


def test_each_call_reads_what_is_new() -> None:
    # The second answer has more than there was at the time of the call.
    session = FakeSession(
        answer(4, (1, b"a"), (2, b"b")), answer(6, (3, b"c"), (4, b"d")), answer(6), answer(6)
    )
    assert [str(each) for each in screens(session, 2)] == ["abcd", "abcd"]
    assert session.asked == [0, 2, 4]


def test_lost_output_is_told() -> None:
    session = FakeSession(answer(3, (2, b"b")), answer(4, (3, b"c")))
    assert [(str(each), each.is_complete) for each in screens(session, 2)] == [
        ("b", False),
        ("bc", False),
    ]
    (screen,) = screens(FakeSession(answer(2, (1, b"b"), lost=7)), 1)
    assert not screen.is_complete


def test_output_without_an_end_is_left_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_module, "RECEIVED_BYTES", 600)
    session = FakeSession(*(answer(2**40, (seq, b"a")) for seq in range(1, 10)))
    shown = [(str(each), each.is_complete) for each in screens(session, 2)]
    assert shown == [("aaa", False), ("aaaaaa", False)]
    # Nor does a server get on that repeats itself.
    assert str(screens(FakeSession(*[answer(9, (1, b"a"))] * 2), 1)[0]) == "a"


def test_the_last_screen_of_a_process_that_is_forgotten() -> None:
    gone = InvalidRequest("unknown process id p")
    assert [str(each) for each in screens(FakeSession(answer(2, (1, b"a")), gone), 2)] == ["a", "a"]
    with pytest.raises(ProcessLost, match="nor its screen"):
        screens(FakeSession(gone), 1)
    with pytest.raises(ValueError, match="1000 rows and columns"):
        screens(FakeSession(), 1, (2000, 80))


def test_without_pyte_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "pyte":
            raise ModuleNotFoundError("No module named 'pyte'", name="pyte")
        return imported(name, *arguments, **options)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, "exec_server.client.screen")
    with pytest.raises(ImportError, match=r"pip install '\.\[screen\]'") as missing:
        importlib.import_module("exec_server.client.screen")
    assert missing.value.name == "pyte"
    sys.modules["exec_server.client.screen"] = screen_module
