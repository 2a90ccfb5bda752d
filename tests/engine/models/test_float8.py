"""fp8 linear layers equal torchao's, save what bf16 layers save, and are refused by name where they do not run."""

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.engine.backward.test_models import build
from tests.engine.float8 import convert
from tests.engine.stages.tiny import tiny, whole
from weft.conf.checks import check
from weft.conf.compose import compose
from weft.conf.host import float8 as host_float8
from weft.conf.schema import Float8, ModelConfig, Recompute
from weft.engine.backward import SplitBackward
from weft.engine.backward.products import multiply
from weft.engine.models.float8 import Float8Product, require_float8, use_float8
from weft.engine.models.recomputation import recompute
from weft.engine.models.skeleton import config_skeleton, hf_model
from weft.engine.stages.files.loading import load_hf_config
from weft.tools.preflight import check_device, check_model

pytest.importorskip("torchao")
RECIPES = [recipe for recipe in Float8 if recipe is not Float8.none]
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def peer(layer, recipe):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear.from_float(layer, config=Float8LinearConfig.from_recipe_name(recipe.value))


class Linear(nn.Linear):
    """A linear layer in fp8."""

    def forward(self, x):
        return multiply(x, Float8Product(self.weight, self.bias, self.recipe.value))


ON_A_GPU = pytest.mark.gpu(shows="linear layers in fp8 give torchao's numbers, in one backward and in two")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(32,), (2, 24), (3, 11)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_equal_torchao_in_one_and_two_parts(recipe, shape, bias, device):
    if device == "cuda" and shape == (3, 11):
        pytest.skip("torchao's own layer needs a number of rows that is a multiple of 16")
    torch.manual_seed(0)
    layer = Linear(64, 48, bias=bias, device=device, dtype=BF16)
    layer.recipe = recipe
    x, gradient = (torch.randn(*shape, size, device=device, dtype=BF16) for size in (64, 48))
    results = []
    for split in (None, False, True):
        layer.zero_grad()
        hidden, backward = x.clone().requires_grad_(), SplitBackward(layer)
        if split is None:
            output = peer(layer, recipe)(hidden)
            output.backward(gradient)
        else:
            output, saved = backward.forward(partial(layer, hidden), hidden, split=split)
            backward.input_backward(saved, gradient)
            assert all((p.grad is None) is split for p in layer.parameters())
            backward.weight_backward(saved)
        backward.remove()
        results.append([output.detach(), hidden.grad, *(parameter.grad for parameter in layer.parameters())])
    for found in results[1:]:
        assert_close(found, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_stays_so(recipe, bad):
    """Everything that is not finite in bf16 is not finite in fp8, and a scale spreads it over its tensor or row."""
    layer = Linear(64, 48, dtype=BF16)
    layer.recipe = recipe
    for place in ("activation", "gradient"):
        x, gradient = torch.randn(32, 64, dtype=BF16), torch.randn(32, 48, dtype=BF16)
        (x if place == "activation" else gradient)[3, 5] = bad
        found = []
        for run in (layer, partial(nn.functional.linear, weight=layer.weight, bias=layer.bias)):
            layer.zero_grad()
            hidden = x.clone().requires_grad_()
            output = run(hidden)
            output.backward(gradient)
            found.append((output, hidden.grad, layer.weight.grad))
        for in_fp8, in_bf16 in zip(*found, strict=True):
            assert not in_fp8[~in_bf16.isfinite()].isfinite().any()
        assert not found[0][0 if place == "activation" else 1][3].isfinite().any()


@pytest.mark.parametrize("lora", [False, True], ids=["trained", "lora"])
@pytest.mark.parametrize("level", [kind for kind in Recompute if kind is not Recompute.auto])
def test_saved_and_deferred_bytes_equal_those_of_bf16(level, lora):
    """So plans, which count bf16 layers, predict them. No level of recomputation changes a gradient."""
    expected = None
    for recipe in RECIPES:
        found = {}
        for kind in (Float8.none, recipe):
            for split in (False, True):
                stage = build("llama", dtype=BF16, lora=lora)
                model = hf_model(stage.model)
                recompute(model, level)
                assert kind is Float8.none or use_float8(model, kind, CPU) == 2 * 7
                backward = SplitBackward(stage)
                loss, saved = backward.forward(stage, None, split=split)
                saved_bytes = saved.activation_bytes
                backward.input_backward(saved, torch.ones_like(loss))
                found[kind, split] = saved_bytes, saved.kept_bytes
                backward.weight_backward(saved)
                gradients = [p.grad for p in stage.parameters() if p.grad is not None]
        assert all(found[recipe, split] == found[Float8.none, split] for split in (False, True))
        if recipe is Float8.tensorwise:
            stage = build("llama", dtype=BF16, lora=lora)
            use_float8(hf_model(stage.model), recipe, CPU)
            stage().backward()
            expected = [p.grad for p in stage.parameters() if p.grad is not None]
            assert_close(gradients, expected, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_equals_the_one_that_torchao_converts(recipe):
    stages = [build("llama", dtype=BF16) for _ in range(2)]
    convert(stages[0].model, recipe.value)
    use_float8(stages[1].model, recipe, CPU)
    losses = [stage() for stage in stages]
    for loss in losses:
        loss.backward()
    assert_close(*losses, rtol=0, atol=0)
    assert_close(*([p.grad for p in stage.parameters()] for stage in stages), rtol=0, atol=0)


def test_activations_in_host_memory_give_the_same_gradients():
    found = []
    for movable in (False, True):
        stage = build("llama", dtype=BF16)
        use_float8(stage.model, Float8.rowwise, CPU)
        backward = SplitBackward(stage)
        loss, saved = backward.forward(stage, None, movable=movable)
        backward.full_backward(saved, torch.ones_like(loss))
        found.append([p.grad for p in stage.parameters()])
    assert_close(*found, rtol=0, atol=0)


class TestLayers:
    def in_fp8(self, model):
        assert use_float8(model, Float8.tensorwise, CPU)
        return {name for name, module in model.named_modules() if "forward" in vars(module)}

    def test_head_experts_and_adapters_stay_in_bf16(self):
        assert len(self.in_fp8(whole(tiny("llama")))) == 7 * len(whole(tiny("llama")).model.layers)
        assert {name.split(".")[-2] for name in self.in_fp8(whole(tiny("mixtral")))} == {"self_attn"}
        adapted = self.in_fp8(hf_model(build("llama", lora=True).model))
        assert adapted and not any("lora" in name for name in adapted)

    def test_a_router_stays_in_bf16(self):
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_experts": 16}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_offset": 0, "attn_layer_period": 1}
        model = config_skeleton(load_hf_config(ModelConfig(arch="jamba", overrides=shape)))
        assert any(name.endswith("router") for name, _ in model.named_modules())
        assert not any("router" in name for name in self.in_fp8(model))

    def test_sizes_that_are_no_multiples_are_named(self, caplog):
        with caplog.at_level(logging.INFO):
            use_float8(whole(tiny("llama", intermediate_size=40)), Float8.tensorwise, CPU)
        assert "not multiples of 16: model.layers.*.mlp.down_proj [32, 40], " in caplog.text

    def test_another_model_and_the_weights_names_are_unchanged(self):
        model = whole(tiny("llama"))
        other, names = copy.deepcopy(model), list(model.state_dict())
        self.in_fp8(model)
        assert list(model.state_dict()) == names
        assert not any("forward" in vars(module) for module in other.modules())


class TestRefusals:
    def refused(self, text, run, *settings, name="tensorwise"):
        with pytest.raises(ValueError, match=rf"^model\.float8={name}: {text}"):
            run(compose([f"model.float8={name}", "train.precision=bf16", *settings]))

    def test_on_a_cpu(self, monkeypatch):
        monkeypatch.delenv(host_float8.ON_CPU)
        self.refused("it is for GPUs with fp8 products; train on those, or set it to none", check_device)
        with pytest.raises(ValueError, match=r"^model\.float8=rowwise: it is for GPUs"):
            use_float8(whole(tiny("llama")), Float8.rowwise, CPU)

    def test_a_gpu_without_fp8(self, monkeypatch, tmp_path):
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\nprintf '9.0\\n8.6\\n'")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        self.refused(
            "a GPU with compute capability 8.6 has no fp8 products, which need 8.9", check_device, "cluster.ranks=2"
        )

    def test_without_torchao(self, monkeypatch):
        monkeypatch.setattr(host_float8, "find_spec", lambda name: None)
        self.refused("torchao is not installed; run pip install torchao, or set it to none", check_device)

    def test_other_number_formats(self):
        for precision in ("fp32", "fp16"):
            text = rf"it does not support train\.precision={precision}; set train\.precision=bf16"
            self.refused(text, check, f"train.precision={precision}")

    def test_a_quantised_base(self):
        settings = ["model.lora.enabled=true", "model.lora.quantize=nf4", "model.path=somewhere"]
        self.refused(r"model\.lora\.quantize=nf4 has quantised the weights already", check, *settings)

    def test_a_model_without_such_layers(self):
        text = "the decoder layers of GPT2LMHeadModel have no nn.Linear whose sizes are multiples of 16"
        self.refused(text, check_model, "model.arch=gpt2")
        with pytest.raises(ValueError, match=r"have no nn\.Linear"):
            require_float8(whole(tiny("llama", hidden_size=24, intermediate_size=40)), Float8.tensorwise)
