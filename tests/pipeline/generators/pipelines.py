"""Random pipelines for the tests of `auto`."""

from hypothesis import strategies as st

from tests.pipeline.pair_costs import scaled
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.placement import Placement


@st.composite
def placements(draw):
    sites = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    ranks = sum(sites)
    layout = draw(st.sampled_from(["straight", "interleaved", "fold", "more legs", "site fold"]))
    if layout == "straight":
        return Placement.straight(ranks, sites)
    if layout == "interleaved":
        return Placement.interleaved(ranks, draw(st.integers(2, 3)), sites)
    if layout == "site fold":
        return Placement.site_fold(sites)
    return Placement.fold(ranks, legs=2 if layout == "fold" else draw(st.integers(3, 4)), sites=sites)


@st.composite
def costs_of(draw, placement, pair_scale=1.0):
    seconds = st.integers(1, 5)
    stages = tuple(
        StageCost(
            forward_s=draw(seconds),
            input_s=draw(seconds),
            weight_s=draw(seconds),
            activation_bytes=draw(st.integers(1, 4)),
            weight_saved_bytes=draw(st.integers(0, 4)),
            output_bytes=draw(st.integers(0, 2)),
        )
        for _ in range(placement.num_stages)
    )
    link = st.builds(LinkCost, latency_s=st.integers(0, 4), bandwidth_bps=st.sampled_from([2.0, 8.0, float("inf")]))
    return CostModel(stages=stages, local=draw(link), wan=draw(link), pairs=scaled(pair_scale))


def least_cap_bytes(placement, costs):
    """One micro-batch alone: less holds no schedule."""
    return max(sum(costs.stages[stage].activation_bytes for stage in held) for held in placement.rank_stages)
