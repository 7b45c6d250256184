"""result_html: the result of a command as notebooks show it. Pure; the output may be hostile."""

from __future__ import annotations

import codecs
import html
import shlex
from typing import Final

from exec_server.client.ansi_html import ansi_to_html
from exec_server.printable import printable

# Of each stream, at both ends: a screen or two. A notebook stores what it shows.
SHOWN_LINES: Final = 60
SHOWN_BYTES: Final = 16_384
# Of the command.
SHOWN_CHARACTERS: Final = 200

_DECODER: Final = codecs.getincrementaldecoder("utf-8")
_CONTINUATIONS: Final = bytes(range(0x80, 0xC0))  # they do not begin a character
_GOOD, _BAD, _GREY = "#1a8f4a", "#d0384a", "#8a8f98"
_PRE: Final = (
    "margin:2px 0 0 0;padding:0 0 0 8px;border-left:3px solid {};white-space:pre-wrap;"
    "overflow-wrap:anywhere"
)


def result_to_html(
    argv: tuple[str, ...],
    streams: tuple[tuple[bytes, int], ...],
    *,
    exit_code: int,
    duration: float,
    is_denied: bool,
    lost: int = 0,
) -> str:
    """One `div`; each of the `streams`, stdout and stderr, has its bytes and the discarded ones.

    `lost` bytes of either stream were lost with a connection.
    """
    colour = _BAD if exit_code else _GOOD
    state = f"exit code {exit_code}"
    if is_denied:
        state += ", denied by its sandbox"
    command = shlex.join(argv)
    if len(command) > SHOWN_CHARACTERS:
        command = f"{command[:SHOWN_CHARACTERS]}…"
    # A line break would make the heading as long as the command.
    shown = html.escape(printable(" ".join(command.split())))
    parts = [
        f'<div><span style="color:{colour};font-weight:bold">{state}</span> · '
        f"{_duration(duration)} · <code>{shown}</code></div>"
    ]
    for (data, discarded), border in zip(streams, (_GREY, _BAD), strict=True):
        if data or discarded:
            parts.append(f'<pre style="{_PRE.format(border)}">{_stream(data, discarded)}</pre>')
    if lost:
        parts.append(f"<div>{lost:,} bytes were lost with the connection</div>")
    return f"<div>{''.join(parts)}</div>"


def _stream(data: bytes, discarded: int) -> str:
    """The beginning and the end of a stream, and how much is missing between them."""
    head, middle, tail = _split(data)
    if not middle and not discarded:
        return ansi_to_html(head.decode(errors="replace"))
    lines = middle.count(b"\n")
    counts = [f"{lines:,} lines"] if lines else []
    counts.append(f"{len(middle) + discarded:,} bytes")
    note = f'<span style="opacity:0.7">[… {", ".join(counts)} left out …]</span>'
    begin = _DECODER("replace").decode(head)  # without a character that was cut off
    end = tail.lstrip(_CONTINUATIONS) if middle else tail
    texts = (
        ansi_to_html(begin).removesuffix("\n"),
        note,
        ansi_to_html(end.decode(errors="replace")),
    )
    return "\n".join(text for text in texts if text)


def _split(data: bytes) -> tuple[bytes, bytes, bytes]:
    """The shown beginning, the part that is left out, and the shown end."""
    if len(data) <= 2 * SHOWN_BYTES and data.count(b"\n") <= 2 * SHOWN_LINES:
        return data, b"", b""
    head = _first_lines(data[:SHOWN_BYTES])
    tail = _last_lines(data[len(head) :][-SHOWN_BYTES:])
    return head, data[len(head) : len(data) - len(tail)], tail


def _first_lines(data: bytes) -> bytes:
    lines = data.split(b"\n")
    return data if len(lines) <= SHOWN_LINES else b"\n".join((*lines[:SHOWN_LINES], b""))


def _last_lines(data: bytes) -> bytes:
    lines = data.rsplit(b"\n", SHOWN_LINES + 1)
    return data if len(lines) <= SHOWN_LINES + 1 else b"\n".join(lines[1:])


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
