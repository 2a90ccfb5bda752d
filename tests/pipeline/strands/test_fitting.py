"""Pairs of a timeline show the overlap of operators with which it was made."""

import pytest

from tests.pipeline.strands.pairs import INSIDE, llama_layer
from weft.pipeline.action import Action, Op
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import StrandCosts, fit_overlap
from weft.pipeline.strands.segments import Kind, StageStrands
from weft.pipeline.timeline import Span, Timeline


def overlapping(factor):
    return OverlapTable({(kind, INSIDE): factor for kind in Kind})


@pytest.mark.parametrize(("planned", "real"), [(0.9, 0.3), (0.2, 0.8), (0.6, 0.6)])
def test_pairs_show_how_well_operators_overlap(planned, real):
    stage = StageStrands(((llama_layer(), 4),))
    pairs = StrandCosts((stage, stage), overlapping(planned))
    forward, backward, other = Action(Op.F, 0, 3), Action(Op.B, 1, 2), Action(Op.B, 0, 2)
    pair_s = 30.0 * pairs.scale_under(overlapping(real), 0, 1, True)
    slots = [((forward,), 10.0), ((backward,), 20.0), ((forward, backward), pair_s), ((forward, other), 99.0)]
    spans = tuple(Span(0, "compute", slot, 1.0, 1.0 + seconds) for slot, seconds in slots)
    found, faster = fit_overlap([Timeline("measured", 1, spans, (0.0,), (0,))], pairs)
    assert all(factor == pytest.approx(real, abs=1e-3) for factor in found.compute.values())
    assert (faster > 1.05, faster < 0.95) == (real > planned, real < planned)
    assert fit_overlap([Timeline("measured", 1, spans[:2], (0.0,), (0,))], pairs) is None, "no pair"
    assert fit_overlap([Timeline("measured", 1, spans[1:], (0.0,), (0,))], pairs) is None, "no forward alone"
