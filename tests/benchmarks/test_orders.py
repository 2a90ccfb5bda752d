"""Orders of two strands: their shares of communication, the paper's ranking, and the memory of the W."""

from dataclasses import replace
from itertools import pairwise

import pytest
from pytest import approx

from benchmarks.overlap.cases import B_THEN_F, CHUNKS, OURS, PAIRS, ROUND_ROBIN, SHARES, Orders, OverlapCase
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.memory import peak_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.strands.pairs import StrandCosts

RANKS, MICROBATCHES = 4, 12


def _memory(layers):
    """Activations of the fullest rank under the W, whose pairs run by plans, over those under 1F1B."""
    stages = (OverlapCase("tensor", 2, 0.31, layers=layers).stage(),) * (2 * RANKS)
    costs = replace(CostModel.unit(RANKS).cut(2 * RANKS), pairs=StrandCosts(stages))
    folded = generate("w", Placement.fold(RANKS), MICROBATCHES)
    straight = generate("1f1b", Placement.straight(RANKS), MICROBATCHES)
    return peak_bytes(folded, costs) / peak_bytes(straight, CostModel.unit(RANKS))


@pytest.mark.parametrize("axis", ["tensor", "context", "expert"])
@pytest.mark.parametrize("share", [0.1, 0.45])
def test_collectives_take_the_wanted_share(axis, share):
    pair = OverlapCase(axis, 2, share, layers=2).stage().whole
    assert pair.comm_s / pair.sequential_s == approx(share)
    assert pair.sequential_s == approx(OverlapCase.seconds)


@pytest.mark.parametrize("factor", [1.0, 0.8])
@pytest.mark.parametrize("share", SHARES)
def test_ways_to_run_a_pair_come_in_the_papers_order(share, factor):
    """DHelix's figure 11 and section 6.2: MegaScale's chunks, Wavelet's turns, pairs of operators; then ours."""
    case = OverlapCase("tensor", 2, share, factor)
    pair = case.stage().whole
    predicted = Orders.of(pair, case.table).predicted_s(pair, case.table)
    ways = [B_THEN_F, CHUNKS, ROUND_ROBIN, PAIRS, OURS]
    assert all(predicted[later] <= predicted[way] for way, later in pairwise(ways))
    if factor == 1 and share <= 0.35:
        assert (pair.sequential_s - predicted[OURS]) / pair.comm_s >= 0.9


def test_the_w_takes_little_more_where_chunks_have_layers_to_interleave():
    """DHelix: under 3 % of all memory, of which activations are some two thirds (abstract, figure 5)."""
    more = {layers: _memory(layers) for layers in (4, 8)}
    assert 1 <= more[8] <= more[4] and more[8] - 1 < 0.03 and (more[4] - 1) * 2 / 3 < 0.03
