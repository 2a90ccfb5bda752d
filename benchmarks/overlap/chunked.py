"""Overlap inside of one micro-batch: collectives and matrix products run in chunks (MegaScale section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.segments import Kind, LinkScope, Strand, StrandPair, WeightGradient

CHUNKS = 4
"""Chunks of a collective and of the concurrent matrix products."""


class Do(Enum):
    """The kinds of a rank's operations."""

    compute = "compute"
    start = "start"
    """Start a chunk of a collective."""
    wait = "wait"
    """Wait for the oldest chunk that is still on its way."""


@dataclass(frozen=True)
class ChunkStep:
    """An operation on one chunk, and the seconds for which it occupies the processor or the link.

    Attributes:
        last: True for the last chunk of a collective.
    """

    do: Do
    seconds: float = 0.0
    kind: Kind = Kind.gemm
    link: LinkScope | None = None
    last: bool = False


def chunked(pair: StrandPair, chunks: int = CHUNKS) -> Iterator[ChunkStep]:
    """Yield the steps of a backward, then a forward, each pipelined with its own collectives.

    A product that consumes a collective's result begins with its first chunk. A product that produces a
    collective's input sends each chunk of its result at once. Division into chunks costs nothing. Weight gradients
    stay in place, where they hide their own strand's collectives, as in Megatron-LM.
    """
    yield from _strand(pair.backward, pair.weights, chunks)
    yield from _strand(pair.forward, (), chunks)


def chunked_s(pair: StrandPair, table: OverlapTable, chunks: int = CHUNKS) -> float:
    """Return the predicted seconds of `chunked`; hidden time is scaled by the OEF of products and each link."""
    now_s = free_s = hidden_s = 0.0
    coming: list[float] = []
    for step in chunked(pair, chunks):
        if step.do is Do.wait:
            now_s = max(now_s, coming.pop(0))
        elif step.do is Do.start:
            assert step.link is not None
            free_s = max(now_s, free_s) + step.seconds
            coming.append(free_s)
        else:
            hidden_s += min(step.seconds, max(0.0, free_s - now_s))
            now_s += step.seconds
    links = {segment.link for strand in (pair.forward, pair.backward) for segment in strand.segments}
    worst = max((table.slowdown(Kind.gemm, (link,)) for link in links if link is not None), default=1.0)
    return now_s + (worst - 1.0) * hidden_s


def _strand(strand: Strand, weights: tuple[WeightGradient, ...], chunks: int) -> Iterator[ChunkStep]:
    """Yield the steps of one of the two strands of `chunked`."""
    longest_s = max((max(s.leading_s, s.trailing_s) for s in strand.segments), default=0.0)
    on_their_way = 0
    for index, segment in enumerate(strand.segments):
        cut = on_their_way == chunks and _is_cut(segment.leading_s, longest_s)
        leading_s = segment.leading_s if cut else 0.0
        for _ in range(on_their_way):
            yield ChunkStep(Do.wait)
            if leading_s:
                yield ChunkStep(Do.compute, leading_s / chunks, segment.kind)
        cut = segment.link is not None and _is_cut(segment.trailing_s, longest_s)
        trailing_s = min(segment.trailing_s, segment.compute_s - leading_s) if cut else 0.0
        yield ChunkStep(Do.compute, segment.compute_s - leading_s - trailing_s, segment.kind)
        following = strand.segments[index + 1].leading_s if index + 1 < len(strand.segments) else 0.0
        on_their_way = 0
        if segment.link is not None:
            on_their_way = chunks if cut or _is_cut(following, longest_s) else 1
        for left in reversed(range(on_their_way)):
            if trailing_s:
                yield ChunkStep(Do.compute, trailing_s / chunks, segment.kind)
            yield ChunkStep(Do.start, segment.comm_s / on_their_way, segment.kind, segment.link, last=not left)
        for weight in weights:
            if weight.after == index:
                yield ChunkStep(Do.compute, weight.compute_s, weight.kind)
    for _ in range(on_their_way):
        yield ChunkStep(Do.wait)


def _is_cut(product_s: float, longest_s: float) -> bool:
    """Return True for a large product of the feed-forward part, because MegaScale fuses only these."""
    return product_s > 0 and product_s >= longest_s / 2
