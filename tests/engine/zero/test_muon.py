"""Muon equals DeepSpeed's, takes the parameters that DeepSpeed's takes, and steps each matrix on one replica."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.checkpoint.engines import resume, save_and_go_on
from tests.engine.tiny import many_losses, tiny_config
from tests.engine.zero.deepspeed_muon import deepspeed_losses, orthogonalize_in_fp32
from tests.engine.zero.replicas import SmallStage
from weft.conf.schema import OptimizerKind, ZeroConfig
from weft.engine.models.hidden_matrices import is_hidden_matrix, newton_schulz_work, place, tag
from weft.engine.zero import Collectives, muon
from weft.engine.zero.division import divide
from weft.engine.zero.muon import Muon
from weft.tools.ranks import run_ranks

SETTINGS = {"lr": 0.02, "adam_lr": 0.01, "momentum": 0.9, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = {"wide": (5, 12), "tall": (12, 5), "square": (6, 6), "stack": (3, 4, 8), "norm": (7,)}


@pytest.mark.parametrize("more", [{}, {"ns_method": "standard", "adam_w_mode": False}])
def test_ten_steps_equal_deepspeeds(more):
    """Matrices of any form, to the last bit, with DeepSpeed's kernels run eagerly."""
    made = {}
    for kind in ("ours", "theirs"):
        torch.manual_seed(3)
        named = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
        tag(named.items())
        groups = [{"params": list(named.values())[:3], "weight_decay": 0.2}, {"params": list(named.values())[3:]}]
        if kind == "ours":
            made[kind] = named, Muon(groups, SETTINGS | more)
        else:
            decoupled = more.get("adam_w_mode", True)
            divided = deepspeed.DeepSpeedEngine._muon_param_groups(groups, SETTINGS | more)
            adam = torch.optim.AdamW if decoupled else torch.optim.Adam
            made[kind] = named, MuonWithAuxAdam(divided, adam_optimizer=adam, adam_w_mode=decoupled)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(10):
            gradients = [torch.randn(shape) for shape in SHAPES.values()]
            for named, optimizer in made.values():
                for parameter, gradient in zip(named.values(), gradients, strict=True):
                    parameter.grad = gradient.clone()
                optimizer.step()
    (ours, _), (theirs, _) = made.values()
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


@pytest.mark.parametrize("more", [{}, {"ns_method": "standard"}])
def test_small_matrices_of_one_shape_are_orthogonalized_together(more, monkeypatch):
    monkeypatch.setattr(original_muon, "ns_compute_dtype", lambda _method="gram": torch.float32)
    calls = []

    def counted(orthogonalize, update, steps):
        calls.append(tuple(update.shape))
        return orthogonalize(update, steps)

    kernels = {name: partial(counted, kernel) for name, kernel in muon.NEWTON_SCHULZ.items()}
    monkeypatch.setattr(muon, "NEWTON_SCHULZ", kernels)
    shapes = [(5, 12), (12, 5), (5, 12), (5, 12), (20, 20), (20, 20), (2, 3, 2, 2), (2, 3, 2, 2), (7,)]
    gradients = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    made = []
    for limit in (150, 1):
        monkeypatch.setattr(muon, "BATCH_ELEMENTS", limit)
        torch.manual_seed(3)
        weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        tag((f"layer.{number}", weight) for number, weight in enumerate(weights))
        optimizer = Muon([{"params": weights}], SETTINGS | more)
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
        made.append([weight.detach() for weight in weights])
    together = [(2, 5, 12), (5, 12), (12, 5), (20, 20), (20, 20), (2, 2, 12)]
    assert sorted(calls[:6]) == sorted(together) and len(calls) == 3 * (6 + 8)
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gpt_neox", "mixtral", "gemma2", "bloom"])
def test_deepspeeds_choice_of_matrices(arch):
    config = AutoConfig.for_model(arch)
    for name in ("num_hidden_layers", "n_layer"):
        if hasattr(config, name):
            setattr(config, name, 2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon", optimizer_params={}), model)
    chosen = {name: p.use_muon for name, p in model.named_parameters()}
    assert chosen == {name: is_hidden_matrix(name, p) for name, p in model.named_parameters()}
    assert set(chosen.values()) == {True, False}


def test_an_empty_stage_and_a_weight_without_gradient_are_left_alone():
    Muon([{"params": []}], SETTINGS).step()
    weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
    tag(zip(("weight", "bias"), weights, strict=True))
    optimizer = Muon([{"params": weights}], SETTINGS)
    optimizer.step()
    assert not optimizer.state and all(bool((weight == 1).all()) for weight in weights)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_matrices_are_placed_by_size_and_replicas_have_about_equal_work(replicas):
    layer = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
    loads = [0.0] * replicas
    for _ in range(16):  # a bucket per layer, as at stage 3
        owners = place(layer, loads)
        sizes = [sum(s[0] * s[1] for s, o in zip(layer, owners, strict=True) if o == r) for r in range(replicas)]
        mean = sum(sizes) / replicas
        assert max(sizes) <= max(4 / 3 * mean, 128 * 64), "the bound of longest processing time first"
    assert sum(loads) == pytest.approx(16 * sum(map(newton_schulz_work, layer)))
    assert max(loads) <= 1.1 * sum(loads) / replicas
    assert place(layer, [0.0] * replicas) == place(layer, [0.0] * replicas), "equal on all ranks"


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("replicas", [1, 3])
def test_each_matrix_is_whole_on_one_replica(zero, replicas):
    """The fragments of all replicas make up every parameter once, and hold its values."""
    found: dict[str, list] = {}
    for replica in range(replicas):
        stage = SmallStage()
        stage.layers[1][0].weight.requires_grad_(False)
        tag(stage.named_global_parameters())
        before = {name: p.detach().clone() for name, p in stage.named_parameters()}
        buckets = divide(
            [stage],
            ZeroConfig(stage=zero, reduce_bucket_size=90),
            Collectives(replica=replica, num_replicas=replicas),
            {},
            {},
        )
        for bucket in buckets:
            ends = [(m.offset, m.offset + m.parameter.numel()) for m in sorted(bucket.members, key=lambda m: m.offset)]
            assert ends[-1][1] <= bucket.length and all(a[1] <= b[0] for a, b in pairwise(ends))
            for fragment in bucket.fragments:
                found.setdefault(fragment.name, []).append((fragment.start, fragment.tensor))
                if fragment.trained and is_hidden_matrix(fragment.name, fragment.parameter):
                    assert fragment.tensor.shape == fragment.parameter.shape
    for name, parts in found.items():
        if zero:
            whole = torch.cat([tensor.flatten() for _, tensor in sorted(parts, key=lambda part: part[0])])
            assert torch.equal(whole, before[name].flatten())
        else:
            assert len(parts) == replicas


def muon_config(clip: float, **keywords):
    """Small buckets, and steps large enough that a wrong update shows."""
    config = tiny_config(layers=4, **keywords)
    config.optimizer.clip = clip
    config.optimizer.kind, config.optimizer.muon_lr = OptimizerKind.muon, 0.02
    config.zero.reduce_bucket_size = 10_000
    return config


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_equal_those_of_deepspeeds_engine():
    """20 steps at each stage of ZeRO, without a pipeline and with two stages.

    DeepSpeed clips gradients at stage 0, and orthogonalized updates at the others.
    """
    plain, clipped = muon_config(0.0), muon_config(0.5)
    expected = run_ranks(1, orthogonalize_in_fp32, deepspeed_losses, plain, 8, [0, 1, 2, 3], 20, timeout_s=300)[0]
    (limited,) = run_ranks(1, orthogonalize_in_fp32, deepspeed_losses, clipped, 8, [0], 20, timeout_s=300)[0]
    whole = [muon_config(0.0, stages=1, zero=zero) for zero in range(4)]
    stages = [*(muon_config(0.0, zero=zero) for zero in range(4)), muon_config(0.5, zero=2)]
    found = run_ranks(2, orthogonalize_in_fp32, many_losses, whole, 20, timeout_s=300)[0]
    *pipelined, again = run_ranks(4, orthogonalize_in_fp32, many_losses, stages, 20, timeout_s=300)[0]
    for losses in (*expected, *found, *pipelined):
        assert losses == pytest.approx(expected[0], rel=1e-6)
    assert again == pytest.approx(limited, rel=1e-6)
    assert again != pytest.approx(expected[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_layout_goes_on_alike(tmp_path):
    """Three steps of two replicas, then of two stages at another stage of ZeRO, and of one process."""
    first = muon_config(0.5, stages=1, zero=2)
    whole = run_ranks(2, orthogonalize_in_fp32, save_and_go_on, first, str(tmp_path), 3, 5, 8)[0]["losses"]
    for world, keywords in ((2, {"stages": 2, "zero": 1}), (1, {"stages": 1, "zero": 3})):
        other = muon_config(0.5, microbatches=8, **keywords)
        for found in run_ranks(world, orthogonalize_in_fp32, resume, other, str(tmp_path), 5, 8):
            assert found["losses"] == pytest.approx(whole[3:], rel=1e-6), keywords
