"""Costs of a model's stages before anything has run: known ones, or by weights, tokens and a rank's speed."""

from __future__ import annotations

from collections.abc import Sequence

from weft.conf.schema import ContextExchange, OptimizerKind, PairChoice, WeftConfig
from weft.engine.planning.facts import Facts
from weft.engine.planning.pairing import stage_pairs, with_strands
from weft.engine.stages.sizes import ModelSizes, PartSize
from weft.engine.stages.split import StageSplit
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.planner.workload import (
    CUT_LOSS_WORKING_BYTES,
    LOSS_BYTES,
    LOSS_WORKING_BYTES,
    NOTHING,
    LayerWork,
    ModelWork,
)
from weft.pipeline.states import WEIGHT_BYTES

SAVED_WIDTHS = 17
"""Hidden states that a layer saves for its backward, in widths of the model: 34 bytes per token
and width at 2 bytes each, with attention that keeps no scores (Korthikanti et al. 2022, section 4)."""
GATHERED_WIDTHS = 2
"""Hidden states that a tensor member gathers from the whole sequence: the inputs of attention and feed-forward."""

_STEP_BYTES = 4
"""Bytes of a root of a second moment, or of an update."""


def stage_sizes(model: ModelSizes, split: StageSplit) -> list[PartSize]:
    """Weights of each virtual stage; tied ones count wherever they are held."""
    stages = [sum((model.layers[layer] for layer in layers), PartSize(0, 0)) for layers in split.layers]
    stages[0] += model.before
    stages[-1] += model.after
    return stages


def rank_size(model: ModelSizes, split: StageSplit, held: Sequence[int]) -> PartSize:
    """Weights of a rank with these virtual stages; tied ones are one parameter there."""
    stages = stage_sizes(model, split)
    size = sum((stages[stage] for stage in held), PartSize(0, 0))
    return size.without(model.tied) if {0, split.num_stages - 1} <= {*held} else size


def planning_costs(config: WeftConfig, facts: Facts, split: StageSplit) -> CostModel:
    """Costs to plan with, on the route that schedules are planned for: those that are known, else estimates.

    Raises:
        ValueError: they are known for other numbers of virtual stages.
    """
    if facts.flops_per_s is not None:
        stages = (
            _by_weights(config, facts, split, facts.flops_per_s)
            if facts.work is None
            else _by_work(config, facts, facts.work, split, facts.flops_per_s)
        )
        pairs = stage_pairs(facts, split, ())
        stages = stages if pairs is None else with_strands(stages, pairs)
    elif split.num_stages in facts.stage_costs:
        stages = facts.stage_costs[split.num_stages]
        pairs = stage_pairs(facts, split, stages)
    else:
        known = ", ".join(map(str, facts.stage_costs))
        raise ValueError(f"costs are known of {known} virtual stages, and the placement has {split.num_stages}")
    return CostModel(
        stages=stages,
        local=facts.links.local,
        wan=facts.links.wan,
        wan_links=facts.links.between(facts.layout.site_numbers(facts.layout.reference)),
        pairs=None if config.pipeline.pairs is PairChoice.never else pairs,
    )


def working_bytes(config: WeftConfig, facts: Facts, split: StageSplit, costs: CostModel) -> list[float]:
    """Return the memory of each virtual stage's backward besides saved activations; empty without ``facts.work``."""
    if facts.work is None:
        return [0.0] * split.num_stages
    found = []
    for work, layers in zip(_stage_works(facts.work, split), split.layers, strict=True):
        again = (work.activation_bytes - work.unrecomputed_bytes) / len(layers)
        again += _gathered_widths(facts) * facts.work.message_bytes
        loss = work.working_bytes * _share_of_loss(config, facts)
        found.append(_sequences(config, facts) * max(loss, again if facts.recomputes else 0.0))
    # An embedding's gradient is as large as its weights, and comes last, when nothing else of its micro-batch is left.
    embedding = facts.model.before.largest * WEIGHT_BYTES[config.train.precision]
    found[0] = max(found[0], embedding - costs.stages[0].activation_bytes)
    return found


def stepping_bytes(config: WeftConfig, facts: Facts, split: StageSplit, held: Sequence[int], stepped: float) -> float:
    """Return the memory that an optimiser's step needs besides its state.

    AdamW of torch: roots of the second moments. It takes one parameter after the other on a CPU, and holds the roots
    twice; on a GPU all at once. SGD: gradients with weight decay, in the same way. LAMB: all updates, and a root.

    Args:
        held: virtual stages of a rank.
        stepped: weights that the rank's optimiser steps.
    """
    sizes = stage_sizes(facts.model, split)
    largest = min(stepped, max(sizes[stage].largest for stage in held))
    if config.optimizer.kind is OptimizerKind.lamb:
        return _STEP_BYTES * (stepped + 2 * largest)
    together = stepped if facts.device != "cpu" else largest
    if config.optimizer.kind is OptimizerKind.sgd:
        return _STEP_BYTES * together if config.optimizer.weight_decay else 0.0
    return _STEP_BYTES * together * (1 if facts.device != "cpu" else 2)


def _share_of_loss(config: WeftConfig, facts: Facts) -> float:
    """Return the memory of the loss's backward as a share of that with an undivided vocabulary."""
    if facts.layout.tensor == 1:
        return 1.0
    return CUT_LOSS_WORKING_BYTES[WEIGHT_BYTES[config.train.precision]] / LOSS_WORKING_BYTES


def _sequences(config: WeftConfig, facts: Facts) -> float:
    """Return the sequences of a micro-batch on one rank: a fraction where ranks share layers or sequences."""
    return config.train.microbatch_size / (facts.layout.tensor * facts.layout.context)


def _gathered_widths(facts: Facts) -> float:
    """Return the saved parts of other members, in hidden states of one rank's size."""
    found = float(GATHERED_WIDTHS * (facts.layout.tensor - 1))
    if facts.exchange is ContextExchange.gather:
        found += facts.model.key_value_size / facts.model.hidden_size * (facts.layout.context - 1)
    return found


def _stage_works(work: ModelWork, split: StageSplit) -> list[LayerWork]:
    """Return the operations and bytes per sequence of each virtual stage."""
    stages = [sum((work.layers[layer] for layer in layers), NOTHING) for layers in split.layers]
    stages[0] += work.before
    stages[-1] += work.after
    return stages


def _by_work(
    config: WeftConfig, facts: Facts, work: ModelWork, split: StageSplit, flops_per_s: float
) -> tuple[StageCost, ...]:
    """By the operations and bytes of each layer; ranks that share layers divide all of this among them."""
    sequences, recompute = _sequences(config, facts), facts.recomputes
    stages = []
    for part, layers in zip(_stage_works(work, split), split.layers, strict=True):
        matmul_s, attention_s = (flops * sequences / flops_per_s for flops in (part.matmul_flops, part.attention_flops))
        forward_s = matmul_s + attention_s
        hidden_bytes = len(layers) * work.message_bytes
        gathered_bytes = _gathered_widths(facts) * hidden_bytes
        saved = part.unrecomputed_bytes + hidden_bytes if recompute else part.activation_bytes + gathered_bytes
        stages.append(
            StageCost(
                forward_s=forward_s,
                input_s=matmul_s + 2 * attention_s + (forward_s if recompute else 0.0),
                weight_s=matmul_s,
                activation_bytes=saved * sequences,
                # Inputs and output gradients of the matrices: about what the forward saved.
                weight_saved_bytes=saved * sequences,
                output_bytes=work.message_bytes * sequences,
            )
        )
    return tuple(stages)


def _by_weights(config: WeftConfig, facts: Facts, split: StageSplit, flops_per_s: float) -> tuple[StageCost, ...]:
    """Where the work of layers is not known.

    A forward takes two operations per active weight and token, and attention's scores on top;
    the gradients of inputs and of weights take as much each. Recomputed layers add a forward
    to the input gradient. Ranks that share layers divide all of this among them; what they exchange
    is in the costs of strands, where these are known.

    Args:
        flops_per_s: what a rank reaches in practice.
    """
    model, layout = facts.model, facts.layout
    sharing = layout.context * layout.tensor
    tokens = config.train.microbatch_size * config.data.sequence_length
    hidden_bytes = tokens * model.hidden_size * WEIGHT_BYTES[config.train.precision] / sharing
    recompute = facts.recomputes
    widths = SAVED_WIDTHS + _gathered_widths(facts)
    stages = []
    for index, (size, layers) in enumerate(zip(stage_sizes(model, split), split.layers, strict=True)):
        is_last = index == split.num_stages - 1
        scores = 2 * len(layers) * model.hidden_size * config.data.sequence_length  # causal: half of 4
        forward_s = tokens * (2 * size.active + scores) / flops_per_s / sharing
        saved = len(layers) * hidden_bytes * (1 if recompute else widths)
        if is_last:
            saved += tokens * model.vocab_size * LOSS_BYTES / sharing
        stages.append(
            StageCost(
                forward_s=forward_s,
                input_s=forward_s * (2 if recompute else 1),
                weight_s=forward_s,
                activation_bytes=saved,
                # Inputs and output gradients of the matrices: about what the forward saved.
                weight_saved_bytes=saved,
                output_bytes=hidden_bytes,
            )
        )
    return tuple(stages)
