"""Schedules, placements and costs for property tests."""

from hypothesis import strategies as st

from tests.pipeline.pair_costs import scaled
from weft.conf.schedule_kinds import EVERY_PLACEMENT, PlacementKind
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate, generators
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement

SITES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
STRAIGHT = SITES.map(lambda sites: Placement.straight(sum(sites), sites))
INTERLEAVED = st.builds(
    lambda sites, chunks: Placement.interleaved(sum(sites), chunks, sites), SITES, st.integers(2, 4)
)
FOLD = SITES.map(lambda sites: Placement.fold(sum(sites), sites=sites))

LAYOUTS = {
    PlacementKind.straight: STRAIGHT,
    PlacementKind.interleaved: INTERLEAVED,
    PlacementKind.fold: FOLD,
    PlacementKind.site_fold: SITES.map(Placement.site_fold),
    PlacementKind.site_interleaved: st.builds(
        lambda sites, chunks: Placement(sites, "d" * chunks, sites), SITES, st.integers(2, 4)
    ),
}
ANY = st.one_of(*LAYOUTS.values(), st.builds(Placement.site_fold, SITES, st.integers(1, 4)))


def placements_of(rules):
    """A placement that a kind of schedule is defined for."""
    if set(rules.placements) == set(EVERY_PLACEMENT):
        return ANY
    layouts = [kind for kind in rules.placements if not (rules.goes_in_rounds and kind is PlacementKind.straight)]
    return st.one_of(*map(LAYOUTS.get, layouts))


FIXED = tuple(kind for kind, rules in generators().items() if not rules.looks_at_costs)
"""Kinds that do not search, which takes its time."""


@st.composite
def schedules(draw, kinds=FIXED):
    """A compute-only schedule of some kind, on a placement and of a size that go with it."""
    kind = draw(st.sampled_from(kinds))
    rules = generators()[kind]
    placement = draw(placements_of(rules))
    least = max(1, rules.microbatches_per_rank * placement.num_ranks)
    return generate(kind, placement, draw(st.integers(least, least + 12)), search_seconds=0.0)


maybe_lowered = st.builds(lambda schedule, low: lower(schedule) if low else schedule, schedules(), st.booleans())

SECONDS = st.integers(0, 12).map(lambda quarters: quarters / 4)
POSITIVE = st.integers(1, 12).map(lambda quarters: quarters / 4)
LINKS = st.builds(
    LinkCost,
    latency_s=SECONDS,
    bandwidth_bps=st.sampled_from([4.0, 8.0, 32.0, float("inf")]),
    sharing=st.integers(1, 3),
    jitter=st.sampled_from([0.0, 0.25]),
)
STAGES = st.builds(
    StageCost,
    forward_s=POSITIVE,
    input_s=POSITIVE,
    weight_s=POSITIVE,
    activation_bytes=POSITIVE,
    weight_saved_bytes=SECONDS,
    output_bytes=SECONDS,
    reduce_s=SECONDS,
    unshard_s=SECONDS,
    step_s=SECONDS,
    send_s=SECONDS,
    jitter=st.sampled_from([0.0, 0.25]),
)


def costs_for(num_stages):
    """Any cost model for so many virtual stages; all its numbers are exact in binary."""
    return st.builds(
        CostModel,
        stages=st.lists(STAGES, min_size=num_stages, max_size=num_stages).map(tuple),
        local=LINKS,
        wan=LINKS,
        wan_links=st.lists(st.tuples(st.tuples(st.integers(0, 2), st.integers(0, 2)), LINKS), max_size=2).map(tuple),
        pairs=st.sampled_from([scaled(0.75), None]),
    )
