"""Replicas that go through different sites train as one process does."""

from dataclasses import replace

import pytest

from tests.engine.routes import losses_over_sites, meshes_of_reductions
from tests.engine.tiny import reference_losses, tiny_config
from weft.conf.schema import Partition
from weft.tools.ranks import run_ranks

WHOLE = {"sites": (2, 2), "routes": [["site0"], ["site1"]]}
MIXED = {"sites": (1, 1, 2), "routes": [["site0", "site1"], ["site2"]]}
CASES = {
    "whole pipelines at two sites": (4, WHOLE, [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"schedule": "auto"}]),
    "a pipeline over two sites, and a whole one at a third": (
        4,
        MIXED,
        [{}, {"zero": 1, "tied": True}, {"schedule": "w", "placement": "fold"}, {"precision": "bf16", "zero": 1}],
    ),
    "two replicas on each route": (8, MIXED, [{"zero": 1}, {"zero": 1, "schedule": "auto"}]),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "where", "kinds"), CASES.values(), ids=CASES)
def test_losses_equal_a_single_process(num_ranks, where, kinds):
    configs = [tiny_config(**where, **{"stages": 2, "layers": 4, **kind}) for kind in kinds]
    results = run_ranks(num_ranks, losses_over_sites, configs, 4, timeout_s=500)
    assert all(result == results[0] for result in results), "ranks report different losses"
    for config, losses in zip(configs, results[0], strict=True):
        precise = config.train.precision.value == "fp32"
        expected = reference_losses(config, num_ranks // 2, 4)
        assert losses == pytest.approx(expected, rel=1e-5 if precise else 1e-3)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_gradients_are_reduced_inside_of_sites_first(tmp_path):
    config = tiny_config(**WHOLE, stages=2, zero=1, layers=4)
    config.data.cache_dir = str(tmp_path)
    config.zero = replace(config.zero, partition=Partition.group)
    for meshes, kinds, nodes, source in run_ranks(8, meshes_of_reductions, config, timeout_s=180):
        assert (2, 2) in meshes and nodes == (0, 0, 1, 1) and "at sites" in source
        across = {kind for mesh, kind in zip(meshes, kinds, strict=True) if mesh == (2, 2)}
        assert across == {"SiteGroup", "ProcessGroup"}
