"""Fused kernels compute what Hugging Face's modules compute, in stages with split backwards."""

import json
import os
from collections import Counter

import pytest
import torch
from transformers import AutoConfig

from tests.engine.stages.tiny import ARCHITECTURES, stages_of, tiny, whole
from tests.interpreter import python
from weft.conf import load
from weft.conf.host import triton as host_triton
from weft.engine.models.kernels import fuse, kernel_kinds
from weft.engine.models.skeleton import config_skeleton
from weft.engine.stages.files.loading import load_hf_config
from weft.tools.preflight import check_device, check_model

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")
KINDS = {arch: {"RMSNorm", "SwiGLU", "rotary"} for arch in ARCHITECTURES} | {
    "gemma2": {"RMSNorm", "GeGLU", "rotary"},
    "gemma3_text": {"RMSNorm", "GeGLU", "rotary"},
    "gemma4_text": {"RMSNorm", "GeGLU"},
    "gpt2": {"LayerNorm"},
    "mixtral": {"RMSNorm", "rotary"},
    "qwen3_moe": {"RMSNorm", "rotary"},
}
"""Kinds of modules that are fused. Experts are not, nor is gemma4's rotation of single tensors."""
TRAINED = [arch for arch in ARCHITECTURES if arch != "gemma4_text"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_modules_are_recognised_by_what_they_compute(arch):
    assert kernel_kinds(config_skeleton(load_hf_config(tiny(arch)))).keys() == KINDS[arch]


def test_other_formulas_are_not_fused():
    """cohere's norm subtracts the mean and has no bias; glm rotates neighbours, not halves; gelu without tanh."""
    kinds = {arch: kernel_kinds(config_skeleton(AutoConfig.for_model(arch))) for arch in ("cohere", "glm")}
    assert kinds["cohere"].keys() == {"SwiGLU"} and "rotary" not in kinds["glm"]
    exact = kernel_kinds(config_skeleton(load_hf_config(tiny("gemma2", hidden_activation="gelu"))))
    assert exact.keys() == {"RMSNorm", "rotary"}


def test_only_the_stages_that_are_given_are_changed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("weft.engine.models.interpreter.complete_interpreter", lambda: None)
    other, (first, last) = whole(tiny("llama")), stages_of(tiny("llama"), 2)
    found = fuse(first.hf_model, torch.device("cpu"))
    assert found == Counter(RMSNorm=4, SwiGLU=2, rotary=2), "without the layers of the other stage"
    for model in (other, last):
        assert not any("forward" in vars(module) for module in model.modules())


class TestRefusals:
    def refused(self, text, check, *settings):
        with pytest.raises(ValueError, match=rf"^model\.kernels=fused: {text}"):
            check(load(["model.kernels=fused", *settings]))

    def test_without_a_gpu(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        self.refused("Triton has no CPU backend; train on GPUs, or set it to none", check_device)
        with pytest.raises(ValueError, match=r"^model\.kernels=fused: Triton has no CPU backend"):
            fuse(whole(tiny("llama")), torch.device("cpu"))

    def test_without_the_packages(self, monkeypatch):
        monkeypatch.setattr(host_triton, "find_spec", lambda name: None)
        self.refused("triton and liger-kernel not installed; pip install triton liger-kernel", check_device)

    def test_architecture_without_kernels(self):
        self.refused(
            "MptForCausalLM has no norm, rotary embedding or gated MLP that a fused kernel computes; set",
            check_model,
            "model.arch=mpt",
            "model.attn_implementation=eager",
            "data.packing=false",
        )


@pytest.fixture(scope="module")
def rows():
    """Losses of 20 steps with and without kernels, of all architectures, in a process that interprets Triton."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = python("-m", "tests.engine.stages.fused_training", *TRAINED, timeout_s=1500, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_architectures_train_alike_with_fused_kernels(rows):
    """Through Triton's interpreter, whose bf16 is corrected by `weft.engine.models.interpreter`; no GPU is shown."""
    assert [(row["arch"], row["dtype"]) for row in rows] == [(a, d) for a in TRAINED for d in ("float32", "bfloat16")]
    assert len(TRAINED) == 10
    for row in rows:
        tolerance = {"float32": 1e-5, "bfloat16": 1e-3}[row["dtype"]]
        kinds = {kind for of_stage in row["kernels"] for kind in of_stage}
        off = max(abs(fused / plain - 1) for fused, plain in zip(row["fused"], row["plain"], strict=True))
        assert kinds == KINDS[row["arch"]] and len(row["fused"]) == 20, row["arch"]
        assert off < tolerance, f"{row['arch']} in {row['dtype']}: losses differ by {off:.2g}"
        worst = max(row["gradients"], key=row["gradients"].get)
        assert row["gradients"][worst] < {"float32": 1e-5, "bfloat16": 1e-2}[row["dtype"]], (
            f"{row['arch']}: gradient of {worst}"
        )
        assert row["fused"][-1] < row["fused"][0] - 0.1
