"""The results of all versions as a table, and the verdict. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tests.versions import client_sessions, server_checks

_CLIENT, _SERVER = client_sessions.NAMES, server_checks.NAMES


@dataclass(frozen=True)
class Row:
    """What failed with one version, and why."""

    version: str
    with_own: dict[str, str]  # its client with its own server
    with_ours: dict[str, str]  # its client with our server
    our_client: dict[str, str]  # our client with its server
    server_lacks: dict[str, str]  # what our client says that its server lacks

    @property
    def lacks(self) -> list[str]:
        """What its client does with our server no more than with its own."""
        return [name for name in _CLIENT if name in self.with_own and name in self.with_ours]

    @property
    def broken(self) -> list[str]:
        """What its client can do with its own server alone."""
        return [name for name in _CLIENT if name in self.with_ours and name not in self.with_own]

    @property
    def failed(self) -> list[str]:
        """What our client does wrong with its server."""
        return [name for name in _SERVER if name in self.our_client]

    @property
    def unsupported(self) -> list[str]:
        """What its server lacks and our client cannot replace."""
        return [name for name in _SERVER if name in self.server_lacks]

    @property
    def is_good(self) -> bool:
        return not self.broken and not self.failed


def table(rows: list[Row]) -> list[str]:
    """The lines of the matrix, in Markdown."""
    lines = [
        "| version | its client, its server | its client, our server | fails with both "
        "| fails with ours alone | our client, its server | its server lacks | fails |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row.version,
            f"{len(_CLIENT) - len(row.with_own)} of {len(_CLIENT)}",
            f"{len(_CLIENT) - len(row.with_ours)} of {len(_CLIENT)}",
            ", ".join(row.lacks) or "-",
            ", ".join(row.broken) or "-",
            f"{len(_SERVER) - len(row.our_client) - len(row.server_lacks)} of {len(_SERVER)}",
            ", ".join(row.unsupported) or "-",
            ", ".join(row.failed) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def reasons(row: Row) -> list[str]:
    """Why something fails, a line each."""
    return [
        *(f"{row.version}: {name} with our server: {row.with_ours[name]}" for name in row.broken),
        *(f"{row.version}: {name} with both: {row.with_own[name]}" for name in row.lacks),
        *(f"{row.version}: {name} of our client: {row.our_client[name]}" for name in row.failed),
        *(f"{row.version}: {name}: {row.server_lacks[name]}" for name in row.unsupported),
    ]
