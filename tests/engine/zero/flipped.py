"""Training in which a bit flips on one replica, as a rank runs it."""

from __future__ import annotations

import torch

from tests.engine.tiny import begun, tiny_config
from weft.engine.zero import ReplicasDiffer


def trained_with_a_flip(stages: int, zero: int, where: str) -> tuple[str, int, str, list[float]]:
    """Train with comparisons every two steps; before step 6 a bit flips on the second replica of the last stage.

    Args:
        where: in a "weight", in the optimiser's "state", or in a weight, after which a checkpoint is "saved".

    Returns:
        What was found, the steps done by then, the parameter's name where it happened, and the losses.
    """
    config = tiny_config(stages=stages, zero=zero, microbatches=2, layers=2)
    config.supervise.compare_every = 2
    engine = begun(config)
    losses, name, text = [], "", ""
    for step in range(1, 10):
        if step == 6 and engine.holds_loss and engine.replica == 1:
            name = _flip(engine, where)
        try:
            if step == 6 and where == "saved":
                engine.check_finite()
            losses.append(float(engine.train_batch()))
        except ReplicasDiffer as error:
            text = str(error)
            break
    done = engine.global_steps
    engine.destroy()
    return text, done, name, losses


def _flip(engine: object, where: str) -> str:
    """Flip the lowest bit of a number of a weight, or of the optimiser's state of one."""
    engine.sharding.settle()  # type: ignore[attr-defined]
    bucket = engine.sharding.trained[-1]  # type: ignore[attr-defined]
    fragment = bucket.fragments[-1]
    tensor = fragment.parameter.data
    if where == "state":
        tensor = engine.basic_optimizer.state[fragment.tensor]["exp_avg_sq"]  # type: ignore[attr-defined]
    tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    return fragment.name
