"""A run corrects what it was planned with, where its slots and collectives contradict that."""

import pytest
import torch

from tests.engine.tiny import begun, tiny_config
from weft.comm.collectives import AlphaBeta, CollectiveCosts, Group, LinkClass, Primitive
from weft.comm.collectives.cache import CostCache, topology_key
from weft.conf.host.measurements import Measurements
from weft.engine.planning.devices import _name
from weft.tools.dry_run import expected_plan
from weft.tools.ranks import run_ranks

COSTS = CollectiveCosts.of_links({LinkClass.intra: AlphaBeta(5.0, 1e-6)})
KEY = topology_key(Group((0, 1), (0, 0)), "cpu")


def corrected(config, steps):
    """Train, and correct; the speed that was planned with."""
    engine = begun(config)
    for _ in range(steps):
        engine.train_batch()
    timelines = engine.correct_measurements()
    engine.destroy()
    return engine.plan.facts.flops_per_s, len(timelines)


@pytest.mark.slow
def test_a_run_replaces_speeds_and_costs_that_it_contradicts(tmp_path):
    """Collectives were said to take 5 s, and ranks to do a thousand operations in a second."""
    config = tiny_config(stages=1, zero=1)
    config.data.cache_dir, config.data.sequence_length, config.cluster.ranks = str(tmp_path), 12, 2
    CostCache.in_folder(str(tmp_path)).write(KEY, COSTS)
    run, speeds = expected_plan(config).facts.run, Measurements(tmp_path / "devices.json")
    name = _name(f"{run}: ", torch.device("cpu"), 1)
    speeds.store({name: 1000.0})
    planned = {flops for flops, _ in run_ranks(2, corrected, config, 3, timeout_s=200)}
    table = CostCache.in_folder(str(tmp_path)).read(KEY).table
    assert planned == {1000.0}
    assert table[LinkClass.intra, Primitive.reduce_scatter].alpha_s < 0.5
    assert table[LinkClass.intra, Primitive.broadcasts] == AlphaBeta(5.0, 1e-6), "it has not carried out any"
    facts = expected_plan(config).facts
    assert (
        facts.flops_per_s == speeds.read()[name].value > 1e5
        and "reached by a run of llama" in facts.sources["flops_per_s"]
    )
