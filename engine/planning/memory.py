"""What each rank of a run holds: states that ZeRO shards, and saved activations."""

from __future__ import annotations

from collections.abc import Sequence

from weft.conf.schema import Precision, WeftConfig
from weft.pipeline.action import Op
from weft.pipeline.cell import pipeline_of
from weft.pipeline.costs import CostModel
from weft.pipeline.memory import held_along
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.states import MASTER_BYTES, OPTIMIZER_BYTES, USABLE, RankMemory, ZeroMemory, zero_memory


def memory_checkpoint_bytes(parameters: int, ranks: int) -> float:
    """Bytes of host memory that one memory checkpoint of a rank takes: fp32 weights and Adam's moments.

    The ranks of a stage share its weights out, by ZeRO or because they are on one host; at stage 0 each
    further host with a replica holds all of them.

    Args:
        parameters: of the rank's stages, as a whole.
        ranks: of a stage.
    """
    return parameters / ranks * (MASTER_BYTES[Precision.bf16] + OPTIMIZER_BYTES)


def rank_states(
    config: WeftConfig,
    placement: Placement,
    parameters: Sequence[int],
    *,
    replicas: int,
    largest_block: int,
    shares: Sequence[float] | None = None,
) -> list[ZeroMemory]:
    """What the states of each pipeline rank take; see `zero_memory`.

    Args:
        parameters: trained weights that a rank holds of each virtual stage.
        replicas: ranks that hold the same parts of matrices.
        shares: of each virtual stage, weights of a rank's shard; None: 1 / ``replicas`` of ``parameters``.
    """
    return [
        zero_memory(
            sum(parameters[stage] for stage in held),
            config.zero,
            config.train.precision,
            replicas,
            largest_block=largest_block,
            microbatches=config.pipeline.microbatches,
            share=None if shares is None else sum(shares[stage] for stage in held),
        )
        for held in placement.rank_stages
    ]


def rank_memory(
    config: WeftConfig,
    cell: Schedule,
    costs: CostModel,
    states: Sequence[ZeroMemory],
    parameters: Sequence[int],
    working: Sequence[float],
    stepping: Sequence[float],
) -> tuple[RankMemory, ...]:
    """What each pipeline rank of a cell's first pipeline holds along its row.

    Args:
        cell: lowered.
        costs: of one pipeline.
        states: of each rank.
        parameters: trained weights of each virtual stage.
        working: what a backward of each virtual stage takes besides what is saved.
        stepping: what the optimiser of each pipeline rank takes besides its state.
    """
    single = pipeline_of(cell, 0)
    found = []
    for rank, (row, state) in enumerate(zip(single.rows, states, strict=True)):
        held = single.placement.rank_stages[rank]
        saved = [entry.num_bytes for entry in held_along(row, costs)]
        used = [
            num_bytes + max((working[action.stage] for action in slot if action.op in (Op.B, Op.I)), default=0.0)
            for slot, num_bytes in zip(row, saved, strict=True)
        ]
        reducing = [
            num_bytes + state.buffers * parameters[slot[0].stage] / max(parameters[stage] for stage in held)
            for slot, num_bytes in zip(row, saved, strict=True)
            if slot[0].op is Op.REDUCE_GRAD
        ]
        activations, most = max(saved, default=0.0), max(used, default=0.0)
        beside = state.buffers if config.zero.stage == 3 else max(0.0, max(reducing, default=0.0) - most)
        found.append(RankMemory(state, activations, most - activations, beside, stepping[rank]))
    return tuple(found)


def activation_memory(
    config: WeftConfig, costs: CostModel, placement: Placement, states: Sequence[ZeroMemory], available: float
) -> float:
    """Bytes that are left for saved activations on the fullest rank: the M of Centauri's equation 2.

    That is ``pipeline.memory_cap_bytes``, if it is set; or what the states leave of the device,
    and at least one micro-batch in as many stages as a rank holds.

    Args:
        states: of each pipeline rank.
        available: memory of a rank's device, see `device_bytes`.
    """
    if config.pipeline.memory_cap_bytes:
        return float(config.pipeline.memory_cap_bytes)
    taken = max(state.total for state in states)
    most = max(cost.activation_bytes for cost in costs.stages)
    return max(USABLE * available - taken, most * max(map(len, placement.rank_stages)))
