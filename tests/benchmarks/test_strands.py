"""`benchmarks strands`: what is emulated, the paper's order of ways to run a pair, and one pair that runs."""

from itertools import pairwise

import pytest
import torch.distributed as dist
from pytest import approx

from benchmarks import strands
from benchmarks.overlap.cases import (
    B_THEN_F,
    CHUNKS,
    COMPUTE,
    NAMES,
    OURS,
    PAIRS,
    ROUND_ROBIN,
    Orders,
    OverlapCase,
)
from benchmarks.overlap.emulator import measure
from benchmarks.overlap.timeline import PROCESSOR
from weft.tools.ranks import run_ranks

USUAL = OverlapCase("tensor", 2, 0.31)


@pytest.mark.parametrize("axis", ["tensor", "context", "expert"])
@pytest.mark.parametrize("share", [0.1, 0.45])
def test_collectives_take_the_wanted_share(axis, share):
    pair = OverlapCase(axis, 2, share, layers=2).stage().whole
    assert pair.comm_s / pair.sequential_s == approx(share)
    assert pair.sequential_s == approx(OverlapCase.seconds)


@pytest.mark.parametrize("factor", [1.0, 0.8])
@pytest.mark.parametrize("share", strands.SHARES)
def test_ways_to_run_a_pair_come_in_the_papers_order(share, factor):
    """DHelix's figure 11 and section 6.2: MegaScale's chunks, Wavelet's turns, pairs of operators; then ours."""
    case = OverlapCase("tensor", 2, share, factor)
    pair = case.stage().whole
    predicted = Orders.of(pair, case.table).predicted_s(pair, case.table)
    ways = [B_THEN_F, CHUNKS, ROUND_ROBIN, PAIRS, OURS]
    assert all(predicted[later] <= predicted[way] for way, later in pairwise(ways))
    if factor == 1 and share <= strands.UP_TO:
        assert (pair.sequential_s - predicted[OURS]) / pair.comm_s >= strands.GOAL


def test_every_case_once():
    cases = strands.cases_of((0.2, 0.31), 2, tensor_only=False)
    assert len(set(cases)) == len(cases) == 8
    sizes = {(case.axis, case.members) for case in cases}
    assert sizes == {("tensor", 2), ("tensor", 4), ("context", 2), ("expert", 2)}
    assert strands.cases_of((0.2, 0.31), 2, tensor_only=True) == cases[:2]


def test_what_falls_short_is_named():
    pair = USUAL.stage().whole
    orders = Orders.of(pair, USUAL.table)
    predicted = orders.predicted_s(pair, USUAL.table)
    exact = strands._rows(USUAL, pair, orders, {name: [seconds] for name, seconds in predicted.items()})
    assert strands._unmet(USUAL, exact) == []
    slow = strands._rows(USUAL, pair, orders, {n: [s * (1.1 if n == OURS else 1)] for n, s in predicted.items()})
    assert [text.split()[1] for text in strands._unmet(USUAL, slow)] == ["hides", "takes"]
    assert [set(strands._shown(row)) for row in exact] == [set(strands._shown(exact[0]))] * len(NAMES)


def _measured(case, pair, orders):
    dist.init_process_group("gloo")
    found = measure(case, pair, orders, 1)
    dist.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("factor", [1.0, 0.8])
def test_all_ways_run_and_the_picture_has_all_of_ours(factor):
    case = OverlapCase("tensor", 2, 0.31, factor, layers=1, seconds=0.05)
    pair = case.stage().whole
    orders = Orders.of(pair, case.table)
    for seconds, spans in run_ranks(2, _measured, case, pair, orders, timeout_s=100):
        assert set(seconds) == set(NAMES) and all(len(found) == 1 for found in seconds.values())
        assert all(found[0] >= pair.compute_s * 0.99 for found in seconds.values())
        assert seconds[COMPUTE][0] > 0
        steps = len(pair.forward.segments) + len(pair.backward.segments) + len(pair.weights)
        assert sum(span.lane == PROCESSOR for span in spans) == steps


def test_the_w_takes_little_more_where_chunks_have_layers_to_interleave():
    """DHelix: under 3 % of all memory, of which activations are some two thirds (abstract, figure 5)."""
    more = {layers: strands._memory(layers) for layers in (4, 8)}
    assert 1 <= more[8] <= more[4] and more[8] - 1 < 0.03 and (more[4] - 1) * 2 / 3 < 0.03
