"""Weights are loaded as exactly as they are given, and exported in the type of the base model."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engine.stages.tiny import tiny, whole
from weft.conf.schema import ModelConfig, SplitKind
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.files.exporting import export_stages
from weft.engine.stages.files.loading import load_hf_config, load_stages

LOW, HIGH = torch.bfloat16, torch.float32


def base(folder, dtype, wide=""):
    model = whole(tiny("llama"), dtype=dtype)
    if wide:
        model.get_parameter(wide).data = model.get_parameter(wide).data.float() + 1e-4
    model.save_pretrained(folder)
    return ModelConfig(path=str(folder))


def exact_stages(config, computed):
    split = split_layers(load_hf_config(config), 2, SplitKind.even)
    return load_stages(config, split, range(2), dtype=computed, seed=1, exact=True)


@pytest.mark.parametrize(
    ("given", "computed", "wide", "loaded"),
    [(HIGH, LOW, "", HIGH), (LOW, LOW, "", LOW), (LOW, HIGH, "", HIGH), (LOW, LOW, "model.norm.weight", HIGH)],
)
def test_nothing_is_rounded_before_masters_are_made(given, computed, wide, loaded, tmp_path):
    config = base(tmp_path / "base", given, wide)
    stages = exact_stages(config, computed)
    expected = load_file(tmp_path / "base" / "model.safetensors")
    found = {name: p for stage in stages for name, p in stage.named_global_parameters()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == loaded and torch.equal(found[name].float(), value.float())
    export_stages(stages, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in again.parameters()} == {given}
    export_stages(stages, tmp_path / "half", dtype=torch.float16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.float16


def test_a_frozen_base_is_loaded_in_the_type_that_training_computes_in(tmp_path):
    config = base(tmp_path / "base", HIGH)
    config.lora.enabled, config.lora.target_modules = True, ["q_proj"]
    parameters = dict(p for stage in exact_stages(config, LOW) for p in stage.named_global_parameters())
    types = {name: parameter.dtype for name, parameter in parameters.items()}
    assert all(dtype == (HIGH if "lora_" in name else LOW) for name, dtype in types.items())
