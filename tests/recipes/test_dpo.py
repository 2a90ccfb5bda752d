"""The recipe `dpo` has the losses of TRL's DPOTrainer, with the reference computed in line."""

import pytest

from tests.recipes.preferences import STEPS, losses, losses_of_trl, prepare, train
from weft.conf import load
from weft.tools.ranks import run_ranks

TWO = ["cluster.ranks=2", "pipeline.microbatches=4", "train.microbatch_size=2"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_are_those_of_trl_also_after_a_resume_and_with_sharded_weights(tmp_path):
    settings = prepare(tmp_path)
    first = [*settings, *TWO, "train.name=two", f"train.steps={STEPS // 2}", "checkpoint.every=5"]
    for part in (first, [*first, f"train.steps={STEPS}"]):
        run_ranks(2, train, part, timeout_s=200)
    sharded = [*settings, "train.name=four", "cluster.ranks=4", "zero.stage=3", "pipeline.microbatches=2"]
    (found, *_) = run_ranks(4, train, [*sharded, "train.microbatch_size=2"], timeout_s=200)
    assert found == ["0 ahead", "2 in line"]
    expected = losses_of_trl(tmp_path)
    for name in ("two", "four"):
        assert losses(tmp_path / "runs" / name) == pytest.approx(expected, abs=1e-5), name
    assert max(expected) - min(expected) > 0.1


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["data.packing=true"], "data.packing=true: the two answers of a pair"),
        (["train.microbatch_size=3"], "train.microbatch_size=3: it counts sequences"),
        (["model.path=", "model.arch=llama", "model.tokenizer=a"], "model.path='': the reference is the model before"),
        (["train.preference.beta=0"], "train.preference.beta=0"),
    ],
)
def test_settings_without_pairs_or_a_reference_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        load(["recipe=dpo", "model.path=a/b", "data.path=c/d", *settings])
