"""Losses of fp8 linear layers equal those of a single process with torchao's own layers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.float8 import STEPS, config_of, torchao_loss, trained
from tests.engine.tiny import batches, reference_losses
from weft.tools.ranks import run_ranks

pytest.importorskip("torchao")
FAST = {"zbv, ZeRO-1": ("tensorwise", {"schedule": "zbv", "placement": "fold", "zero": 1})}
SLOW = {
    "dualpipev, ZeRO-2": (
        "rowwise",
        {"schedule": "dualpipev", "placement": "fold", "microbatches": 8, "zero": 2},
    ),
    "ZeRO-3": ("rowwise_with_gw_hp", {"stages": 1, "zero": 3}),
    "ZeRO-3, recomputed": ("tensorwise", {"zero": 3, "recompute": "layers"}),
    "elementwise": ("rowwise", {"schedule": "w", "placement": "fold", "recompute": "elementwise"}),
    "LoRA": ("tensorwise", {"schedule": "zbv", "placement": "fold", "lora": True}),
    "context": ("rowwise", {"context": 2, "zero": 1}),
    "offload": ("tensorwise", {"schedule": "auto", "placement": "fold", "offload_cap": 6_000_000}),
}
LOCAL_SCALES = {
    "tensor": ("tensorwise", {"tensor": 2, "schedule": "w", "placement": "fold"}),
    "tensor, rows": ("rowwise", {"tensor": 2, "zero": 3, "stages": 1}),
    "context, one scale": ("tensorwise", {"context": 2, "zero": 1}),
}


def off_by(cases, folder):
    """Return the largest relative difference of any loss, after checking that exports compute what engines evaluate."""
    configs = [config_of(*case) for case in cases.values()]
    results = run_ranks(4, trained, configs, str(folder), timeout_s=500)[0]
    found = {}
    for number, (name, config, (losses, evaluation)) in enumerate(zip(cases, configs, results, strict=True)):
        loss_of, parallel = torchao_loss(config.model.float8.value), config.parallel
        replicas = 4 // config.pipeline.stages // parallel.tensor // parallel.context
        expected = reference_losses(config, replicas, STEPS, loss_of=loss_of)
        found[name] = max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
        if not config.model.lora.enabled:
            model = AutoModelForCausalLM.from_pretrained(folder / str(number) / "export", dtype=torch.bfloat16)
            assert float(loss_of(model, next(batches(0, 1)), None, 1).detach()) == pytest.approx(
                evaluation, rel=1e-3
            ), name
    return found


@pytest.mark.timeout(200)
def test_losses_equal_torchao(tmp_path):
    """As closely as those of bf16 runs; the run stops and resumes halfway."""
    assert max(off_by(FAST, tmp_path).values()) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_of_other_layouts_equal_torchao(tmp_path):
    """Ranks that share layers scale their own parts, which rounds differently."""
    found = off_by(SLOW | LOCAL_SCALES, tmp_path)
    assert all(off < (3e-3 if name in LOCAL_SCALES else 1e-3) for name, off in found.items()), found
