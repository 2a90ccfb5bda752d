"""A run whose ranks are machines at three sites learns what the same run at one site learns."""

import pytest

from tests.interpreter import python
from tests.quickstart import TINY_QUICKSTART, losses_of, train
from weft.tools import cli
from weft.tools.netbed import missing
from weft.tools.ranks import run_ranks

SETTINGS = [*TINY_QUICKSTART, "train.steps=4", "checkpoint.final=false", "comm.connections=3"]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(bool(missing()), reason=f"weft netbed: {missing()}")
def test_losses_over_three_sites_equal_those_of_one(tmp_path):
    run_ranks(4, train, SETTINGS, tmp_path / "one", timeout_s=240)
    one = losses_of(tmp_path / "one")
    assert len(one) == 4
    command = ["-m", "weft.tools.cli", "netbed", "launch", "cluster=three_sites", *SETTINGS]
    command.append(f"train.output_dir={tmp_path / 'three'}")
    done = python(*command, timeout_s=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses_of(tmp_path / "three") == pytest.approx(one, rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(bool(missing()), reason=f"weft netbed: {missing()}")
def test_losses_of_replicas_on_two_routes_equal_those_of_one_site(tmp_path):
    """A pipeline over two sites, and a whole one at a third."""
    settings = [*SETTINGS, "pipeline.stages=2", "zero.stage=1"]
    run_ranks(4, train, settings, tmp_path / "one", timeout_s=240)
    sites = "cluster.sites=[{name: east, ranks: 1}, {name: mid, ranks: 1}, {name: west, ranks: 2}]"
    command = ["-m", "weft.tools.cli", "netbed", "launch", "cluster=three_sites", *settings, sites]
    command += ["cluster.routes=[[east, mid], [west]]", f"train.output_dir={tmp_path / 'three'}"]
    done = python(*command, timeout_s=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses_of(tmp_path / "three") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["recipe=quickstart"], "a bed has at least two; choose cluster=three_sites"),
        (["recipe=quickstart", "cluster=three_sites", "pipeline.stages=3"], "the sites hold 1 + 2 + 1 = 4"),
    ],
)
@pytest.mark.skipif(bool(missing()), reason=f"weft netbed: {missing()}")
def test_what_cannot_run_is_refused_before_a_bed_is_built(capsys, settings, part):
    assert cli.main(["netbed", "launch", *settings]) == 2
    assert part in capsys.readouterr().err
