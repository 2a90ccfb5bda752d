"""The controller's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from weft.inference.controller.fleet import Fleet
from weft.inference.controller.worker import Ticket

CLIENT_GONE = 499
"""Status in the metrics of requests whose client disconnected, as in nginx."""
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_LATE_SECONDS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """Metrics of one controller."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = registry = CollectorRegistry()
        self._grants = Counter("weft_prefill_grants", "requests placed", ["worker"], registry=registry)
        self._refusals = Counter(
            "weft_prefill_refusals", "responses with an error, by HTTP status", ["status"], registry=registry
        )
        self._moved = Counter(
            "weft_prefill_moved", "requests moved away from a failed worker", ["worker"], registry=registry
        )
        self._work = Counter(
            "weft_prefill_work_seconds", "predicted work of answered requests", ["worker"], registry=registry
        )
        self._predicted = Histogram("weft_prefill_ttft_predicted_seconds", "", buckets=_SECONDS, registry=registry)
        self._real = Histogram("weft_prefill_ttft_seconds", "", buckets=_SECONDS, registry=registry)
        self._late = Histogram(
            "weft_prefill_lateness_seconds",
            "how much later than predicted a response was",
            buckets=_LATE_SECONDS,
            registry=registry,
        )
        self._requests = Counter("weft_client_requests", "requests admitted", ["client"], registry=registry)
        self._tokens = Counter("weft_client_prompt_tokens", "their prompt tokens", ["client"], registry=registry)
        self._outcomes = Counter(
            "weft_client_outcomes",
            "how they ended: answered, refused or abandoned",
            ["client", "outcome"],
            registry=registry,
        )
        self._answers = Counter(
            "weft_answers",
            "whole answers by who computed the prompt, and why",
            ["prefill", "reason"],
            registry=registry,
        )
        self._begun = Histogram(
            "weft_answer_begin_seconds",
            "time to the first part of an answer",
            ["prefill"],
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(_FleetMetrics(fleet))

    def admitted(self, client: str, tokens: int) -> None:
        """Count a request within its client's limits."""
        self._requests.labels(client).inc()
        self._tokens.labels(client).inc(tokens)

    def ended(self, client: str, error: int) -> None:
        """Count the end of an admitted request, by the status of its error, or 0."""
        outcome = "abandoned" if error == CLIENT_GONE else "refused" if error else "answered"
        self._outcomes.labels(client, outcome).inc()

    def granted(self, ticket: Ticket) -> None:
        """Count a request that was placed."""
        self._grants.labels(ticket.worker).inc()
        self._predicted.observe(ticket.expected_s - ticket.placed_s)

    def answered(self, ticket: Ticket, now_s: float) -> None:
        """Count a request that was answered, and observe its durations."""
        self._work.labels(ticket.worker).inc(ticket.work_s)
        self._real.observe(now_s - ticket.placed_s)
        self._late.observe(max(0.0, now_s - ticket.expected_s))

    def moved(self, ticket: Ticket) -> None:
        """Count a request whose worker failed before it answered."""
        self._moved.labels(ticket.worker).inc()

    def refused(self, status: int) -> None:
        """Count a response with an error, of the controller or a server, or a stream that ends with one."""
        self._refusals.labels(status).inc()

    def prefilled(self, prefill: str, reason: str) -> None:
        """Count a prompt of a whole answer, computed in a ``bubble`` or by the server that decodes."""
        self._answers.labels(prefill, reason).inc()

    def begun(self, prefill: str, after_s: float) -> None:
        """Observe the time to the first part of an answer."""
        self._begun.labels(prefill).observe(after_s)

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _FleetMetrics:
    """Metrics computed at collection time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("weft_prefill_worker_up", "whether the worker answers", labels=["worker"])
        queue = GaugeMetricFamily("weft_prefill_queue", "requests in flight", labels=["worker"])
        bubbles = CounterMetricFamily("weft_prefill_bubble_seconds", "total length of past bubbles", labels=["worker"])
        for worker in self._fleet.workers:
            name = [str(worker.index)]
            up.add_metric(name, float(worker.up))
            queue.add_metric(name, len(worker.tickets))
            bubbles.add_metric(name, worker.bubble_s)
        return iter((up, queue, bubbles))
