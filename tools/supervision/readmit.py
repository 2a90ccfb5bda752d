"""`weft readmit`: let evicted hosts back into runs."""

from __future__ import annotations

from collections.abc import Sequence

from weft.tools.supervision.evict import command_parser, parse_hosts


def main(argv: Sequence[str]) -> int:
    """Run ``weft readmit HOST ... [key=value ...]`` and return 1 if one of them was not denied.

    Raises:
        ValueError: no host is named, or the deny-list cannot be read.
    """
    hosts, denied, _ = parse_hosts(
        command_parser("readmit", "Let evicted hosts back in; runs grow back by them."), argv
    )
    if not hosts:
        raise ValueError("no host is named; `weft readmit HOST`")
    unknown = [host for host in hosts if not denied.readmit(host)]
    for host in hosts:
        print(f"{host} was not kept out by {denied.path}" if host in unknown else f"{host} may be taken again")
    return 1 if unknown else 0
