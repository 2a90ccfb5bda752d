"""The cost model: seconds and bytes of each virtual stage and each link."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    A transfer occupies the link for ``bytes * 8 / bandwidth_bps`` seconds, and arrives
    ``latency_s`` after it has left. Transfers over one ``resource`` queue behind each other.
    """

    latency_s: float = 0.0
    """One-way delay in seconds."""
    bandwidth_bps: float = float("inf")
    """Bits per second of all streams together."""
    streams: int = 1
    """TCP connections; a fact for people and for the channel, already in ``bandwidth_bps``."""
    sharing: int = 1
    """Pipelines of the DP-cell whose uplinks carry one transfer together (Atlas 4.4)."""

    def occupancy_s(self, num_bytes: float) -> float:
        """Seconds for which ``num_bytes`` occupy the link."""
        return num_bytes * 8 / (self.bandwidth_bps * self.sharing)


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

    def link(self, from_site: int, to_site: int) -> LinkCost:
        """The link from a rank of one site to a rank of another, or of the same."""
        if from_site == to_site:
            return self.local
        return dict(self.wan_links).get((from_site, to_site), self.wan)
