"""Lower bounds of a rank's compute time at each site, whichever layers it holds."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from weft.pipeline.planner.cluster import Site
from weft.pipeline.planner.estimates import Estimates, timing_key
from weft.pipeline.planner.layout import Shape


class Speed(NamedTuple):
    """Lower bounds of a rank's seconds at one site.

    Attributes:
        whole_s: seconds of a micro-batch if the rank holds the whole model.
        through_s: the part of ``whole_s`` without weight gradients; ``through_share`` is its share.
        layer_s: seconds of a micro-batch on the fastest layer.
        layer_forward_s: seconds of the forward of the layer with the fastest one.
        layer_through_s: seconds of the forward and input gradient of the layer with the fastest ones.
        after_s: seconds of a micro-batch on what follows the layers; ``after_through_s`` is the part without weight
            gradients.
        gathered_s: seconds in which a rank with the whole model gathers the weights for a micro-batch (ZeRO 3); 0 with
            shared experts.
        ends_s: seconds of a step outside of the pipeline.
    """

    whole_s: float
    through_s: float
    through_share: float
    layer_s: float
    layer_forward_s: float
    layer_through_s: float
    after_s: float
    after_through_s: float
    gathered_s: float = 0.0
    ends_s: float = 0.0


class Speeds:
    """The speed of a rank at each site, by shape.

    Attributes:
        kinds: for each site, the first site with the same GPUs and internal network.
    """

    def __init__(self, estimates: Estimates) -> None:
        self._estimates, self._work, self._sites = estimates, estimates.work, estimates.cluster.sites
        alike = [(site.gpu.name, site.gpus_per_host, site.network_bps) for site in self._sites]
        self.kinds = [alike.index(kind) for kind in alike]
        self._memo = estimates.memo
        self._own = self._memo.of(("speeds", type(estimates).__name__, *estimates.kinds), object)
        self._whole, self._layers = self._work.whole, Counter(self._work.layers)

    def of(self, shape: Shape) -> list[Speed]:
        """Return the speed of a rank at each site."""
        key = self._own, *timing_key(shape)
        if (found := self._memo.get(key)) is None:
            of = {first: self._speed(shape, self._sites[first]) for first in set(self.kinds)}
            if len(of) > 1:
                of = self._comparable(of, shape)
            found = [of[first] for first in self.kinds]
            self._memo.add(key, found)
        return found

    def _comparable(self, speeds: dict[int, Speed], shape: Shape) -> dict[int, Speed]:
        """Return speeds that stay lower bounds when ranks of several kinds divide the model in any way.

        One kind of GPU may be relatively better at some parts than at others, and ZeRO 3 gathers weights while a rank
        computes other parts. So the amount of work is measured in seconds at one kind, and a site's pace is that of the
        part at which it is relatively best.
        """
        work, alone = self._work, shape.changed(zero_stage=1)
        found = [(1, 0, work.before), *((many, 1, layer) for layer, many in self._layers.items())]
        found.append((1, 0, work.after))
        times = {  # by kind: how many there are of each part, and what one costs
            first: [
                (many, self._estimates.stage_seconds(part, held, alone, self._sites[first]))
                for many, held, part in found
            ]
            for first in speeds
        }
        some = next(iter(times.values()))
        one_s = [sum(cost) for _, cost in some]
        whole_s = sum(many * seconds for (many, _), seconds in zip(some, one_s, strict=True))
        parts = list(zip(*times.values(), strict=True))
        through_s = sum(part[0][0] * min(forward_s + input_s for _, (forward_s, input_s, _) in part) for part in parts)
        return {
            first: speed._replace(
                whole_s=whole_s * min(sum(cost) / s for (_, cost), s in zip(times[first], one_s, strict=True) if s),
                through_s=through_s,
                through_share=min((cost[0] + cost[1]) / sum(cost) for _, cost in times[first] if sum(cost)),
            )
            for first, speed in speeds.items()
        }

    def _speed(self, shape: Shape, site: Site) -> Speed:
        estimates = self._estimates
        whole = estimates.stage_seconds(self._whole, len(self._work.layers), shape, site)
        alone = shape.changed(zero_stage=1)  # a layer's share of the weights that ZeRO 3 gathers is not its own
        each = [estimates.stage_seconds(layer, 1, alone, site) for layer in self._layers]
        after = estimates.stage_seconds(self._work.after, 0, alone, site)
        through_s, whole_s = whole[0] + whole[1], sum(whole)
        return Speed(
            whole_s,
            through_s,
            through_s / whole_s,
            min(map(sum, each)),
            min(forward_s for forward_s, _, _ in each),
            min(forward_s + input_s for forward_s, input_s, _ in each),
            sum(after),
            after[0] + after[1],
            2 * estimates.weights_s(self._whole, shape, site) if shape.expert == 1 else 0.0,
        )
