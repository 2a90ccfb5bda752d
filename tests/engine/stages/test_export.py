"""Tests that plain transformers and plain peft read the exports of stages, bit by bit."""

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.checkpoint.ranks_in_threads import in_threads
from tests.engine.stages.tiny import ARCHITECTURES, batch, stages_of, tiny, whole
from weft.engine.stages.files.exporting import ExportStorageError, export_stages
from weft.engine.stages.files.shards import write_shards


def require_equal(a, b):
    one, two = dict(a.named_parameters()), dict(b.named_parameters())
    assert one.keys() == two.keys()
    for name, parameter in one.items():
        assert parameter.dtype == two[name].dtype and torch.equal(parameter, two[name]), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_reload(arch, tmp_path):
    config, dtype = tiny(arch), torch.bfloat16 if arch in ("qwen2", "mixtral") else torch.float32
    export_stages(stages_of(config, 2, dtype=dtype), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    require_equal(again, whole(config, dtype=dtype))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("arch", ["llama", "mixtral"])
def test_same_keys_as_transformers(arch, tmp_path):
    config = tiny(arch, tie_word_embeddings=True)
    whole(config).save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    export_stages(stages_of(config, 4), tmp_path / "ours")

    def read(name):
        return json.loads((tmp_path / name / "model.safetensors.index.json").read_text())

    ours, theirs = read("ours"), read("theirs")
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    config_of = {n: json.loads((tmp_path / n / "config.json").read_text()) for n in ("ours", "theirs")}
    assert config_of["ours"] == config_of["theirs"]
    assert (tmp_path / "ours" / "generation_config.json").is_file()


def test_stages_of_several_layers_in_small_shards(tmp_path):
    (stage,) = stages_of(tiny("mixtral"), 1)
    shards = write_shards(stage, tmp_path, shard_bytes=60_000)
    assert len(shards) > 2 and all(shard.num_bytes < 130_000 for shard in shards)


def written_together(writers, folder):
    """Return what each writer of one job returned or raised; ``writers`` are the stages that each holds."""
    return in_threads(
        len(writers), lambda ranks: export_stages(writers[ranks.rank], folder, rank=ranks.rank, gather=ranks.gather)
    )


def test_several_writers(tmp_path):
    config = tiny("llama", tie_word_embeddings=True)
    stages = stages_of(config, 4)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    fold = [[stages[0], stages[3]], [stages[1], stages[2]]]
    assert written_together(fold, tmp_path / "out") == [None, None]
    require_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), whole(config))
    assert not (tmp_path / "out" / "old").exists()


def test_a_failing_writer_stops_all_and_leaves_the_old_export(tmp_path, monkeypatch):
    stages = stages_of(tiny("llama"), 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()

    def full(stage, folder, **named):
        if stage.index == 1:
            raise OSError(28, "No space left on device")
        return write_shards(stage, folder, **named)

    monkeypatch.setattr("weft.engine.stages.files.exporting.write_shards", full)
    results = written_together([[stage] for stage in stages], tmp_path / "out")
    assert all(isinstance(r, ExportStorageError) and "rank 1" in str(r) and "No space" in str(r) for r in results)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["old"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_writers_without_a_common_disk(tmp_path, monkeypatch):
    stages = stages_of(tiny("llama"), 2)

    def elsewhere(stage, folder, **named):
        target = folder if stage.index == 0 else tmp_path / "other"
        target.mkdir(exist_ok=True)
        return write_shards(stage, target, **named)

    monkeypatch.setattr("weft.engine.stages.files.exporting.write_shards", elsewhere)
    with pytest.raises(ValueError, match="every host mounts"):
        export_stages(stages, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def nudge(model):
    """Adapters start as no-ops; give them weights that depend on their names only."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_((len(name) % 7 + 1) / 100)


def adapter_config(path="", **more):
    config = tiny("llama", **more)
    config.path = path
    if path:
        config.overrides = {}
    config.lora.enabled, config.lora.target_modules = True, ["q_proj", "down_proj"]
    return config


def test_adapters_on_a_saved_model(tmp_path):
    whole(tiny("llama")).save_pretrained(tmp_path / "base")
    config = adapter_config(str(tmp_path / "base"))
    stages, reference = stages_of(config, 3), whole(config)
    for stage in stages:
        nudge(stage.model)
    nudge(reference)
    export_stages(stages, tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names and "base_model" not in names
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    require_equal(again, reference)
    data = batch()
    with torch.no_grad():
        assert torch.equal(again(**data).logits, reference.eval()(**data).logits)


def test_adapters_on_a_new_model_bring_it_along(tmp_path):
    config = adapter_config()
    stages, reference = stages_of(config, 2), whole(config)
    export_stages(stages, tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base_model")
    require_equal(base, whole(tiny("llama")))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    data = batch()
    with torch.no_grad():
        assert torch.equal(again(**data).logits, reference.eval()(**data).logits)
