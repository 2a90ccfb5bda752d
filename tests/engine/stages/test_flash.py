"""Packed rows in flash attention: what it is attached is what transformers would find out, in every stage."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from tests.engine.stages.tiny import batch, run, stages_of, tiny, whole
from weft.engine.execution.batches import prepare_batch
from weft.engine.models.batch import ON_CPU, PackedRows, attach_packed_rows, flash_arguments
from weft.engine.stages.checking.self_check import check_flash_packing
from weft.engine.stages.files.loading import load_hf_config

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


@pytest.mark.gpu(shows="flash attention keeps the documents of several packed rows apart, as sdpa's masks do")
def test_the_kernel_keeps_documents_apart_in_every_row():
    pytest.importorskip("flash_attn")
    device = torch.device("cuda", 0)
    data = prepare_batch(batch(packed=True), device)
    with torch.no_grad():
        expected = whole(tiny("llama"), dtype=torch.bfloat16).to(device)(**data, use_cache=False).loss
        stages = [stage.to(device) for stage in stages_of(tiny("llama"), 2, dtype=torch.bfloat16)]
        for stage in stages:
            stage.hf_model.set_attn_implementation("flash_attention_2")
        torch.testing.assert_close(run(stages, data), expected, rtol=1e-2, atol=0.0)
