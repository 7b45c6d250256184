"""Results as notebooks show them."""

from __future__ import annotations

import re

import pytest

from exec_server.client.result_html import SHOWN_BYTES, SHOWN_LINES
from exec_server.client.results import Result
from exec_server.protocol.sandbox import Denial


def text_of(shown: str) -> str:
    return re.sub(r"<[^>]*>", "", shown)


def make(stdout: bytes = b"", stderr: bytes = b"", **values: object) -> str:
    fields: dict[str, object] = {"exit_code": 0, "duration": 0.25} | values
    return Result(("sh", "-c", "x"), stdout, stderr, **fields)._repr_html_()  # type: ignore[arg-type]


def test_a_short_result() -> None:
    shown = make(b"\x1b[32mgreen\x1b[m\n", b"careful\n")
    assert text_of(shown) == "exit code 0 · 250 ms · sh -c xgreen\ncareful\n"
    assert shown.count("<pre") == 2
    assert 'color:#1a8f4a">green</span>' in shown
    assert make().count("<pre") == 0


def test_hostile_output_and_commands_are_escaped() -> None:
    attack = "</pre><script>alert(1)</script><img src=x onerror='y'>"
    shown = Result(("sh", attack + "\n"), attack.encode(), attack.encode(), 1, 0.1)._repr_html_()
    assert set(re.findall(r"<(\w+)", shown)) == {"div", "span", "code", "pre"}
    assert shown.count("&lt;script&gt;") == 3


def test_the_middle_of_many_lines_is_left_out() -> None:
    data = b"".join(b"%d\n" % number for number in range(1000))
    text = text_of(make(data))
    left_out = data[data.index(b"\n60\n") + 1 : data.index(b"\n940\n") + 1]
    assert f"\n59\n[… 880 lines, {len(left_out):,} bytes left out …]\n940\n" in text
    assert text.endswith("\n999\n")
    whole = b"x\n" * (2 * SHOWN_LINES)
    assert text_of(make(whole)).endswith(whole.decode())


def test_the_middle_of_a_long_line_is_left_out_between_characters() -> None:
    text = text_of(make("ä€".encode() * SHOWN_BYTES))
    head, tail = text.split("\n[… ")
    assert head.endswith("ä€ä€ä")
    left_out, end = tail.split(" bytes left out …]\n")
    assert len(end.encode()) in range(SHOWN_BYTES - 3, SHOWN_BYTES + 1)
    assert int(left_out.replace(",", "")) == 3 * SHOWN_BYTES  # between the cuts
    assert "\ufffd" not in text


def test_discarded_and_lost_bytes_are_counted() -> None:
    shown = text_of(make(b"a\n", b"", lost_bytes=7000, lost_stdout=1000, lost_stderr=1000))
    assert "xa\n[… 1,000 bytes left out …][… 1,000 bytes left out …]5,000 bytes were lost" in shown


def test_failures() -> None:
    shown = make(exit_code=3, sandbox_denied=True)
    assert 'color:#d0384a;font-weight:bold">exit code 3, denied by its sandbox<' in shown
    denial = Denial(text=None, path="/x", operation="write", rule=None)
    denied = make(exit_code=3, sandbox_denial=denial)
    assert "denied by its sandbox" in denied


def test_a_long_command_is_cut() -> None:
    shown = Result(("sh", "-c", "word " * 1000), b"", b"", 0, 0.1)._repr_html_()
    assert len(shown) < 500
    assert " word wor…</code>" in shown


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0021, "2 ms"), (1.26, "1.3 s"), (75, "1 min 15 s"), (3 * 3600 + 120, "3 h 02 min")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert f" · {expected} · " in make(duration=seconds)
