"""Stages against Hugging Face's own run of the whole model: bit-equal loss, logits and gradients."""

import copy
import gc
import pickle
import weakref

import peft
import pytest
import torch

from benchmarks.verification.shared_architectures import small_model
from tests.engine.stages.tiny import ARCHITECTURES, batch, gradients, logits, run, stages_of, tiny, whole
from weft.conf.schema import Attention, LoraConfig, ModelConfig, Recompute, SplitKind
from weft.engine.models import seeding
from weft.engine.models.lora import add_adapters, require_adapters
from weft.engine.models.recomputation import recompute
from weft.engine.stages.checking.self_check import tried_batch
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.files.loading import check_model_fits, load_hf_config


def check(config, count, *, dtype=torch.float32, packed=False, masked=False, typed=False, again=Recompute.none):
    reference = whole(config, dtype=dtype)
    stages = stages_of(config, count, dtype=dtype)
    for stage in stages:
        recompute(stage.hf_model, again)
    data = batch(packed=packed)
    if masked:
        data["attention_mask"] = torch.ones_like(data["input_ids"])
        data["attention_mask"][0, -3:] = 0
    if typed:
        data["token_type_ids"] = torch.arange(10).repeat(2, 1) % 2
    num_items = torch.tensor(37)
    want = reference(**data, num_items_in_batch=num_items, use_cache=False)
    got = run(stages, data, num_items)
    assert torch.equal(got, want.loss)
    with torch.no_grad():
        assert torch.equal(logits(stages, data), want.logits)
    want.loss.backward()
    got.backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    found = gradients(stages)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    return reference, stages


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equal(arch):
    check(tiny(arch), 4)


def test_one_stage_is_the_whole_model():
    _, (stage,) = check(tiny(tie_word_embeddings=True), 1)
    assert stage.is_first and stage.is_last and not stage.tied


@pytest.mark.parametrize("arch", ["llama", "gemma4_text"])
def test_a_stage_may_run_twice_on_what_it_received(arch):
    """An evaluation with logits does: the second run is the first one's equal, also behind its first layer."""
    first, last = stages_of(tiny(arch), 2)
    data = batch()
    with torch.no_grad():
        handed = first(None, data)
        assert torch.equal(first(None, data), handed)
        once = last.logits(handed, data)
        assert torch.equal(last.logits(handed, data), once)
        assert torch.equal(last.output(handed, data).logits, once)


def test_one_stage_runs_what_cannot_be_cut():
    overrides = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 96, "causal": True, "dropout": 0.0}
    overrides |= {"attention_dropout": 0.0, "pad_index": 0}
    config = ModelConfig(arch="xlm", overrides=overrides, attn_implementation=Attention.eager)
    (stage,) = stages_of(config, 1)
    data = batch()
    assert torch.equal(run([stage], data), whole(config)(**data, use_cache=False).loss)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_tied(arch, tie):
    _, stages = check(tiny(arch, tie_word_embeddings=tie), 3)
    names = [{n for n, _ in s.named_global_parameters()} & s.tied for s in stages]
    assert bool(names[0]) == tie and names[0] == names[2] and not names[1]
    assert not [n for n, _ in stages[1].named_global_parameters() if "embed" in n or "wte" in n]


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gpt2", "qwen3_moe"])
def test_packed(arch):
    check(tiny(arch), 2, packed=True)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gpt2"])
def test_padded(arch):
    check(tiny(arch), 2, masked=True)


def test_token_types():
    check(tiny("gpt2"), 2, typed=True)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2", "mixtral"])
def test_bf16_with_checkpointing(arch):
    check(tiny(arch), 2, dtype=torch.bfloat16, again=Recompute.layers)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_recomputed_elementwise_operations_with_documents(arch):
    check(tiny(arch), 2, packed=True, again=Recompute.elementwise)


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"], ["all-linear"]])
def test_lora(targets):
    config = tiny("llama")
    config.lora.enabled, config.lora.target_modules = True, targets
    _, stages = check(config, 3)
    assert all(p.requires_grad == ("lora_" in n) for s in stages for n, p in s.named_global_parameters())


@pytest.mark.parametrize("arch", ["llama", "gpt2", "phi3"])
def test_adapters_on_all_matrices_are_those_that_peft_would_make(arch):
    config = tiny(arch)
    reference = peft.get_peft_model(whole(config), peft.LoraConfig(target_modules="all-linear"))
    config.lora.enabled, config.lora.target_modules = True, ["all-linear"]
    found = [name for stage in stages_of(config, 2) for name, p in stage.named_global_parameters() if p.requires_grad]
    assert sorted(found) == sorted(name for name, p in reference.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("model_type", ["llama4_text", "phimoe", "deepseek_v4", "gemma3n_text", "ctrl", "falcon"])
def test_adapters_on_all_matrices_leave_out_modules_that_peft_cannot_adapt(model_type):
    """Routers that return tuples, grouped layers, and modules whose names end like those of matrices."""
    model = small_model(model_type, 1).eval()
    data = tried_batch(model)
    before = model(**data).loss
    settings = LoraConfig(enabled=True, target_modules=["all-linear"])
    adapted = add_adapters(model, settings, seed=1)
    loss = adapted(**data).loss
    loss.backward()
    assert torch.equal(loss, before), "new adapters change nothing"
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert trained and any(weight.grad.any() for name, weight in adapted.named_parameters() if name in trained)
    require_adapters(settings, type(model), model.config)


@pytest.mark.parametrize(
    ("model_type", "target", "message"),
    [
        ("llama4_text", "router", r"=\['router'\]: router stands for \S+, a Llama4Router, .*leave it out"),
        (
            "mamba",
            "all-linear",
            r"=\['all-linear'\]: peft cannot adapt MambaForCausalLM .*'out_proj'.*name other modules",
        ),
    ],
)
def test_modules_that_peft_cannot_adapt_are_refused_by_name(model_type, target, message):
    model = small_model(model_type, 1)
    with pytest.raises(ValueError, match="model.lora.target_modules" + message):
        require_adapters(LoraConfig(enabled=True, target_modules=[target]), type(model), model.config)


def test_foreign_modules_cost_nothing():
    _, middle, last = stages_of(tiny("llama", tie_word_embeddings=False), 3)
    reference = whole(tiny("llama", tie_word_embeddings=False))
    layer = sum(p.numel() for p in reference.model.layers[0].parameters())
    assert sum(p.numel() for p in middle.parameters()) == 2 * layer
    embedding = reference.model.embed_tokens.weight.numel()
    assert sum(p.numel() for p in last.parameters()) == layer + embedding + reference.model.norm.weight.numel()


def test_new_weights_are_rounded_in_bf16():
    high, low = whole(tiny()), whole(tiny(), dtype=torch.bfloat16)
    for (name, a), b in zip(high.named_parameters(), low.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b), name


def test_weights_depend_on_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = whole(tiny(), seed=1), whole(tiny(), seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one.model.layers[0].mlp.up_proj.weight, two.model.layers[0].mlp.up_proj.weight)
    assert not torch.equal(one.model.layers[0].mlp.up_proj.weight, one.model.layers[1].mlp.up_proj.weight)


def test_nothing_is_kept_after_a_forward():
    """Leaving the forward early must not keep its frames, and so its tensors, alive."""
    first, _ = stages_of(tiny(), 2)
    inside = []
    first.hf_model.model.layers[0].register_forward_hook(
        lambda module, args, output: inside.append(weakref.ref(output))
    )
    gc.disable()
    try:
        with torch.no_grad():
            first(None, batch())
        assert inside[0]() is None
    finally:
        gc.enable()


def test_stages_can_be_copied_and_pickled():
    first, last = pickle.loads(pickle.dumps(stages_of(tiny(), 2)))
    data = batch()
    assert torch.equal(run(copy.deepcopy([first, last]), data), whole(tiny())(**data, use_cache=False).loss)


def test_hidden_spec():
    stages = stages_of(tiny(), 2, dtype=torch.bfloat16)
    data = batch()
    hidden = stages[0](None, data)
    assert stages[1].hidden_spec(data) == (hidden.shape, hidden.dtype)


@pytest.mark.parametrize("arch", ["apertus", "openai-gpt"])
def test_weights_that_only_the_constructor_makes(arch):
    """Hugging Face's rules of initialisation leave some out: they are the constructor's, not what was in memory."""
    overrides = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    overrides |= {"intermediate_size": 48, "num_key_value_heads": 2} if arch == "apertus" else {}
    config = ModelConfig(arch=arch, overrides=overrides, attn_implementation=Attention.eager)
    made = type(whole(config))(load_hf_config(config))
    constant = [name for name, p in made.named_parameters() if (p == p.flatten()[0]).all()]
    assert constant
    for name in constant:
        assert torch.equal(whole(config).get_parameter(name), made.get_parameter(name)), name
    found = {name: p for stage in stages_of(config, 2) for name, p in stage.named_global_parameters()}
    assert all(torch.equal(found[name], p) for name, p in whole(config).named_parameters())


def test_weights_that_only_the_constructor_of_a_large_model_makes(monkeypatch):
    monkeypatch.setattr(seeding, "MAX_CONSTRUCTED", 10)
    overrides = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match=r"leaves .* of a new OpenAIGPTLMHeadModel to its constructor.*model\.path"):
        whole(ModelConfig(arch="openai-gpt", overrides=overrides, attn_implementation=Attention.eager))


def test_adapters_that_would_get_no_gradient_are_refused():
    sizes = {"attn_layers": ["local"] * 2, "axial_pos_embds": False, "is_decoder": True, "vocab_size": 96}
    config = ModelConfig(arch="reformer", overrides=sizes, lora=LoraConfig(enabled=True))
    config.attn_implementation = Attention.eager
    with pytest.raises(ValueError, match=r"model\.lora\.enabled=true: the layers of ReformerModelWithLMHead compute"):
        check_model_fits(config, 1, 8)


def test_a_recurrent_model_that_has_run_is_cut():
    """Its states have a history, which torch does not copy."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16, "lru_width": 32}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 96}
    model = whole(ModelConfig(arch="recurrent_gemma", overrides=sizes)).train()
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids, use_cache=False)
    names = {name for name, _ in model.named_parameters()}
    stages = stages_from_model(model, split_layers(model.config, 2, SplitKind.even), range(2))
    assert {name for stage in stages for name, _ in stage.named_global_parameters()} == names
