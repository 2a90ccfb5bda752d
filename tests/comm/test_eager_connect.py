"""First contacts come in one order on all ranks, and pairs without a common rank make theirs side by side."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weft.comm.torch_channel import components, edge_colors, in_color_order

RANKS = st.integers(0, 9)
HOPS = st.sets(st.tuples(RANKS, RANKS).filter(lambda hop: hop[0] != hop[1]), max_size=30)


@given(HOPS, st.randoms())
def test_every_rank_finds_the_same_order(hops, random):
    shuffled = list(hops)
    random.shuffle(shuffled)
    assert in_color_order(shuffled) == in_color_order(hops)
    assert sorted(in_color_order(hops)) == sorted(hops)


@given(HOPS)
def test_ranks_that_call_each_in_turn_all_get_through(hops):
    """Each rank goes through its own hops in order, and a hop is made when both have come to it."""
    order = in_color_order(hops)
    left = {rank: [hop for hop in order if rank in hop] for hop in hops for rank in hop}
    while any(left.values()):
        made = [hop for hop in order if left[hop[0]][:1] == left[hop[1]][:1] == [hop]]
        assert made, left
        for hop in made:
            for rank in hop:
                left[rank].pop(0)


def test_a_pipeline_meets_in_two_rounds():
    """A chain of 16 ranks, four replicas each: no rank waits for a chain of others."""
    hops = {hop for a, b in pairwise(range(0, 64, 4)) for r in range(4) for hop in ((a + r, b + r), (b + r, a + r))}
    order, rounds = in_color_order(hops), dict.fromkeys(range(64), 0)
    for hop in order:
        rounds[hop[0]] = rounds[hop[1]] = 1 + max(rounds[hop[0]], rounds[hop[1]])
    assert max(rounds.values()) == 4  # two pairs a rank, two directions each


@given(HOPS)
def test_hops_of_one_number_have_no_rank_in_common(hops):
    numbers = edge_colors(hops)
    for number in set(numbers.values()):
        ranks = [rank for hop in hops if numbers[hop] == number for rank in hop]
        assert len(ranks) == len(set(ranks))


def test_four_numbers_do_for_any_number_of_pipelines():
    for stages, replicas in ((8, 8), (16, 3), (64, 16)):
        pairs = [(s * replicas + r, (s + 1) * replicas + r) for s in range(stages - 1) for r in range(replicas)]
        assert set(edge_colors([hop for a, b in pairs for hop in ((a, b), (b, a))]).values()) == {0, 1, 2, 3}


@given(HOPS)
def test_components_hold_every_hop_and_nothing_apart(hops):
    found = components(hops)
    members = [rank for ranks in found for rank in ranks]
    assert sorted(members) == sorted({rank for hop in hops for rank in hop})
    home = {rank: index for index, ranks in enumerate(found) for rank in ranks}
    assert all(home[sender] == home[receiver] for sender, receiver in hops)
    assert components(sorted(hops, reverse=True)) == found


def test_replicas_of_a_pipeline_are_groups_of_their_own():
    assert components({(0, 2), (2, 0), (2, 4), (1, 3), (3, 5), (5, 3)}) == [[0, 2, 4], [1, 3, 5]]
