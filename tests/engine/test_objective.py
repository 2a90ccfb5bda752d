"""Losses of one's own on the last stage equal one process's, whatever the split; what cannot add up is refused."""

import pytest
import torch

from tests.engine.losses import reference_losses, routed_config, smoothed, undivided_loss, weft_losses
from tests.engine.stages.tiny import batch, gradients, run, stages_of, tiny, whole
from tests.engine.tiny import tiny_config, with_costs
from weft.engine.huggingface.objective import LastStage
from weft.engine.initialize import initialize
from weft.engine.models.objective import Minimised, Objective, one_item
from weft.tools.ranks import run_ranks


def test_stages_in_one_process():
    model, stages, data, items = whole(tiny("gemma2")), stages_of(tiny("gemma2"), 3), batch(), torch.tensor(40.0)
    stages[-1].objective = Minimised(Objective.of(smoothed))
    got = run(stages, data, items)
    got.backward()
    inputs = {name: data[name] for name in ("input_ids", "position_ids")}
    want = smoothed(model(**inputs, use_cache=False), data, items)
    want.backward()
    assert torch.equal(got, want)
    found = gradients(stages)
    assert all(torch.equal(found[name], p.grad) for name, p in model.named_parameters())
    stages[-1].objective.require_sums()


def test_a_microbatch_that_counts_nothing():
    """It only fills up a schedule: a mean over nothing would be no number."""
    stages, data = stages_of(tiny("llama"), 2), batch()
    data["labels"] = torch.full_like(data["labels"], -100)
    stages[-1].objective = Minimised(Objective.mean(lambda outputs, batch: outputs.logits.sum() / 0.0))
    loss = stages[1](stages[0](None, data), data, torch.tensor(4.0), counts=False)
    loss.backward()
    assert loss == 0 and not any(gradient.any() for gradient in gradients(stages[1:]).values())
    assert (one_item(data), one_item(batch())) == (0, 1)


class TestMinimised:
    outputs = {"logits": torch.ones(2, 3, 4)}

    def minimised(self, loss):
        return Minimised(Objective(loss))(lambda: dict(self.outputs), {}, torch.tensor(2.0))

    def test_not_a_scalar(self):
        with pytest.raises(ValueError, match=r"loss: returned \(2, 3\); return a scalar"):
            self.minimised(lambda forward, batch, items: forward()["logits"].sum(-1))
        with pytest.raises(ValueError, match="loss: returned float"):
            self.minimised(lambda forward, batch, items: 1.0)

    def test_the_model_run_twice(self):
        with pytest.raises(ValueError, match="runs the model twice"):
            self.minimised(lambda forward, batch, items: (forward(), forward())[0]["logits"].sum())

    def test_not_divided(self):
        minimised = Minimised(Objective.of(lambda outputs, batch, items: outputs["logits"].mean()))
        minimised(lambda: dict(self.outputs), {}, torch.tensor(2.0))
        with pytest.raises(ValueError, match=r"not divided by num_items.*weft\.Objective\.mean"):
            minimised.require_sums()
        minimised.require_sums()  # said once


def test_without_weft():
    with pytest.raises(ValueError, match=r"loss: deepspeed\.initialize takes none"):
        initialize(config={"train_batch_size": 1}, loss=smoothed)


def test_a_model_asked_about_other_tokens():
    """TRL's preference trainers concatenate their inputs: the pipeline has run other ones."""
    data = batch()
    model = LastStage(whole(tiny("llama")), lambda **more: more, data)
    assert model(**data, use_cache=False).keys() == {"labels"} and model.config.model_type == "llama"
    with pytest.raises(ValueError, match="another input_ids"):
        model(input_ids=data["input_ids"].repeat(2, 1))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("known", [False, True], ids=["no costs", "known costs"])
def test_pipelines_and_zero_match_one_process(tmp_path, known):
    """Where costs are known strands are paired by a plan, which has to count what an objective communicates."""
    cases = [
        ("smoothed", tiny_config()),
        ("smoothed", tiny_config("w", "fold", zero=3)),
        ("preferred", tiny_config("zbv", "fold", zero=1)),
        ("preferred", tiny_config("auto", zero=2, tied=True)),
        ("router", routed_config(tiny_config("1f1b", zero=1))),
        ("router", routed_config(tiny_config("zbv", "fold", zero=3))),
        ("smoothed", tiny_config("w", "fold", context=2)),
        ("preferred", tiny_config(context=2, stages=1)),
        ("router", routed_config(tiny_config(context=2, expert=2, zero=1))),
        ("router", routed_config(tiny_config(expert=2, stages=1))),
    ]
    if known:
        cases += [("own", tiny_config("w", "fold", context=2)), ("own", tiny_config("w", "fold", tensor=2))]
        cases = [(name, with_costs(config, tmp_path)) for name, config in cases]
    found = run_ranks(4, weft_losses, cases, timeout_s=380)[0]
    for (name, config), losses in zip(cases, found, strict=True):
        replicas = 4 // config.pipeline.stages // config.parallel.context // config.parallel.tensor
        assert losses == pytest.approx(reference_losses(name, config, replicas), rel=1e-5), (name, config.pipeline)


@pytest.mark.slow
def test_a_mean_that_does_not_say_so():
    for said in run_ranks(2, undivided_loss, tiny_config()):
        assert "not divided by num_items" in said
