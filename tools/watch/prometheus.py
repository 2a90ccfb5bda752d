"""The Prometheus endpoint of a run, on loopback: the newest metrics, last steps, links, supervision's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.conf.host.json_records import JsonRecords


class Exporter:
    """Serves gauges named ``weft_METRIC``, such as ``weft_loss``, ``weft_rank_step_seconds`` and ``weft_events``."""

    def __init__(self, run_folder: Path, port: int) -> None:
        """Listen on 127.0.0.1. Raise OSError if the port is in use."""
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._registry, self._gauge = CollectorRegistry(), Gauge
        self._gauges: dict[str, Gauge] = {}
        self._step_s = Gauge("weft_rank_step_seconds", "last step of a rank", ["rank"], registry=self._registry)
        self._link = Gauge(
            "weft_link",
            "counters of links of this host's ranks to other sites",
            ["rank", "peer", "counter"],
            registry=self._registry,
        )
        self._events = Gauge(
            "weft_events",
            "events of the supervisor's journal, such as attempts and alerts",
            ["event"],
            registry=self._registry,
        )
        self._restarts = Gauge("weft_restarts", "restarts of the ranks by the supervisor", registry=self._registry)
        self._metrics = JsonRecords(run_folder / "metrics.jsonl")
        self._journal = JsonRecords(run_folder / "supervisor" / "journal.jsonl")
        start_http_server(port, addr="127.0.0.1", registry=self._registry)

    def update(
        self, last_steps: Mapping[int, tuple[int, float]], links: Mapping[object, Mapping[str, Any]] | None = None
    ) -> None:
        """Set the gauges from the run's files.

        Args:
            last_steps: number and seconds of each rank's last step.
            links: `Collector.links`.
        """
        for record in [each for each in self._metrics.read() if each.get("kind") == "train"][-1:]:
            for name, value in record.items():
                if isinstance(value, int | float):
                    if name not in self._gauges:
                        self._gauges[name] = self._gauge(f"weft_{name}", "from metrics.jsonl", registry=self._registry)
                    self._gauges[name].set(value)
        for rank, (_, seconds) in last_steps.items():
            self._step_s.labels(rank).set(seconds)
        for sender, found in (links or {}).items():
            for link in found["links"]:
                with suppress(KeyError, TypeError, ValueError, AttributeError):  # a damaged file
                    for name, value in link.items():
                        if name != "peer":
                            self._link.labels(sender, link["peer"], name).set(value)
        journal = self._journal.read()
        self._restarts.set(restarts(journal))
        for event, count in Counter(str(record.get("event")) for record in journal).items():
            self._events.labels(event).set(count)


def restarts(journal: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of restarts of a run: all attempts but the first."""
    return max(0, sum(each.get("event") == "attempt" for each in journal) - 1)
