"""What each rank of a run holds: states that ZeRO shards, and saved activations."""

from __future__ import annotations

from collections.abc import Sequence

from weft.conf.schema import Precision, WeftConfig
from weft.pipeline.costs import CostModel
from weft.pipeline.placement import Placement
from weft.pipeline.states import MASTER_BYTES, OPTIMIZER_BYTES, USABLE, ZeroMemory, zero_memory


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
