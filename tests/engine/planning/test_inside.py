"""Tests of plans of ranks that share layers: what each holds, exchanges, saves and sends."""

from dataclasses import replace
from math import inf

import pytest
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig

from tests.comm.collectives.balanced import regular
from tests.engine.planning.given import MODEL
from weft.comm.collectives import AlphaBeta, CollectiveCosts, LinkClass, Primitive
from weft.comm.collectives.cache import CostCache, topology_key
from weft.conf.schema import (
    ClusterConfig,
    ContextExchange,
    LinkConfig,
    ParallelConfig,
    PipelineConfig,
    Precision,
    Recompute,
    SiteConfig,
    WeftConfig,
)
from weft.engine.models.sizes import model_sizes
from weft.engine.parallel.context_exchange import key_value_size
from weft.engine.planning import axis_facts
from weft.engine.planning.gathering import facts_before_start
from weft.engine.planning.run_plan import plan_run
from weft.pipeline.memory import USABLE

LLAMA = LlamaConfig(**MODEL.to_dict() | {"vocab_size": 4096})
MIXTRAL = MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4,
)  # fmt: skip


def plan_of(folder, hf_config=LLAMA, *, checkpointing=False, precision=Precision.fp32, device="cpu", **axes):
    config = WeftConfig(parallel=ParallelConfig(**axes), pipeline=PipelineConfig(stages=2))
    config.train.precision = precision
    config.pipeline.recompute = Recompute.layers if checkpointing else Recompute.none
    config.cluster.ranks = 4
    config.data.cache_dir = str(folder)
    facts = facts_before_start(config, hf_config)
    return plan_run(config, replace(facts, flops_per_s=1e9, device=device))


def test_what_a_member_holds():
    whole, half = model_sizes(MIXTRAL), model_sizes(MIXTRAL, expert=2)
    experts = 4 * 3 * 32 * 64
    assert [layer.held for layer in half.layers] == [layer.parameters - experts // 2 for layer in whole.layers]
    assert [layer.parameters for layer in half.layers] == [layer.parameters for layer in whole.layers]
    llama, part = model_sizes(LLAMA), model_sizes(LLAMA, tensor=2)
    norms = 2 * LLAMA.hidden_size
    assert [layer.held for layer in part.layers] == [(layer.parameters - norms) // 2 + norms for layer in llama.layers]
    assert part.after.held == llama.after.parameters // 2 and part.largest_layer(4) < llama.largest_layer(4)
    with pytest.raises(ValueError, match="num_attention_heads=4, which 8 ranks cannot divide"):
        model_sizes(LLAMA, tensor=8)


def test_members_divide_what_is_computed_saved_and_sent(tmp_path):
    alone = plan_of(tmp_path)
    gather, all_to_all = ContextExchange.gather, ContextExchange.all_to_all
    for axes, gathered in (
        ({"tensor": 2}, 2),  # the inputs of two blocks
        ({"context": 2, "context_exchange": gather}, 3),  # keys and values, each as wide as the model, and the output
        ({"context": 2, "context_exchange": all_to_all}, 1),
    ):
        plan = plan_of(tmp_path, **axes)
        for mine, whole in zip(plan.costs.stages, alone.costs.stages, strict=True):
            assert mine.forward_s == pytest.approx(whole.forward_s / 2)
            assert mine.output_bytes == whole.output_bytes / 2
            layers = MODEL.num_hidden_layers // 2
            more = gathered * layers * whole.output_bytes / 2  # what is gathered is saved by all
            if "tensor" in axes:  # positions, and the head's input
                more += plan.facts.work.received.shared_bytes / 2
                more += whole.output_bytes / 2 if mine is plan.costs.stages[-1] else 0
            assert mine.activation_bytes == pytest.approx(whole.activation_bytes / 2 + more)


def test_a_layer_that_is_computed_again_gathers_again(tmp_path):
    """So the whole sequence's keys and values are there in the backward of one layer, not saved for all."""

    few_tokens = LlamaConfig(**LLAMA.to_dict() | {"vocab_size": 64})  # so that an embedding's gradient is small

    def memory_of(exchange):
        (most, _) = plan_of(tmp_path, few_tokens, context=2, context_exchange=exchange, checkpointing=True).memory
        return most

    gathered, exchanged = memory_of(ContextExchange.gather), memory_of(ContextExchange.all_to_all)
    assert gathered.activations == exchanged.activations
    assert gathered.working > exchanged.working


def test_keys_and_values_of_a_layer():
    grouped = LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    assert key_value_size(grouped) == 2 * 2 * 8
    latent = DeepseekV3Config(num_attention_heads=4, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    assert key_value_size(latent) == 4 * (16 + 8 + 12)


def test_experts_are_held_in_parts_and_sharded_over_who_holds_the_same(tmp_path):
    alone, plan = plan_of(tmp_path, MIXTRAL), plan_of(tmp_path, MIXTRAL, expert=2)
    for mine, whole in zip(plan.memory, alone.memory, strict=True):
        assert mine.zero.weights < 0.8 * whole.zero.weights


def test_measured_collectives_of_an_axis_are_in_the_step(tmp_path):
    alpha = 1.0
    links = CollectiveCosts.of_links({LinkClass.intra: AlphaBeta(alpha, 0.0)})
    CostCache.in_folder(str(tmp_path)).write(topology_key(regular(1, 2), "cpu"), links)
    layers = MODEL.num_hidden_layers // 2
    for stage in plan_of(tmp_path, tensor=2).costs.stages:  # two blocks a layer, each of which gathers and sums
        assert 4 * layers * alpha < stage.forward_s < 5 * layers * alpha
        assert 4 * layers * alpha < stage.input_s < 5 * layers * alpha


@pytest.mark.parametrize(
    ("line", "attention_s", "chosen"),
    [((1.0, 0.0), 0.0, "gather"), ((0.0, 1e-9), 0.0, "all_to_all"), ((0.0, 1e-9), 1.0, "ring")],
)
def test_what_costs_less_is_exchanged(tmp_path, monkeypatch, line, attention_s, chosen):
    """Twice as many collectives, or half of the bytes; or shifts that attention hides, as long as it takes here."""
    monkeypatch.setattr(axis_facts, "_attention_s", lambda *_: attention_s)
    key = topology_key(regular(1, 4), "cpu")
    CostCache.in_folder(str(tmp_path)).write(key, CollectiveCosts.of_links({LinkClass.intra: AlphaBeta(*line)}))
    config = WeftConfig(parallel=ParallelConfig(context=4))
    config.cluster.ranks = 4
    config.data.cache_dir = str(tmp_path)
    facts = facts_before_start(config, LLAMA)
    assert facts.exchange is ContextExchange[chosen], facts.sources["exchange"]
    assert "a layer and micro-batch: " in facts.sources["exchange"]


@pytest.mark.parametrize(
    ("line", "chosen"), [((1.0, 0.0), "gather"), ((0.0, 1e-20), "all_to_all"), ((1e-9, 0.0), "ring")]
)
def test_an_exchange_is_chosen_by_what_it_was_measured_to_take(tmp_path, monkeypatch, line, chosen):
    """Not by what a gather takes; and by bytes where it was not measured."""
    monkeypatch.setattr(axis_facts, "_attention_s", lambda *_: 0.0)  # as this machine's may hide any shift
    config = WeftConfig(parallel=ParallelConfig(context=4))
    config.cluster.ranks = 4
    config.data.cache_dir = str(tmp_path)
    key, cache = topology_key(regular(1, 4), "cpu"), CostCache.in_folder(str(tmp_path))
    table = dict(CollectiveCosts.of_links({LinkClass.intra: AlphaBeta(1e-3, 0.0)}).table)
    cache.write(key, CollectiveCosts(table | {(LinkClass.intra, Primitive.all_to_all): AlphaBeta(*line)}))
    assert facts_before_start(config, LLAMA).exchange is ContextExchange[chosen]
    del table[LinkClass.intra, Primitive.all_to_all]
    cache.write(key, CollectiveCosts(table))
    facts = facts_before_start(config, LLAMA)
    assert facts.exchange is ContextExchange.all_to_all and " ms " not in facts.sources["exchange"]


def ring_choice(tmp_path, *, memory):
    """Return the choice of ranks with so many bytes, for two members of a long sequence, and its reason."""
    config = WeftConfig(parallel=ParallelConfig(context=2))
    config.cluster.ranks = 2
    config.data.cache_dir, config.data.sequence_length = str(tmp_path), 1 << 14
    facts = facts_before_start(config, LLAMA)
    found = axis_facts.with_exchange(config, LLAMA, replace(facts, device_bytes=memory))
    return found.exchange.value, found.sources["exchange"]


def test_auto_chooses_the_ring_if_gathered_keys_do_not_fit_memory(tmp_path):
    """Two members with four heads each: by heads would move as much as a gather does, and fits as well as the ring."""
    config = WeftConfig(parallel=ParallelConfig(context=2, context_exchange=ContextExchange.gather))
    config.cluster.ranks = 2
    config.data.cache_dir, config.data.sequence_length = str(tmp_path), 1 << 14
    facts = facts_before_start(config, LLAMA)
    needed = {
        exchange: axis_facts.needed_bytes(config, replace(facts, exchange=exchange))
        for exchange in (ContextExchange.gather, ContextExchange.ring)
    }
    kept = MODEL.num_hidden_layers * (1 << 13) * 2 * MODEL.hidden_size * 4
    assert needed[ContextExchange.gather] - needed[ContextExchange.ring] == pytest.approx(kept)
    between = sum(needed.values()) / 2 / USABLE
    assert ring_choice(tmp_path, memory=2 * between) == ("gather", ring_choice(tmp_path, memory=inf)[1])
    chosen, why = ring_choice(tmp_path, memory=between)
    assert chosen != "gather" and why.endswith("gather does not fit in memory")
    chosen, why = ring_choice(tmp_path, memory=between / 100)
    assert chosen != "gather" and why.endswith("gather does not fit in memory, nor do others")


def test_links_between_sites_are_shared_by_members(tmp_path):
    config = WeftConfig(pipeline=PipelineConfig(stages=2))
    config.cluster = ClusterConfig(
        ranks=4,
        sites=[SiteConfig(name=name, ranks=1) for name in "ab"],
        links=[LinkConfig(sites=["a", "b"], latency_ms=1, bandwidth_mbps=200)],
    )
    config.data.cache_dir = str(tmp_path)
    alone = facts_before_start(config, LLAMA).links.wan
    config.parallel = ParallelConfig(context=2)
    assert facts_before_start(config, LLAMA).links.wan == replace(alone, bandwidth_bps=alone.bandwidth_bps / 2)


def test_an_embeddings_gradient_and_an_optimisers_step_take_memory(tmp_path):
    little = {"context": 2, "context_exchange": ContextExchange.all_to_all, "checkpointing": True}
    many_tokens = LlamaConfig(**LLAMA.to_dict() | {"vocab_size": 8192})  # the gradient exceeds a layer's temporary ones
    plan = plan_of(tmp_path, many_tokens, **little)
    embedding = 4 * many_tokens.vocab_size * many_tokens.hidden_size
    first, last = plan.memory
    stage = plan.costs.stages[0]
    assert first.working == embedding - stage.activation_bytes + stage.output_bytes, "an output is on its way"
    assert first.stepping == last.stepping == 2 * embedding, "two roots of the largest matrix's second moments"
    on_gpus = plan_of(tmp_path, many_tokens, device="cuda", **little)
    assert [memory.stepping for memory in on_gpus.memory] == [memory.zero.gradients for memory in on_gpus.memory]


@pytest.mark.parametrize(("precision", "share"), [(Precision.fp32, 4 / 8), (Precision.bf16, 6 / 8)])
def test_the_loss_over_a_shared_vocabulary_takes_less(tmp_path, precision, share):
    plan, divided = (plan_of(tmp_path, precision=precision, **axes) for axes in ({}, {"tensor": 2}))
    backward = plan.memory[-1].working / 2 * share
    forward = plan.memory[-1].working / 2 * 4 / 8 + divided.costs.stages[0].output_bytes  # logits, and gathered states
    assert divided.memory[-1].working == pytest.approx(max(forward, backward))
