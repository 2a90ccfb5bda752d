"""`benchmarks sharing`: losses of shared layers compared with those of one process, and refusals."""

import json
from math import inf, isnan, nan

import pytest

from benchmarks import sharing


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_are_those_of_one_process(tmp_path, capsys):
    file = tmp_path / "found.json"
    chosen = ["--sharings", "context 2, ring", "expert 2", "--layouts", "alone", "ZeRO-3", "packed", "--steps", "3"]
    assert sharing.main(["--archs", "mixtral", *chosen, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["met"] and len(found["figures"]) == 6
    assert all(each["off"] <= sharing.TOLERANCES["fp32"] for each in found["figures"])
    assert "6 layouts, largest difference" in capsys.readouterr().out


@pytest.mark.slow
def test_in_bf16_master_weights_are_compared(tmp_path):
    file = tmp_path / "found.json"
    chosen = ["--sharings", "tensor 2", "--layouts", "alone", "--steps", "4", "--precision", "bf16"]
    assert sharing.main(["--archs", "llama", *chosen, "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["figures"]
    assert 0 < found["off"] <= sharing.TOLERANCES["bf16"]


@pytest.mark.slow
def test_other_losses_are_reported(monkeypatch):
    monkeypatch.setattr(sharing, "one_process", sharing_of_another_seed)
    assert sharing.main(["--archs", "llama", "--sharings", "tensor 2", "--layouts", "alone", "--steps", "1"]) == 1


def sharing_of_another_seed(config, replicas, packed):
    """Return a sharing with another seed, which one process would not have."""
    return [1.0] * config.train.steps


def test_what_is_refused_is_not_compared():
    """Gemma2's soft caps need eager attention, and a Llama has no experts."""
    with pytest.raises(ValueError, match="all of it is refused"):
        sharing.main(["--archs", "gemma2", "--sharings", "context 2, ring", "context 2, all_to_all"])
    with pytest.raises(ValueError, match="all of it is refused"):
        sharing.main(["--archs", "llama", "--sharings", "expert 2"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--archs", "bloom"], "--archs bloom: not known; choose from llama"),
        (["--sharings", "tensor 3"], "--sharings tensor 3: not known"),
        (["--steps", "0"], "--steps 0: there is nothing to compare"),
    ],
)
def test_bad_arguments_are_refused(argv, message):
    with pytest.raises(ValueError, match=message):
        sharing.main(argv)


def test_what_is_not_a_number_is_no_small_difference():
    assert sharing.largest([1e-9, 1e-7]) == 1e-7
    assert isnan(sharing.largest([1e-9, nan, 1e-7])) and sharing.largest([1.0, inf]) == inf
