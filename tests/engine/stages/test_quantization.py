"""Base weights of 4 bits: which are quantised, what is refused, and stages that equal peft and bitsandbytes."""

import importlib.util
import json

import pytest
import torch

from tests.engine.quantized import peft_model, quantized_config
from tests.engine.stages.tiny import batch, gradients, run, stages_of, tiny, whole
from weft.conf import load
from weft.conf.schema import LoraConfig, ModelConfig, Quantization
from weft.engine.models.sizes import model_sizes
from weft.engine.stages.files.loading import build_model, load_hf_config, quantization_of
from weft.tools.check import main as weft_check
from weft.tools.preflight import check_model

pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module", params=["llama", "gpt2", "mixtral"])
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    whole(tiny(request.param, tie_word_embeddings=request.param != "mixtral")).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("count", [1, 2])
def test_loss_and_gradients_of_stages_are_those_of_peft_and_bitsandbytes(base, count):
    config = quantized_config(base)
    if "mixtral" in base:  # in which peft's "all-linear" includes routers
        config.model.lora.target_modules = ["q_proj", "o_proj"]
    model, stages = peft_model(base, config), stages_of(config.model, count, seed=config.train.seed)
    ours = {name: weight for stage in stages for name, weight in stage.named_global_parameters()}
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert {type(weight) for weight in ours.values()} == {type(weight) for weight in theirs.values()}
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
    expected, found = model(**batch(), use_cache=False).loss, run(stages, batch())
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected)
    for name, gradient in gradients(stages).items():
        torch.testing.assert_close(gradient, theirs[name].grad, msg=name)


def test_counted_4_bit_weights_are_the_loaded_ones(base):
    config = quantized_config(base).model
    sizes = model_sizes(load_hf_config(config), lora=config.lora, quantized=quantization_of(config))
    parts = [sizes.before, *sizes.layers, sizes.after]
    weights = build_model(config, dtype=torch.float32, seed=0).parameters()
    packed = [weight for weight in weights if weight.dtype is torch.uint8]
    assert sum(part.four_bit for part in parts) == 2 * sum(weight.numel() for weight in packed) > 0


def refused(match, config: ModelConfig):
    with pytest.raises(ValueError, match=match):
        load_hf_config(config)


def adapters(**more) -> LoraConfig:
    return LoraConfig(enabled=True, **more)


class TestRefusals:
    @pytest.fixture
    def folder(self, tmp_path):
        whole(tiny("llama")).save_pretrained(tmp_path)
        return tmp_path

    def stored(self, folder, **settings):
        config = json.loads((folder / "config.json").read_text())
        given = {"quant_method": "bitsandbytes", "load_in_4bit": True} | settings
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
        return str(folder)

    def test_new_model(self):
        refused("model.lora.quantize=nf4: a new model", ModelConfig(lora=adapters(quantize=Quantization.nf4)))

    def test_scales_without_quantised_weights(self, folder):
        refused(
            "double_quantize=false: no weights", ModelConfig(path=str(folder), lora=adapters(double_quantize=False))
        )

    def test_without_adapters(self):
        with pytest.raises(ValueError, match=r"model\.lora\.quantize=nf4: adapters are off"):
            load(["model.lora.quantize=nf4"])

    def test_stored_without_adapters(self, folder):
        refused("only adapters can be trained", ModelConfig(path=self.stored(folder)))

    @pytest.mark.parametrize("settings", [{"quant_method": "gptq"}, {"load_in_4bit": False, "load_in_8bit": True}])
    def test_other_methods(self, folder, settings):
        refused("in a form that stages", ModelConfig(path=self.stored(folder, **settings), lora=adapters()))

    def test_storage_that_looks_like_numbers(self, folder):
        path = self.stored(folder, bnb_4bit_quant_storage="bfloat16")
        refused("stored as uint8", ModelConfig(path=path, lora=adapters()))

    def test_quantised_twice(self, folder):
        lora = adapters(quantize=Quantization.fp4)
        refused("quantize=fp4.*quantised already", ModelConfig(path=self.stored(folder), lora=lora))

    def test_without_bitsandbytes(self, folder, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(
            "weft.engine.models.quantization.find_spec", lambda name: None if name == "bitsandbytes" else find(name)
        )
        lora = adapters(quantize=Quantization.nf4)
        refused("nf4: 4-bit weights need bitsandbytes", ModelConfig(path=str(folder), lora=lora))

    @pytest.mark.parametrize("axis", ["tensor", "expert"])
    def test_shared_layers_before_start_and_by_weft_check(self, folder, axis):
        given = [f"model.path={folder}", "model.lora.enabled=true", "model.lora.quantize=nf4", f"parallel.{axis}=2"]
        for check in (lambda: check_model(load([*given, "data.sequence_length=32"])), lambda: weft_check(given)):
            with pytest.raises(ValueError, match=rf"parallel\.{axis}=2: ranks cannot share layers .*quantize=nf4"):
                check()
