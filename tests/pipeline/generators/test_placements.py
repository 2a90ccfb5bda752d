"""The reference cases of straight, folded and site-folded pipelines over two sites."""

from pathlib import Path

import pytest

from weft.tools.schedule import main

COSTS = Path(__file__).parents[3] / "examples" / "slow_wan_costs.yaml"


@pytest.fixture
def step(tmp_path, capsys):
    """Seconds of a step, by `weft schedule auto`."""

    def of(num_microbatches, placement, split):
        costs = COSTS.read_text()
        if not split:  # the weight gradient counts as part of the input gradient
            costs = costs.replace("input_ms: 500, weight_ms: 500", "input_ms: 1000, weight_ms: 0")
        (tmp_path / "costs.yaml").write_text(costs)
        where = ["--placement", placement, "--ranks", "8", "--sites", "4,4", "--costs", str(tmp_path / "costs.yaml")]
        assert main(["auto", "--microbatches", f"{num_microbatches}", "--memory-cap", "12", *where]) == 0
        return float(capsys.readouterr().out.partition("predicted: step ")[2].split()[0])

    return of


@pytest.mark.parametrize(
    ("num_microbatches", "placement", "split", "seconds"),
    [
        (32, "straight", False, 125),
        (32, "straight", True, 119),
        (32, "site_fold", True, 117.5),
        (8, "straight", True, 47),
        (8, "site_fold", True, 45.5),
    ],
)
def test_reference_steps(step, num_microbatches, placement, split, seconds):
    assert step(num_microbatches, placement, split) == pytest.approx(seconds)


def test_a_fold_across_sites_pays_for_its_crossings(step):
    """The reference simulation's best greedy schedule took 235."""
    assert step(32, "fold", True) < step(32, "fold", False) <= 235
