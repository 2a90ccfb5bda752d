"""Pairs of strands to try."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

from hypothesis import strategies as st

from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.strands.plan import Step, take, turned
from weft.pipeline.strands.segments import Kind, LinkScope, Segment, StageStrands, Strand, StrandPair, WeightGradient
from weft.pipeline.strands.state import PairState

INSIDE, BETWEEN = LinkScope.inside_host, LinkScope.between_hosts

# Sixteenths add up without rounding, so that equal plans are equally long.
seconds = st.integers(0, 32).map(lambda sixteenths: sixteenths / 16)
factor = st.sampled_from([1.0, 0.75, 0.5])
tables = st.builds(OverlapTable, default=factor, links=factor)


@st.composite
def strands(draw, most):
    """Segments that each end in a collective, but perhaps the last."""
    number = draw(st.integers(1, most))
    parts = [
        Segment(draw(seconds), draw(st.sampled_from([INSIDE, INSIDE, BETWEEN])), draw(seconds), draw(kinds))
        for _ in range(number)
    ]
    if draw(st.booleans()):
        parts[-1] = Segment(parts[-1].compute_s)
    return Strand(tuple(parts))


kinds = st.sampled_from(list(Kind))


@st.composite
def pairs(draw, most=3, most_weights=2):
    """A pair with movable weight gradients."""
    forward, backward = draw(strands(most)), draw(strands(most))
    after = sorted(draw(st.lists(st.integers(0, len(backward.segments) - 1), max_size=most_weights)))
    return StrandPair(forward, backward, tuple(WeightGradient(index, draw(seconds)) for index in after))


def over(strand, link):
    """The strand with all of its collectives on one link class."""
    return Strand(tuple(replace(part, link=link if part.link else None) for part in strand.segments))


def llama_layer(comm_s=0.02):
    """About a layer of Llama under tensor and sequence parallelism: two blocks, a gather and a sum for each."""
    norm = Segment(0.002, INSIDE, comm_s, Kind.memory)
    forward = Strand((norm, Segment(0.030, INSIDE, comm_s), norm, Segment(0.040, INSIDE, comm_s)))
    backward = Strand((norm, Segment(0.045, INSIDE, comm_s), norm, Segment(0.040, INSIDE, comm_s)))
    weights = tuple(WeightGradient(after, s) for after, s in ((1, 0.02), (1, 0.02), (3, 0.01), (3, 0.015)))
    return StrandPair(forward, backward, weights)


def scaled(num_stages, scale):
    """Return pairs that take a share of their halves, from 0.5 to 1: a collective overlaps with compute."""
    hidden = 2 - 2 * scale
    stage = StrandPair(Strand((Segment(0.0, INSIDE, hidden), Segment(1 - hidden))), Strand((Segment(1.0),)))
    return None if scale == 1 else StrandCosts((StageStrands(((stage, 1),)),) * num_stages)


def shortest(pair, table, handover_s=0.0):
    """Seconds of the best of all plans, by trying every one."""
    ends = len(pair.forward.segments), len(pair.backward.segments)

    @cache
    def best(state, turn, at):
        options = []
        for number, step in enumerate((Step.forward, Step.backward, Step.weight)):
            if at[number] < (*ends, pair.available(at[1]))[number]:
                turned_state, turned_to = turned(state, turn, step, table, handover_s)
                after = tuple(count + (index == number) for index, count in enumerate(at))
                options.append(best(take(turned_state, pair, step, at[number], table), turned_to, after))
        return min(options, default=state.ended(table).now_s)

    return best(PairState(), None, (0, 0, 0))


def num_switches(plan):
    """Return how often a plan switches between the strands."""
    turns = [step for step in plan.steps if step is not Step.weight]
    return sum(one is not other for one, other in pairwise(turns))
