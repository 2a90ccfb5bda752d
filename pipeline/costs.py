"""The cost model: seconds and bytes of every virtual stage and link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Protocol

from weft.pipeline.action import Action, Op

SECONDS_OF = {
    Op.F: "forward_s",
    Op.I: "input_s",
    Op.W: "weight_s",
    Op.REDUCE_GRAD: "reduce_s",
    Op.UNSHARD: "unshard_s",
    Op.STEP: "step_s",
    Op.SEND_F: "send_s",
    Op.SEND_B: "send_s",
}
"""The field of `StageCost` with the seconds of an operation; a full backward takes those of its halves."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Costs of one virtual stage for one micro-batch."""

    forward_s: float
    """Seconds of a forward."""
    input_s: float
    """Seconds of an input-gradient backward."""
    weight_s: float
    """Seconds of a weight-gradient backward; a full backward takes input_s + weight_s."""
    activation_bytes: float
    """Activation memory: bytes that a forward saves until its input-gradient (or full) backward ends."""
    weight_saved_bytes: float = 0.0
    """Bytes kept from the input-gradient backward until the weight-gradient backward ends."""
    output_bytes: float = 0.0
    """Bytes of the activation sent to the next stage, and of the gradient sent back."""
    reduce_s: float = 0.0
    """Seconds of this stage's gradient reduction over its replicas."""
    unshard_s: float = 0.0
    """Seconds of this stage's weight all-gather."""
    step_s: float = 0.0
    """Seconds of this stage's optimiser step."""
    send_s: float = 0.0
    """Seconds for which starting a send occupies the rank."""
    jitter: float = 0.0
    """Standard deviation of the logarithms of a computation's durations, whose median is the seconds above."""

    @classmethod
    def whole(cls, parts: Sequence[StageCost]) -> StageCost:
        """Return the cost of running ``parts`` one after the other; only the last part's output is sent on."""
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(cls)]
        sums = {name: sum(getattr(part, name) for part in parts) for name in names} | parts[-1]._sent()
        return cls(**sums | {"jitter": max(part.jitter for part in parts)})

    def part(self, count: int) -> StageCost:
        """Return the cost of one of ``count`` equal parts; each part sends as many bytes as the whole stage."""
        return replace(self, **{field.name: getattr(self, field.name) / count for field in fields(self)} | self._sent())

    def _sent(self) -> dict[str, float]:
        return {"output_bytes": self.output_bytes, "send_s": self.send_s, "jitter": self.jitter}

    @property
    def compute_s(self) -> float:
        """Seconds of all computations of a micro-batch."""
        return self.forward_s + self.input_s + self.weight_s

    def seconds(self, op: Op) -> float:
        """Return the seconds for which ``op`` occupies its rank; `LinkCost` has the time on the link."""
        if op is Op.B:
            return self.input_s + self.weight_s
        return getattr(self, SECONDS_OF[op]) if op in SECONDS_OF else 0.0


class PairCosts(Protocol):
    """Durations of strand pairs, by the virtual stages of the forward and the backward. See `weft.pipeline.strands`."""

    def scale(self, forward: int, backward: int, *, weights: bool = True) -> float:
        """Return a pair's duration relative to that of its two halves, run one after the other.

        Args:
            forward, backward: numbers of the stages.
            weights: True if the backward's weight gradients belong to the pair.
        """

    def held(self, forward: int, backward: int, saved_bytes: float, freed_bytes: float) -> float:
        """Return the peak memory of a pair with a full backward, in bytes beyond what was allocated before the pair.

        Args:
            saved_bytes: bytes saved by the whole forward.
            freed_bytes: bytes freed by the whole backward.
        """

    def for_cell(self, pipelines: int) -> PairCosts:
        """Return the costs of a DP-cell of ``pipelines`` pipelines."""

    def joined(self, bounds: list[int]) -> PairCosts:
        """Return the costs after stages ``bounds[i]`` to ``bounds[i + 1]`` are joined to one stage."""

    def divided(self, parts: int) -> PairCosts:
        """Return the costs with each stage divided into ``parts`` stages of equal layers.

        Raises:
            ValueError: the layers of a stage do not divide.
        """

    def timed(self, stages: Sequence[StageCost]) -> tuple[StageCost, ...]:
        """Return the stages' costs with the seconds of the strands, which include collectives inside of layers."""


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The link from one rank to another.

    A transfer occupies the sender's uplink for ``bytes * 8 / bandwidth_bps`` seconds. If a pair
    of nodes gets less than the uplink's bandwidth (Atlas section 4.1), the transfer occupies the
    link of that pair for ``bytes * 8 / pair_bps`` while the uplink serves other pairs. It arrives
    ``latency_s`` after its last byte has left.
    """

    latency_s: float = 0.0
    """One-way delay in seconds."""
    bandwidth_bps: float = float("inf")
    """Bandwidth of a node's uplink in bits per second, over all streams."""
    pair_bps: float = float("inf")
    """Bandwidth between one pair of nodes in bits per second, where it is less than the uplink's."""
    streams: int = 1
    """TCP connections; for information only, since ``bandwidth_bps`` already counts all of them."""
    sharing: int = 1
    """Pipelines of the DP-cell whose uplinks carry one transfer together (Atlas 4.4)."""
    jitter: float = 0.0
    """Standard deviation of the logarithms of transfers' durations, latency included."""

    def occupancy_s(self, num_bytes: float) -> float:
        """Return the seconds for which sending ``num_bytes`` occupies the uplink."""
        return num_bytes * 8 / (self.bandwidth_bps * self.sharing)

    def transit_s(self, num_bytes: float) -> float:
        """Return the seconds until the last of ``num_bytes`` has left, at the lower of the two bandwidths."""
        return num_bytes * 8 / (min(self.bandwidth_bps, self.pair_bps) * self.sharing)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of every virtual stage, of links inside a site and of links between sites.

    Attributes:
        stages: one entry per virtual stage.
        local: a link between two ranks of one site.
        wan: a link between two sites, unless ``wan_links`` names that pair.
        wan_links: links of particular site pairs, by (from site, to site).
        pairs: the segments of virtual stages, from which strand pairs are planned. With None no
            pair is planned, and interleaving gains nothing.
    """

    stages: tuple[StageCost, ...]
    local: LinkCost = LinkCost()
    wan: LinkCost = LinkCost()
    wan_links: tuple[tuple[tuple[int, int], LinkCost], ...] = ()
    pairs: PairCosts | None = None
    host: LinkCost = LinkCost()
    """Each direction between a device and its host's memory."""

    @classmethod
    def unit(cls, num_stages: int, *, local: LinkCost | None = None, wan: LinkCost | None = None) -> CostModel:
        """Create unit costs: F, I and W take 1 second each, activations 1 byte, and links are free."""
        one = StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=1.0, output_bytes=1.0)
        return cls(stages=(one,) * num_stages, local=local or LinkCost(), wan=wan or LinkCost())

    def require_stages(self, count: int, whose: str = "the placement") -> None:
        """Check that these are the costs of ``count`` virtual stages. Raise ValueError otherwise."""
        if len(self.stages) != count:
            raise ValueError(f"costs.stages: costs of {len(self.stages)} virtual stages, {whose} has {count}")

    def for_cell(self, pipelines: int) -> CostModel:
        """Return the costs of a DP-cell of ``pipelines`` pipelines, which pool their WAN uplinks."""
        shared = tuple((pair, replace(link, sharing=pipelines)) for pair, link in self.wan_links)
        pairs = self.pairs and self.pairs.for_cell(pipelines)
        wan = replace(self.wan, sharing=pipelines)
        return replace(self, stages=self.stages * pipelines, wan=wan, wan_links=shared, pairs=pairs)

    def cut(self, num_stages: int) -> CostModel:
        """Return the costs regrouped into ``num_stages`` virtual stages; here ``stages`` are layers or larger pieces.

        Whole pieces are shared out as evenly as layers are, with the remainder in the middle.
        If there are fewer pieces than stages, each piece is divided into equal parts.

        Raises:
            ValueError: the pieces do not divide into ``num_stages``.
        """
        pieces = len(self.stages)
        if pieces < num_stages and num_stages % pieces:
            raise ValueError(
                f"costs of {pieces} pieces of the model cannot be cut into {num_stages} virtual stages; give costs per "
                f"layer (`layers:`), of at least {num_stages} layers"
            )
        if pieces < num_stages:
            parts = num_stages // pieces
            stages = tuple(stage.part(parts) for stage in self.stages for _ in range(parts))
            return replace(self, stages=stages, pairs=self.pairs and self.pairs.divided(parts))
        bounds = [0, *accumulate(even_counts(pieces, num_stages))]
        stages = tuple(StageCost.whole(self.stages[start:stop]) for start, stop in pairwise(bounds))
        return replace(self, stages=stages, pairs=self.pairs and self.pairs.joined(bounds))

    def offload_bytes(self, stage: int) -> float:
        """Return the bytes that an offload of a stage's activations moves: all but the stage's input."""
        input_bytes = self.stages[stage - 1].output_bytes if stage else 0.0
        return max(0.0, self.stages[stage].activation_bytes - input_bytes)

    def pair_s(self, forward: Action, backward: Action) -> float:
        """Return the seconds of a strand pair by its segment plan; without a plan, the sum of its halves."""
        halves_s = sum(self.stages[action.stage].seconds(action.op) for action in (forward, backward))
        return halves_s * self.pair_scale(forward.stage, backward.stage, backward.op)

    def pair_scale(self, forward: int, backward: int, op: Op) -> float:
        """Return the duration of a pair of these stages divided by the sum of its halves.

        Args:
            op: kind of the backward: B, or I alone.
        """
        return 1.0 if self.pairs is None else self.pairs.scale(forward, backward, weights=op is Op.B)

    def least_pair_scale(self, stages: Iterable[int]) -> float:
        """Return the smallest `pair_scale` among these stages of one rank, or 1 if no pair gains."""
        held = tuple(stages) if self.pairs is not None else ()
        return min((self.pair_scale(f, b, op) for f in held for b in held for op in (Op.B, Op.I)), default=1.0)

    def link(self, from_site: int, to_site: int) -> LinkCost:
        """Return the link between two sites, or inside a site if both are the same."""
        if from_site == to_site:
            return self.local
        return dict(self.wan_links).get((from_site, to_site), self.wan)


def even_counts(total: int, parts: int) -> list[int]:
    """Return ``total`` split into even parts; the remainder goes to the middle, away from embedding and head."""
    each, extra = divmod(total, parts)
    start = (parts - extra) // 2
    return [each + (start <= part < start + extra) for part in range(parts)]
