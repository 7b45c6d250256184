"""A TCP proxy on loopback, for connections that are lost on purpose."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from exec_server.net.websocket.frames import FrameReader, Opcode


class Proxy:
    """A TCP proxy on loopback that can cut its connections, refuse new ones, and turn away."""

    def __init__(self, url: str, *, record: bool = False) -> None:
        self.target = url
        self._sent: list[bytearray] | None = [] if record else None  # of each connection
        self.accepted_at: list[float] = []  # by the monotonic clock
        self._is_closing = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        self._close_listener()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self, refuse_for: float = 0.0) -> None:
        """Drops every connection on both sides; refuses new ones for this many seconds."""
        if refuse_for:
            self._refuse(refuse_for)
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                # Wakes the thread that reads from it, which closes it.
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _close_listener(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _refuse(self, seconds: float) -> None:
        # A socket that is bound and does not listen keeps the port and refuses connections.
        address = self._listener.getsockname()
        self._close_listener()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(address)
        self._start(self._listen_after, seconds)

    def _listen_after(self, seconds: float) -> None:
        if not self._is_closing.wait(seconds):
            with contextlib.suppress(OSError):  # closed in this moment
                self._listener.listen()
            self._accept()

    @property
    def accepted(self) -> int:
        return len(self.accepted_at)

    def _accept(self) -> None:
        listener = self._listener
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            address = urlsplit(self.target)
            far = socket.create_connection((address.hostname or "", address.port or 0))
            self.accepted_at.append(time.monotonic())
            self._pairs.append((near, far))
            sent = None
            if self._sent is not None:
                sent = bytearray()
                self._sent.append(sent)
            self._start(_relay, near, far, sent)

    def methods(self) -> list[str]:
        """The methods of all messages that clients have sent, if they are recorded."""
        assert self._sent is not None
        methods = []
        for sent in self._sent:
            reader = FrameReader()
            reader.feed(bytes(sent).partition(b"\r\n\r\n")[2])
            while (event := reader.next_event()) is not None:
                if event.opcode is Opcode.TEXT:
                    methods.append(json.loads(event.payload).get("method"))
        return methods

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()


def _relay(near: socket.socket, far: socket.socket, sent: bytearray | None) -> None:
    """Copies both directions until one of them ends, and closes both."""
    with near, far, contextlib.suppress(OSError):
        while True:
            for source in select.select([near, far], [], [])[0]:
                if not (data := source.recv(65536)):
                    return
                if source is near and sent is not None:
                    sent += data
                (far if source is near else near).sendall(data)
