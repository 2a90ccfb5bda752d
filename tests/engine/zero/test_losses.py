"""Losses of every ZeRO stage equal those of a single process; `matrix.py` is the whole product."""

import pytest

from tests.engine.tiny import tiny_config
from tests.engine.zero.matrix import TOLERANCE, cases, worst
from weft.conf.schema import ChunkedLoss, OptimizerKind, Precision, Recompute


def special(
    zero: int,
    optimizer: str = "adamw",
    reduce_every: int = 0,
    recompute: str = "none",
    travel: str = "fp32",
    whole: int = 0,
    chunked: bool = False,
    **keywords,
):
    """Small buckets, so that stages hold many buckets."""
    config = tiny_config(zero=zero, layers=4, **keywords)
    config.zero.reduce_bucket_size = 3000
    config.pipeline.recompute = Recompute[recompute]
    if chunked:
        config.model.chunked_loss, config.model.loss_chunk_mb = ChunkedLoss.always, 1e-3
    config.zero.reduce_every = reduce_every
    config.zero.param_persistence_threshold = config.zero.model_persistence_threshold = whole
    config.zero.communication_data_type = Precision[travel]
    config.optimizer.kind = OptimizerKind[optimizer]
    return config


SPECIAL = {
    "many buckets": special(2, stages=2),
    "reduced after each micro-batch": special(2, reduce_every=1, stages=2, schedule="w", placement="fold"),
    "reduced after three of four": special(3, reduce_every=3, stages=2, schedule="zbv", placement="fold"),
    "some weights stay whole": special(3, whole=10_000, stages=2, schedule="w", placement="fold", tied=True),
    "shards reduced in bf16": special(2, travel="bf16", stages=2),
    "all reduced in bf16": special(0, travel="bf16", stages=1),
    "lamb, shards": special(2, "lamb", stages=1),
    "lamb, whole": special(0, "lamb", stages=2),
    "loss in chunks": special(3, chunked=True, stages=2, schedule="w", placement="fold"),
    "tied on a rank, checkpointed": special(
        3, recompute="layers", stages=2, schedule="auto", placement="fold", tied=True
    ),
    "element-wise operations again": special(3, recompute="elementwise", stages=2, schedule="zbv", placement="fold"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_settings():
    differences = dict(zip(SPECIAL, worst(list(SPECIAL.values()), 4, steps=6), strict=True))
    allowed = {name: TOLERANCE[config.zero.communication_data_type.value] for name, config in SPECIAL.items()}
    assert not {name: found for name, found in differences.items() if not found < allowed[name]}
    rounded = [name for name in SPECIAL if "bf16" in name]
    assert all(differences[name] > 3 * differences["many buckets"] for name in rounded), differences


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [4, 8])
def test_stages_and_pipelines(world):
    chosen = dict(list(cases(world).items())[world // 4 :: 5])
    differences = dict(zip(chosen, worst(list(chosen.values()), world, steps=4), strict=True))
    assert not {
        name: found for name, found in differences.items() if not found < TOLERANCE[chosen[name].train.precision.value]
    }
