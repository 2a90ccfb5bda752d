"""The cut of layers: as good as the best of all cuts, to a thousandth, within what ranks have room for."""

from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.pipeline.planner.cutting import RankSpeed, cut_layers


def slowest_s(counts, ranks):
    ends = [0, *accumulate(counts)]
    return max(rank.seconds(start, stop) for rank, (start, stop) in zip(ranks, pairwise(ends), strict=True))


@st.composite
def machines(draw):
    """Layers of several sizes on ranks of several speeds, with room for some of them."""
    layers = draw(st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=1, max_size=7))
    ranks = []
    for _ in range(draw(st.integers(1, min(4, len(layers))))):  # a layer for each
        speed = draw(st.sampled_from([1.0, 2.0, 0.3]))
        sums = list(accumulate((seconds / speed for seconds in layers), initial=0.0))
        ranks.append(RankSpeed(sums, draw(st.sampled_from([0.0, 0.7, 3.0])), draw(st.integers(0, 7))))
    return len(layers), ranks


@given(machines())
def test_no_cut_is_faster_by_more_than_a_thousandth(some):
    num_layers, ranks = some
    cuts = [counts for counts in product(*(range(1, rank.most + 1) for rank in ranks)) if sum(counts) == num_layers]
    found = cut_layers(num_layers, ranks)
    if not cuts:
        assert found is None
        return
    assert found in cuts
    assert slowest_s(found, ranks) <= min(slowest_s(counts, ranks) for counts in cuts) * 1.0011 + 1e-9


def speeds(*seconds, most=99, extra_s=()):
    extra_s = extra_s or (0.0,) * len(seconds)
    return [
        RankSpeed([each * count for count in range(13)], extra, most)
        for each, extra in zip(seconds, extra_s, strict=True)
    ]


@pytest.mark.parametrize(
    ("num_layers", "ranks", "counts"),
    [
        (8, speeds(1.0, 1.0, 1.0, 1.0), (2, 2, 2, 2)),
        (8, speeds(1.0, 1.0, 1.0), (3, 3, 2)),
        (12, speeds(1.0, 2.0), (8, 4)),
        (12, speeds(1.0, 2.0, most=6), (6, 6)),
        (12, speeds(1.0, 1.0, most=5), None),
        (12, speeds(1.0, 1.0, most=0), None),
        (2, speeds(1.0, 1.0), (1, 1)),
        (4, speeds(1.0, 1.0, extra_s=(2.0, 0.0)), (1, 3)),
        (4, speeds(1.0, 1.0, extra_s=(0.0, 2.0)), (3, 1)),
        # The even cut stays, where another is faster by less than a thousandth, and gives way where it is by more.
        (4, speeds(1.0, 1.0, extra_s=(1.0005, 0.0)), (2, 2)),
        (4, speeds(1.0, 1.0, extra_s=(1.01, 0.0)), (1, 3)),
    ],
)
def test_cuts_by_hand(num_layers, ranks, counts):
    assert cut_layers(num_layers, ranks) == counts
