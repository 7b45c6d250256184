"""Seeded bytes that commands print, and the account of the bytes that a client receives. Pure."""

import random
from dataclasses import dataclass, field


def seeded_bytes(seed: int, size: int) -> bytes:
    """The bytes that `soak/child.py print SEED SIZE` prints, also if it writes them in pieces."""
    return random.Random(seed).randbytes(size)


class WrongBytes(Exception):
    """A client has received other bytes than the command printed."""


@dataclass
class Account:
    """One stream of a command as a client receives it, compared with the printed bytes.

    Each received piece must be the next printed bytes, or printed later if bytes were declared
    lost. Where several gaps follow each other, a client knows their sum only, so a declaration
    may precede its gap; in the end the declarations must equal the gaps.
    """

    expected: bytes
    received: int = 0
    declared: int = 0
    _position: int = field(default=0, init=False)  # after the last received byte

    def add(self, data: bytes, lost_before: int = 0) -> None:
        """Take the next piece; raises WrongBytes if it is not the next one."""
        self.lose(lost_before)
        latest = self.received + self.declared
        for start in (latest, self._position):
            if self.expected.startswith(data, start):
                break
        else:
            start = self.expected.find(data, self._position, latest + len(data))
            if start < 0:
                raise WrongBytes(
                    f"{len(data)} bytes after the first {self._position} of {len(self.expected)} "
                    f"are wrong: {self.received} received, {self.declared} declared lost"
                )
        self._position = start + len(data)
        self.received += len(data)

    def lose(self, count: int) -> None:
        """Take a declaration that bytes are lost."""
        self.declared += count

    @property
    def missing(self) -> int:
        """The bytes that are neither received nor declared lost."""
        return len(self.expected) - self.received - self.declared

    def close(self) -> None:
        """The stream has ended; raises WrongBytes unless every byte is received or declared."""
        if self.missing:
            raise WrongBytes(
                f"{self.missing} of {len(self.expected)} bytes are missing: "
                f"{self.received} received, {self.declared} declared lost"
            )
