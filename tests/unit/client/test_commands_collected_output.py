"""How much of each stream a result keeps, and the count of the rest."""

from __future__ import annotations

import pytest

from exec_server.client.commands import SLACK_BYTES, CollectedOutput, OutputLimit
from exec_server.errors import InvalidParams


def test_one_limit_for_both_streams() -> None:
    output = CollectedOutput(5)
    output.add("stdout", b"abc")
    output.add("stderr", b"defg")
    output.add("pty", b"h")
    assert (output.stdout, output.stderr) == (b"abc", b"de")
    assert (output.lost_stdout, output.lost_stderr) == (1, 2)


def test_both_ends_of_each_stream() -> None:
    output = CollectedOutput(OutputLimit(head=2, tail=3))
    for piece in (b"a", b"bcd", b"efg"):
        output.add("stdout", piece)
    output.add("stderr", b"short")
    assert (output.stdout, output.stderr) == (b"abefg", b"short")
    assert (output.lost_stdout, output.lost_stderr) == (2, 0)


@pytest.mark.parametrize(
    ("limit", "kept"), [(OutputLimit(head=2), b"ab"), (OutputLimit(tail=2), b"yz")]
)
def test_one_end(limit: OutputLimit, kept: bytes) -> None:
    output = CollectedOutput(limit)
    output.add("stdout", b"ab" + b"-" * SLACK_BYTES * 2 + b"yz")
    assert (output.stdout, output.lost_stdout) == (kept, 2 * SLACK_BYTES + 2)


def test_the_end_of_a_long_stream_takes_little_memory() -> None:
    output = CollectedOutput(OutputLimit(tail=10))
    for _ in range(100):
        output.add("stdout", b"x" * SLACK_BYTES)
        assert len(output._streams[False]._tail) <= 10 + SLACK_BYTES  # type: ignore[union-attr]
    assert output.lost_stdout == 100 * SLACK_BYTES - 10


@pytest.mark.parametrize("limit", [-1, OutputLimit(head=-1), OutputLimit(tail=-1)])
def test_a_negative_limit_is_refused(limit: int | OutputLimit) -> None:
    with pytest.raises(InvalidParams, match="must not be negative: -1"):
        CollectedOutput(limit)
