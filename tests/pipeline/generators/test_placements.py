"""The reference cases of straight, folded and site-folded pipelines over two sites."""

import pytest

from weft.tools.benchmarks.placements import WAN, layouts, main


@pytest.mark.parametrize(
    ("num_microbatches", "name", "split", "step"),
    [
        (32, "straight", False, 125),
        (32, "straight", True, 119),
        (32, "site fold", True, 117.5),
        (8, "straight", True, 47),
        (8, "site fold", True, 45.5),
    ],
)
def test_reference_steps(num_microbatches, name, split, step):
    layout = next(layout for layout in layouts() if layout.name == name)
    assert layout.step(num_microbatches, WAN, split=split) == pytest.approx(step)


def test_a_fold_across_sites_pays_for_its_crossings():
    """The reference simulation's best greedy schedule took 235."""
    fold = next(layout for layout in layouts() if layout.name == "fold")
    assert fold.step(32, WAN, split=True) < fold.step(32, WAN, split=False) <= 235


def test_the_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("weft.tools.benchmarks.placements.STEPS", 3)
    monkeypatch.setattr("weft.tools.benchmarks.placements.MICROBATCHES", (2, 4))
    assert main(["--out", str(tmp_path / "plots" / "choice.png"), "--search", "0"]) == 0
    assert (tmp_path / "plots" / "choice.png").stat().st_size > 10_000
    assert "site fold" in capsys.readouterr().out
