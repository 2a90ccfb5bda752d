"""Strand pairs of a schedule: losses and gradients are those of their halves one after the other, bit by bit."""

import itertools
import threading

import pytest

from tests.engine.stages.tiny_models import tiny_model
from tests.engine.strands.strand_ranks import SPLIT, Case, any_plan, outcomes, require_equal
from weft.conf.schema import ContextExchange
from weft.pipeline.strands.plan import SegmentPlan

ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma2", "phi3", "mixtral", "qwen3_moe")
BY_TURNS = SegmentPlan(())
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.02}


def wide(arch, **more):
    """A model that four tensor ranks can divide."""
    return tiny_model(arch, num_key_value_heads=4, num_hidden_layers=2, **more)


def recomputing(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})


def recomputing_reentrantly(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def frozen(model):
    """As with adapters: most weights get no gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "down_proj" in name)


def slow_but(fast, names):
    """Parameters, of which all but some are slow tests: each takes seconds."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("arch", slow_but(["llama"], ARCHITECTURES))
def test_layers_shared_out(arch):
    require_equal(Case(model=wide(arch), tensor=2), [any_plan(1)])


CASES = {
    "tensor 4": Case(model=wide("llama"), tensor=4),
    "tensor 2, recomputed": Case(model=wide("llama"), tensor=2, adjust=recomputing),
    "tensor 2, recomputed reentrantly": Case(model=wide("llama"), tensor=2, adjust=recomputing_reentrantly),
    "tensor 2, split": Case(model=wide("qwen3"), tensor=2, order=SPLIT),
    "tensor 2, split, recomputed": Case(model=wide("llama"), tensor=2, order=SPLIT, adjust=recomputing),
    "tensor 2, mostly frozen": Case(model=wide("llama"), tensor=2, adjust=frozen),
    "tensor 2, tied": Case(model=wide("llama", tie_word_embeddings=True), tensor=2),
    "tensor 2, ZeRO-1": Case(model=wide("llama"), tensor=2, replicas=2, zero=1),
    "tensor 2, ZeRO-2, split": Case(model=wide("llama"), tensor=2, replicas=2, zero=2, order=SPLIT),
    "tensor 2, ZeRO-3": Case(model=wide("llama"), tensor=2, replicas=2, zero=3),
    "tensor 2, ZeRO-3, recomputed, split": Case(
        model=wide("llama"), tensor=2, replicas=2, zero=3, adjust=recomputing, order=SPLIT
    ),
    "tensor 2, ZeRO-3, tied": Case(model=wide("llama", tie_word_embeddings=True), tensor=2, replicas=2, zero=3),
    "routers, tensor 2": Case(model=wide("mixtral", **ROUTERS), tensor=2),
    "routers, tensor 2, recomputed": Case(model=wide("mixtral", **ROUTERS), tensor=2, adjust=recomputing),
    "context 2": Case(model=wide("llama"), context=2),
    "context 2, packed": Case(model=wide("qwen3"), context=2, form={"documents": (5, 8, 3)}),
    "context 2, recomputed, ZeRO-3": Case(model=wide("llama"), context=2, adjust=recomputing, zero=3),
    "context 2, heads, recomputed, split": Case(
        model=wide("llama"), context=2, exchange=ContextExchange.all_to_all, adjust=recomputing, order=SPLIT
    ),
    "context 2, ring, packed": Case(
        model=wide("qwen3"), context=2, exchange=ContextExchange.ring, form={"documents": (5, 8, 3)}
    ),
    "context 4, ring, recomputed, split, ZeRO-1": Case(
        model=wide("mistral"), context=4, exchange=ContextExchange.ring, adjust=recomputing, order=SPLIT, zero=1
    ),
    "context 2, tensor 2, split": Case(model=wide("mistral"), context=2, tensor=2, order=SPLIT),
    "expert 2": Case(model=wide("mixtral"), expert=2, replicas=2),
    "expert 2, eager": Case(
        model=wide("qwen3_moe"), expert=2, replicas=2, adjust=lambda model: model.set_experts_implementation("eager")
    ),
    "expert 2, split, recomputed, ZeRO-1": Case(
        model=wide("mixtral"), expert=2, replicas=2, order=SPLIT, adjust=recomputing, zero=1
    ),
    "expert 2, ZeRO-3, routers": Case(model=wide("mixtral", **ROUTERS), expert=2, replicas=2, zero=3),
    "expert 2, context 2, tensor 1": Case(model=wide("mixtral"), expert=2, context=2),
}


FAST = [
    "tensor 2, split, recomputed",
    "tensor 2, ZeRO-3",
    "routers, tensor 2, recomputed",
    "context 2",
    "expert 2, split, recomputed, ZeRO-1",
]


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_equal(name):
    require_equal(CASES[name], [BY_TURNS, any_plan(len(name))])


class Broken(Exception):
    """The error of a failing rank."""


def fails_in_forward(stages):
    calls = itertools.count()

    def fail(*_):
        if next(calls) == 1:  # micro-batch 0 goes alone
            raise Broken("forward")

    stages[1].blocks()[0].register_forward_hook(fail)


def fails_in_backward(stages):
    stages[1].blocks()[0].register_full_backward_hook(fail_in("backward"))


def fails_in_a_weight_gradient(stages):
    for parameter in stages[1].blocks()[0].parameters():
        parameter.register_post_accumulate_grad_hook(fail_in("weight gradient"))


def fails_between_collectives(stages):
    stages[1].blocks()[0].self_attn.register_full_backward_hook(fail_in("backward"))


def fail_in(place):
    def fail(*_):
        raise Broken(place)

    return fail


@pytest.mark.slow  # the others wait until their groups' time is over
@pytest.mark.parametrize(
    "spoil", [fails_in_forward, fails_in_backward, fails_in_a_weight_gradient, fails_between_collectives]
)
@pytest.mark.parametrize("plan", [BY_TURNS, any_plan(5)], ids=["alternately", "planned"])
def test_an_error_in_either_strand_of_one_rank_ends_all_with_that_error(spoil, plan):
    with pytest.raises(Broken):
        outcomes(Case(model=wide("llama"), tensor=2, spoil=spoil, timeout_s=5.0), [plan])
    assert not [thread for thread in threading.enumerate() if thread.name == "weft strand"]
