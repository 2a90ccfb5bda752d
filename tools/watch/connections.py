"""Links between sites: what the ranks at their ends counted, next to the probe's rate."""

from __future__ import annotations

from contextlib import suppress
from math import isfinite
from typing import Any

from weft.tools.watch.record import RunRecord

COUNTED = ("ready", "sent_bytes", "queued_bytes", "retransmissions", "resent_chunks", "broken")


def connections(record: RunRecord) -> list[dict[str, Any]]:
    """Return the links to other sites by sending rank, since they were opened. See `weft.comm.links.LinkCounters`.

    ``mbps`` is the rate while data was on its way, and ``probed_mbps`` that of the plan: the probe's, unless the
    configuration states the bandwidth.
    """
    found = []
    for entry in record.current():
        links = entry.get("links")
        for link in links if isinstance(links, list) else ():
            with suppress(KeyError, TypeError, AttributeError, ArithmeticError, ValueError):  # not of this Weft
                found.append(_connection(record, int(entry["rank"]), link))
    return found


def _connection(record: RunRecord, rank: int, link: dict[str, Any]) -> dict[str, Any]:
    peer, busy_s, rtt_s = int(link["peer"]), float(link["busy_s"]), float(link["rtt_s"])
    here, there = record.places[rank], record.places[peer]
    cost = record.costs.link(here.site, there.site)
    planned_bps = min(cost.bandwidth_bps, cost.pair_bps)
    counted = {name: int(link[name]) for name in COUNTED}
    return counted | {
        "from": rank,
        "to": peer,
        "sites": f"{record.site_name(rank)} → {record.site_name(peer)}",
        "rtt_s": rtt_s,
        "mbps": counted["sent_bytes"] * 8e-6 / busy_s if busy_s > 0 else None,
        "probed_mbps": planned_bps / 1e6 if isfinite(planned_bps) else None,
    }
