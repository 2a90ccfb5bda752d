"""`benchmarks collectives`: what it measures is kept where runs look for it."""

import pytest
import torch

from benchmarks.__main__ import main
from weft.comm.collectives.cache import CostCache
from weft.comm.collectives.group import LinkClass
from weft.conf.host.measurements import Measurements
from weft.engine.strands.overlap_cache import overlap_cache, overlap_key
from weft.engine.strands.overlap_probe import usual_kernels
from weft.pipeline.strands.segments import LinkScope
from weft.tools.netbed import missing


@pytest.mark.slow
def test_costs_and_overlap_of_both_kinds_of_links_are_kept(tmp_path, capsys):
    if missing():
        pytest.skip(f"weft netbed: {missing()}")
    small = ["--rate", "500", "--latency", "0.2", "--sizes", "65536", "--repeats", "1"]
    assert main(["collectives", *small, "--cache", str(tmp_path)]) == 0
    assert "compute alongside a collective" in capsys.readouterr().out
    device = torch.device("cpu")
    overlap = overlap_cache(str(tmp_path)).read(overlap_key(device))
    assert set(overlap.compute) == {(kind, link) for kind in usual_kernels(device) for link in LinkScope}
    (costs,) = (CostCache.in_folder(str(tmp_path)).read(key) for key in _topologies(tmp_path))
    assert {link for link, _ in costs.table} >= {LinkClass.intra, LinkClass.inter}


def _topologies(folder):
    return list(Measurements(folder / "collectives.json").read())
