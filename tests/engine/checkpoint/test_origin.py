"""A checkpoint records what it was made from, and a run that goes on from it compares that with its own."""

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.engine.stages.tiny import tiny, whole
from weft.conf.schema import ModelConfig, WeftConfig
from weft.conf.trees import to_tree
from weft.engine.checkpoint.durable import OtherBaseError
from weft.engine.checkpoint.origin import Origin, flat, model_settings
from weft.engine.stages.files.fingerprint import files_fingerprint, folder_fingerprint, model_fingerprint

WHERE = Path("/runs/sft/checkpoints/step-00000004")
OWN = Origin("aaaa1111", "/models/a", flat(to_tree(WeftConfig())), {"the tokenizer": "1", "data.path": "2"})


def test_same_base_under_another_path_is_accepted():
    replace(OWN, path="/elsewhere/a").require_base(OWN.to_tree(), WHERE)


def test_another_base_is_refused_with_both_names():
    with pytest.raises(
        OtherBaseError, match=r"trained from model /models/a .*model /models/b .*checkpoint.resume=never"
    ):
        replace(OWN, base="bbbb2222", path="/models/b").require_base(OWN.to_tree(), WHERE)


@pytest.mark.parametrize(("own", "saved"), [("", "aaaa1111"), ("aaaa1111", "")])
def test_new_and_loaded_models_are_other_bases_of_each_other(own, saved):
    with pytest.raises(OtherBaseError, match="a new model"):
        replace(OWN, base=own).require_base(replace(OWN, base=saved).to_tree(), WHERE)


def test_model_from_the_checkpoint_itself_is_accepted():
    own = replace(OWN, base="bbbb2222", path="/runs/sft")
    own.require_base(OWN.to_tree(), WHERE)


def test_checkpoint_of_an_earlier_version_is_accepted():
    OWN.require_base({}, WHERE)
    assert OWN.differences({}) == []


def test_every_setting_that_differs_is_listed():
    config = WeftConfig()
    config.optimizer.lr, config.optimizer.betas, config.train.steps = 1e-5, [0.8, 0.9], 7
    config.cluster.master_port, config.model.overrides = 4711, {"rope_theta": 5.0}
    other = replace(OWN, settings=flat(to_tree(config)), inputs={"the tokenizer": "1", "data.path": "3"})
    assert OWN.differences(OWN.to_tree()) == []
    assert other.differences(OWN.to_tree()) == [
        "model.overrides=None (was {})",
        "model.overrides.rope_theta=5.0 (was None)",
        "optimizer.betas=[0.8, 0.9] (was [0.9, 0.95])",
        "optimizer.lr=1e-05 (was 0.0003)",
        "train.steps=7 (was 100)",
        "other content of data.path",
    ]


def saved_model(folder, seed=1, **more):
    model = whole(tiny("llama"), seed=seed)
    model.save_pretrained(folder, **more)
    return ModelConfig(path=str(folder))


def test_fingerprint_is_of_weights_not_of_files(tmp_path):
    one, same = saved_model(tmp_path / "one"), saved_model(tmp_path / "same", max_shard_size=20_000)
    assert len(list((tmp_path / "same").glob("*.safetensors"))) > 1
    assert folder_fingerprint(one) == folder_fingerprint(same) != folder_fingerprint(saved_model(tmp_path / "x", 2))


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_fingerprint_sees_one_changed_weight(name, tmp_path):
    before = folder_fingerprint(saved_model(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.get_parameter(name).data[-1] += 1e-3
    model.save_pretrained(tmp_path / "model")
    assert folder_fingerprint(ModelConfig(path=str(tmp_path / "model"))) != before


def test_large_files_are_sampled_where_they_change(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(bytes(3_000_000))
    before = files_fingerprint([file])
    for place in (0, 1_500_000, 2_999_999):
        file.write_bytes(bytes(place) + b"x" + bytes(3_000_000 - place - 1))
        assert files_fingerprint([file]) != before


def test_model_in_memory_is_known_by_its_layers(tmp_path):
    saved_model(tmp_path / "a"), saved_model(tmp_path / "b", 2)

    def loaded(name, seed=0):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_pretrained(tmp_path / name)

    assert model_fingerprint(loaded("a")) == model_fingerprint(loaded("a")) != model_fingerprint(loaded("b"))

    def adapted(name, seed):
        model = loaded(name, seed)
        model.resize_token_embeddings(120)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))

    assert (
        model_fingerprint(adapted("a", 1)) == model_fingerprint(adapted("a", 2)) != model_fingerprint(adapted("b", 1))
    )


def test_new_model_in_memory_has_a_base_only_where_it_is_frozen():
    assert model_fingerprint(whole(tiny("llama"))) == ""
    frozen = peft.get_peft_model(whole(tiny("llama")), peft.LoraConfig(target_modules=["q_proj"]))
    assert model_fingerprint(frozen)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("lora_alpha", 32, "32 (was 8)"),
        ("lora_dropout", 0.5, "0.5 (was 0.0)"),
        ("target_modules", ["v_proj", "k_proj"], "['k_proj', 'v_proj'] (was ['q_proj', 'v_proj'])"),
        ("use_rslora", True, "True (was False)"),
    ],
)
def test_changed_adapter_of_a_model_in_memory_is_listed(field, value, shown):
    def adapted(**more):
        adapter = peft.LoraConfig(**{"r": 4, "target_modules": ["v_proj", "q_proj"]} | more)
        return Origin(settings=model_settings(LlamaConfig(), {"default": adapter}))

    saved = adapted(lora_alpha=8).to_tree()
    assert adapted(lora_alpha=8).report(saved) == ""
    assert adapted(**{"lora_alpha": 8, field: value}).report(saved) == f"model.adapters.default.{field}={shown}"


def test_changed_configuration_of_a_model_is_listed():
    config, other = LlamaConfig(), LlamaConfig()
    other.attention_dropout, other.dtype = 0.5, "bfloat16"
    saved = Origin(settings=model_settings(config, {})).to_tree()
    assert Origin(settings=model_settings(other, {})).report(saved) == "model.config.attention_dropout=0.5 (was 0.0)"


def test_what_an_earlier_version_did_not_record_is_no_difference():
    settings = flat(to_tree(WeftConfig()))
    earlier = {name: value for name, value in settings.items() if name != "checkpoint.on_signal"} | {"train.seed": 9}
    saved = Origin(settings=earlier, inputs={"data.path": "2"}).to_tree()
    adapters = {"default": peft.LoraConfig(target_modules=["q_proj"])}
    settings |= model_settings(LlamaConfig(), adapters)
    own = Origin(settings=settings, inputs=OWN.inputs)
    assert own.differences(saved) == ["train.seed=1234 (was 9)"]
    settings["checkpoint.on_signal"] = not settings["checkpoint.on_signal"]
    assert own.differences(saved)[0].startswith("checkpoint.on_signal=")
