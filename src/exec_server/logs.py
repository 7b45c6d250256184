"""Log lines on stderr, for people or as JSON. One event is one line, whatever it quotes."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

LEVELS = ("error", "warning", "info", "debug")
FORMATS = ("human", "json")

# Ids and names in messages come from clients: none of them may start a line of its own or
# paint the terminal.
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_ESCAPED |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_ESCAPED |= {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage().translate(_ESCAPED)
        line = f"{_time(record)} {record.levelname.lower():7} {record.name}: {text}"
        if record.exc_info:
            # Quoted like the message: a traceback ends in a text that a client may have chosen.
            line += " | " + self.formatException(record.exc_info).translate(_ESCAPED)
        return line


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        import json

        event = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        # In ASCII, which can also say the halves of characters that file names may contain.
        return json.dumps(event)


def configure(level: str, style: str) -> None:
    """Send the package's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else HumanFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
