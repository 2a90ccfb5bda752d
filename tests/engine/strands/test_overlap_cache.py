"""`weft profile` measures the overlap of compute and collectives, with which runs on this host plan their pairs."""

import pytest
import torch
import yaml

from tests.tools.test_profile import QUICK
from weft.comm.collectives.collective import EXECUTED
from weft.conf.batch import fit_batch
from weft.conf.compose import compose
from weft.engine.strands.overlap_cache import overlap_cache, overlap_key
from weft.pipeline.strands.segments import LinkScope
from weft.tools import cli
from weft.tools.dry_run import expected_plan


@pytest.mark.slow
def test_runs_on_this_host_plan_with_what_collectives_were_measured_to_take(tmp_path, capsys):
    cache = f"data.cache_dir={tmp_path}"
    options = ["--seconds", "0.1", "--ranks", "2", "--out", str(tmp_path / "p.yaml")]
    assert cli.main(["profile", *QUICK, cache, *options]) == 0
    said = capsys.readouterr().out
    assert "cpu on 2 ranks" in said and "OEF" in said
    overlap = overlap_cache(str(tmp_path)).read(overlap_key(torch.device("cpu")))
    assert {link for _, link in overlap.compute} == {LinkScope.inside_host}
    config = compose([*QUICK, cache, "parallel.tensor=2", "pipeline.stages=2", "cluster.ranks=4"])
    collectives = yaml.safe_load((tmp_path / "p.yaml").read_text())["measured"]["collectives"]
    assert collectives["ranks"] == 2 and collectives["latency_us"] + 1 / collectives["gb_per_s"] > 0
    facts = expected_plan(fit_batch(config, 4)).facts
    assert facts.strands is not None and facts.strands.operators == overlap
    measured = facts.axes["tensor"].costs.table
    assert {primitive for _, primitive in measured} == set(EXECUTED)
