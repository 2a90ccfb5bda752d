"""Stages of which members of axis groups hold their parts: made as training makes them, run as a pipeline."""

import copy
import threading

import pytest
import torch

from tests.engine.parallel.members import CPU, items_of, micro_batches, require_same, whole_model
from tests.engine.stages.tiny_models import tiny_model
from weft.conf.schema import LoraConfig, SplitKind
from weft.engine.execution.batches import prepare_batch
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.stages.checking.comparison import Outcome, gradients, run_stages, whole_outcome
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.files.loading import load_hf_config, load_stages

MAKING = threading.Lock()
"""Held while a model is made: transformers changes its classes for the time."""


def outcome(make, batches, **sizes) -> Outcome:
    """Return the outcome of micro-batches by members, with the stages that ``make`` makes for each."""

    def member(axes):
        with MAKING:
            stages = make(axes)
        losses, logits = [], []
        for batch in batches[axes.expert.index :: axes.expert.size]:
            part = prepare_batch(batch, CPU, axes.context)
            loss = run_stages(stages, part, items_of(batches))
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                logits.append(stages[-1].logits(run_stages(stages[:-1], part), part))
        return axes, stages, torch.stack(losses).sum(), torch.stack(logits)

    results = run_in_threads(sizes, member)
    totals = {}
    for _, stages, _, _ in results:
        cuts = {name: cut for stage in stages for name, cut in stage.cuts.items()}
        for name, gradient in gradients(stages).items():
            whole = gradient
            if name in cuts:
                whole = torch.zeros(cuts[name].shape)
                cuts[name].put(gradient, whole)
            totals[name] = totals.get(name, 0) + whole
    first = [logits for axes, _, _, logits in results if axes.context.index == 0]
    return Outcome(torch.stack(first, 1).flatten(0, 2), torch.stack([loss for _, _, loss, _ in results]).sum(), totals)


@pytest.mark.parametrize("given", [False, True], ids=["loaded", "given"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_stages_of_members_are_the_whole_model(num_stages, given):
    config = tiny_model("qwen3_moe", num_hidden_layers=2, tie_word_embeddings=False)
    whole, batches = whole_model(config), micro_batches(2, rows=1, length=8, documents=(3, 5))
    split = split_layers(load_hf_config(config), num_stages, SplitKind.even)

    def make(axes):
        if given:
            return stages_from_model(copy.deepcopy(whole), split, range(num_stages), axes)
        stages = load_stages(config, split, range(num_stages), dtype=torch.float32, seed=1, axes=axes)
        copy_weights(whole, stages)
        return stages

    got = outcome(make, batches, context=2, expert=2)
    require_same(got, whole_outcome(whole, batches, items_of(batches)))


def copy_weights(whole, stages) -> None:
    """The weights of a whole model to those who hold them, or their parts of them."""
    held = dict(whole.named_parameters())
    with torch.no_grad():
        for stage in stages:
            for name, parameter in stage.named_global_parameters():
                cut = stage.cuts.get(name)
                parameter.copy_(held[name] if cut is None else cut.take(held[name]))


def test_new_weights_are_those_of_a_whole_model():
    config = tiny_model("mixtral", num_hidden_layers=2)
    split = split_layers(load_hf_config(config), 2, SplitKind.even)

    def stages(axes):
        with MAKING:
            return load_stages(config, split, range(2), dtype=torch.float32, seed=1, axes=axes)

    (alone,) = run_in_threads({}, stages)
    want = {name: p for stage in alone for name, p in stage.named_global_parameters()}
    for members in run_in_threads({"expert": 2}, stages):
        for stage in members:
            for name, parameter in stage.named_global_parameters():
                cut = stage.cuts.get(name)
                torch.testing.assert_close(parameter, want[name] if cut is None else cut.take(want[name]))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_parts_have_the_names_that_adapters_give_parameters(num_stages):
    config = tiny_model("mixtral", num_hidden_layers=2)
    config.lora = LoraConfig(enabled=True, target_modules=["q_proj"])
    split = split_layers(load_hf_config(config), num_stages, SplitKind.even)

    def names(axes):
        with MAKING:
            stages = load_stages(config, split, range(num_stages), dtype=torch.float32, seed=1, axes=axes)
        return [(set(stage.cuts), {name for name, _ in stage.named_global_parameters()}) for stage in stages]

    for stages in run_in_threads({"expert": 2}, names):
        for cut, held in stages:
            assert cut, "every stage has experts"
            assert cut <= held
