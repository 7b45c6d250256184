"""The command `python -m soak`."""

import argparse
import asyncio
import dataclasses
import logging
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

from bench.client import BenchError
from bench.remote import service
from bench.report import gather_facts
from bench.servers import (
    INSTALL_HELP,
    OURS,
    REFERENCE,
    Server,
    custom_server,
    default_servers,
    reference_cache,
)

from soak import footprint, report
from soak.outcome import CALM_SECONDS, Outcome, Plan
from soak.runner import Soak
from soak.scenarios import SCENARIOS, Scenario

_SECONDS, _CLIENTS = 180.0, 24
# A run of this length also waits until the server has ended its idle helpers.
_DRAINED_SECONDS = 600.0


def main() -> int:
    """Soak the selected servers one after the other and print the table."""
    options = _parse()
    # SIGTERM ends the servers too: as an exception it runs all clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    footprint.become_subreaper()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # writes to connections that were cut
    print(f"seed {options.seed}", file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(prefix="exec-server-soak-") as folder:
            outcomes = _soak_all(options, Path(folder))
            facts = gather_facts({}, folder) | {"seed": str(options.seed)}
    except KeyboardInterrupt:
        print("interrupted; the servers have ended", file=sys.stderr)
        return 130
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    print(report.text_table(outcomes))
    for outcome in outcomes:
        for finding in outcome.findings:
            repeat = f"--seed {options.seed} --only {finding.scenario} --case {finding.case}"
            print(f"{outcome.label}: {finding.scenario}: {finding.text} ({repeat})")
    if options.markdown:
        Path(options.markdown).write_text(report.markdown(outcomes, facts))
    # The reference is only compared with: its violations are counted, not judged.
    return int(any(outcome.findings for outcome in outcomes if outcome.label != REFERENCE))


def _soak_all(options: argparse.Namespace, folder: Path) -> list[Outcome]:
    """Soak one server after the other, ours once more through a relay if that is asked for."""
    outcomes = []
    for server in _servers(options):
        plan = _plan(options, is_ours=server.label == OURS)
        outcomes.append(asyncio.run(Soak(server, folder / server.label, plan).run()))
        if options.relay and server.label == OURS:
            plan = dataclasses.replace(
                plan, scenarios=[each for each in plan.scenarios if not each.direct]
            )
            with service() as relay:
                soak = Soak(server, folder / "relayed", plan, relay)
                outcomes.append(asyncio.run(soak.run()))
    return outcomes


def _servers(options: argparse.Namespace) -> list[Server]:
    servers = {server.label: server for server in default_servers()}
    servers |= {server.label: server for server in options.server}
    chosen = [OURS]
    if options.reference:
        chosen.append(REFERENCE)
        if REFERENCE not in servers:
            sys.exit(INSTALL_HELP.format(cache=reference_cache()))
    chosen += [label for label in servers if label not in (OURS, REFERENCE)]
    return [servers[label] for label in chosen]


def _plan(options: argparse.Namespace, *, is_ours: bool) -> Plan:
    scenarios = [each for each in options.only if is_ours or not each.ours]
    return Plan(
        options.seconds,
        options.seed,
        options.clients,
        scenarios,
        options.case,
        options.calm,
        drains=is_ours and options.seconds >= _DRAINED_SECONDS,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m soak",
        description="Mixed traffic with faults, then a count of what is left.",
        epilog="scenarios: " + ", ".join(scenario.name for scenario in SCENARIOS),
    )
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="length of the traffic")
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of a run")
    parser.add_argument("--clients", type=int, default=_CLIENTS, help="scenarios at a time")
    parser.add_argument("--only", type=_scenarios, default=SCENARIOS, metavar="NAME,...")
    parser.add_argument("--case", type=int, help="run each scenario of --only once, with this case")
    parser.add_argument("--reference", action="store_true", help="soak the reference too")
    parser.add_argument(
        "--calm", type=float, default=CALM_SECONDS, help="seconds without clients before measuring"
    )
    parser.add_argument("--relay", action="store_true", help="soak ours through a relay too")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        type=custom_server,
        metavar="LABEL=COMMAND",
        help="add a server, or replace `ours` or `reference`; it must print its ws:// URL",
    )
    parser.add_argument("--markdown", metavar="FILE", help="write the table as Markdown")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(3), "big")
    return options


def _scenarios(text: str) -> list[Scenario]:
    known = {scenario.name: scenario for scenario in SCENARIOS}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown scenario {', '.join(unknown)}")
    return [known[name] for name in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
