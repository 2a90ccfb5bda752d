"""Tests that an impossible export is refused before training, and that a configuration is exported unchanged."""

import json

import peft
import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.engine.stages.tiny import stages_of, tiny, whole
from weft.engine.data.tokenizer import train_bpe
from weft.engine.stages.files import exporting as module
from weft.engine.stages.files.exporting import export_stages, rehearse_export


@pytest.fixture
def base(tmp_path):
    whole(tiny("llama")).save_pretrained(tmp_path / "base")
    config = tiny("llama")
    config.path, config.overrides = str(tmp_path / "base"), {}
    return config


def test_sampling_values_without_sampling_are_exported_as_they_are(base, tmp_path):
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_p": 0.95}))
    stages = stages_of(base, 2)
    rehearse_export(stages, tmp_path / "out")
    export_stages(stages, tmp_path / "out")
    found = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (found.temperature, found.top_p) == (0.7, 0.95)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_valid_generation_config_is_what_transformers_saves(base, tmp_path):
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7}))
    export_stages(stages_of(base, 2), tmp_path / "ours")
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / n / "generation_config.json").read_text()) for n in ("ours", "theirs"))
    assert ours == theirs


def test_rehearsal_leaves_nothing(base, tmp_path):
    rehearse_export(stages_of(base, 2), tmp_path / "out", tokenizer=train_bpe(["a few words"] * 9, 300))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def _bad_config(stages, tokenizer, patch):
    stages[0].hf_model.config.odd = object()


def _bad_generation_config(stages, tokenizer, patch):
    stages[0].hf_model.generation_config.odd = object()


def _bad_tokenizer(stages, tokenizer, patch):
    patch.setattr(tokenizer, "save_pretrained", _refuse)


def _refuse(*args):
    raise TypeError("not JSON")


@pytest.mark.parametrize("spoil", [_bad_config, _bad_generation_config, _bad_tokenizer])
def test_what_cannot_be_saved_is_refused_before_training(spoil, base, tmp_path, monkeypatch):
    stages, tokenizer = stages_of(base, 2), train_bpe(["a few words"] * 9, 300)
    spoil(stages, tokenizer, monkeypatch)
    with pytest.raises(ValueError, match=r"^export: .*JSON.*set train.export=false$"):
        rehearse_export(stages, tmp_path / "out", tokenizer=tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_adapter_config_that_cannot_be_saved_is_refused_before_training(base, tmp_path, monkeypatch):
    base.lora.enabled, base.lora.target_modules = True, ["q_proj"]
    stages = stages_of(base, 2)
    rehearse_export(stages, tmp_path / "out")
    monkeypatch.setattr(peft.LoraConfig, "save_pretrained", _refuse)
    with pytest.raises(ValueError, match="not JSON"):
        rehearse_export(stages, tmp_path / "out")


def test_a_disk_without_room_for_the_weights_is_refused(base, tmp_path, monkeypatch):
    stages = stages_of(base, 2)
    size = sum(module.exported_bytes(stage, None) for stage in stages)
    export_stages(stages, tmp_path / "out")
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert size == pytest.approx(written, rel=0.1)
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    with pytest.raises(ValueError, match="are free"):
        rehearse_export(stages, tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_refused(base, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="could not write"):
        rehearse_export(stages_of(base, 2), tmp_path / "file" / "out")
