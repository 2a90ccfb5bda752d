"""Predicted memory of each rank: states that ZeRO shards, and saved activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.conf.schema import Precision, WeftConfig
from weft.engine.models.sizes import PartSize
from weft.engine.planning.estimates import rank_size, stage_sizes
from weft.engine.planning.facts import Facts
from weft.engine.stages.cutting.split import StageSplit
from weft.pipeline.action import COMPUTE, Action, Op, Slot
from weft.pipeline.cell import pipeline_of
from weft.pipeline.costs import CostModel
from weft.pipeline.memory import (
    GRADIENT_BYTES,
    MASTER_BYTES,
    USABLE,
    WEIGHT_BYTES,
    RankMemory,
    TrainedWeights,
    ZeroMemory,
    held_along,
    optimizer_bytes,
    whole_weights,
    zero_memory,
)
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.workload import Working

EXACT_BYTES = 4
"""Bytes of a frozen weight in its original type."""


def memory_checkpoint_bytes(size: PartSize, config: WeftConfig, ranks: int) -> float:
    """Return the bytes of a rank's memory checkpoint: trained weights in fp32, their moments, and frozen weights.

    The ranks of a stage divide its weights, by ZeRO or because they are on one host. At stage 0 each further host with
    a replica stores all of them.

    Args:
        size: the weights of the rank's stages, before they are divided.
        ranks: number of ranks of a stage.
    """
    stepped = size.trained * (MASTER_BYTES[Precision.bf16] + optimizer_bytes(config.optimizer))
    weight = WEIGHT_BYTES[config.train.precision]
    frozen = size.parameters - size.trained - (size.held - size.stored(weight))
    return (stepped + frozen * weight) / ranks


def rank_states(config: WeftConfig, facts: Facts, placement: Placement, split: StageSplit) -> list[ZeroMemory]:
    """Return the memory of each pipeline rank's states. See `zero_memory`."""
    found = []
    for held in placement.rank_stages:
        size, lines = rank_size(facts.model, split, held), facts.layout.lines
        weight = WEIGHT_BYTES[config.train.precision]
        stored = size.stored(weight)
        state = zero_memory(
            stored,
            config.zero,
            config.train.precision,
            facts.layout.data_ranks,
            largest_block=facts.model.largest_layer(weight),
            whole=max(_gathered_weights(config, facts, split, stage) for stage in held),
            microbatches=config.pipeline.microbatches,
            share=(size.parameters - size.held + stored) / lines,
            trained=TrainedWeights(
                size.held_trained,
                size.trained / lines,
                facts.model.largest_trained_layer,
                _state_bytes(config, facts, split, held),
            ),
        )
        if facts.padding:
            state = _padded(state, facts.padding / placement.num_ranks, config, facts.layout.lines)
        if facts.keeps_frozen:
            state = replace(state, weights=state.weights + (size.held - size.held_trained) * EXACT_BYTES)
        state = replace(state, weights=state.weights + size.scale_bytes)
        if facts.teacher is not None and placement.num_stages - 1 in held:
            state = replace(state, weights=state.weights + facts.teacher.resident_bytes)
        found.append(state)
    return found


class Gathered(NamedTuple):
    """Weights that a computation of a virtual stage gathers at a time at ZeRO-3."""

    num_bytes: float = 0.0
    is_whole: bool = True
    """True if these are all of the stage's, so that none are gathered while it computes."""


def gathered_weights(config: WeftConfig, facts: Facts, split: StageSplit) -> list[Gathered]:
    """Return what each virtual stage gathers."""
    if config.zero.stage < 3 or facts.layout.data_ranks == 1:
        return [Gathered()] * split.num_stages
    weight = WEIGHT_BYTES[config.train.precision]
    found = []
    for stage, size in enumerate(stage_sizes(facts.model, split)):
        whole = _gathered_weights(config, facts, split, stage)
        found.append(Gathered(weight * whole, size.stored(weight) <= whole))
    return found


def _gathered_weights(config: WeftConfig, facts: Facts, split: StageSplit, stage: int) -> float:
    """Return the number of weights that a computation of a virtual stage gathers at a time at ZeRO-3."""
    model, weight_bytes = facts.model, WEIGHT_BYTES[config.train.precision]
    before, after, tied = (part.stored(weight_bytes) for part in (model.before, model.after, model.tied))
    outside, head = before if stage == 0 else 0.0, 0.0
    if stage == split.num_stages - 1:
        head = 0.0 if tied else after
        outside += after - (tied if stage == 0 else 0.0) if tied else 0.0
    return whole_weights(outside, model.largest_layer(weight_bytes), len(split.layers[stage]), head)


def _padded(state: ZeroMemory, elements: float, config: WeftConfig, lines: int) -> ZeroMemory:
    """Return the memory of a rank whose shard is padded with ``elements``."""
    zero, precision = config.zero, config.train.precision
    reduces_each = (zero.reduce_every or config.pipeline.microbatches) == 1
    return replace(
        state,
        weights=state.weights + elements * WEIGHT_BYTES[precision] * (lines if zero.stage < 3 else 1),
        gradients=state.gradients + elements * GRADIENT_BYTES * (1 if zero.stage >= 2 and reduces_each else lines),
        optimizer=state.optimizer + elements * MASTER_BYTES[precision],
    )


def _state_bytes(config: WeftConfig, facts: Facts, split: StageSplit, held: Sequence[int]) -> float:
    """Return the bytes of optimiser state per trained weight of a rank with these virtual stages."""
    if facts.optimizer_bytes is None:
        return optimizer_bytes(config.optimizer)
    sizes = [facts.model.before, *facts.model.layers, facts.model.after]
    parts = {layer + 1 for stage in held for layer in split.layers[stage]}
    parts |= {0} if 0 in held else set()
    parts |= {len(sizes) - 1} if split.num_stages - 1 in held and not {0, len(sizes) - 1} <= parts else set()
    trained = {part: sizes[part].trained for part in parts}
    stored = sum(facts.optimizer_bytes[part] * count for part, count in trained.items())
    return stored / max(1, sum(trained.values()))


class RankBytes(NamedTuple):
    """Bytes of a pipeline rank that do not depend on its row."""

    state: ZeroMemory
    stepping: float
    """Bytes that the optimiser needs during an update, besides its state."""
    small: float
    """Bytes of batches and single numbers."""


def rank_memory(
    config: WeftConfig,
    cell: Schedule,
    costs: CostModel,
    ranks: Sequence[RankBytes],
    parameters: Sequence[int],
    working: Sequence[Working],
    gathered: Sequence[Gathered],
) -> tuple[RankMemory, ...]:
    """Return the memory of each pipeline rank of a cell's first pipeline along its row.

    Args:
        cell: the lowered schedule of a cell.
        costs: costs of one pipeline.
        ranks: other bytes of each pipeline rank.
        parameters: number of trained weights of each virtual stage.
        working: bytes that the actions of each virtual stage need besides saved activations.
        gathered: weights that each virtual stage gathers.
    """

    def during(action: Action, zero: ZeroMemory, reducers: Collection[Action]) -> float:
        gathers = not gathered[action.stage].is_whole and action.op is not Op.W
        reducing = zero.buffers - zero.gathering if action in reducers else 0.0
        needed = working[action.stage].during(action.op, zero.gathering * gathers + reducing)
        # the bytes along a row have all of it while the input gradient runs
        return needed - (costs.stages[action.stage].weight_saved_bytes if action.op is Op.I else 0.0)

    single = pipeline_of(cell, 0)
    found = []
    for rank, (row, (state, stepping, small)) in enumerate(zip(single.rows, ranks, strict=True)):
        held = single.placement.rank_stages[rank]
        saved = [entry.num_bytes for entry in held_along(row, costs)]
        sent = list(_sent_along(row, costs))
        reducers = _reducing(row, config.zero.reduce_every) if config.zero.stage == 3 else ()
        counted = max(gathered[stage].num_bytes for stage in held)  # among the weights of the state
        used = [
            num_bytes
            + on_its_way
            + max((during(action, state, reducers) for action in slot if action.op in COMPUTE), default=0.0)
            + state.gathering * (slot[0].op is Op.UNSHARD)
            + sum(gathered[stage].num_bytes for stage in {action.stage for action in slot})
            - counted
            for slot, num_bytes, on_its_way in zip(row, saved, sent, strict=True)
        ]
        reducing = [
            num_bytes + state.buffers * parameters[slot[0].stage] / max(1, *(parameters[stage] for stage in held))
            for slot, num_bytes in zip(row, saved, strict=True)
            if slot[0].op is Op.REDUCE_GRAD
        ]
        most = max(used, default=0.0)
        activations = min(most, max(saved, default=0.0))
        beside = 0.0 if state.gathering else max(0.0, max(reducing, default=0.0) - most)
        beside += message_bytes(single.placement, costs, rank)
        found.append(RankMemory(state, activations, most - activations, beside, stepping, small))
    return tuple(found)


def _reducing(row: Iterable[Slot], every: int) -> set[Action]:
    """Return the actions of a row during which gradients are reduced: every so many micro-batches, or 0 once."""
    backwards = defaultdict[int, list[Action]](list)
    for slot in row:
        for action in slot:
            if action.op in (Op.B, Op.W):
                backwards[action.stage].append(action)
    return {action for found in backwards.values() for action in found[:: -(every or len(found))]}


def _sent_along(row: Iterable[Slot], costs: CostModel) -> Iterator[float]:
    """Yield the bytes of outputs that a rank has sent, until its gradient shows that an output has arrived."""
    on_its_way = 0.0
    for slot in row:
        op, stage, _ = slot[0]
        if op in (Op.SEND_F, Op.RECV_B):
            on_its_way += costs.stages[stage].output_bytes * (1 if op is Op.SEND_F else -1)
        yield on_its_way


def message_bytes(placement: Placement, costs: CostModel, rank: int) -> float:
    """Return the bytes of a rank's messages besides outputs on their way: a gradient of each hop, and what it gets."""
    hops = list(enumerate(zip(placement.stage_ranks, placement.stage_ranks[1:], strict=False)))
    ways = [
        (stage, 1 if here == rank else 2) for stage, (here, there) in hops if here != there and rank in (here, there)
    ]
    return sum(number * costs.stages[stage].output_bytes for stage, number in ways)


def activation_memory(
    config: WeftConfig, costs: CostModel, placement: Placement, states: Sequence[ZeroMemory], available: float
) -> float:
    """Return the bytes that are left for saved activations on the fullest rank: the M of Centauri's equation 2.

    That is ``pipeline.memory_cap_bytes`` if it is set, or the device's memory without the states, but at least one
    micro-batch in all stages of a rank.

    Args:
        states: memory of the states of each pipeline rank.
        available: memory of a rank's device, see `device_bytes`.
    """
    if config.pipeline.memory_cap_bytes:
        return float(config.pipeline.memory_cap_bytes)
    taken = max(state.total for state in states)
    most = max(cost.activation_bytes for cost in costs.stages)
    return max(USABLE * available - taken, most * max(map(len, placement.rank_stages)))


WIDEST = 1024
"""Most rows and columns of the matrix that is stepped."""

OptimizerMaker = Callable[[Iterable[dict[str, Any]]], Optimizer]
"""Makes an optimiser of parameter groups."""


def state_bytes(
    given: Optimizer | OptimizerMaker, device: torch.device, shapes: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], float]:
    """Return by shape the bytes of state that an optimiser keeps for each fp32 weight that it steps in this shape.

    Some optimisers store state per row and column, and others have another state for small parameters.

    Args:
        given: an optimiser, of whose class another one is created, or a function of parameter groups.

    Raises:
        Exception: any error of the optimiser.
    """
    most = {1: WIDEST * WIDEST}
    small = {shape: [min(size, most.get(len(shape), WIDEST)) for size in shape] for shape in shapes}
    weights = {shape: nn.Parameter(torch.ones(sizes, device=device)) for shape, sizes in small.items()}
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    groups = [{"params": list(weights.values())}]
    optimizer = type(given)(groups, **given.defaults) if isinstance(given, Optimizer) else given(groups)
    optimizer.step()
    return {s: sum(map(_bytes_of, optimizer.state[w].values())) / max(1, w.numel()) for s, w in weights.items()}


def _bytes_of(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) and value.numel() > 1 else 0
