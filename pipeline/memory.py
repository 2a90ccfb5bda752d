"""Memory of a rank: weights, gradients, optimiser state (ZeRO, Rajbhandari et al. 2020), saved activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from weft.conf.schema import OptimizerConfig, OptimizerKind, OptimizerState, Precision, ZeroConfig
from weft.pipeline.action import COMPUTE, HOST_COPIES, Op, Slot
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.schedule import Schedule

WEIGHT_BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp16: 2}
"""Bytes of a weight, and of an activation's element."""
MASTER_BYTES = {Precision.fp32: 0, Precision.bf16: 4, Precision.fp16: 4}
"""Bytes of the fp32 copy of a weight that low precision keeps."""
GRADIENT_BYTES = 4
"""Bytes of an added-up gradient."""
OPTIMIZER_BYTES = 8
"""Bytes of optimiser state per weight of AdamW and LAMB: two fp32 moments."""
ROOT_BYTES = 4
"""Bytes of a root of a second moment, or of an update."""
NEWTON_SCHULZ_COPIES = 5
"""fp32 copies of a square matrix that Newton-Schulz iterations need at most: update, iterate and three products."""
BATCH_ELEMENTS = 2**16
"""Elements of small matrices that Newton-Schulz iterations take together, because launches take most of their time."""
ALIGNMENT = 8
"""Shard sizes are multiples of this number of elements, so that fast kernels and transports apply."""
USABLE = 0.8
"""Share of a device's memory that a plan fills; the rest is the library's, the allocator's and an estimate's error."""


BF16_COPIES = 3
"""fp32 copies of a parameter that AdamW with bf16 moments needs to step it: moments and a root."""
INT8_BLOCK = 256
"""Elements of a moment of 8 bits that share a scale, as in bitsandbytes."""
INT8_BYTES = 2 * (1 + 4 / INT8_BLOCK)
"""Bytes of two moments of 8 bits with their scales."""
INT8_COPIES = 5
"""fp32 copies of a parameter that bitsandbytes needs to step it on a CPU: moments, gradient, and two for the root."""
BATCH_BYTES = 24
"""Bytes of a token of a micro-batch: its id, its label and its mask."""
LEAST_BYTES = 512
"""Bytes that the smallest tensor takes on a GPU."""
NUMBERS = 320
"""Single numbers that a rank keeps in a step, such as losses and parts of a norm."""
LEAST_INT8 = 4096
"""Least elements of a parameter whose moments have 8 bits, as in bitsandbytes."""


def has_int8_state(num_elements: int) -> bool:
    """True if the moments of a parameter of this size have 8 bits under ``optimizer.state=int8``."""
    return num_elements >= LEAST_INT8


def optimizer_bytes(optimizer: OptimizerConfig) -> float:
    """Return the bytes of optimiser state per trained weight; sgd has one moment, or none without momentum.

    Muon has one moment of hidden matrices, and two of other parameters, which the result assumes. With 8-bit moments
    all parameters are assumed to have them.
    """
    if optimizer.state is OptimizerState.int8:
        return INT8_BYTES
    if optimizer.state is OptimizerState.bf16:
        return OPTIMIZER_BYTES / 2
    if optimizer.kind is OptimizerKind.sgd:
        return OPTIMIZER_BYTES // 2 if optimizer.betas[0] else 0
    return OPTIMIZER_BYTES


def stepping_bytes(optimizer: OptimizerConfig, stepped: float, largest: float, *, together: bool) -> float:
    """Return the bytes that an optimiser's step needs beyond its state.

    AdamW of torch needs the roots of the second moments; on a CPU, where it updates one parameter after the other, two
    copies of one parameter. SGD with weight decay needs a copy of the gradients, in the same way. LAMB needs all
    updates and a root. Muon needs up to `NEWTON_SCHULZ_COPIES` of a matrix or a batch of them, and AdamW's for other
    parameters. With 8-bit moments a CPU needs `INT8_COPIES` of one parameter, with bf16 moments any device needs
    `BF16_COPIES`.

    Args:
        stepped: number of weights that a rank's optimiser updates.
        largest: elements of the largest parameter.
        together: True if all parameters are updated at once, as on a GPU.
    """
    largest = min(stepped, largest)
    if optimizer.state is OptimizerState.int8:
        return 0.0 if together else ROOT_BYTES * INT8_COPIES * largest
    if optimizer.state is OptimizerState.bf16:
        return ROOT_BYTES * BF16_COPIES * largest
    if optimizer.kind is OptimizerKind.lamb:
        return ROOT_BYTES * (stepped + 2 * largest)
    at_once = stepped if together else largest
    if optimizer.kind is OptimizerKind.muon:
        batch = max(largest, min(stepped, BATCH_ELEMENTS))
        return ROOT_BYTES * max(NEWTON_SCHULZ_COPIES * batch, at_once * (1 if together else 2))
    if optimizer.kind is OptimizerKind.sgd:
        return ROOT_BYTES * at_once if optimizer.weight_decay else 0.0
    return ROOT_BYTES * at_once * (1 if together else 2)


@dataclass(frozen=True)
class TrainedWeights:
    """The trained ones among a rank's weights.

    Attributes:
        count: number on the rank.
        share: number in the rank's shard.
        largest_block: number in the largest block.
        state_bytes: bytes of optimiser state per trained weight.
    """

    count: float
    share: float
    largest_block: float
    state_bytes: float = OPTIMIZER_BYTES


@dataclass(frozen=True)
class ZeroMemory:
    """Peak bytes of weights, gradients and optimiser state on one rank."""

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    gathering: float = 0.0
    """Those of the buffers to which ZeRO-3 gathers weights while others are used."""

    @property
    def resident(self) -> float:
        """The bytes that are allocated all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """The sum of all fields."""
        return self.resident + self.buffers


@dataclass(frozen=True)
class RankMemory:
    """Peak bytes on a pipeline rank.

    Attributes:
        zero: bytes of weights, gradients and optimiser state, as sharded.
        activations: bytes of saved activations, of all micro-batches in flight.
        working: temporary bytes of a backward.
        concurrent_buffers: bytes of buffers that exist while most activations do. Other buffers exist only after a
            rank's backwards, while gradients are reduced.
        stepping: temporary bytes of the optimiser's step, or of scores before one, without activations and buffers.
        small: bytes of batches and single numbers. See `small_bytes`.
    """

    zero: ZeroMemory
    activations: float
    working: float = 0.0
    concurrent_buffers: float = 0.0
    stepping: float = 0.0
    small: float = 0.0

    @property
    def resident(self) -> float:
        """The bytes that are allocated all the time."""
        return self.zero.resident + self.small

    @property
    def total(self) -> float:
        """The peak bytes at any time."""
        return self.resident + max(
            self.activations + self.working + self.concurrent_buffers, self.zero.buffers, self.stepping
        )

    def headroom(self, limit: float) -> float:
        """Return the bytes for further activations; negative if a rank does not fit without any."""
        others = self.resident + max(self.zero.buffers, self.stepping)
        if others > limit:
            return limit - others
        return limit - self.resident - self.activations - self.working - self.concurrent_buffers


def small_bytes(tokens: float, tensors: int = 0, *, on_gpu: bool = True) -> float:
    """Return the bytes of a step's micro-batches, of the optimiser's counters, and of single numbers.

    Args:
        tokens: tokens of a step on the rank.
        tensors: number of trained parameters.
        on_gpu: True if `LEAST_BYTES` holds.
    """
    return BATCH_BYTES * tokens + (LEAST_BYTES * (tensors + NUMBERS) if on_gpu else 0)


def whole_weights(outside: float, layer: float, num_layers: int, head: float) -> float:
    """Return the number of weights that are whole at a time at ZeRO-3, while a virtual stage computes.

    Those outside of layers stay all the time. Of layers and the head, two after each other are whole.

    Args:
        head: weights of a head of its own, or 0.
    """
    return outside + sum(sorted([layer] * min(2, num_layers) + [head])[-2:])


def zero_memory(
    parameters: float,
    zero: ZeroConfig,
    precision: Precision,
    replicas: int,
    *,
    largest_block: float,
    microbatches: int,
    share: float | None = None,
    trained: TrainedWeights | None = None,
    whole: float | None = None,
) -> ZeroMemory:
    """Return the memory of ``parameters`` weights on a rank.

    Sharded collectives use a staging buffer, so two buckets are counted: one in flight and one
    being copied. At stage 3 these are one of weights and one of gradients.

    Args:
        trained: the weights that have gradients and optimiser state; None: all, with Adam.
        replicas: number of ranks that hold the same part of each weight.
        share: parameters of a rank's shard, if parameters have different numbers of holders. None: all have
            ``replicas`` holders.
        largest_block: parameters of the largest block. At stages 2 and 3 the gradients of two blocks are whole, if each
            micro-batch is reduced. Parameters so small that they stay whole count if all are.
        whole: parameters that are whole at a time at stage 3. None: two of the largest blocks.
    """
    share = parameters / replicas if share is None else share
    trained = trained or TrainedWeights(parameters, share, largest_block)
    blocks = min(parameters, 2 * largest_block if whole is None else whole) if replicas > 1 else parameters
    weights: float = parameters
    if zero.stage == 3 and replicas > 1:
        persists = zero.param_persistence_threshold > largest_block
        kept = min(parameters, zero.model_persistence_threshold) if persists else 0
        rest = parameters - kept  # of which a rank stores a shard besides those that are whole
        weights = kept + share * rest / max(1, parameters) + min(rest, blocks)
    limit = min(zero.reduce_bucket_size, zero.allgather_bucket_size)
    gradients: float = trained.count
    if zero.stage >= 2 and replicas > 1:
        gradients = _reduced_gradients(trained, zero, microbatches, limit)
    stepped = trained.share if zero.stage else trained.count
    buffers, gathering = 2 * min(trained.count, limit) * GRADIENT_BYTES, 0.0
    if zero.stage == 3:  # frozen weights are gathered, too
        gathering = min(parameters, limit, largest_block) * WEIGHT_BYTES[precision]
        buffers = gathering + min(trained.count, limit, trained.largest_block) * GRADIENT_BYTES
    communicates = zero.stage > 0 and replicas > 1
    return ZeroMemory(
        weights=weights * WEIGHT_BYTES[precision],
        gradients=gradients * GRADIENT_BYTES,
        optimizer=stepped * (trained.state_bytes + MASTER_BYTES[precision]),
        buffers=buffers if communicates else 0.0,
        gathering=gathering if communicates else 0.0,
    )


def _reduced_gradients(trained: TrainedWeights, zero: ZeroConfig, microbatches: int, bucket: int) -> float:
    """Return the number of gradients at stages 2 and 3: whole ones, and shards of sums.

    A sum is added to the shard when the next reduction begins.
    """
    every = zero.reduce_every or microbatches
    sums = -(-microbatches // every) - 1
    if every > 1:
        return trained.count + trained.share * min(2, sums)
    blocks = 2 * trained.largest_block
    if zero.stage == 3:
        return trained.share + max(min(trained.count, blocks), trained.share * min(1, sums))
    whole = min(trained.count, max(blocks, bucket))
    return whole + trained.share * min(2, sums) if sums else min(trained.count, whole + trained.share)


class Held(NamedTuple):
    """The peak memory of a rank while one slot runs."""

    num_bytes: float
    num_chunks: int
    """Live chunk activations: forwards whose input gradient has not been computed yet."""


def peak_bytes(schedule: Schedule, costs: CostModel) -> float:
    """Return the peak bytes of saved activations on any rank."""
    return max((held.num_bytes for row in schedule.rows for held in held_along(row, costs)), default=0.0)


def held_along(row: Iterable[Slot], costs: CostModel) -> Iterator[Held]:
    """Yield the peak memory of a rank during each slot of its row.

    A strand pair with a segment plan and a full backward saves and frees layer by layer. Any other slot
    saves when it starts and frees when it has finished; in a pair, both halves do so together.
    """
    saved = {(op, stage): saved_bytes(cost, op) for stage, cost in enumerate(costs.stages) for op in COMPUTE}
    freed = {(op, stage): freed_bytes(cost, op) for stage, cost in enumerate(costs.stages) for op in COMPUTE}
    num_bytes, num_chunks = 0.0, 0
    for slot in row:
        if slot[0].op not in COMPUTE:
            moved = costs.offload_bytes(slot[0].stage) if slot[0].op in HOST_COPIES else 0.0
            num_bytes += moved if slot[0].op is Op.RELOAD else 0.0
            yield Held(num_bytes, num_chunks)
            num_bytes -= moved if slot[0].op is Op.OFFLOAD else 0.0
            continue
        before = num_bytes
        for op, stage, _ in slot:
            num_bytes += saved[op, stage]
            num_chunks += op is Op.F
        yield Held(before + _paired_bytes(slot, costs) if _is_planned(slot, costs) else num_bytes, num_chunks)
        for op, stage, _ in slot:
            num_bytes -= freed[op, stage]
            num_chunks -= op is Op.B or op is Op.I


def _is_planned(slot: Slot, costs: CostModel) -> bool:
    return costs.pairs is not None and len(slot) == 2 and slot[1].op is Op.B


def _paired_bytes(slot: Slot, costs: CostModel) -> float:
    """Return the peak bytes that a pair adds to those saved before it."""
    (_, forward, _), (_, backward, _) = slot
    assert costs.pairs is not None
    saved, freed = (costs.stages[stage].activation_bytes for stage in (forward, backward))
    return costs.pairs.held(forward, backward, saved, freed)


def saved_bytes(cost: StageCost, op: Op) -> float:
    """Return the bytes that ``op`` saves when it starts: activations, or the inputs of the weight gradient."""
    if op is Op.F:
        return cost.activation_bytes
    return cost.weight_saved_bytes if op is Op.I else 0.0


def freed_bytes(cost: StageCost, op: Op) -> float:
    """Return the bytes that ``op`` frees when it ends, which the forward or the input gradient saved."""
    if op is Op.I or op is Op.B:
        return cost.activation_bytes
    return cost.weight_saved_bytes if op is Op.W else 0.0
