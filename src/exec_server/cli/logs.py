"""Log formats on stderr, text or JSON; control characters in names never add a line."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

from exec_server.errors import printable


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = printable(record.getMessage())
        line = f"{_time(record)} {record.levelname.lower():7} {record.name}: {text}"
        if record.exc_info:
            # Escaped like the message: a traceback ends in text that a client may have chosen.
            line += " | " + printable(self.formatException(record.exc_info))
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
        # ASCII output, because file names may contain lone surrogates.
        return json.dumps(event)


def configure(level: str, log_format: str) -> None:
    """Log to stderr with a level and a format of `serve.arguments`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else HumanFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
