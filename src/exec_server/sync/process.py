"""Processes and HTTP responses without `async`."""

from __future__ import annotations

from collections.abc import Iterator

from exec_server.client import http, process
from exec_server.client.results import Chunk, Line
from exec_server.protocol.process import ProcessId
from exec_server.protocol.sandbox import Denial
from exec_server.sync.thread import BlockingHandle, blocking, iterate


class Process(BlockingHandle[process.Process]):
    """A running command; `close`, or leaving its `with`, kills it with all its descendants.

    A detached one is left running.
    """

    def __iter__(self) -> Iterator[Chunk]:
        output = aiter(self._inner)  # the output is wanted while this generator lives
        while chunks := self._thread.call(output.read_some):
            yield from chunks

    def lines(self) -> Iterator[Line]:
        """The output by lines: texts without their ends, each of one stream."""
        return iterate(self._thread, self._inner.lines())

    @property
    def id(self) -> ProcessId:
        return self._inner.id

    @property
    def pid(self) -> int | None:
        return self._inner.pid

    @property
    def name(self) -> str | None:
        return self._inner.name

    @property
    def argv(self) -> tuple[str, ...]:
        return self._inner.argv

    @property
    def exit_code(self) -> int | None:
        return self._inner.exit_code

    @property
    def returncode(self) -> int | None:
        return self._inner.returncode

    @property
    def is_over(self) -> bool:
        return self._inner.is_over

    @property
    def sandbox_denied(self) -> bool:
        return self._inner.sandbox_denied

    @property
    def sandbox_denial(self) -> Denial | None:
        return self._inner.sandbox_denial

    @property
    def lost_bytes(self) -> int:
        return self._inner.lost_bytes

    read_some = blocking(process.Process.read_some)
    collect = blocking(process.Process.collect)
    read_until = blocking(process.Process.read_until)
    wait_for_output = blocking(process.Process.wait_for_output)
    write = blocking(process.Process.write)
    close_stdin = blocking(process.Process.close_stdin)
    resize = blocking(process.Process.resize)
    interrupt = blocking(process.Process.interrupt)
    signal = blocking(process.Process.signal)
    terminate = blocking(process.Process.terminate)
    kill = blocking(process.Process.kill)
    wait = blocking(process.Process.wait)


class HttpStream(BlockingHandle[http.HttpStream]):
    """A response with a streamed body, for `with` or `close`; iterating gives its pieces."""

    def __iter__(self) -> Iterator[bytes]:
        return iterate(self._thread, self._inner)

    @property
    def status(self) -> int:
        return self._inner.status

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return self._inner.headers

    def header(self, name: str) -> str | None:
        return self._inner.header(name)
