"""The loss of each document in packed rows equals its loss in a row of its own."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from tests.engine.stages.tiny import ARCHITECTURES, VOCABULARY, logits, stages_of, tiny
from weft.conf import load
from weft.engine.data.documents import IGNORED, Document
from weft.engine.data.loader import collate
from weft.engine.execution.batches import prepare_batch
from weft.engine.models.varlen import VARLEN
from weft.engine.stages.checking.refusals import LEAKS_ACROSS_DOCUMENTS
from weft.engine.stages.checking.self_check import check_packing
from weft.tools.preflight import check_model

LENGTH = 14
ROWS = ((3, 7, 4), (6, 2, 5), (14,))
"""Lengths of the documents in each packed row. Windows have 4 tokens, and the second row ends with padding."""

OTHER_SCORES = ("gemma2",)
"""Architectures whose scores have a soft cap, which varlen_attn does not compute."""


def documents():
    generator = torch.Generator().manual_seed(0)
    for lengths in ROWS:
        ids = (torch.randint(3, VOCABULARY, (length,), generator=generator).numpy() for length in lengths)
        yield [Document(tokens, tokens) for tokens in ids]


def losses(stages, rows, *, packing):
    """Return the summed loss of each document of a micro-batch, in order."""
    batch = prepare_batch(collate(rows, LENGTH, 0, packing=packing), torch.device("cpu"))
    with torch.no_grad():
        got = logits(stages, batch)[:, :-1].transpose(1, 2)
    each = F.cross_entropy(got, batch["labels"][:, 1:], reduction="none", ignore_index=IGNORED)
    each = F.pad(each, (1, 0))
    sizes = [[len(piece.ids) for piece in pieces] for pieces in rows]
    return [part.sum() for row, size in zip(each, sizes, strict=True) for part in row[: sum(size)].split(size)]


@pytest.mark.parametrize(
    ("arch", "attention"),
    [
        *((arch, "sdpa") for arch in ARCHITECTURES),
        *((arch, VARLEN) for arch in ARCHITECTURES if arch not in OTHER_SCORES),
        ("gemma2", "eager"),
    ],
)
def test_documents_have_the_same_loss_packed_and_unpacked(arch, attention):
    """In micro-batches of one row and of several, on two stages."""
    stages, rows = stages_of(tiny(arch), 2), list(documents())
    for stage in stages:
        stage.eval().hf_model.set_attn_implementation(attention)
    expected = torch.stack(losses(stages, [[document] for row in rows for document in row], packing=False))
    several = torch.stack(losses(stages, rows, packing=True))
    single = torch.stack([loss for row in rows for loss in losses(stages, [row], packing=True)])
    torch.testing.assert_close(several, expected, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(single, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("arch", ["cpmant", "bloom", "qwen3_next", "gpt_oss"])
def test_architectures_whose_documents_depend_on_each_other_are_refused(arch):
    """By name before anything starts, and on a small copy for types that are not listed."""
    assert arch in LEAKS_ACROSS_DOCUMENTS
    settings = ["model.attn_implementation=eager", f"model.arch={arch}"]
    with pytest.raises(ValueError, match=f"^data.packing=true: with model_type={arch} .* set data.packing=false$"):
        check_model(load(settings))
    check_model(load([*settings, "data.packing=false"]))
    with pytest.raises(ValueError, match=r"differently from the same documents alone.*; set data\.packing=false"):
        check_packing(AutoConfig.for_model(arch))
