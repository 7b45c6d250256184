"""The service as a program, for benchmarks and for trying things out.

Prints one line of JSON with its address, then serves until SIGTERM or until stdin closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys

import uvloop

from tests.relay_service.service import RelayService
from tests.relay_service.state import Form


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="relay_service", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--prefix", default="", help="path before every registry path")
    parser.add_argument(
        "--authorization", action="append", help="accept only this header value; repeatable"
    )
    parser.add_argument("--plaintext", action="store_true", help="serve the historical forms")
    parser.add_argument(
        "--executor-form", type=Form, choices=[Form.TEXT, Form.RELAY], default=Form.TEXT
    )
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def read_stdin() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    settings = {
        "host": arguments.host,
        "port": arguments.port,
        "prefix": arguments.prefix,
        "authorizations": arguments.authorization,
        "plaintext": arguments.plaintext,
        "executor_form": arguments.executor_form,
        "record": False,
    }
    async with RelayService(**settings) as service:
        print(json.dumps({"url": service.url, "token": service.token}), flush=True)
        # A file or the null device cannot be waited for; its end is not the end of the parent.
        with contextlib.suppress(OSError):
            loop.add_reader(0, read_stdin)
        await stop.wait()


def main() -> int:
    uvloop.run(_serve(_arguments()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
