"""Experts over the members of an expert group: the same logits, losses and gradients as one process."""

import copy
from contextlib import nullcontext

import pytest
import torch

from tests.engine.parallel.members import (
    items_of,
    micro_batches,
    recompute,
    require_exact,
    require_same,
    shared,
    whole_model,
)
from tests.engine.stages.small_configs import small_config
from tests.engine.stages.tiny_models import tiny_model
from weft.engine.models.sizes import model_sizes
from weft.engine.parallel.axis import UnshareableError
from weft.engine.stages.checking.axis_check import check_axes
from weft.engine.stages.checking.comparison import Outcome, gradients, whole_outcome
from weft.engine.stages.cutting.port import Port
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.loading import load_hf_config

DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


def deepseek(**overrides):
    config = tiny_model("llama", **overrides)
    config.arch, config.overrides = "deepseek_v3", config.overrides | DEEPSEEK
    return config


@pytest.mark.parametrize("computation", ["grouped_mm", "eager"])
@pytest.mark.parametrize(("arch", "size"), [("mixtral", 2), ("mixtral", 4), ("qwen3_moe", 2), ("deepseek_v3", 2)])
def test_members_compute_what_one_process_does(arch, size, computation):
    """Three micro-batches on each member, which are replicas of everything but the experts."""
    make = deepseek if arch == "deepseek_v3" else lambda **more: tiny_model(arch, **more)
    model = whole_model(make(num_hidden_layers=2))
    model.set_experts_implementation(computation)
    require_exact(model, micro_batches(3 * size, rows=1, length=8), expert=size)


def test_experts_without_tokens_have_zero_gradients():
    """Two of four members have nothing to do, and take part all the same."""
    model = whole_model(tiny_model("mixtral", num_hidden_layers=2, num_experts_per_tok=1))
    for layer in model.model.layers:
        gate = layer.mlp.gate.weight.data
        gate[1], gate[2:] = -gate[0], 0.0  # of the first two, one is always above zero
    batches = micro_batches(4, rows=1, length=4)
    want = whole_outcome(model, batches, items_of(batches))
    assert not want.gradients["model.layers.1.mlp.experts.down_proj"][2:].any()
    require_same(shared(model, batches, expert=4), want)


def test_the_routers_loss_is_counted_once():
    """The loss of each micro-batch is weighted by its share of the label tokens, as without expert parallelism."""
    model = whole_model(tiny_model("mixtral", num_hidden_layers=2, output_router_logits=True))
    batches = micro_batches(4, rows=1, length=8)
    alone = Stage(copy.deepcopy(model), index=0, num_stages=1, port=Port())
    outputs = [alone.output(None, batch, items_of(batches)) for batch in batches]
    for output in outputs:
        output.loss.backward()
    want = Outcome(torch.cat([output.logits for output in outputs]), sum(o.loss for o in outputs), gradients([alone]))
    require_same(shared(model, batches, expert=2), want)


def test_members_of_both_axes():
    """Two replicas, each of which shares its sequences between two ranks."""
    model = whole_model(tiny_model("qwen3_moe", num_hidden_layers=2))
    require_exact(model, micro_batches(4, rows=1, length=8, documents=(3, 5)), context=2, expert=2)


@pytest.mark.parametrize(("tensor", "expert"), [(2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
def test_members_may_share_matrices_as_well(arch, tensor, expert):
    """Experts stay whole; members of a tensor group, which have the same tokens, send a part of them each."""
    model = whole_model(tiny_model(arch, num_hidden_layers=2, num_key_value_heads=4))
    require_exact(model, micro_batches(4, rows=1, length=8), tensor=tensor, expert=expert)


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"])
def test_architectures_that_share_matrices_and_experts_are_found_exact(arch):
    """Qwen2-MoE's plan says nothing of experts: what members make of them is not added up behind their block."""
    check_axes(small_config(arch), tensor=2, expert=4)
    check_axes(small_config(arch), tensor=2, expert=2, packing=True)


def test_recomputed_layers_dispatch_again():
    model = whole_model(tiny_model("mixtral", num_hidden_layers=2))
    require_exact(model, micro_batches(2, rows=1, length=8), change=recompute, expert=2)


def test_experts_that_cannot_be_divided_are_refused():
    model = whole_model(tiny_model("mixtral", num_hidden_layers=1))
    with pytest.raises(UnshareableError, match=r"parallel.expert=3: MixtralForCausalLM has 4 experts .* divisor of 4"):
        shared(model, micro_batches(3), expert=3)


def test_a_model_without_experts_is_refused_by_name():
    with pytest.raises(UnshareableError, match=r"parallel.expert=2: LlamaForCausalLM has no experts"):
        check_axes(tiny_model("llama"), expert=2)


@pytest.mark.parametrize(
    ("sizes", "dtype", "refused"),
    [
        ({"tensor": 4}, torch.bfloat16, r"parallel.tensor=4: .*experts.down_proj .* 4 elements .* 8 bytes in bfloat16"),
        ({"tensor": 4}, torch.float32, ""),
        ({"tensor": 2}, torch.bfloat16, ""),
        ({"expert": 4}, torch.bfloat16, ""),
        ({"tensor": 4}, None, ""),
    ],
)
def test_rows_that_grouped_products_do_not_take_are_refused_before_the_start(sizes, dtype, refused):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = load_hf_config(tiny_model("mixtral", intermediate_size=16, **heads))
    with pytest.raises(UnshareableError, match=refused) if refused else nullcontext():
        model_sizes(config, dtype=dtype, **sizes)
    model = whole_model(tiny_model("mixtral", intermediate_size=16, **heads))
    model.set_experts_implementation("eager")
    model_sizes(model.config, dtype=dtype, **sizes)


@pytest.mark.parametrize(
    ("size", "dtype", "row"), [(6, torch.bfloat16, 12), (4, torch.bfloat16, 4), (2, torch.float32, 2)]
)
def test_rows_of_a_model_of_one_rank_are_refused_as_torch_refuses_them(size, dtype, row):
    config = load_hf_config(tiny_model("mixtral", intermediate_size=size, num_hidden_layers=1))
    model = whole_model(tiny_model("mixtral", intermediate_size=size, num_hidden_layers=1)).to(dtype)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        model(torch.tensor([[1, 2, 3]]))
    with pytest.raises(UnshareableError, match=rf"model: .*MixtralForCausalLM has rows of {row} elements"):
        model_sizes(config, dtype=dtype)


@pytest.mark.parametrize("config", [tiny_model("mixtral"), deepseek()], ids=["mixtral", "deepseek_v3"])
def test_an_architecture_that_works_is_found_exact(config):
    check_axes(config, expert=2, context=2)
