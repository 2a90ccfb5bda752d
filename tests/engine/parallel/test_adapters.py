"""peft's models whose matrices two ranks divide, against peft's own forward in one process."""

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from weft.engine.models.batch import attach_rows_of, count_label_tokens
from weft.engine.stages.checking.comparison import Outcome, difference, whole_outcome
from weft.engine.stages.checking.members import members_outcome
from weft.engine.stages.checking.self_check import tried_batch

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj"]


def adapted(kind=peft.LoraConfig, **settings):
    """A Llama with biases and adapters, none of whose numbers is zero; its vocabulary was resized."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=56, hidden_size=32, intermediate_size=64, attention_bias=True, mlp_bias=True, pad_token_id=0, **SIZES
    )
    model = LlamaForCausalLM(config)
    model.resize_token_embeddings(64)
    made = peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **settings))
    for name, parameter in made.named_parameters():
        if "lora_B" in name or "bias" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": TARGETS},
        {"target_modules": TARGETS, "bias": "all"},
        {"target_modules": TARGETS, "bias": "lora_only", "use_rslora": True},
        {"target_modules": TARGETS, "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["o_proj", "input_layernorm"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 60]},
    ],
    ids=str,
)
@pytest.mark.parametrize("stages", [1, 2])
def test_adapters_of_divided_matrices_match_peft(settings, stages):
    model = adapted(**settings)
    batch = tried_batch(model.get_base_model())
    attach_rows_of(batch["position_ids"], batch["position_ids"])
    items = torch.tensor(count_label_tokens(batch))
    want = whole_outcome(model, [batch], items)
    want = Outcome(want.logits, want.loss, {name: gradient.clone() for name, gradient in want.gradients.items()})
    model.zero_grad()
    off = difference(members_outcome(model, [batch], items, {"tensor": 2}, stages), want)
    assert off.worst < 1e-6, off


def test_adapters_of_divided_experts_are_refused():
    config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_local_experts=4, **SIZES)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=[], target_parameters=["experts.gate_up_proj"])
    model = peft.get_peft_model(MixtralForCausalLM(config), lora)
    with pytest.raises(ValueError, match=r"parallel\.tensor=2: .*experts has an adapter of its gate_up_proj"):
        members_outcome(model, [tried_batch(model.get_base_model())], torch.tensor(1), {"tensor": 2})


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (peft.LoraConfig, {"use_dora": True}, "lora_magnitude_vector"),
        (peft.LoraConfig, {"lora_bias": True}, "lora_B.default.bias"),
        (peft.IA3Config, {"feedforward_modules": ["up_proj", "down_proj"]}, "ia3_l"),
        (peft.VeraConfig, {"r": 4, "target_modules": ["q_proj"]}, "vera_lambda"),
    ],
)
def test_other_adapters_of_divided_matrices_are_refused(kind, settings, named):
    model = adapted(kind, **{"target_modules": TARGETS} | settings)
    batch = tried_batch(model.get_base_model())
    with pytest.raises(ValueError, match=rf"parallel\.tensor=2: the adapter of .*{named}.* use plain LoRA"):
        members_outcome(model, [batch], torch.tensor(1), {"tensor": 2})
