"""Direct preference optimisation by the example's script is that of one process of plain transformers."""

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.huggingface.preferences import by_hand, example, on_ranks, pairs
from tests.engine.huggingface.runs import tiny_model
from weft.tools.ranks import run_ranks


def test_pairs_become_rows():
    """As TRL's collator for preference data: chosen answers first, labels on answers only."""
    rows = [
        {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6], "ref_chosen_logps": -1.0},
        {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11], "ref_chosen_logps": -3.0},
    ]
    batch = example().collate([row | {"ref_rejected_logps": -2.0} for row in rows])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 0, 0], [1, 2, 3, 6, 0], [7, 8, 10, 11, 0]]
    assert batch["attention_mask"].sum(-1).tolist() == [5, 3, 4, 4]
    assert [(row != -100).nonzero().flatten().tolist() for row in batch["labels"]] == [[3, 4], [2], [3], [2, 3]]
    assert batch["reference"].tolist() == [-1.0, -3.0, -2.0, -2.0]


def test_what_the_reference_says_of_padded_rows_is_what_it_says_of_each():
    """So training begins where nothing is preferred."""
    batch = example().collate(pairs()[:3])
    logits = tiny_model()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(example().answers_logps(logits, batch["labels"]), batch["reference"])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (4, 2)], ids=["two stages", "two stages, two replicas"])
def test_preference_training_is_that_of_one_process(tmp_path, ranks, stages):
    run_ranks(ranks, on_ranks, str(tmp_path), stages, timeout_s=200)
    parts = sorted((tmp_path / "trained").glob("*.safetensors"))
    trained, expected = {name: tensor for part in parts for name, tensor in load_file(part).items()}, by_hand()
    assert set(trained) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-4, atol=2e-6)
