"""Emulated cases: strands of real architectures with a chosen share of communication."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

from benchmarks.overlap.chunked import chunked_s
from benchmarks.overlap.orders import backward_then_forward, round_robin
from benchmarks.overlap.recurrence import Pairing, pair_operators
from weft.engine.strands.facts import HANDOVER_S
from weft.engine.strands.tracing import trace_strands
from weft.pipeline.hardware import EFFICIENCY, GPU_KINDS
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.plan import SegmentPlan
from weft.pipeline.strands.search import search
from weft.pipeline.strands.segments import LinkScope, Segment, StageStrands, Strand, StrandPair
from weft.pipeline.strands.work import Speed, Traffic

TOKENS = 8192
_LLAMA = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=1, num_attention_heads=64, num_key_value_heads=8
)
"""Layers of DHelix's Llama-25B (table 3)."""
_MIXTRAL = MixtralConfig(
    hidden_size=4096, intermediate_size=6400, num_hidden_layers=1, num_local_experts=16, num_experts_per_tok=2
)
"""Layers of about DHelix's Phi-31B (table 5)."""
_MODELS: dict[str, PreTrainedConfig] = {"tensor": _LLAMA, "context": _LLAMA, "expert": _MIXTRAL}
_LINKS = {"tensor": LinkScope.inside_host, "context": LinkScope.between_hosts, "expert": LinkScope.between_hosts}
_GPU = GPU_KINDS["A800"]
SHARES = (0.10, 0.20, 0.31, 0.45)
"""Share of a pair without overlap that collectives take; 0.31 is DHelix's Llama on A800s (section 2)."""
_LATENCY_BYTES = 1e6
"""Bytes that a link carries in a collective's latency."""


@dataclass(frozen=True)
class OverlapCase:
    """A strand pair to interleave.

    Attributes:
        axis: the axis along which ranks share the layers.
        members: number of ranks of the axis.
        share: share of collectives in the pair's time without overlap.
        factor: overlap effectiveness of all pairs of operators.
        layers: number of layers of the stage.
        seconds: duration of the pair without overlap.
    """

    axis: str
    members: int
    share: float
    factor: float = 1.0
    layers: int = 2
    seconds: float = 0.8

    def __str__(self) -> str:
        """Return a title such as ``tensor 2, 31 %``."""
        return f"{self.axis} {self.members}, {self.share:.0%}" + (f", OEF {self.factor:g}" if self.factor < 1 else "")

    @property
    def table(self) -> OverlapTable:
        """The OEF of all pairs of operators."""
        return OverlapTable(default=self.factor, links=self.factor)

    def stage(self) -> StageStrands:
        """A stage from the middle of a pipeline."""
        work = trace_strands(_MODELS[self.axis], {self.axis: self.members}, microbatch_size=1, sequence_length=TOKENS)
        speed = Speed(EFFICIENCY * _GPU.flops_per_s, _GPU.bytes_per_s)

        def bytes_of(traffic: Traffic) -> float:
            return _LATENCY_BYTES + traffic.num_bytes

        stage = work.timed(speed, bytes_of, lambda axis: _LINKS[axis])([0] * self.layers, False, False)
        pair = stage.whole
        compute = self.seconds * (1 - self.share) / pair.compute_s
        comm = self.seconds * self.share / pair.comm_s
        return StageStrands(tuple((_scaled(part, compute, comm), count) for part, count in stage.runs))


@dataclass(frozen=True)
class Orders:
    """The orders of a pair's segments that are compared.

    Attributes:
        plans: segment plans by name.
        paired: the paper's order, with a barrier after each pair of operators.
    """

    plans: dict[str, SegmentPlan]
    paired: Pairing

    @classmethod
    def of(cls, pair: StrandPair, table: OverlapTable) -> Orders:
        """Return the orders of a pair."""
        plans = {
            B_THEN_F: backward_then_forward(pair),
            ROUND_ROBIN: round_robin(pair),
            OURS: search(pair, table, handover_s=HANDOVER_S),
        }
        return cls(plans, pair_operators(pair, table))

    def predicted_s(self, pair: StrandPair, table: OverlapTable) -> dict[str, float]:
        """Return the simulated seconds of each order, as if the host ran ahead."""
        seconds = {name: plan.seconds(pair, table) for name, plan in self.plans.items()}
        alone = {SEQUENTIAL: pair.sequential_s, COMPUTE: pair.compute_s}
        found = alone | seconds | {CHUNKS: chunked_s(pair, table), PAIRS: self.paired.seconds}
        return {name: found[name] for name in NAMES}


COMPUTE, SEQUENTIAL = "compute alone", "sequential"
B_THEN_F, CHUNKS = "B, then F (Megatron-LM)", "chunks (MegaScale)"
ROUND_ROBIN, PAIRS, OURS = "round robin (Wavelet+)", "pairs (DHelix)", "Weft"
NAMES = (COMPUTE, SEQUENTIAL, B_THEN_F, CHUNKS, ROUND_ROBIN, PAIRS, OURS)


def _scaled(pair: StrandPair, compute: float, comm: float) -> StrandPair:
    """Return the pair with compute and collectives scaled by factors."""

    def segment(given: Segment) -> Segment:
        return replace(
            given,
            compute_s=given.compute_s * compute,
            comm_s=given.comm_s * comm,
            leading_s=given.leading_s * compute,
            trailing_s=given.trailing_s * compute,
        )

    forward, backward = (Strand(tuple(map(segment, strand.segments))) for strand in (pair.forward, pair.backward))
    weights = tuple(replace(weight, compute_s=weight.compute_s * compute) for weight in pair.weights)
    return StrandPair(forward, backward, weights)
