"""The choice to compute a loss in chunks: by the setting, the model's head, and memory."""

from dataclasses import replace

import pytest

from tests.engine.planning.given import MODEL, facts_of
from weft.conf.schema import ChunkedLoss, PipelineConfig, WeftConfig
from weft.engine.planning.axis_facts import needed_bytes, with_chunked_loss
from weft.engine.planning.run_plan import plan_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two stages whose vocabulary is 64 times as wide as its hidden states, and its facts."""
    config = WeftConfig(pipeline=PipelineConfig(stages=2, microbatches=2))
    config.data.cache_dir = str(tmp_path_factory.mktemp("cache"))
    config.model.loss_chunk_mb, config.model.chunked_loss = 1.0, ChunkedLoss.always
    model = type(MODEL)(**MODEL.to_dict() | {"vocab_size": 64 * MODEL.hidden_size})
    return config, replace(facts_of(config, model), flops_per_s=1e9)


def chosen(run, choice, memory=1e12, own_loss=True):
    config, facts = run
    config.model.chunked_loss = choice
    return with_chunked_loss(config, replace(facts, device_bytes=memory), own_loss=own_loss).model.chunks_loss


def test_auto_divides_only_what_does_not_fit(run):
    config, facts = run
    whole = needed_bytes(config, replace(facts, model=replace(facts.model, chunks_loss=False)))
    assert needed_bytes(config, facts) < whole
    assert chosen(run, ChunkedLoss.auto, memory=whole) and not chosen(run, ChunkedLoss.auto, memory=2 * whole)


def test_settings_and_custom_losses(run):
    assert chosen(run, ChunkedLoss.always) and not chosen(run, ChunkedLoss.never, memory=1.0)
    assert not chosen(run, ChunkedLoss.always, own_loss=False), "a custom loss gets logits"


def test_a_plan_with_chunks_takes_less_memory_on_the_last_stage_only(run):
    config, facts = run
    whole, chunks = (
        plan_run(config, replace(facts, model=replace(facts.model, chunks_loss=flag))) for flag in (False, True)
    )
    assert chunks.memory[0].total == whole.memory[0].total
    assert chunks.memory[-1].total < whole.memory[-1].total
    assert chunks.costs.stages[-1].forward_s > whole.costs.stages[-1].forward_s
