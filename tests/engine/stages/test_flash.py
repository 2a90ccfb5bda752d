"""Packed rows in flash attention: what it is attached is what transformers would find out, in every stage."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import varlen
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from tests.engine.stages.tiny import batch, run, stages_of, tiny, whole
from weft.conf import load
from weft.conf.schema import Attention, ModelConfig
from weft.engine.execution.batches import prepare_batch
from weft.engine.models.batch import PackedRows, attach_packed_rows, flash_arguments, sequence_indices
from weft.engine.models.varlen import ON_CPU, VARLEN, attend_documents
from weft.engine.stages.checking.self_check import check_flash_packing, self_check
from weft.engine.stages.files.loading import load_hf_config
from weft.tools import preflight
from weft.tools.preflight import check_device

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(rows=st.lists(LENGTHS, min_size=1, max_size=3))
def test_bounds_are_those_that_transformers_finds(rows):
    size = max(map(sum, rows))
    filled = [[*row, size - sum(row)] if sum(row) < size else row for row in rows]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in filled])
    found = PackedRows.of(positions)
    if found is None:
        assert all(len(row) == 1 for row in filled)
        return
    (bounds, _), (longest, _) = prepare_fa_kwargs_from_position_ids(positions)
    assert torch.equal(found.bounds, bounds) and found.bounds.dtype == torch.int32
    assert found.longest == int(longest)


def test_a_prepared_batch_says_where_documents_begin():
    packed, plain = (prepare_batch(batch(packed=packed), torch.device("cpu")) for packed in (True, False))
    attached = flash_arguments(packed["position_ids"])
    assert attached["cu_seq_lens_q"].tolist() == [0, 3, 10, 13, 20] and attached["max_length_k"] == 7
    assert flash_arguments(plain["position_ids"]) == {}
    assert flash_arguments(torch.arange(4)[None]) == {}, "nobody has attached"


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_stages_keep_documents_apart_in_every_row(arch):
    data = prepare_batch(batch(packed=True), torch.device("cpu"))
    with torch.no_grad():
        expected = whole(tiny(arch))(**data, use_cache=False).loss
        stages = stages_of(tiny(arch), 4)
        for stage in stages:
            stage.hf_model.set_attn_implementation(ON_CPU)
        torch.testing.assert_close(run(stages, data), expected, rtol=1e-5, atol=0.0)
        attach_packed_rows(data["position_ids"], None)
        assert abs(float(run(stages, data) / expected) - 1) > 1e-4, "without the bounds they see each other"


def test_an_architecture_that_tells_its_attention_nothing_is_refused(monkeypatch):
    config = load_hf_config(tiny("llama"))
    check_flash_packing(config)
    monkeypatch.setattr("weft.engine.stages.checking.self_check.wanted_arguments", lambda *_: {})
    with pytest.raises(ValueError, match=r"LlamaForCausalLM does not tell.*train\.microbatch_size=1"):
        check_flash_packing(config)


@pytest.mark.parametrize("window", [None, 3])
def test_varlen_attention_on_a_cpu_is_hugging_faces_masked_attention(window):
    """Rows have several documents, or one each. Heads are grouped."""
    query, key, value = (torch.randn(2, heads, 8, 4) for heads in (4, 2, 2))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
    for rows in (positions, torch.arange(8).repeat(2, 1)):
        attach_packed_rows(rows, PackedRows.of(rows))
        got, _ = attend_documents(None, query, key, value, None, sliding_window=window, **flash_arguments(rows))
        seen = sequence_indices(rows)
        seen = (seen[:, :, None] == seen[:, None]).tril().triu(1 - (window or 8))
        want = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None], enable_gqa=True)
        torch.testing.assert_close(got, want.transpose(1, 2))


def test_varlen_calls_the_kernel_with_the_bounds_of_documents(monkeypatch):
    """The kernel needs a GPU, so its arguments are checked on the meta device."""
    calls = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **named: calls.append((args, named)) or args[0])
    query, key = torch.empty(2, 4, 8, 16, device="meta"), torch.empty(2, 2, 8, 16, device="meta")
    bounds = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    more = {"cu_seq_lens_q": bounds, "max_length_q": 8, "sliding_window": 3, "scaling": 0.5}
    output, _ = attend_documents(None, query, key, key, None, **more)
    ((args, named),) = calls
    assert [arg.shape for arg in args[:3]] == [(16, 4, 16), (16, 2, 16), (16, 2, 16)] and output.shape == (2, 8, 4, 16)
    assert args[3] is args[4] is bounds and args[5:] == (8, 8)
    assert named == {"scale": 0.5, "window_size": (2, 0), "enable_gqa": True}


def test_architectures_that_varlen_does_not_compute_are_refused():
    def settings(arch, **more):
        config = tiny(arch, **more)
        config.attn_implementation = Attention.varlen
        return load_hf_config(config)

    self_check(settings("llama"), packing=True)
    with pytest.raises(ValueError, match=r"attn_implementation=varlen: Gemma2Attention has softcap, .*sdpa or eager"):
        self_check(settings("gemma2"))
    with pytest.raises(ValueError, match=r"attn_implementation=varlen: BloomForCausalLM does not support it"):
        load_hf_config(ModelConfig(arch="bloom", attn_implementation=Attention.varlen))


class TestRefusalsBeforeTheStart:
    def refused(self, text, *settings):
        with pytest.raises(ValueError, match=text):
            check_device(load([f"model.attn_implementation={settings[0]}", *settings[1:]]))

    @pytest.mark.parametrize(("version", "package"), [(2, "flash-attn"), (3, "flash-attn-3"), (4, "flash-attn-4")])
    def test_flash_attention_without_its_package(self, version, package):
        text = rf"^model\.attn_implementation=flash_attention_{version}: {package} is not installed; pip install"
        self.refused(text, f"flash_attention_{version}", "train.precision=bf16")

    def test_kernels_for_gpus(self, monkeypatch):
        self.refused("flex_attention: its kernels train on GPUs only; choose sdpa", "flex_attention")
        monkeypatch.setattr(preflight, "_is_installed", lambda package: True)
        self.refused("flash_attention_2: its kernels train on GPUs", "flash_attention_2", "train.precision=bf16")
        check_device(load(["model.attn_implementation=varlen"]))
        monkeypatch.setattr(preflight, "num_gpus", lambda: 4)
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        self.refused("varlen: on GPUs the kernel takes no fp32; set", "varlen", "train.precision=fp32")


@pytest.mark.gpu(shows="flash attention keeps the documents of several packed rows apart, as sdpa's masks do")
@pytest.mark.parametrize("attention", [VARLEN, "flash_attention_2"])
def test_the_kernel_keeps_documents_apart_in_every_row(attention):
    if attention != VARLEN:
        pytest.importorskip("flash_attn")
    device = torch.device("cuda", 0)
    data = prepare_batch(batch(packed=True), device)
    with torch.no_grad():
        expected = whole(tiny("llama"), dtype=torch.bfloat16).to(device)(**data, use_cache=False).loss
        stages = [stage.to(device) for stage in stages_of(tiny("llama"), 2, dtype=torch.bfloat16)]
        for stage in stages:
            stage.hf_model.set_attn_implementation(attention)
        torch.testing.assert_close(run(stages, data), expected, rtol=1e-2, atol=0.0)
