from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from weft.engine.data import count_label_tokens
from weft.engine.data.documents import IGNORED, Document
from weft.engine.data.loader import collate
from weft.engine.data.packing import OPEN_SEQUENCES, lay_out_contiguous, lay_out_single, lay_out_whole

LENGTHS = st.lists(st.integers(0, 40), max_size=60)
SEEDS = st.none() | st.integers(0, 5)


def generator(seed: int | None) -> np.random.Generator | None:
    return None if seed is None else np.random.default_rng(seed)


def tokens(layout):
    """Every (document, position) that the layout uses."""
    return [(piece.document, at) for i in range(len(layout)) for piece in layout[i] for at in range(*piece[1:])]


@given(LENGTHS, st.integers(1, 50), SEEDS)
def test_contiguous_uses_every_token_once_and_fills_all_sequences_but_one(lengths, size, seed):
    layout = lay_out_contiguous(np.array(lengths, dtype=np.int64), size, generator(seed))
    assert sorted(tokens(layout)) == [(d, at) for d, n in enumerate(lengths) for at in range(n)]
    filled = [sum(stop - start for _, start, stop in layout[i]) for i in range(len(layout))]
    assert all(n == size for n in sorted(filled)[1:])
    assert all(filled), "no sequence is empty"


@given(LENGTHS, st.integers(40, 60), SEEDS, st.sampled_from([lay_out_whole, lay_out_single]))
def test_whole_documents_stay_whole(lengths, size, seed, lay_out):
    layout = lay_out(np.array(lengths, dtype=np.int64), size, generator(seed))
    pieces = [piece for i in range(len(layout)) for piece in layout[i]]
    assert sorted(pieces) == [(d, 0, n) for d, n in enumerate(lengths) if n]
    assert all(sum(p.stop for p in layout[i]) <= size for i in range(len(layout)))
    if lay_out is lay_out_single:
        assert all(len(layout[i]) == 1 for i in range(len(layout)))


@given(LENGTHS, st.integers(40, 60), SEEDS)
def test_no_two_sequences_that_were_open_together_would_fit_into_one(lengths, size, seed):
    layout = lay_out_whole(np.array(lengths, dtype=np.int64), size, generator(seed))
    filled = sorted(sum(p.stop for p in layout[i]) for i in range(len(layout)))
    if len(lengths) <= OPEN_SEQUENCES:
        assert all(n > size // 2 for n in filled[1:]), "best fit leaves at most one sequence half empty"


def test_packing_is_tight_when_documents_are_short():
    lengths = np.random.default_rng(0).integers(1, 200, 5000)
    layout = lay_out_whole(lengths, 256, np.random.default_rng(1))
    assert lengths.sum() / (256 * len(layout)) > 0.97


def test_shuffling_changes_the_order_and_nothing_else():
    lengths = np.arange(1, 40)
    for lay_out in (lay_out_contiguous, lay_out_single, lay_out_whole):
        plain, mixed = lay_out(lengths, 64, None), lay_out(lengths, 64, np.random.default_rng(3))
        again = lay_out(lengths, 64, np.random.default_rng(3))
        assert tokens(plain) != tokens(mixed) == tokens(again)
        assert sorted(tokens(plain)) == sorted(tokens(mixed))


@given(st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=6), min_size=1, max_size=4), st.booleans())
def test_batches_have_no_loss_across_documents_and_positions_that_restart(rows, packing):
    if not packing:
        rows = [row[:1] for row in rows]
    size, ids = 64, iter(range(10, 10_000))
    documents = [[document([next(ids) for _ in range(n)]) for n in row] for row in rows]
    batch = collate(documents, size, pad=1, packing=packing)
    assert set(batch) == {"input_ids", "labels"} | ({"position_ids"} if packing else batch.keys() & {"attention_mask"})
    for row, pieces in enumerate(documents):
        at = 0
        for piece in pieces:
            end = at + len(piece.ids)
            assert batch["input_ids"][row, at:end].tolist() == piece.ids.tolist()
            assert batch["labels"][row, at:end].tolist() == [IGNORED, *piece.ids[1:].tolist()]
            if packing:
                assert batch["position_ids"][row, at:end].tolist() == list(range(end - at))
            at = end
        assert (batch["input_ids"][row, at:] == 1).all()
        assert (batch["labels"][row, at:] == IGNORED).all()
        if packing:
            assert batch["position_ids"][row, at:].tolist() == list(range(size - at))
        if "attention_mask" in batch:
            assert batch["attention_mask"][row].tolist() == ([1] * at + [0] * (size - at) if at else [1] * size)
    assert ("attention_mask" in batch) == (not packing and any(rows))
    assert count_label_tokens(batch) == sum(n - 1 for row in rows for n in row)


def document(ids) -> Document:
    array = np.array(ids, dtype=np.int32)
    return Document(array, array)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def test_a_packed_row_gives_hugging_face_the_logits_of_its_documents_alone(model):
    documents = [document(range(3, 3 + n)) for n in (7, 1, 20, 9)]
    batch = collate([documents], 48, pad=0, packing=True)
    with torch.no_grad():
        packed = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        at = 0
        for piece in documents:
            alone = model(torch.tensor(piece.ids[None].astype(np.int64)), use_cache=False).logits[0]
            torch.testing.assert_close(packed[at : at + len(alone)], alone)
            at += len(alone)


def test_the_tokens_counted_are_those_of_hugging_faces_loss(model):
    batch = collate([[document(range(2, 20)), document(range(30, 35))], []], 32, pad=0, packing=True)
    with torch.no_grad():
        logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        total = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum", ignore_index=IGNORED
        )
        loss = model(**batch, use_cache=False).loss
    torch.testing.assert_close(loss, total / count_label_tokens(batch))


def test_padded_rows_are_finite_even_without_a_document(model):
    batch = collate([[document(range(2, 20))], []], 32, pad=0, packing=False)
    with torch.no_grad():
        output = model(**batch, use_cache=False)
    assert torch.isfinite(output.logits).all()
    alone = collate([[document(range(2, 20))]], 18, pad=0, packing=False)
    assert "attention_mask" not in alone
    with torch.no_grad():
        torch.testing.assert_close(output.loss, model(**alone, use_cache=False).loss)
