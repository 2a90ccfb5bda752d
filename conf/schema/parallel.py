"""Settings of pipelines, parallelism inside of layers, and ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from weft.conf.schedule_kinds import PlacementKind, ScheduleKind
from weft.conf.schema.ranges import COUNT, NATURAL, Range
from weft.conf.schema.training import Precision

MOST_JITTER_SAMPLES = 1024


class SplitKind(Enum):
    """The division of layers among virtual stages."""

    even = "even"
    cost = "cost"


class Partition(Enum):
    """Dimensions along which collectives may be partitioned; each includes the previous ones (Centauri section 3.1)."""

    none = "none"
    primitive = "primitive"
    group = "group"
    workload = "workload"


class PairChoice(Enum):
    """The strand pairs that run interleaved (DHelix section 4.2)."""

    auto = "auto"
    always = "always"
    never = "never"


class Recompute(Enum):
    """The part of a virtual stage's forward that runs again before its backward, so that less is saved."""

    none = "none"
    elementwise = "elementwise"
    attention = "attention"
    layers = "layers"
    auto = "auto"


@dataclass(kw_only=True)
class PipelineConfig:
    """The placement of the model on ranks, and their schedule."""

    stages: Annotated[int, COUNT] = 1
    """Number of pipeline ranks; the number of replicas is world size / (stages x context x tensor)."""
    schedule: ScheduleKind = ScheduleKind["1f1b"]
    """Schedule generator; `file` reads `schedule_file`."""
    schedule_file: str = ""
    """Schedule file for schedule=file: Weft's JSON or torch's compute-only CSV."""
    costs_file: str = ""
    """Cost model of the virtual stages, in the format of `weft simulate --costs`; empty estimates costs.
    A run with `train.timeline` writes its measured costs as `costs.yaml`. Links come from `cluster`."""
    placement: PlacementKind = PlacementKind.any
    """straight: one chunk per rank; interleaved: several, round-robin; fold: two, down and back up;
    site_fold, site_interleaved: the same within each site. any: what the schedule needs, or for
    schedule=auto the placement with the shortest predicted step."""
    chunks_per_rank: Annotated[int, COUNT] = 2
    """Virtual stages per rank in an interleaved placement."""
    launch_together: Annotated[int, NATURAL] = 0
    """Micro-batches of a chunk that the interleaved schedule launches in a row: more overlap more of
    ZeRO's collectives but hold more activations. 0 takes the number that `weft plan` prints, as far
    as memory allows, if collectives have been measured, and otherwise one per rank."""
    microbatches: Annotated[int, NATURAL] = 4
    """Micro-batches per step and replica; 0 derives it from `train.batch_size`, which is also done if
    only that is given on the command line."""
    split: SplitKind = SplitKind.even
    """How to divide layers among stages: even counts, or cost, which also weighs embedding and head."""
    layers: list[int] = field(default_factory=list)
    """Number of layers of each virtual stage; empty lets `split` decide."""
    memory_cap_bytes: Annotated[int, NATURAL] = 0
    """Limit on the activation memory that a schedule may hold on any rank; 0 means no cap, or for
    schedule=auto one that it sets itself and that the dry run prints."""
    recompute: Recompute = Recompute.none
    """Values that backwards compute again to save activation memory: none, elementwise (norms, activations and other
    cheap operations of each layer, but no products, attention kernels or random draws: selective checkpointing),
    attention (modules of attention), layers (all of each layer: gradient checkpointing), or auto, which chooses for
    each virtual stage what costs least time under `memory_cap_bytes`, or in the device's memory. The dry run prints
    the choice."""
    offload: bool = False
    """Copy activations to the host's memory and back where the schedule does not fit under `memory_cap_bytes`
    otherwise."""
    offload_mbps: Annotated[float, NATURAL] = 0
    """Bandwidth of these copies in megabits per second in each direction. 0 takes this machine's. On CPUs, copies are
    as slow as this."""
    search_seconds: Annotated[float, NATURAL] = 2.0
    """Nominal time for schedule=auto to improve its first schedule."""
    jitter_samples: Annotated[int, Range(0, MOST_JITTER_SAMPLES)] = 0
    """Steps with sampled durations whose mean schedule=auto minimizes, by the jitter in `costs_file`; 16 is enough for
    most. 0 plans with the median durations. Placements are compared by that mean, too."""
    pairs: PairChoice = PairChoice.auto
    """Which strand pairs of a schedule run interleaved, where ranks share layers: auto, those that are
    shorter so by their segment plans; always, all of them; never, none. The halves of others run one after
    the other, backward first."""
    receive_ahead: Annotated[int, COUNT] = 4
    """Number of receives to post in advance, per neighbour and direction."""
    adapt: bool = False
    """Plan the schedule again while training, or move micro-batches from slow replicas to others, when the measured
    costs of stages or of links between sites have left the plan for `adapt_steps` steps. A supervised run also moves
    layers, or lets a spare replace a slow host, by a restart from its next checkpoint. It needs schedule=auto, and
    keeps the memory cap of the first schedule."""
    adapt_steps: Annotated[int, COUNT] = 30
    """Consecutive steps that must deviate before the schedule is planned again. Choose more than a disturbance
    that passes by itself takes; after each plan the next one waits twice as long."""
    debug: bool = False
    """Check before each action that its dependencies have finished."""


class ContextExchange(Enum):
    """The exchange among ranks that share sequences, by which each query meets all keys before it."""

    auto = "auto"
    gather = "gather"
    all_to_all = "all_to_all"
    ring = "ring"


@dataclass(kw_only=True)
class ParallelConfig:
    """Parallelism inside of layers; a replica has stages x context x tensor ranks."""

    tensor: Annotated[int, COUNT] = 1
    """Ranks that share each layer's matrices, the embedding and the head, and between blocks the
    sequence: neighbouring ranks of one host."""
    context: Annotated[int, COUNT] = 1
    """Ranks that share each sequence; they are data ranks of ZeRO, too."""
    context_exchange: ContextExchange = ContextExchange.auto
    """How attention sees whole sequences: gather collects keys and values on every rank; all_to_all gives
    each rank some heads of the whole sequence, and needs heads that `context` divides; ring passes parts of
    keys and values from rank to rank while attention to others is computed, and keeps a rank's own only. auto
    takes what costs least time of what fits in memory, as `python -m benchmarks collectives` has measured, or moves
    the fewest bytes."""
    expert: Annotated[int, COUNT] = 1
    """Ranks that share the experts of each layer, each with tokens of its own; a divisor of replicas x context
    x tensor, and a multiple of tensor."""
    tensor_across_hosts: bool = False
    """Let ranks of different hosts share matrices: four collectives per layer and micro-batch then use
    the network between them."""


@dataclass(kw_only=True)
class ZeroConfig:
    """Sharding of optimiser state, gradients and weights over replicas."""

    stage: Annotated[int, Range(0, 3)] = 0
    """Sharded state: 0: nothing; 1: optimiser state; 2: also gradients; 3: also weights."""
    overlap_comm: bool = True
    """Overlap gradient reductions and weight all-gathers with compute; off waits for each of them."""
    reduce_bucket_size: Annotated[int, COUNT] = 50_000_000
    """Largest number of elements per gradient reduction."""
    allgather_bucket_size: Annotated[int, COUNT] = 50_000_000
    """Largest number of elements per weight all-gather."""
    param_persistence_threshold: Annotated[int, NATURAL] = 0
    """Stage 3 keeps parameters with fewer elements than this unsharded, in order of use, up to
    `model_persistence_threshold` elements."""
    model_persistence_threshold: Annotated[int, NATURAL] = 9_223_372_036_854_775_807
    """Largest number of elements per rank that `param_persistence_threshold` may keep unsharded."""
    communication_data_type: Precision = Precision.fp32
    """Number format in which gradients are sent; they are accumulated in fp32 before and after."""
    reduce_every: Annotated[int, NATURAL] = 0
    """Micro-batches of a stage to accumulate before stages 2 and 3 reduce-scatter the gradients. 0
    accumulates the whole step and communicates least; 1 takes the least memory."""
    partition: Partition = Partition.workload
    """Dimensions along which to partition reductions and all-gathers if that is faster: none,
    primitive, group (and primitive), workload (all three). Costs are measured once and kept in
    data.cache_dir."""
