"""The self-check accepts what is faithful and names what is not; the command line around it."""

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from transformers import AutoConfig, BertConfig, BertForSequenceClassification
from transformers.integrations import HfDeepSpeedConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from tests.engine.stages.tiny import ARCHITECTURES, batch, run, stages_of, tiny, whole
from weft.conf.schema import ModelConfig, WeftConfig
from weft.engine.initialize import initialize
from weft.engine.models.head_loss import HeadLoss
from weft.engine.models.shrink import shrunken_model
from weft.engine.models.skeleton import model_class
from weft.engine.stages.checking.self_check import self_check
from weft.engine.stages.cutting.outline import outline_of
from weft.engine.stages.files.loading import load_hf_config
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


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
def test_accepts_the_routers_loss(arch):
    """It is the same, and not nothing: with a large share the loss is another."""
    config = tiny(arch, output_router_logits=True, router_aux_loss_coef=0.5)
    self_check(config)
    self_check(whole(config))
    data = batch()
    want = whole(config)(**data, use_cache=False)
    assert torch.allclose(run(stages_of(config, 3), data), want.loss)
    assert want.loss > run(stages_of(tiny(arch), 3), data) + 0.1


def test_refuses_a_routers_loss_that_is_another():
    with pytest.raises(ValueError, match="output_router_logits=true: Llama4ForCausalLM has no auxiliary loss"):
        self_check(AutoConfig.for_model("llama4_text", output_router_logits=True))


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

    def test_leak_across_documents_is_printed(self, capsys):
        assert check.main(["model.arch=bloom", "model.attn_implementation=eager"]) == 0
        assert "set data.packing=false" in capsys.readouterr().out

    def test_layers_that_members_share(self, capsys):
        assert check.main(["model.arch=qwen3", "model.overrides.num_hidden_layers=2", "parallel.tensor=2"]) == 0
        assert "parallel.tensor=2: logits, loss and gradients of two members" in capsys.readouterr().out
        with pytest.raises(ValueError, match=r"parallel\.tensor=2: transformers has no tensor-parallel plan"):
            check.main(["model.arch=gpt2", "parallel.tensor=2"])

    def test_missing_folder(self):
        with pytest.raises(ValueError, match="not a folder"):
            check.main(["model=/nowhere/at/all"])


def test_config_types():
    self_check(load_hf_config(tiny("llama")), num_stages=2)
    self_check(ModelConfig(arch="llama"))


class TestWhatIsGiven:
    """The self-check is of the model that trains, and of the way in which its stages are made."""

    def test_another_module(self):
        with pytest.raises(ValueError, match="Linear is no Hugging Face model"):
            self_check(torch.nn.Linear(2, 2))

    def test_nothing_to_train(self):
        with pytest.raises(ValueError, match="every weight has requires_grad=False"):
            initialize(model=whole(tiny("llama")).requires_grad_(False), config=WeftConfig())

    def test_another_head(self):
        config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
        with pytest.raises(ValueError, match="BertForSequenceClassification is no causal language model"):
            self_check(BertForSequenceClassification(config))

    def test_labels_that_would_leak(self):
        with pytest.raises(ValueError, match=r"see those after them.*model\.overrides\.is_decoder=true"):
            self_check(AutoConfig.for_model("bert"))
        self_check(AutoConfig.for_model("bert", is_decoder=True))

    def test_layers_that_are_initialised_from_above(self):
        """falcon_h1 walks over all layers to initialise them, wherever they are."""
        overrides = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        overrides |= {"intermediate_size": 64, "vocab_size": 96, "mamba_d_ssm": 64, "mamba_n_heads": 4}
        config = ModelConfig(arch="falcon_h1", overrides=overrides | {"mamba_d_head": 16})
        stages = stages_of(config, 2)
        assert torch.equal(run(stages, batch()), whole(config)(**batch(), use_cache=False).loss)

    def test_embeddings_named_by_their_head(self):
        """camembert's head comes before its embeddings, so the name of what they share depends on the stage."""
        self_check(AutoConfig.for_model("camembert", is_decoder=True))

    def test_inside_zero_init(self, monkeypatch):
        monkeypatch.setattr(partition_parameters, "top_level_context", object())
        with pytest.raises(ValueError, match=r"inside deepspeed\.zero\.Init"):
            self_check(tiny("llama"))
        with pytest.raises(ValueError, match=r"inside deepspeed\.zero\.Init"):
            initialize(config=WeftConfig())

    def test_made_inside_zero_init(self):
        model = whole(tiny("llama"))
        model.lm_head.weight.ds_id = 0
        with pytest.raises(ValueError, match=r"made inside deepspeed\.zero\.Init"):
            self_check(model)

    def test_under_the_trainers_zero_3(self):
        given = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
        with pytest.raises(ValueError, match="HfDeepSpeedConfig"):
            self_check(tiny("llama"))
        del given
        self_check(tiny("llama"))


def test_a_wrong_loss_in_chunks_is_refused_with_the_remedy(monkeypatch):
    compute = HeadLoss.forward
    monkeypatch.setattr(HeadLoss, "forward", lambda self, hidden: compute(self, hidden) * 1.01)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM in chunks .* differs .*; set model\.chunked_loss=never"):
        self_check(load_hf_config(tiny("llama")))
    self_check(load_hf_config(tiny("llama")), chunks=False)
