"""A traced layer saves and computes what torch's estimator of selective recomputation finds."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM

from weft.engine.models.elementwise import is_cheap
from weft.engine.models.tracing import trace_model

WIDTH = 64
SHAPE = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": WIDTH // 4,
}


def run_and_count(alive, function, args, named):
    """Count operations in place of milliseconds, because both of torch's modes need CUDA to time an operation.

    Args:
        alive: takes all results. Torch recognises storages by their address, which another one would reuse.
    """
    out = function(*args, **(named or {}))
    alive.append(out)
    if function._overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return out, float(flop_registry[torch.ops.aten._scaled_dot_product_flash_attention](*args[:3], out_val=out))
    count = flop_registry.get(function._overloadpacket)
    return out, float(count(*args, **(named or {}), out_val=out)) if count else 0.0


def run_and_time(alive, function, args, named):
    """Count seconds on a GPU that does so many operations and reads and writes so many bytes in a second."""
    out, flops = run_and_count(alive, function, args, named)
    moved = sum(leaf.nbytes for leaf in tree_leaves((args, named, out)) if isinstance(leaf, torch.Tensor))
    return out, max(flops / 4e14, moved / 3e12)


def estimate(config, tokens, monkeypatch, cost=run_and_count):
    """Return torch's statistics of the second layer and of its modules, by the module's name."""
    monkeypatch.setattr(RuntimeEstimator, "_roofline_estimate", partial(cost, []))
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        estimator = SACEstimator()
        with estimator("operator-level-cost-model"):
            model.base_model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    found = estimator.sac_mod_stats.items()
    return {name.partition(".layers.1")[2].removeprefix("."): stats for name, stats in found if ".layers.1" in name}


def saved_bytes(stats):
    """Bytes of the results that autograd saves, without the mask, which flash attention on GPUs does not need."""
    kept = [number for number in stats.saved_autograd_ops if stats.func_names[number] not in ("where", "scalar_tensor")]
    return sum(stats.memory[number] for number in kept)


@pytest.mark.parametrize("tokens", [16, 256])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_attention_and_layer_save_and_compute_what_torch_finds(kind, tokens, monkeypatch):
    """So that both rank attention and the whole layer alike by bytes that recomputing an operation frees."""
    config = AutoConfig.for_model(kind, **SHAPE)
    theirs = estimate(config, tokens, monkeypatch)
    ours = trace_model(config, tokens, dtype=torch.float32).layers[1]
    hidden, causal = 4 * tokens * WIDTH, 2 * ours.attention_flops / (1 + 1 / tokens)  # they count all pairs
    layer, attention = theirs[""], theirs["self_attn"]
    assert sum(layer.runtimes) == pytest.approx(ours.matmul_flops + causal)
    assert sum(attention.runtimes) == pytest.approx(ours.attention_matmul_flops + causal)
    # They leave out the layer's result, which the next one saves.
    assert saved_bytes(layer) == pytest.approx(ours.activation_bytes - hidden, rel=0.03)
    assert saved_bytes(attention) == pytest.approx(ours.attention_bytes, rel=0.03)
    ranks = [
        saved_bytes(attention) / sum(attention.runtimes) > saved_bytes(layer) / sum(layer.runtimes),
        ours.attention_bytes / (ours.attention_matmul_flops + causal)
        > ours.activation_bytes / (ours.matmul_flops + causal),
    ]
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_elementwise_operations_free_more_bytes_per_second_than_all_that_are_kept(kind, monkeypatch):
    """So they come first in the order in which torch's estimator recomputes operations."""
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = AutoConfig.for_model(kind, **(SHAPE | wide | {"head_dim": 128}))
    layer = estimate(config, 4096, monkeypatch, run_and_time)[""]

    def is_kept(number):
        packet = getattr(torch.ops.aten, layer.func_names[number])
        return not any(is_cheap(getattr(packet, overload)) for overload in packet.overloads())

    speeds = {number: layer.memory[number] / layer.runtimes[number] for number in layer.saved_autograd_ops}
    kept = {number for number in range(len(layer.memory)) if is_kept(number)}
    assert {layer.func_names[number] for number in kept} == {"mm", "_scaled_dot_product_flash_attention_for_cpu"}
    cheap = [speeds[number] for number in speeds.keys() - kept if layer.memory[number]]
    assert min(cheap) > max(layer.memory[number] / layer.runtimes[number] for number in kept)
