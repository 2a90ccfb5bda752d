"""The cost model: seconds and bytes of each virtual stage and each link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

from weft.pipeline.action import Op


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One virtual stage, for one micro-batch."""

    forward_s: float
    """Seconds of a forward."""
    input_s: float
    """Seconds of an input-gradient backward."""
    weight_s: float
    """Seconds of a weight-gradient backward; a full backward takes input_s + weight_s."""
    activation_bytes: float
    """Bytes saved by a forward until its input-gradient backward (or full backward) ends."""
    weight_saved_bytes: float = 0.0
    """Bytes kept from the input-gradient backward until the weight-gradient backward ends."""
    output_bytes: float = 0.0
    """Bytes of the activation sent to the next stage, and of the gradient that comes back."""
    reduce_s: float = 0.0
    """Seconds of this stage's gradient reduction over its replicas."""
    unshard_s: float = 0.0
    """Seconds of this stage's weight all-gather."""
    step_s: float = 0.0
    """Seconds of this stage's optimiser step."""
    send_s: float = 0.0
    """Seconds of the rank's own time that starting to send an output or an input gradient takes."""

    @classmethod
    def whole(cls, parts: Sequence[StageCost]) -> StageCost:
        """A stage of these parts, one after the other: the last one's output is sent on."""
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(cls)]
        return cls(**{name: sum(getattr(part, name) for part in parts) for name in names} | parts[-1]._sent())

    def part(self, count: int) -> StageCost:
        """One of ``count`` equal parts; each sends as much as the whole."""
        return replace(self, **{field.name: getattr(self, field.name) / count for field in fields(self)} | self._sent())

    def _sent(self) -> dict[str, float]:
        return {"output_bytes": self.output_bytes, "send_s": self.send_s}

    def seconds(self, op: Op) -> float:
        """Seconds for which ``op`` holds its rank; what a transfer takes besides is the link's business."""
        match op:
            case Op.F:
                return self.forward_s
            case Op.I:
                return self.input_s
            case Op.W:
                return self.weight_s
            case Op.B:
                return self.input_s + self.weight_s
            case Op.REDUCE_GRAD:
                return self.reduce_s
            case Op.UNSHARD:
                return self.unshard_s
            case Op.STEP:
                return self.step_s
            case Op.SEND_F | Op.SEND_B:
                return self.send_s
        return 0.0


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The way from one rank to another.

    A transfer occupies the sender's uplink for ``bytes * 8 / bandwidth_bps`` seconds. Where a
    pair of nodes gets less than that (Atlas section 4.1), it occupies the way between the two
    for ``bytes * 8 / pair_bps``, while the uplink serves other pairs. It arrives ``latency_s``
    after it has left.
    """

    latency_s: float = 0.0
    """One-way delay in seconds."""
    bandwidth_bps: float = float("inf")
    """Bits per second of all streams together: what a node's uplink carries."""
    pair_bps: float = float("inf")
    """Most bits per second between one pair of nodes, whatever else their uplinks could carry."""
    streams: int = 1
    """TCP connections; a fact for people and for the channel, already in ``bandwidth_bps``."""
    sharing: int = 1
    """Pipelines of the DP-cell whose uplinks carry one transfer together (Atlas 4.4)."""

    def occupancy_s(self, num_bytes: float) -> float:
        """Seconds for which ``num_bytes`` occupy the uplink."""
        return num_bytes * 8 / (self.bandwidth_bps * self.sharing)

    def transit_s(self, num_bytes: float) -> float:
        """Seconds until the last of ``num_bytes`` has left: as slow as the uplink or the pair."""
        return num_bytes * 8 / (min(self.bandwidth_bps, self.pair_bps) * self.sharing)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of every virtual stage, and of the links inside a site and between sites.

    Attributes:
        stages: one entry per virtual stage.
        local: a link between two ranks of one site.
        wan: a link between two sites, unless ``wan_links`` names that pair.
        wan_links: particular links by (from site, to site).
        pair_scale: duration of a strand pair over the sum of its halves (1 = no gain from
            interleaving).
    """

    stages: tuple[StageCost, ...]
    local: LinkCost = LinkCost()
    wan: LinkCost = LinkCost()
    wan_links: tuple[tuple[tuple[int, int], LinkCost], ...] = ()
    pair_scale: float = 1.0

    @classmethod
    def unit(cls, num_stages: int, *, local: LinkCost | None = None, wan: LinkCost | None = None) -> CostModel:
        """F = I = W = 1 second and 1 byte of activations for every stage; links free."""
        one = StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=1.0, output_bytes=1.0)
        return cls(stages=(one,) * num_stages, local=local or LinkCost(), wan=wan or LinkCost())

    def for_cell(self, pipelines: int) -> CostModel:
        """Costs of ``pipelines`` side by side, whose WAN uplinks carry each transfer together."""
        shared = tuple((pair, replace(link, sharing=pipelines)) for pair, link in self.wan_links)
        return replace(self, stages=self.stages * pipelines, wan=replace(self.wan, sharing=pipelines), wan_links=shared)

    def cut(self, num_stages: int) -> CostModel:
        """Costs of so many virtual stages, where ``stages`` are the model's layers or coarser pieces.

        Whole pieces are shared out evenly, as layers are: what is left over goes to the middle.
        Fewer pieces than stages are cut into equal parts.

        Raises:
            ValueError: they cannot be.
        """
        pieces = len(self.stages)
        if pieces < num_stages and num_stages % pieces:
            raise ValueError(
                f"costs of {pieces} pieces of the model cannot be cut into {num_stages} virtual stages; give costs per "
                f"layer (`layers:`), of at least {num_stages} layers"
            )
        if pieces < num_stages:
            parts = num_stages // pieces
            return replace(self, stages=tuple(stage.part(parts) for stage in self.stages for _ in range(parts)))
        bounds = [0, *accumulate(even_counts(pieces, num_stages))]
        stages = tuple(StageCost.whole(self.stages[start:stop]) for start, stop in pairwise(bounds))
        return replace(self, stages=stages)

    def link(self, from_site: int, to_site: int) -> LinkCost:
        """The link from a rank of one site to a rank of another, or of the same."""
        if from_site == to_site:
            return self.local
        return dict(self.wan_links).get((from_site, to_site), self.wan)


def even_counts(total: int, parts: int) -> list[int]:
    """``total`` shared out evenly; what is left over goes to the middle, away from embedding and head."""
    each, extra = divmod(total, parts)
    start = (parts - extra) // 2
    return [each + (start <= part < start + extra) for part in range(parts)]
