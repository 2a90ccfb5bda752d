"""Placements: what each name stands for, first and last stages, sites, and what is refused."""

import pytest

from weft.pipeline.choice import placements
from weft.pipeline.limits import MOST_LEGS, MOST_RANKS
from weft.pipeline.placement import LAYOUTS, Placement


def test_each_name_goes_through_its_groups_by_its_legs():
    assert {name: (one.groups, one.legs) for name in LAYOUTS if (one := Placement.named(name, 5, (2, 3), 3))} == {
        "straight": ((5,), "d"),
        "fold": ((5,), "dud"),
        "interleaved": ((5,), "ddd"),
        "site_fold": ((2, 3), "dud"),
        "site_interleaved": ((2, 3), "ddd"),
    }
    assert Placement.named("fold", 4) == Placement((4,), "du", (4,)) == Placement.fold(4)
    assert Placement.fold(4, 3) == Placement((4,), "dud", (4,)) and Placement.site_fold((2, 2), 1).legs == "d"
    assert Placement.straight(4) == Placement((4,), "d", (4,))
    assert Placement.interleaved(4, 3, (1, 3)) == Placement((4,), "ddd", (1, 3))


def test_stages_go_up_and_down_and_on_to_the_next_group():
    assert Placement((2, 3), "du", (2, 3)).stage_ranks == (0, 1, 1, 0, 2, 3, 4, 4, 3, 2)
    assert Placement((3,), "dd", (3,)).stage_ranks == (0, 1, 2, 0, 1, 2)
    cell = Placement((2,), "du", (1, 1), pipelines=2)
    assert cell.stage_ranks == (0, 1, 1, 0, 2, 3, 3, 2)
    assert cell.rank_stages == ((0, 3), (1, 2), (4, 7), (5, 6))
    assert cell.rank_sites == (0, 1, 0, 1)
    assert [cell.crosses_wan(stage) for stage in range(3)] == [True, False, True]
    assert [stage for stage in range(8) if cell.is_first(stage)] == [0, 4]
    assert [stage for stage in range(8) if cell.is_last(stage)] == [3, 7]
    assert (cell.num_ranks, cell.num_stages) == (4, 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"groups": ()}, "placement.groups="),
        ({"groups": (4, 0)}, "placement.groups="),
        ({"sites": (4, 0)}, "placement.sites="),
        ({"sites": (3,)}, "they hold 3 ranks, the pipeline has 4"),
        ({"legs": ""}, "placement.legs=''"),
        ({"legs": "dx"}, "placement.legs='dx'"),
        ({"pipelines": 0}, "placement.pipelines=0"),
        ({"legs": "d" * (MOST_LEGS + 1)}, f"{MOST_LEGS + 1} legs, more than 1000"),
        ({"groups": (MOST_RANKS + 1,), "sites": (MOST_RANKS + 1,)}, "100001 ranks, more than 100000"),
        ({"pipelines": MOST_RANKS // 4 + 1}, "ranks, more than 100000"),
    ],
)
def test_what_is_no_placement_is_named(changes, said):
    with pytest.raises(ValueError) as caught:
        Placement(**{"groups": (4,), "legs": "d", "sites": (4,)} | changes)
    assert said in str(caught.value)


def test_as_many_legs_and_ranks_as_there_may_be():
    assert Placement((1,), "d" * MOST_LEGS, (1,)).num_stages == 1000
    assert Placement((4,), "d", (4,), pipelines=MOST_RANKS // 4).num_ranks == 100_000


def test_placements_to_choose_from_are_those_that_differ():
    assert list(placements(4)) == ["straight", "fold", "interleaved"]
    assert list(placements(4, (2, 2))) == list(LAYOUTS)
    assert list(placements(1)) == ["straight"]
    assert list(placements(4, (4,))) == ["straight", "fold", "interleaved"]
    assert {one.legs for one in placements(4).values()} == {"d", "du", "dd"}
    assert placements(4, (2, 2), 3)["site_fold"] == Placement((2, 2), "dud", (2, 2))
