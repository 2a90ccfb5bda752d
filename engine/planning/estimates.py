"""Costs of a model's stages before a run: known costs, or estimates by weights, tokens and a rank's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.conf.schema import ContextExchange, PairChoice, Precision, Recompute, WeftConfig
from weft.engine.models.sizes import ModelSizes, PartSize
from weft.engine.planning.facts import Facts
from weft.engine.planning.teacher_facts import distilled_work
from weft.engine.stages.cutting.split import StageSplit
from weft.pipeline.costs import CostModel, LinkCost, PairCosts, StageCost
from weft.pipeline.memory import WEIGHT_BYTES
from weft.pipeline.workload import (
    Division,
    LayerWork,
    ModelWork,
    Working,
    loss_work,
    received_work,
    temporary_gradients,
)

SAVED_WIDTHS = 17
"""Hidden states that a layer saves for its backward, in widths of the model: 34 bytes per token
and width at 2 bytes each, with attention that keeps no scores (Korthikanti et al. 2022, section 4)."""
ATTENTION_WIDTHS = 4
"""Those of them that attention saves: queries, keys, values and its output."""


def stage_sizes(model: ModelSizes, split: StageSplit) -> list[PartSize]:
    """Return the number of weights of each virtual stage. Tied weights count in each stage that holds them."""
    stages = [sum((model.layers[layer] for layer in layers), PartSize(0, 0)) for layers in split.layers]
    stages[0] += model.before
    stages[-1] += model.after
    return stages


def rank_size(model: ModelSizes, split: StageSplit, held: Sequence[int]) -> PartSize:
    """Return the number of weights of a rank with these virtual stages. Weights tied among them count once."""
    stages = stage_sizes(model, split)
    size = sum((stages[stage] for stage in held), PartSize(0, 0))
    return size.without(model.tied) if {0, split.num_stages - 1} <= {*held} else size


def planning_costs(
    config: WeftConfig, facts: Facts, split: StageSplit, recompute: Sequence[Recompute] = ()
) -> CostModel:
    """Return the costs for planning on the reference route: known costs if there are any, otherwise estimates.

    Args:
        recompute: recomputation of each virtual stage. Empty is none, beyond the model's own checkpointing.

    Raises:
        ValueError: costs are known, but for other numbers of virtual stages.
    """
    if facts.flops_per_s is not None:
        stages = _estimated_stages(config, facts, split, facts.flops_per_s, recompute)
        pairs = _stage_pairs(facts, split, ())
        stages = stages if pairs is None else pairs.timed(stages)
    elif split.num_stages in facts.stage_costs:
        stages = facts.stage_costs[split.num_stages]
        pairs = _stage_pairs(facts, split, stages)
    else:
        known = ", ".join(map(str, facts.stage_costs))
        raise ValueError(f"costs are known of {known} virtual stages, and the placement has {split.num_stages}")
    return CostModel(
        stages=stages,
        local=facts.links.local,
        wan=facts.links.wan,
        wan_links=facts.links.between(facts.layout.site_numbers(facts.layout.reference)),
        host=LinkCost(bandwidth_bps=facts.host_bps),
        pairs=None if config.pipeline.pairs is PairChoice.never else pairs,
    )


def _stage_pairs(facts: Facts, split: StageSplit, measured: Sequence[StageCost]) -> PairCosts | None:
    """Return the durations of strand pairs, or None if they are unknown."""
    given = facts.stage_pairs.get(split.num_stages)
    if given is not None or facts.strands is None:
        return given
    return facts.strands.pairs(facts.axes, split, measured)


def working_bytes(
    config: WeftConfig, facts: Facts, split: StageSplit, costs: CostModel, recompute: Sequence[Recompute] = ()
) -> list[Working]:
    """Return the memory of each virtual stage's actions besides saved activations. See `planning_costs`."""
    work, divisions = _work(config, facts), _divisions(config, facts, split, recompute)
    found = [
        work.working_bytes(part, len(layers), division, WEIGHT_BYTES[config.train.precision])
        for part, layers, division in zip(_stage_works(work, split), split.layers, divisions, strict=True)
    ]
    for stage, size in enumerate(stage_sizes(facts.model, split)):
        expanded = size.largest_four_bit * WEIGHT_BYTES[config.train.precision]
        used = found[stage]
        found[stage] = used._replace(forward=max(used.forward, expanded), input=used.input + expanded)
    # An embedding's gradient is as large as its weights, and comes last, when nothing else of its micro-batch is left.
    embedding: float = facts.model.before.largest * WEIGHT_BYTES[config.train.precision]
    embedding -= costs.stages[0].activation_bytes
    if facts.teacher is not None:
        most = max(facts.teacher.working_bytes, facts.teacher.loss_bytes)
        found[-1] = found[-1]._replace(forward=max(found[-1].forward, most))
    first = found[0]
    kept = costs.stages[0].weight_saved_bytes
    found[0] = first._replace(whole=max(first.whole, embedding), input=max(first.input, embedding + kept))
    return found


def _division(config: WeftConfig, facts: Facts) -> Division:
    return Division(
        microbatch_size=config.train.microbatch_size,
        tensor=facts.layout.tensor,
        context=facts.layout.context,
        recompute=Recompute.layers if facts.recomputes else Recompute.none,
        gathers=facts.exchange is ContextExchange.gather,
    )


def _stage_works(work: ModelWork, split: StageSplit) -> list[LayerWork]:
    """Return the operations and bytes per sequence of each virtual stage."""
    starts = [work.before] + [work.received] * (split.num_stages - 1)
    stages = [sum((work.layers[i] for i in layers), at) for at, layers in zip(starts, split.layers, strict=True)]
    stages[-1] += work.after
    return stages


def _divisions(config: WeftConfig, facts: Facts, split: StageSplit, recompute: Sequence[Recompute]) -> list[Division]:
    """Return the division of each virtual stage's work."""
    whole = _division(config, facts)
    return [
        whole if whole.recompute is Recompute.layers else replace(whole, recompute=kind)
        for kind in recompute or [Recompute.none] * split.num_stages
    ]


def _estimated_stages(
    config: WeftConfig, facts: Facts, split: StageSplit, flops_per_s: float, recompute: Sequence[Recompute]
) -> tuple[StageCost, ...]:
    """Estimate costs by the operations and bytes of each layer. Ranks that share layers divide them equally."""
    work, divisions = _work(config, facts), _divisions(config, facts, split, recompute)
    stages, in_chunks = [], work.loss_in_chunks(divisions[0])
    for part, layers, division in zip(_stage_works(work, split), split.layers, divisions, strict=True):
        seconds = part.seconds(
            flops_per_s / division.of_rank(1),
            recompute=division.recompute,
            bytes_per_s=facts.bytes_per_s / division.of_rank(1),
            in_chunks=in_chunks,
        )
        stages.append(work.stage_cost(part, len(layers), seconds, division))
    if facts.teacher is not None:
        last, teacher = stages[-1], facts.teacher
        saved, forward_s = last.activation_bytes + teacher.saved_bytes, last.forward_s + teacher.flops / flops_per_s
        stages[-1] = replace(last, forward_s=forward_s, activation_bytes=saved)
    return tuple(stages)


def _work(config: WeftConfig, facts: Facts) -> ModelWork:
    """Return the work of a sequence in each layer, with the loss that is minimised."""
    work, layout = _own_work(config, facts), facts.layout
    if facts.teacher is None:
        return work
    return distilled_work(work, WEIGHT_BYTES[config.train.precision], layout.tensor * layout.context)


def _own_work(config: WeftConfig, facts: Facts) -> ModelWork:
    """Return the work with the model's own loss: traced, or from the sizes of the model's parts.

    A forward takes two operations per active weight and token, and attention's scores on top.
    """
    model, tokens = facts.model, config.data.sequence_length
    hidden_bytes = float(tokens * model.hidden_size * WEIGHT_BYTES[config.train.precision])
    chunk_bytes = config.model.loss_chunk_mb * 1e6 if model.chunks_loss else 0.0
    if facts.work is not None:
        attended = model.key_value_size / model.hidden_size * facts.work.message_bytes
        return replace(facts.work, attended_bytes=attended, loss_chunk_bytes=chunk_bytes)

    def part(size: PartSize, layers: int = 0) -> LayerWork:
        return LayerWork(
            parameters=size.parameters,
            trained_parameters=size.trained,
            matmul_flops=2.0 * tokens * size.active,
            trained_flops=2.0 * tokens * size.active_trained,
            attention_flops=layers * 2.0 * tokens * model.hidden_size * tokens,  # causal: half of 4
            activation_bytes=layers * SAVED_WIDTHS * hidden_bytes,
            attention_bytes=layers * ATTENTION_WIDTHS * hidden_bytes,
            gradient_bytes=layers * temporary_gradients(4 * hidden_bytes, hidden_bytes),
            attention_matmul_flops=layers * 8.0 * tokens * model.hidden_size**2,
        )

    return ModelWork(
        name="by weights",
        sequence_length=tokens,
        before=part(model.before),
        layers=tuple(part(size, 1) for size in model.layers),
        after=part(model.after)
        + loss_work(float(tokens * model.vocab_size), model.hidden_size, trained=model.after.trained > 0),
        tied_parameters=model.tied.parameters,
        message_bytes=hidden_bytes,
        attended_bytes=model.key_value_size / model.hidden_size * hidden_bytes,
        loss_chunk_bytes=chunk_bytes,
        received=received_work(hidden_bytes if config.train.precision is not Precision.fp32 else 0.0),
    )
