"""Ranks of torch.distributed in the nodes of a bed, and the probe of what their collectives cost."""

import os
import signal
from dataclasses import replace

import pytest

from benchmarks.netbed.ranks import run_ranks_in
from tests.comm.collectives.probing import BYTES, probe_here, probe_pairs
from weft.comm.collectives import LinkClass, Primitive
from weft.tools.netbed import NetBed, Topology, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"weft netbed: {missing()}")


def _second_fails():
    if os.environ["RANK"] == "1":
        raise ValueError("on purpose")
    signal.pause()


@pytest.mark.slow
def test_the_probe_tells_slow_links_from_fast_ones():
    slow_line = replace(Topology.even((1, 1), uplink_mbps=2.0, latency_ms=2.0), queue_ms=1000)
    with NetBed.up(slow_line) as bed:
        found = run_ranks_in(bed, ["n0", "n0", "n1", "n1"], probe_here, timeout_s=60)
        with pytest.raises(RuntimeError, match="on purpose"):
            run_ranks_in(bed, ["n0", "n1"], _second_fails, timeout_s=60)
    assert all(nodes == (0, 0, 1, 1) for nodes, _ in found)
    costs = found[0][1]
    assert all(each == costs for _, each in found)  # every rank plans alike
    for primitive in (Primitive.all_gather, Primitive.all_reduce):
        fast, slow = (costs.table[link, primitive] for link in (LinkClass.intra, LinkClass.inter))
        # What the line itself takes, which no load shortens, is far above what a load adds.
        assert slow.alpha_s + BYTES * slow.beta_s > 2 * (fast.alpha_s + BYTES * fast.beta_s)


@pytest.mark.slow
def test_groups_that_share_a_link_are_probed_together(tmp_path):
    with NetBed.up(Topology.even((1, 1), uplink_mbps=50, latency_ms=0.5)) as bed:
        found = run_ranks_in(bed, ["n0", "n1", "n0", "n1"], probe_pairs, str(tmp_path), timeout_s=60)
        again = run_ranks_in(bed, ["n0", "n1", "n1", "n1"], probe_pairs, str(tmp_path), timeout_s=60)
    assert found == [found[0]] * 4
    assert again == [found[0]] * 2 + [None] * 2  # known by its layout; a pair on one node is not probed
    gather = found[0].table[LinkClass.inter, Primitive.all_gather]
    assert gather.beta_s > 0.7 * 2 * 8 / 50e6  # both pairs' bytes are on the link
