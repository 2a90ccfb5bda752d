"""The self-check accepts what is faithful and names what is not; the command line around it."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from tests.stages.tiny import ARCHITECTURES, tiny, whole
from weft.conf.schema import Attention, ModelConfig
from weft.engine.stages import check_packing, load_hf_config, outline_of, refuse_packing, self_check
from weft.engine.stages.shrink import shrunken_model
from weft.engine.stages.skeleton import model_class
from weft.tools import check


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_accepts(arch):
    self_check(tiny(arch), packing=True)


@pytest.mark.parametrize("arch", ["llama4_text", "olmo2", "cohere2", "deepseek_v3", "jamba", "opt", "gpt_neox"])
def test_accepts_configs_as_they_come(arch):
    self_check(AutoConfig.for_model(arch))


def test_leaves_a_model_alone():
    model = whole(tiny("llama"))
    before = {name: p.clone() for name, p in model.named_parameters()}
    self_check(model)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


@pytest.mark.parametrize("arch", ["gemma3n_text", "gemma4_text", "deepseek_v4", "glm_moe_dsa", "hy_v4"])
def test_refuses_state_between_layers(arch):
    with pytest.raises(ValueError, match=f"model_type={arch} hand each other more than the hidden state"):
        self_check(AutoConfig.for_model(arch))


def test_refuses_the_routers_loss():
    with pytest.raises(ValueError, match="output_router_logits=true"):
        self_check(tiny("mixtral", output_router_logits=True))


class Peeking(LlamaModel):
    """A last layer that looks at the embedding again."""

    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state + self.get_input_embeddings()(input_ids)
        return output


class PeekingForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = Peeking(config)
        self.post_init()


def test_refuses_a_forward_that_stages_cannot_reproduce():
    with pytest.raises(ValueError, match=r"embed_tokens runs after and before.*pipeline.stages=1"):
        self_check(PeekingForCausalLM(load_hf_config(tiny("llama"))))


class Remembering(LlamaModel):
    """Adds a buffer that the first layer's stage has written."""

    def __init__(self, config):
        super().__init__(config)
        self.layers[0].register_forward_hook(lambda module, args, output: setattr(self, "kept", output))

    def forward(self, input_ids, **kwargs):
        self.kept = 0.0
        output = super().forward(input_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state + self.kept
        return output


class RememberingForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = Remembering(config)
        self.post_init()


def test_refuses_silent_differences():
    with pytest.raises(ValueError, match=r"RememberingForCausalLM in stages differs .* logits by .*; choose another"):
        self_check(RememberingForCausalLM(load_hf_config(tiny("llama"))))


class MeanForCausalLM(LlamaForCausalLM):
    def forward(self, *args, num_items_in_batch=None, **kwargs):
        return super().forward(*args, **kwargs)


def test_refuses_losses_that_are_not_weighed_by_tokens():
    with pytest.raises(ValueError, match="does not divide its loss by num_items_in_batch"):
        self_check(MeanForCausalLM(load_hf_config(tiny("llama"))))


@pytest.mark.parametrize("arch", ["bloom", "qwen3_next", "gpt_oss"])
def test_packing_that_leaks(arch):
    with pytest.raises(ValueError, match="documents see each other"):
        check_packing(AutoConfig.for_model(arch))
    with pytest.raises(ValueError, match=f"model_type={arch}.*data.packing=false"):
        refuse_packing(arch)


def test_packing_with_flash_attention():
    refuse_packing("llama", attention=Attention.flash_attention_2)
    with pytest.raises(ValueError, match=r"train\.microbatch_size=2"):
        refuse_packing("llama", attention=Attention.flash_attention_2, microbatch_size=2)


def test_shrunken_models_have_every_kind_of_layer():
    config = AutoConfig.for_model("gemma3_text")
    small = shrunken_model(model_class(config), config, min_layers=2)
    assert set(small.config.layer_types) == {"sliding_attention", "full_attention"}
    assert sum(p.numel() for p in small.parameters()) < 50e6
    dense_then_sparse = AutoConfig.for_model("deepseek_v3")
    small = shrunken_model(model_class(dense_then_sparse), dense_then_sparse, min_layers=2)
    assert len({type(layer.mlp) for layer in small.model.layers}) == 2


def test_outline():
    config = load_hf_config(tiny("gpt2"))
    outline = outline_of(model_class(config), config)
    assert (outline.layers, outline.num_layers) == ("transformer.h", 4)
    assert outline.before == ("transformer.wte", "transformer.wpe")
    assert outline.after == ("transformer.ln_f", "lm_head")


class TestCommand:
    def test_new_model(self, capsys):
        assert check.main(["model.arch=qwen3", "model.overrides.num_hidden_layers=4"]) == 0
        out = capsys.readouterr().out
        assert "Qwen3ForCausalLM (model_type=qwen3, 4 layers)" in out and "documents stay apart" in out

    def test_folder(self, capsys, tmp_path):
        whole(tiny("gemma2")).save_pretrained(tmp_path)
        assert check.main([f"model={tmp_path}"]) == 0
        assert "model.norm, lm_head, and the weights of model.embed_tokens (tied)" in capsys.readouterr().out

    def test_leak_is_told(self, capsys):
        assert check.main(["model.arch=bloom", "model.attn_implementation=eager"]) == 0
        assert "set data.packing=false" in capsys.readouterr().out

    def test_missing_folder(self):
        with pytest.raises(ValueError, match="not a folder"):
            check.main(["model=/nowhere/at/all"])


def test_config_types():
    self_check(load_hf_config(tiny("llama")), num_stages=2)
    self_check(ModelConfig(arch="llama"))
