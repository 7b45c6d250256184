"""The program that the commands of the soak test run: `python -I -S child.py MODE ARGUMENTS`.

It imports next to nothing, because thousands of its processes are started.

    print SEED SIZE PIECE PAUSE [SEED SIZE]   seeded bytes to stdout [and stderr], in pieces
    copy                                      stdin to stdout, until its end
    count TOTAL                               TOTAL bytes of stdin to stdout; the rest is not read
    tree TOKEN DEPTH WIDTH                    a tree of processes that wait for a signal
    stubborn TOKEN                            a process that ignores the signals it can ignore
"""

import _random
import os
import signal
import sys
import time

_PIECE_BYTES = 65_536


def main(mode: str, *words: str) -> None:
    """Run one mode."""
    if mode == "print":
        seed, size, piece, pause = int(words[0]), int(words[1]), int(words[2]), float(words[3])
        if len(words) > 4:
            _write(2, _seeded(int(words[4]), int(words[5])), piece, pause)
        _write(1, _seeded(seed, size), piece, pause)
    elif mode == "copy":
        while data := os.read(0, _PIECE_BYTES):
            _write(1, data)
    elif mode == "count":
        left = int(words[0])
        while left and (data := os.read(0, min(left, _PIECE_BYTES))):
            left -= len(data)
            _write(1, data)
    elif mode == "tree":
        _grow(int(words[1]), int(words[2]))
        os.write(1, b"grown\n")
        _wait()
    elif mode == "stubborn":
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        os.write(1, b"grown\n")
        _wait()


def _seeded(seed: int, size: int) -> bytes:
    """The same as random.Random(seed).randbytes(size), without the imports of that module."""
    return _random.Random(seed).getrandbits(size * 8).to_bytes(size, "little") if size else b""


def _write(descriptor: int, data: bytes, piece: int = _PIECE_BYTES, pause: float = 0.0) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:piece]) :]
        if pause:
            time.sleep(pause)


def _grow(depth: int, width: int) -> None:
    """Fork children of every kind: in the group, in a session of their own, and orphans."""
    if not depth:
        return
    for number in range(width):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            if number % 3 == 1:
                os.setsid()
            elif number % 3 == 2:
                os.setsid()
                if os.fork():
                    os._exit(0)  # the daemon's parent: the daemon becomes an orphan
                _close_standard_streams()
            _grow(depth - 1, width)
            os.write(writer, b"x")
            os.close(writer)
            _wait()
        os.close(writer)
        os.read(reader, 1)  # returns when the whole subtree has been forked
        os.close(reader)


def _close_standard_streams() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)


def _wait() -> None:
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
