"""Transfers between ranks, measured and predicted, and the uplinks between sites that carry them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from weft.pipeline.action import Action
from weft.tools.watch.record import RunRecord


class Transfer(NamedTuple):
    """A tensor on its way, from the start of its send until the receiver has it.

    Attributes:
        is_exact: True if the receiver waited for it. Otherwise the end is an upper bound.
    """

    rank: int
    peer: int
    send: Action
    start_s: float
    end_s: float
    is_exact: bool


def measured_transfers(record: RunRecord, spans: pd.DataFrame) -> Iterator[Transfer]:
    """Yield the transfers of a step's spans, by the start of their sends, in seconds since 1970."""
    for rank, peer, send, start_s, begun_s, ended_s in record.arrivals(spans):
        yield Transfer(rank, peer, send, start_s, max(start_s, ended_s), begun_s <= start_s)


def predicted_transfers(record: RunRecord) -> Iterator[Transfer]:
    """Yield the transfers of the plan, in seconds from the start of the step."""
    for ranks, timeline in zip(record.plan["ranks"], record.predictions, strict=True):
        for span in timeline.spans:
            if span.lane.peer is not None:
                yield Transfer(ranks[span.rank], ranks[span.lane.peer], span.slot[0], span.start_s, span.end_s, True)


def uplink(record: RunRecord, transfer: Transfer) -> str:
    """Return the uplink that carries a transfer, such as ``east → west``, or an empty string inside of a site."""
    if record.places[transfer.rank].site == record.places[transfer.peer].site:
        return ""
    return f"{record.site_name(transfer.rank)} → {record.site_name(transfer.peer)}"
