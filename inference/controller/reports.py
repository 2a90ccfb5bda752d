"""Bubbles and costs that workers on other hosts report. See `weft.inference.worker.bubble_report`."""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from math import inf, isfinite
from time import monotonic
from typing import NamedTuple

from weft.inference.controller.server_connections import Servers
from weft.inference.placement.prefill_cost import PrefillCost
from weft.inference.worker.bubble_report import MOST_HORIZON_S, ROUTE
from weft.inference.worker.proofs import HEADER, answer_proof, new_nonce, request_proof

FRESH_S = 3.0
"""Age up to which a report holds. A worker without a newer one is cut off: its prompts move to others."""

Spans = Sequence[tuple[float, float]]


class Report(NamedTuple):
    """A report, on this host's clock: the bubbles of each stage, None after training has ended, and its costs."""

    stages: list[Spans | None]
    costs: list[PrefillCost]


class ReportedBubbles:
    """The predicted bubbles of a stage as its worker has last reported them."""

    def __init__(self) -> None:
        self._spans: Spans | None = []
        self._at_s = -inf

    def update(self, spans: Spans | None) -> None:
        """Replace the bubbles."""
        self._spans, self._at_s = spans, monotonic()

    def upcoming(self, horizon_s: float) -> Spans | None:
        """Return the bubbles from now on. See `Bubbles`."""
        now_s = monotonic()
        if self._spans is None or now_s - self._at_s > FRESH_S:
            return None if self._spans is None else []
        return [
            (max(start_s, now_s), end_s)
            for start_s, end_s in self._spans
            if end_s > now_s and start_s < now_s + horizon_s
        ]


async def read_report(
    servers: Servers, url: str, key: str, *, stages: int, quantile: float, horizon_s: float, timeout_s: float
) -> Report:
    """Return the report of the worker at ``url``.

    Args:
        key: the worker's key, which is not sent.
        stages: number of its stages.

    Raises:
        Lost: it does not answer.
        ValueError: it refuses, or the answer is not its own, or has another form.
    """
    nonce, secret, begun_s = new_nonce(), key.encode(), monotonic()
    headers = {"Authorization": f"Weft {nonce}:{request_proof(secret, nonce)}"}
    asked = f"{url}{ROUTE}?horizon_s={min(horizon_s, MOST_HORIZON_S)}"
    response = await servers.ask("GET", asked, headers=headers, total_s=timeout_s)
    sent_s = (begun_s + monotonic()) / 2
    if not response.is_success:
        raise ValueError(f"{url}: {response.status} {response.content[:300].decode(errors='replace')}")
    proof = answer_proof(secret, nonce, b"", response.content)
    if not hmac.compare_digest(response.headers.get(HEADER, "").encode(), proof.encode()):
        raise ValueError(f"{url}: a report without a proof that its sender has the key of this controller")
    try:
        value = json.loads(response.content)
        spans = [None if found is None else _on_own_clock(found, sent_s) for found in value["stages"]]
        costs = [PrefillCost.from_dict(cost | {"quantile": quantile}) for cost in value["costs"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{url}: not a report of this version of Weft ({error!r})") from error
    if len(spans) != stages or len(costs) != stages:
        raise ValueError(f"{url}: {len(spans)} stages; set inference.controller.workers.stages to that, not {stages}")
    return Report(spans, costs)


def _on_own_clock(spans: Spans, sent_s: float) -> Spans:
    found = [(sent_s + start_s, sent_s + end_s) for start_s, end_s in spans]
    if not all(map(isfinite, (time_s for span in found for time_s in span))):
        raise ValueError("a report with times that are not finite")
    return found
