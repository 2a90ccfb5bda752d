"""Evaluation gives Hugging Face's loss and logits, and leaves training as it was."""

from itertools import islice

import pytest
import torch

from tests.engine.tiny import batches, evaluate_between_steps, reference_losses, tiny_config
from weft.tools.ranks import run_ranks


@pytest.mark.timeout(240)
@pytest.mark.parametrize("context", [1, 2])
def test_evaluation_between_steps(context):
    config, replicas = tiny_config("w", "fold", stages=2, context=context), 2 // context
    config.optimizer.lr = 1e-12  # so that the weights stay what the reference has
    results = run_ranks(4, evaluate_between_steps, config)
    losses, loss, *_, spans = results[0]
    assert losses == pytest.approx(reference_losses(config, replicas, 2), rel=1e-5)

    from weft.engine.stages.files.loading import build_model

    model = build_model(config.model, dtype=torch.float32, seed=config.train.seed).eval()
    data = list(islice(batches(0, 1), 3 * replicas))
    items = torch.tensor(sum(int((b["labels"][:, 1:] != -100).sum()) for b in data))
    with torch.no_grad():
        expected = sum(model(**b, num_items_in_batch=items, use_cache=False).loss.item() for b in data)
        assert loss == pytest.approx(expected, rel=1e-5)
        for _, _, logits, holds_loss, replica, _ in results:
            assert len(logits) == (3 if holds_loss else 0)
            for m, ours in enumerate(logits):
                theirs = model(input_ids=data[m * replicas + replica]["input_ids"], use_cache=False).logits
                torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=1e-4, atol=1e-5)

    for rank in range(2):
        ends = 0.0
        for _, _, start_s, end_s in (span for span in spans if span[:2] == (rank, "compute")):
            assert ends <= start_s <= end_s
            ends = end_s
