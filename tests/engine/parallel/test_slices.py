"""Tests that a rank reads only its parts of a folder, and holds what it would have cut from the whole."""

from types import SimpleNamespace

import pytest
import torch
from transformers import core_model_loading
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from tests.engine.parallel.test_tensor import MODELS, wide
from weft.conf.schema import LoraConfig, ModelConfig, SplitKind
from weft.engine.models import slices
from weft.engine.models.slices import _cut_of_source
from weft.engine.parallel.axis import Alone, AxisGroups
from weft.engine.parallel.cut import Cut
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.files.loading import build_model, load_hf_config, load_stages


@pytest.fixture
def read(monkeypatch):
    """Bytes that have been read from files."""
    count = SimpleNamespace(num_bytes=0)
    materialize = core_model_loading._materialize_copy

    def counting(tensor, *more, **named):
        part = tensor[...]
        count.num_bytes += part.nbytes
        return materialize(part, *more, **named)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", counting)
    return count


def saved(config, folder):
    """The whole model, and where it lies."""
    model = build_model(config, dtype=torch.float32, seed=3)
    model.save_pretrained(folder, max_shard_size="60KB")
    return dict(model.named_parameters()), ModelConfig(path=str(folder))


def require_parts(config, whole, axes, num_stages, read):
    """Require that stages hold their part of the whole; return the bytes that were read, and those that are held."""
    split = split_layers(load_hf_config(config), num_stages, SplitKind.even)
    held = 0
    for index in range(num_stages):
        (stage,) = load_stages(config, split, [index], dtype=torch.float32, seed=1, axes=axes)
        for name, parameter in stage.named_global_parameters():
            cut = stage.cuts.get(name)
            assert torch.equal(parameter, whole[name] if cut is None else cut.take(whole[name])), name
            held += parameter.nbytes
        parameters = {name for name, _ in stage.model.named_parameters(remove_duplicate=False)}
        held += sum(b.nbytes for name, b in stage.model.state_dict().items() if name not in parameters)
    return read.num_bytes, held


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "phi3"])
def test_a_member_reads_its_part_of_every_matrix(arch, member, num_stages, tmp_path, read):
    whole, config = saved(MODELS[arch], tmp_path)
    axes = AxisGroups(tensor=Alone("tensor", 2, member))
    num_bytes, held = require_parts(config, whole, axes, num_stages, read)
    assert num_bytes == held < 0.6 * num_stages * sum(p.nbytes for p in whole.values())


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("member", [0, 1])
def test_a_member_reads_its_experts_alone(arch, member, tmp_path, read):
    whole, config = saved(MODELS[arch], tmp_path)
    axes = AxisGroups(expert=Alone("expert", 2, member))
    num_bytes, held = require_parts(config, whole, axes, 2, read)
    assert num_bytes == held


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("member", [0, 1])
def test_a_member_reads_its_part_of_experts_that_lie_in_several_tensors(arch, member, tmp_path, read):
    whole, config = saved(MODELS[arch], tmp_path)
    num_bytes, held = require_parts(config, whole, AxisGroups(tensor=Alone("tensor", 2, member)), 2, read)
    assert num_bytes == held


@pytest.mark.parametrize(
    ("operations", "shape", "cut", "own"),
    [
        ([MergeModulelist(0)], (6, 8), Cut((4, 6, 8), 2, 1, 2), Cut((6, 8), 1, 1, 2)),
        ([MergeModulelist(0), Concatenate(1)], (6, 8), Cut((4, 12, 8), 1, 1, 3, 2), Cut((6, 8), 0, 1, 3)),
        ([MergeModulelist(0), Concatenate(1)], (6, 8), Cut((4, 12, 8), 2, 0, 2), Cut((6, 8), 1, 0, 2)),
        ([Concatenate(0)], (6, 8), Cut((12, 8), 0, 1, 2, 2), Cut((6, 8), 0, 1, 2)),
        ([Concatenate(0)], (6, 8), Cut((12, 8), 0, 1, 2), None),  # the first member's is the first tensor
        ([Concatenate(0)], (4, 8), Cut((12, 8), 0, 1, 2, 2), None),  # of different sizes
        ([MergeModulelist(0)], (6, 8), Cut((4, 6, 8), 0, 1, 2), None),
        ([MergeModulelist(0), Transpose(1, 2)], (8, 6), Cut((4, 6, 8), 2, 1, 2), None),
        ([MergeModulelist(1)], (6, 8), Cut((6, 4, 8), 2, 1, 2), None),
    ],
)
def test_where_tensors_lie_in_a_weight(operations, shape, cut, own):
    converter = WeightConverter(["a.*.gate", "a.*.up"], "a.both", operations=operations)
    assert _cut_of_source(shape, cut, converter) == own
    if own is not None:
        count = 2 if isinstance(operations[-1], Concatenate) else 1
        sources = [torch.randn(shape) for _ in range(count)]
        join = operations[-1].dim if count == 2 else 0

        def made(tensors):
            tensors = [tensor.expand(4, *tensor.shape) if cut.dim != own.dim else tensor for tensor in tensors]
            return torch.cat(tensors, join) if count == 2 else tensors[0]

        assert torch.equal(made([own.take(source) for source in sources]), cut.take(made(sources)))


def test_a_weight_of_which_one_tensor_is_not_known_to_lie_so_is_read_whole(tmp_path, read, monkeypatch):
    whole, config = saved(MODELS["mixtral"], tmp_path)
    part = slices._part

    def unknown(key, *rest):
        return None if key.endswith("experts.1.w3.weight") else part(key, *rest)

    monkeypatch.setattr(slices, "_part", unknown)
    num_bytes, held = require_parts(config, whole, AxisGroups(tensor=Alone("tensor", 2, 1)), 2, read)
    joined = sum(p.nbytes for name, p in whole.items() if name.endswith("experts.gate_up_proj"))
    assert num_bytes == held + joined // 2


def test_tied_weights_and_adapters(tmp_path, read):
    whole, config = saved(wide("llama", tie_word_embeddings=True), tmp_path)
    config.lora = LoraConfig(enabled=True, rank=4, dropout=0.0, target_modules=["q_proj", "down_proj"])
    split = split_layers(load_hf_config(config), 2, SplitKind.even)
    axes = AxisGroups(tensor=Alone("tensor", 2, 1))
    stages = load_stages(config, split, [0, 1], dtype=torch.float32, seed=1, axes=axes)
    for stage in stages:
        for name, parameter in stage.named_global_parameters():
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if plain in whole:
                cut = stage.cuts.get(name)
                assert torch.equal(parameter, whole[plain] if cut is None else cut.take(whole[plain])), name
            elif cut := stage.cuts.get(name):
                assert cut.shape[cut.dim] == 2 * parameter.shape[cut.dim]
    assert read.num_bytes < 0.8 * sum(p.nbytes for p in whole.values())
