"""Groups that span sites say what gloo's say, and name the link that fails."""

import pytest

from tests.comm.wan.sites import ranks
from weft.comm.backends import GLOO
from weft.tools.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("sites", [(0, 0, 1, 1), (0, 1, 2), (0, 1, 0, 1)], ids=str)
def test_collectives_are_those_of_gloo(sites):
    for wrong in run_ranks(len(sites), ranks.compare, sites, 8, timeout_s=120):
        assert not wrong


@pytest.mark.slow
def test_collectives_overtake_messages_between_two_members():
    for seen in run_ranks(2, ranks.priorities, (0, 1)):
        messages = {priority for tag, priority in seen.items() if tag.startswith("message ")}
        assert messages == {1} and set(seen.values()) == {0, 1}


@pytest.mark.slow
def test_groups_inside_a_site_are_gloos_and_launch_order_is_kept():
    said = run_ranks(4, ranks.groups, (0, 0, 1, 1))
    for rank, told in enumerate(said):
        assert all(number == expected for number, expected in told["sums"])
        for members, kind in told["kinds"].items():
            assert rank in members
            assert kind == ("ProcessGroup" if members in {(0, 1), (2, 3), (3,)} else "SiteGroup")


@pytest.mark.slow
def test_a_lost_link_is_named_on_every_rank_and_ends_the_group():
    said = run_ranks(4, ranks.lose_a_link, (0, 0, 1, 1))
    for heard in said:
        assert len(heard) == 2
        assert all("ChannelError" in error for error in heard)
    assert said[0] == said[1]
    assert "link rank 0 - rank 2" in said[0][0]


@pytest.mark.slow
def test_a_lost_member_is_noticed_at_every_site():
    heard = run_ranks(4, ranks.lose_a_member, (0, 0, 1, 1))
    assert "Connection closed by peer" in heard[0][0] or "gloo" in heard[0][0]
    assert all("link rank 2 - rank 0" in error or "link rank 0 - rank 2" in error for (error,) in heard[2:])


@pytest.mark.slow
def test_groups_are_torn_down_with_a_collective_under_way_and_made_anew():
    assert run_ranks(4, ranks.tear_down, (0, 0, 1, 1)) == [18.0] * 4


@pytest.mark.slow
def test_hosts_of_one_site_accept_no_peer_once_groups_are_connected_and_report_what_is_in_the_clear():
    said = run_ranks(2, ranks.hosts_of_one_site)
    for told in said:
        assert len(told["accepting"]) == 1  # the rendezvous, or the way to it, which ask who comes
        assert told["backends"] == [GLOO, GLOO] and told["sum"] == [16.0] * 3
    assert sum("in the clear" in message for told in said for message in told["said"]) == 1
