"""Heads over the members of a context group: the same logits, losses and gradients as one process."""

import pytest
import torch
from transformers import LlamaConfig

from tests.engine.parallel.members import FORMS, micro_batches, require_exact, whole_model
from tests.engine.stages.tiny_models import tiny_model
from weft.conf.schema import ContextExchange
from weft.engine.models.varlen import ON_CPU
from weft.engine.parallel import zigzag
from weft.engine.parallel.attention import ContextAttention, HeadAttention
from weft.engine.parallel.axis import Alone, UnshareableError
from weft.engine.parallel.context_exchange import choose_exchange, key_value_size
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.stages.checking.axis_check import check_axes

SHAPES = [("llama", 2, form) for form in FORMS] + [("llama", 4, "packed"), ("mistral", 4, "plain")]
SHAPES += [(arch, 2, form) for arch in ("qwen3", "mistral", "phi3", "mixtral") for form in ("plain", "packed")]


def with_heads(arch, heads=4, of_keys=4, layers=2, **more):
    return whole_model(
        tiny_model(arch, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=of_keys, **more)
    )


@pytest.mark.parametrize(("arch", "size", "form"), SHAPES)
def test_members_compute_what_one_process_does(arch, size, form):
    """Three micro-batches; Mistral's window is 4."""
    require_exact(with_heads(arch), micro_batches(3, **FORMS[form]), ContextExchange.all_to_all, context=size)


@pytest.mark.parametrize("form", FORMS)
def test_heads_may_share_keys(form):
    model = with_heads("llama", heads=8, of_keys=2)
    require_exact(model, micro_batches(2, **FORMS[form]), ContextExchange.all_to_all, context=2)


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_attention_that_takes_bounds_in_place_of_masks_gets_those_of_whole_rows(form):
    """A stand-in for flash attention, which needs a GPU, receives the arguments of flash attention."""

    def attend_by_bounds(model):
        model.set_attn_implementation(ON_CPU)

    batches = micro_batches(2, **FORMS[form])
    require_exact(with_heads("llama"), batches, ContextExchange.all_to_all, change=attend_by_bounds, context=2)


class Grouped(torch.nn.Module):
    """The attributes of a module that attention reads: how many heads share keys."""

    is_causal = True

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups


def saved_bytes(makes, size, heads, of_keys, length):
    """Return the bytes that one layer's attention of the first member saves for its backward, by storage."""

    def member(axes):
        parts = [
            2 * torch.zeros(1, count, length // size, 8, requires_grad=True) for count in (heads, of_keys, of_keys)
        ]
        kept = {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            makes(axes.context, "sdpa").attend(Grouped(heads // of_keys), *parts, None)
        return sum(storage.nbytes() for storage in kept.values())

    return run_in_threads({"context": size}, member)[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("of_keys", [4, 8])
def test_gathered_keys_and_values_are_kept_and_exchanged_heads_are_not(size, of_keys):
    """The estimates of memory equal these bytes."""
    heads, length = 8, 64
    config = LlamaConfig(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=of_keys)
    of_others = (size - 1) / size * length * key_value_size(config) * 4
    chunk = length // (2 * size)
    mask = 4 * chunk * (2 * size * chunk)  # the second chunk's, which a processor makes in full
    gathered, exchanged = (
        saved_bytes(makes, size, heads, of_keys, length) for makes in (ContextAttention, HeadAttention)
    )
    assert gathered - exchanged == of_others + mask


def test_members_may_share_matrices_as_well():
    require_exact(with_heads("llama"), micro_batches(2), ContextExchange.all_to_all, context=2, tensor=2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_are_put_in_order_and_back(size):
    whole = torch.arange(12 * size)
    assert torch.equal(zigzag.in_order(size, zigzag.by_member(size, whole, 0), 0), whole)


def config_of(heads, of_keys, attention="sdpa"):
    config = LlamaConfig(hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=of_keys)
    config._attn_implementation = attention
    return config


@pytest.mark.parametrize(
    ("heads", "of_keys", "context", "tensor", "chosen"),
    [
        (32, 32, 2, 1, "gather"),
        (32, 32, 4, 1, "all_to_all"),
        (64, 8, 8, 1, "gather"),
        (16, 8, 4, 1, "all_to_all"),
        (64, 8, 16, 1, "gather"),  # 16 members cannot have 8 heads
        (32, 32, 4, 16, "gather"),  # nor 4 of them the 2 of a member of a tensor group
        (32, 32, 4, 4, "all_to_all"),
    ],
)
def test_what_moves_less_is_chosen(heads, of_keys, context, tensor, chosen):
    found, _ = choose_exchange(config_of(heads, of_keys), ContextExchange.auto, context=context, tensor=tensor)
    assert found is ContextExchange[chosen]


def test_what_takes_longer_is_not_chosen():
    """An exchange of heads starts twice as many collectives, which short sequences do not make up for."""
    config, auto = config_of(32, 32), ContextExchange.auto

    def choice(tokens, latency=1e-5, per_element=1e-11):
        def seconds(primitive, elements):
            return latency + tokens * elements * per_element

        return choose_exchange(config, auto, context=4, tensor=1, seconds=seconds)

    short, why_short = choice(64)
    long, why_long = choice(65536)
    assert (short, long) == (ContextExchange.gather, ContextExchange.all_to_all)
    # 2 x 32 heads of 16 gathered and scattered; 3 x 8 heads there and 8 back, twice
    # 16 heads passed on three times forwards and seven times backwards
    assert why_short.endswith(
        f"; a layer and micro-batch: {2e-2 + 64 * 128 * 16 * 1e-8:.3g} ms gathered, "
        f"{4e-2 + 64 * 64 * 16 * 1e-8:.3g} ms by heads, {1e-1 + 10 * 64 * 16 * 16 * 1e-8:.3g} ms round the ring "
        "that attention does not hide"
    )
    assert why_long != why_short


def test_flash_attention_exchanges_heads_whatever_moves():
    config = config_of(64, 8, "flash_attention_2")
    found, why = choose_exchange(config, ContextExchange.auto, context=2, tensor=1)
    assert found is ContextExchange.all_to_all and why == "flash_attention_2 takes no mask"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heads": 6}, r"context_exchange=all_to_all: parallel.context=4 .* a rank's 6 heads each; set it to gather"),
        ({"of_keys": 2}, "a rank's 2 key and value heads each"),
        ({"attention": "eager"}, "model.attn_implementation=eager has parameters of all heads"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused(given, message):
    config = config_of(**{"heads": 8, "of_keys": 4} | given)
    with pytest.raises(UnshareableError, match=message):
        choose_exchange(config, ContextExchange.all_to_all, context=4, tensor=1)


def test_what_is_given_for_each_head_is_refused():
    attention = HeadAttention(Alone("context", 2), "sdpa")
    with pytest.raises(ValueError, match=r"each head; set parallel.context_exchange=gather"):
        attention.attend(torch.nn.Identity(), *torch.zeros(3, 1, 2, 4, 2), None, s_aux=torch.zeros(2))


@pytest.mark.parametrize("packing", [False, True])
def test_an_architecture_that_works_is_found_exact(packing):
    config = tiny_model("qwen3", num_attention_heads=4, num_key_value_heads=4)
    check_axes(config, context=4, exchange=ContextExchange.all_to_all, packing=packing)
