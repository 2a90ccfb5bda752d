"""An adapter of stages holds what peft saves of the whole model, whatever became of its embeddings."""

import copy

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engine.stages.tiny import batch, gradients, run, stages_of, tiny, whole
from tests.engine.stages.tiny_models import VOCABULARY
from weft.conf.schema import SplitKind
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.files.exporting import export_stages

SETTINGS = {
    "resized": {"target_modules": ["q_proj"], "tokens": 8},
    "resized, late layers": {"target_modules": ["q_proj"], "layers_to_transform": [3], "tokens": 8},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding by pattern": {"target_modules": r".*(q_proj|embed_tokens)"},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both, resized": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "tokens": 8},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "trained tokens, resized": {"target_modules": ["q_proj"], "trainable_token_indices": [VOCABULARY + 1], "tokens": 8},
    "kept whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "kept whole, resized": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "tokens": 8},
}


def adapted(tied, setting, folder=None):
    """A model with trained adapters, and its weights without them; loaded from ``folder`` if that is given."""
    settings = dict(SETTINGS[setting])
    more = settings.pop("tokens", 0)
    model = whole(tiny("llama", tie_word_embeddings=tied))
    if folder is not None:
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    if more:
        model.resize_token_embeddings(VOCABULARY + more)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 20)
    return made, base


def on_ranks(model, count):
    """The stages of ranks that share no memory."""
    split = split_layers(model.get_base_model().config, count, SplitKind.even)
    return [stage for index in range(count) for stage in stages_from_model(copy.deepcopy(model), split, [index])]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_adapter_has_the_keys_and_tensors_that_peft_saves(tied, setting, count, tmp_path):
    model, _ = adapted(tied, setting, tmp_path / "base")
    model.save_pretrained(tmp_path / "theirs")
    export_stages(on_ranks(model, count), tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("active", ["default", "second"])
def test_each_adapter_has_the_folder_that_peft_gives_it(active, tmp_path):
    model, _ = adapted(False, "resized", tmp_path / "base")
    late = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj"], r=2, layers_to_transform=[3])
    model.add_adapter("second", late)
    model.set_adapter(active)
    export_stages(on_ranks(model, 3), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    for folder in (".", "second"):
        ours, theirs = (tmp_path / each / folder for each in ("ours", "theirs"))
        found, expected = (load_file(each / "adapter_model.safetensors") for each in (ours, theirs))
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        configs = [peft.PeftConfig.from_pretrained(str(each)).to_dict() for each in (ours, theirs)]
        assert configs[0] == configs[1]
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {"adapter_config.json", "second"} | {
        "adapter_model.safetensors"
    }


@pytest.mark.parametrize("tied", [False, True])
def test_adapter_on_a_resized_model_computes_the_same_after_reload(tied, tmp_path):
    model, _ = adapted(tied, "resized", tmp_path / "base")
    export_stages(on_ranks(model, 2), tmp_path / "ours")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(VOCABULARY + 8)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(**batch()).logits, model.eval()(**batch()).logits)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("tied", [False, True])
def test_new_base_model_beside_an_adapter_is_without_trained_parts(tied, setting, tmp_path):
    model, base = adapted(tied, setting)
    export_stages(on_ranks(model, 3), tmp_path / "out")
    names = [name for file in (tmp_path / "out/base_model").glob("*.safetensors") for name in load_file(file)]
    assert len(names) == len(set(names))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out/base_model").state_dict()
    assert again.keys() == base.keys() and all(torch.equal(again[name], base[name]) for name in base)


def test_trained_tokens_of_a_tied_embedding_are_one_parameter_of_two_stages():
    model, _ = adapted(True, "trained tokens")
    first, last = stages = on_ranks(model, 2)
    model(**batch()).loss.backward()
    run(stages, batch()).backward()
    (name,) = [name for name, p in model.named_parameters() if p.requires_grad and "trainable_tokens" in name]
    assert name in first.tied and name in last.tied
    summed = sum(gradients([stage])[name] for stage in stages)
    torch.testing.assert_close(summed, model.get_parameter(name).grad)


@pytest.mark.parametrize("targets", [["q_proj", "embed_tokens"], ["q_proj", "lm_head"], ["3.self_attn.q_proj"]])
@pytest.mark.parametrize("tied", [False, True])
def test_recipe_puts_adapters_on_embeddings_and_late_layers_in_any_split(targets, tied, tmp_path):
    whole(tiny("llama", tie_word_embeddings=tied)).save_pretrained(tmp_path / "base")
    config = tiny("llama")
    config.path, config.overrides = str(tmp_path / "base"), {}
    config.lora.enabled, config.lora.target_modules = True, targets
    reference, stages = whole(config), stages_of(config, 3)
    reference.save_pretrained(tmp_path / "theirs")
    export_stages(stages, tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    held = {name for stage in stages for name, _ in stage.named_global_parameters()}
    assert held == {name for name, _ in reference.named_parameters()}
    assert peft.PeftConfig.from_pretrained(tmp_path / "ours").exclude_modules is None
