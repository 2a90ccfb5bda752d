"""Adapters over a base with 4-bit weights (QLoRA) train as with peft and bitsandbytes in one process."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.engine.quantized import losses_of_peft, quantized_config, train_each
from tests.engine.tiny import batches, tiny_config
from weft.engine.stages.files.loading import build_model
from weft.tools.ranks import run_ranks

pytest.importorskip("bitsandbytes")

CASES = {
    "split backward": {"schedule": "zbv", "placement": "fold", "zero": 1},
    "bf16": {"schedule": "auto", "precision": "bf16", "zero": 2},
    "ZeRO-3, fp4": {"kind": "fp4", "double": False, "stages": 1, "zero": 3},
    "ZeRO-3, stages": {"zero": 3},
    "stored": {"kind": "none", "stages": 4},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    build_model(tiny_config(layers=4).model, dtype=torch.float32, seed=5).save_pretrained(folder / "plain")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    stored = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=settings)
    stored.save_pretrained(folder / "stored")
    configs = {
        name: quantized_config(str(folder / ("stored" if name == "stored" else "plain")), **case)
        for name, case in CASES.items()
    }
    losses = run_ranks(4, train_each, str(folder), configs, timeout_s=280)[0]
    return folder, configs, losses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_losses_of_resumed_runs_equal_those_of_peft_and_bitsandbytes_in_one_process(trained):
    _, configs, losses = trained
    for name, config in configs.items():
        expected = losses_of_peft(config.model.path, config, 4 // config.pipeline.stages)
        tolerance = 1e-3 if name == "bf16" else 1e-5
        assert expected[-1] < expected[0] - 0.05, name
        assert losses[name] == pytest.approx(expected, rel=tolerance), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_export_is_an_adapter_that_names_its_base(trained):
    folder, configs, _ = trained
    for name, config in configs.items():
        export = folder / name / "export"
        assert peft.PeftConfig.from_pretrained(export).base_model_name_or_path == config.model.path, name
        trained = peft.AutoPeftModelForCausalLM.from_pretrained(export, dtype=torch.float32)
        trained.train()  # in evaluation bitsandbytes repacks weights for CPUs, which fails for matrices so narrow
        batch = next(batches(0, 1))
        with torch.no_grad():
            learnt = float(trained(**batch).loss)
            with trained.disable_adapter():
                assert learnt < float(trained(**batch).loss) - 0.05, name
