"""Activations while pairs run: the forward saves as the backward frees, layer by layer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from tests.pipeline.strands.pairs import llama_layer
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.lowering import open_pairs
from weft.pipeline.memory import peak_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.strands.segments import StageStrands

MOST = 0.03
"""DHelix's figure for the memory of the W over 1F1B (abstract)."""


def costs_of(ranks, layers):
    """A fold whose chunks have so many layers each."""
    stage = StageStrands(((llama_layer(), layers),))
    return replace(CostModel.unit(ranks).cut(2 * ranks), pairs=StrandCosts((stage,) * (2 * ranks)))


@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("microbatches", [12, 32])
def test_the_w_takes_hardly_more_than_1f1b(microbatches, layers):
    ranks = 4
    straight = generate("1f1b", Placement.straight(ranks), microbatches)
    schedule, costs = generate("w", Placement.fold(ranks), microbatches), costs_of(ranks, layers)
    least = peak_bytes(straight, CostModel.unit(ranks))
    assert least <= peak_bytes(schedule, costs) <= (1 + MOST) * least
    # Without plans both halves' activations would be there at once.
    assert peak_bytes(schedule, replace(costs, pairs=None)) > 1.1 * least
    assert peak_bytes(open_pairs(schedule), costs) == approx(least)


@given(saved=st.floats(0, 10), freed=st.floats(0, 10), layers=st.integers(1, 5))
def test_a_pair_holds_between_the_most_of_its_ends_and_both_halves(saved, freed, layers):
    pairs = StrandCosts((StageStrands(((llama_layer(), layers),)),))
    held = pairs.held(0, 0, saved, freed)
    assert max(0.0, saved - freed) - 1e-9 <= held <= saved
    assert pairs.held(0, 0, saved, 0.0) == approx(saved)
