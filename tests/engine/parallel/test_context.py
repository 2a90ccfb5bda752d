"""Sequences over the members of a context group: the same logits, losses and gradients as one process."""

import copy

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from tests.engine.parallel.members import (
    CPU,
    FORMS,
    items_of,
    micro_batches,
    recompute,
    require_exact,
    shared,
    whole_model,
)
from tests.engine.stages.small_configs import small_config
from tests.engine.stages.tiny_models import tiny_model
from weft.conf.schema import ContextExchange
from weft.engine.execution.batches import prepare_batch
from weft.engine.models.objective import Minimised, Objective, next_token_loss
from weft.engine.parallel import attention, zigzag
from weft.engine.parallel.axis import Alone, UnshareableError
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.stages.checking.axis_check import check_axes
from weft.engine.stages.checking.comparison import whole_outcome
from weft.engine.stages.checking.members import members_outcome
from weft.engine.stages.cutting.port import Port
from weft.engine.stages.cutting.stage import Stage

SHAPES = [("llama", 2, form) for form in FORMS] + [("llama", 4, "packed"), ("mistral", 4, "plain")]
SHAPES += [(arch, 2, form) for arch in ("qwen3", "mistral", "gemma2", "phi3") for form in ("plain", "packed")]


@pytest.mark.parametrize(("arch", "size", "form"), SHAPES)
def test_members_compute_what_one_process_does(arch, size, form):
    """Three micro-batches; Gemma2's soft caps need the eager attention, Mistral's window is 4."""
    model = whole_model(tiny_model(arch, num_hidden_layers=2))
    model.set_attn_implementation("eager" if arch == "gemma2" else "sdpa")
    require_exact(model, micro_batches(3, **FORMS[form]), context=size)


def test_nothing_is_computed_to_be_masked(monkeypatch):
    """Full rows under sdpa: each chunk of queries attends to the keys before its end."""
    seen = []

    def look(queries, keys):
        seen.append((queries, keys))
        return causal_lower_right(queries, keys)

    monkeypatch.setattr(attention, "causal_lower_right", look)
    model = whole_model(tiny_model("llama", num_hidden_layers=1))
    model.set_attn_implementation("sdpa")
    shared(model, micro_batches(1, length=16), context=2)
    assert sorted(seen) == [(4, 8), (4, 12), (4, 16)]


@pytest.mark.parametrize("exchange", [each for each in ContextExchange if each is not ContextExchange.auto])
def test_recomputed_layers_exchange_again(exchange):
    model = whole_model(tiny_model("llama", num_hidden_layers=2))
    require_exact(model, micro_batches(2, documents=(6, 10)), exchange, change=recompute, context=2)


def test_an_objective_sees_whole_sequences():
    """Its loss counts once, and its gradient as well, whether it takes the logits or the model's own loss."""

    def loss(forward, batch, num_items):
        outputs = forward(labels=batch["labels"], num_items_in_batch=num_items)
        assert outputs.logits.shape[:2] == batch["labels"].shape
        return 0.25 * outputs.loss + 0.75 * next_token_loss(outputs, batch, num_items)

    model, (batch,) = whole_model(tiny_model("llama", num_hidden_layers=1)), micro_batches(1)
    want = whole_outcome(model, [batch], items_of([batch]))

    def member(axes):
        own = copy.deepcopy(model)
        own.zero_grad()
        stage = Stage(own, index=0, num_stages=1, port=Port(), axes=axes)
        stage.objective = Minimised(Objective(loss))
        part = prepare_batch(batch, CPU, axes.context, keep_whole=True)
        result = stage(None, part, items_of([batch]))
        result.backward()
        return result.detach(), {name: p.grad for name, p in own.named_parameters() if p.grad is not None}

    members = run_in_threads({"context": 2}, member)
    torch.testing.assert_close(sum(value for value, _ in members), want.loss)
    for name, gradient in want.gradients.items():
        torch.testing.assert_close(sum(grads[name] for _, grads in members), gradient)


def test_the_routers_loss_is_counted_once():
    """It is a product of means over the whole micro-batch, of which each member has a part."""
    model = whole_model(tiny_model("mixtral", num_hidden_layers=2, output_router_logits=True))
    require_exact(model, micro_batches(1, padding=3), context=2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_zigzag_is_a_permutation_of_the_sequence(size):
    def member(axes):
        return zigzag.positions(axes.context, 12 * size, CPU)

    parts = run_in_threads({"context": size}, member)
    assert torch.equal(zigzag.in_order(size, torch.cat(parts), 0), torch.arange(12 * size))
    attended = {int((part + 1).sum()) for part in parts}
    assert len(attended) == 1, "members attend to equally many positions"


def test_sequences_that_cannot_be_shared_are_refused():
    with pytest.raises(UnshareableError, match=r"parallel.context=2: a sequence of 18 tokens .* multiple of 4"):
        shared(whole_model(tiny_model("llama", num_hidden_layers=1)), micro_batches(1, length=18), context=2)


def test_attention_without_masks_is_refused():
    model = whole_model(tiny_model("llama", num_hidden_layers=1))
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnshareableError, match=r"model.attn_implementation=flash_attention_2: .* choose sdpa or eager"):
        members_outcome(model, micro_batches(1), torch.tensor(1), {"context": 2})


def test_alone_nothing_changes():
    (batch,) = micro_batches(1)
    assert prepare_batch(batch, CPU, Alone("context")).keys() == batch.keys()


@pytest.mark.parametrize("packing", [False, True])
def test_an_architecture_that_works_is_found_exact(packing):
    check_axes(tiny_model("qwen3"), context=4, packing=packing)


@pytest.mark.parametrize(
    ("arch", "what"),
    [
        ("mamba", "MambaForCausalLM .* differs from one process"),
        ("bloom", "look up its attention"),
        ("doge", r"model.layers.0.self_attn \(DogeAttention\) gives attention keys or masks of its own making"),
        ("git", r"git \(GitModel\) makes masks of other tensors than the positions and the padding"),
        ("deepseek_v32", r"self_attn.indexer \(DeepseekV32Indexer\) combines a rank's part of the sequence with all"),
    ],
)
def test_an_architecture_that_cannot_share_sequences_is_refused_by_name(arch, what):
    with pytest.raises(ValueError, match=f"parallel.context=2: .*{what}.*set parallel.context=1"):
        check_axes(small_config(arch), context=2)


def test_names_of_tied_weights_are_those_of_the_whole_model():
    check_axes(small_config("camembert"), context=2)
