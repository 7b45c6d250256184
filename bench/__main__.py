"""The command `python -m bench`."""

import argparse
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench import report
from bench.awake import can_keep_awake
from bench.runner import Runner
from bench.servers import (
    INSTALL_HELP,
    OURS,
    REFERENCE,
    compile_sources,
    custom_server,
    default_servers,
    reference_cache,
)
from bench.workloads import WORKLOADS, Workload

_ROUNDS, _QUICK_ROUNDS = 5, 2


def main() -> int:
    """Runs the selected workloads and prints the table."""
    options = _parse()
    # SIGTERM must stop the servers, too: as an exception it runs all clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A thousand connections need more descriptors than the usual soft limit.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    compile_sources()
    servers = {server.label: server for server in default_servers()}
    servers |= {server.label: server for server in options.server}
    if REFERENCE not in servers:
        print(INSTALL_HELP.format(cache=reference_cache()), file=sys.stderr)
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    results = []
    awake = options.idle_cores == "awake" and can_keep_awake()
    with tempfile.TemporaryDirectory(prefix="exec-server-bench-") as folder:
        runner = Runner(list(servers.values()), folder, rounds, quick=options.quick, awake=awake)
        try:
            for workload in options.only:
                began = time.monotonic()
                results.append(runner.measure(workload))
                print(f"{workload.title}: {time.monotonic() - began:.1f} s", file=sys.stderr)
        finally:
            runner.close()
        facts = report.gather_facts(runner.versions, folder)
    facts |= {"rounds": str(rounds), "idle cores": "awake for single requests" if awake else "halt"}
    rows = [report.Row(result) for result in results]
    # This server is the first column of the tables, although the reference runs first.
    labels = sorted(servers, key=lambda label: (label != OURS, label != REFERENCE))
    text = report.markdown(rows, labels, facts)
    if options.markdown == "-":
        print(text, end="")
    else:
        print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
        print(report.text_table(rows, labels))
    if options.json:
        report.write_json(options.json, rows, facts)
    if options.markdown not in (None, "-"):
        Path(options.markdown).write_text(text)
    return int(any(result.failed for result in results))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Compares this server with the reference: every workload on both in turns.",
        epilog="workloads: " + ", ".join(workload.name for workload in WORKLOADS),
    )
    parser.add_argument("--only", type=_workloads, default=WORKLOADS, metavar="NAME,...")
    parser.add_argument("--rounds", type=int, help=f"turns per server, default {_ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter turns")
    parser.add_argument(
        "--idle-cores",
        choices=["awake", "halt"],
        default="awake",
        help="awake (default): poll while single requests are timed, if this is root",
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        type=custom_server,
        metavar="LABEL=COMMAND",
        help="add a server, or replace `ours` or `reference`; it must print its ws:// URL",
    )
    parser.add_argument("--json", metavar="FILE", help="write all results as JSON")
    parser.add_argument(
        "--markdown", metavar="FILE", help="write the tables as Markdown; - is stdout"
    )
    return parser.parse_args()


def _workloads(text: str) -> list[Workload]:
    known = {workload.name: workload for workload in WORKLOADS}
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown workload {', '.join(unknown)}")
    return [known[name] for name in names]


if __name__ == "__main__":
    sys.exit(main())
