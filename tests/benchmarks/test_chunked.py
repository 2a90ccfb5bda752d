"""MegaScale's overlap inside of one micro-batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from benchmarks.overlap.chunked import Do, chunked, chunked_s
from benchmarks.overlap.orders import backward_then_forward
from tests.pipeline.strands.pairs import BETWEEN, INSIDE, pairs, tables
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.segments import Segment, Strand, StrandPair


@given(pair=pairs(most=5, most_weights=4), chunks=st.integers(1, 5), table=tables)
def test_chunks_are_all_that_was_to_do_and_never_slower_than_nothing_hidden(pair, chunks, table):
    steps = list(chunked(pair, chunks))
    assert sum(step.seconds for step in steps if step.do is Do.compute) == approx(pair.compute_s)
    assert sum(step.seconds for step in steps if step.do is Do.start) == approx(pair.comm_s)
    starts, waits = ([number for number, step in enumerate(steps) if step.do is do] for do in (Do.start, Do.wait))
    last = [step for step in steps if step.last]
    assert len(last) == sum(segment.link is not None for segment in (*pair.forward.segments, *pair.backward.segments))
    assert all(step.do is Do.start for step in last)
    assert len(starts) == len(waits) and all(start < wait for start, wait in zip(starts, waits, strict=True))
    seconds = chunked_s(pair, table, chunks)
    assert pair.compute_s - 1e-9 <= seconds <= pair.sequential_s + 1e-9
    assert chunked_s(pair, OverlapTable(), chunks) <= seconds + 1e-9


@given(pair=pairs(most=5, most_weights=4))
def test_without_products_to_cut_it_is_one_strand_after_the_other(pair):
    """Where links differ, this plan waits for less: the forward begins while the backward's last gather runs."""
    plan = backward_then_forward(pair).seconds(pair, OverlapTable())
    assert plan <= chunked_s(pair, OverlapTable()) + 1e-9


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_a_product_and_its_collective_are_pipelined(chunks):
    """Three seconds of a product whose sum takes three: a chunk's time is left over."""
    forward = Strand((Segment(4.0, INSIDE, 3.0, trailing_s=3.0), Segment(1.0)))
    pair = StrandPair(forward, Strand((Segment(2.0),)))
    assert chunked_s(pair, OverlapTable(), chunks) == approx(2.0 + 4.0 + 3.0 / chunks + 1.0)
    gathered = Strand((Segment(1.0, INSIDE, 3.0), Segment(4.0, leading_s=3.0)))
    pair = StrandPair(gathered, Strand((Segment(2.0),)))
    assert chunked_s(pair, OverlapTable(), chunks) == approx(2.0 + 1.0 + 3.0 / chunks + 4.0)


def test_a_collective_has_four_chunks():
    forward = Strand((Segment(4.0, INSIDE, 3.0, trailing_s=3.0), Segment(1.0)))
    pair = StrandPair(forward, Strand((Segment(2.0),)))
    assert chunked_s(pair, OverlapTable()) == chunked_s(pair, OverlapTable(), 4) != chunked_s(pair, OverlapTable(), 5)
    assert list(chunked(pair)) == list(chunked(pair, 4))


def test_small_products_are_left_whole():
    """MegaScale cuts those of the feed-forward part."""
    forward = Strand((Segment(4.0, INSIDE, 3.0, trailing_s=1.0), Segment(4.0, INSIDE, 3.0, trailing_s=4.0)))
    starts = [step.seconds for step in chunked(StrandPair(forward, Strand(())), 3) if step.do is Do.start]
    assert starts == [3.0, 1.0, 1.0, 1.0]


def test_a_collective_without_products_to_cut_is_one_chunk():
    sent = Strand((Segment(1.0, INSIDE, 3.0), Segment(2.0, BETWEEN, 1.0), Segment(1.0)))
    starts = [step.seconds for step in chunked(StrandPair(sent, Strand(())), 4) if step.do is Do.start]
    assert starts == [3.0, 1.0]
