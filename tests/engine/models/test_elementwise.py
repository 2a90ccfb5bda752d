"""Recomputed element-wise operations: what is kept, counted, repeated and refused."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.backward.test_models import MOE, TINY, build, hidden_of
from weft.conf.checks import check
from weft.conf.compose import compose
from weft.conf.schema import LoraConfig, Recompute
from weft.engine.backward import SplitBackward
from weft.engine.backward.offload import HostMemory
from weft.engine.models.elementwise import recompute_elementwise
from weft.engine.models.recomputation import recompute
from weft.engine.models.tracing import trace_model
from weft.pipeline.workload import LOSS_BYTES, Division

TOKENS = 64
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
SHAPES = {"llama": TINY, "mixtral": TINY | MOE, "gpt2": GPT2, "gpt2_dropout": GPT2 | {"resid_pdrop": 0.1}}


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in SHAPES), ("llama", torch.bfloat16)])
def test_traced_bytes_are_those_that_autograd_saves(name, dtype):
    config = AutoConfig.for_model(name.partition("_")[0], **SHAPES[name])
    work = trace_model(config, TOKENS, dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    recompute(model, Recompute.elementwise)
    ids = torch.arange(TOKENS).view(1, -1)
    _, saved = SplitBackward(model).forward(lambda: model(ids, use_cache=False).logits, None, split=True)
    division = Division(microbatch_size=1, tensor=1, context=1, recompute=Recompute.elementwise)
    # Layers get rotations of positions and share them, so no layer saves them.
    expected = work.saved_bytes(work.whole, 2, division) - work.before.shared_bytes - LOSS_BYTES * TOKENS * 64
    assert saved.activation_bytes == expected


class Odd(nn.Module):
    """A layer that draws in place, changes a product in place, and counts its forwards."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        noise = torch.empty_like(x).bernoulli_(0.5).div_(0.5)
        product = self.first(x)
        doubled = product.detach().clone().exp_()
        product = product.mul_(noise).tanh()
        joined = torch.empty(2, *x.shape)
        joined[0] = product.detach()
        joined[1].normal_()
        return x + self.second(product * joined.sum(0) + doubled)


def test_second_products_of_narrow_adapters_run_again():
    kept = {}
    for rank in (0, 4, 20):
        lora = LoraConfig(enabled=True, rank=rank, target_modules=["all-linear"]) if rank else None
        layer = trace_model(AutoConfig.for_model("llama", **TINY), TOKENS, lora=lora).layers[1]
        kept[rank] = layer.results_bytes
    hidden_state, narrow = 2 * TOKENS * 32, 2 * TOKENS * 4
    # The results of the adapters' first products, and of the layer's last product, which an adapter follows.
    assert kept[4] == kept[0] + 7 * narrow + hidden_state
    assert kept[20] > kept[4] + 7 * hidden_state


def test_changes_in_place_and_random_draws_are_not_repeated():
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        layer, x = Odd(), torch.randn(4, 32, requires_grad=True)
        out = recompute_elementwise(layer, layer.forward, x) if again else layer(x)
        out.square().sum().backward()
        found.append([out, x.grad, *(weight.grad for weight in layer.parameters()), layer.count, torch.rand(3)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[1][-2] == 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_no_product_runs_again(name):
    found = []
    for kind in (Recompute.none, Recompute.elementwise, Recompute.layers):
        stage = build(name)
        recompute(stage.model, kind)
        loss = stage(hidden_of(stage, use_hidden=True))
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        found.append(counter.get_total_flops())
    assert found[0] == found[1] < found[2]


def test_a_backward_frees_what_was_kept_without_the_garbage_collector():
    layer, x = Odd(), torch.randn(4, 32, requires_grad=True)
    seen = []
    layer.second.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    gc.disable()
    try:
        hidden = x * 1
        seen.append(weakref.ref(hidden))
        out = recompute_elementwise(layer, layer.forward, hidden)
        del hidden
        out.sum().backward()
        del out
        assert [tensor() for tensor in seen] == [None] * 3
    finally:
        gc.enable()


def test_forwards_and_backwards_may_run_in_two_threads():
    def run(seed, pool):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32), nn.Tanh())
        x = torch.full((4, 32), float(seed), requires_grad=True)
        out = recompute_elementwise(layer, layer.forward, x)
        for _ in range(20):
            below = pool.submit(backward, out)
            out = recompute_elementwise(layer, layer.forward, x)
            below.result()
        backward(out)
        return [x.grad, *(weight.grad for weight in layer.parameters())]

    def backward(out):
        with torch.autograd.set_multithreading_enabled(False):
            out.sum().backward()

    def plain(seed):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32), nn.Tanh())
        x = torch.full((4, 32), float(seed), requires_grad=True)
        for _ in range(21):
            layer(x).sum().backward()
        return [x.grad, *(weight.grad for weight in layer.parameters())]

    with ThreadPoolExecutor(1) as pool:
        assert all(torch.equal(one, other) for one, other in zip(run(3, pool), plain(3), strict=True))


def test_another_sequence_of_operations_is_refused_by_name():
    layer, x = Odd(), torch.randn(4, 32, requires_grad=True)
    out = recompute_elementwise(layer, layer.forward, x)
    layer.first.forward = lambda x: x.cumsum(0)
    with pytest.raises(RuntimeError, match=r"pipeline.recompute=elementwise: a layer ran aten.cumsum.* its forward"):
        out.sum().backward()


def test_kept_results_move_to_the_host():
    stage = build("llama")
    recompute(stage.model, Recompute.elementwise)
    found = []
    for movable in (False, True):
        hidden = hidden_of(stage, use_hidden=True)
        backward = SplitBackward(stage)
        loss, saved = backward.forward(lambda: stage(hidden), hidden, movable=movable)  # noqa: B023
        total = saved.activation_bytes
        if movable:
            saved.movable.begin_offload(HostMemory(torch.device("cpu")))
            saved.movable.end_offload()
            assert saved.live_bytes < 0.2 * total
            saved.movable.begin_reload()
        backward.full_backward(saved, torch.ones_like(loss))
        found.append(hidden.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.kernels=fused"], "model.kernels=fused rotates products in place"),
        (["model.attn_implementation=flex_attention"], "model.attn_implementation=flex_attention is compiled"),
        (["parallel.tensor=2"], "parallel.tensor=2 ranks share layers"),
        (["parallel.context=2"], "parallel.context=2 ranks share layers"),
        (["parallel.expert=2"], "parallel.expert=2 ranks share layers"),
    ],
)
def test_unsupported_settings_are_refused_by_name(settings, message):
    config = compose(["pipeline.recompute=elementwise", *settings])
    with pytest.raises(ValueError, match=f"pipeline.recompute=elementwise: {message}"):
        check(config)
