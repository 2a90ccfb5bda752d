"""Which decoder layers each virtual stage holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from transformers import PreTrainedConfig

from weft.conf.schema import SplitKind
from weft.engine.stages.sizes import model_sizes
from weft.engine.stages.skeleton import num_layers as count_layers
from weft.pipeline.costs import even_counts


@dataclass(frozen=True)
class StageSplit:
    """Decoder layers of each virtual stage, in order.

    The embedding goes with the first stage, the final norm and the head with the last.
    """

    layers: tuple[range, ...]

    def __post_init__(self) -> None:
        assert self.layers and self.layers[0].start == 0
        assert all(a.stop == b.start for a, b in pairwise(self.layers))
        assert all(len(layers) > 0 for layers in self.layers)

    @classmethod
    def of_counts(cls, counts: Sequence[int]) -> StageSplit:
        """The split with ``counts[i]`` layers on stage i."""
        return cls(tuple(range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)))

    @property
    def num_stages(self) -> int:
        """Virtual stages."""
        return len(self.layers)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model."""
        return self.layers[-1].stop


def split_layers(
    hf_config: PreTrainedConfig, num_stages: int, kind: SplitKind, given: Sequence[int] = ()
) -> StageSplit:
    """Share the model's decoder layers out over virtual stages.

    Args:
        hf_config: the Hugging Face config of the model.
        num_stages: virtual stages of the whole pipeline.
        kind: even counts, or balanced by the weights that a token meets (which its FLOPs are
            proportional to), with the embedding and the head weighed in.
        given: layers of each virtual stage, by hand; overrides ``kind``.

    Raises:
        ValueError: more stages than layers, or ``given`` does not fit.
    """
    num_layers = count_layers(hf_config)
    if given:
        return _by_hand(given, num_stages, num_layers)
    if num_stages > num_layers:
        raise ValueError(
            f"pipeline.stages: {num_stages} virtual stages, but the model has {num_layers} layers and every stage "
            "needs one; use fewer stages, or placement=straight (one stage per rank)"
        )
    return _SPLITTERS[kind](hf_config, num_stages)


def _by_hand(given: Sequence[int], num_stages: int, num_layers: int) -> StageSplit:
    shown = ",".join(map(str, given))
    if len(given) != num_stages:
        raise ValueError(
            f"pipeline.layers=[{shown}]: {len(given)} counts for {num_stages} virtual stages; give one per stage"
        )
    if min(given) < 1:
        raise ValueError(f"pipeline.layers=[{shown}]: every virtual stage needs at least one layer")
    if sum(given) != num_layers:
        raise ValueError(
            f"pipeline.layers=[{shown}]: sums to {sum(given)}, but the model has {num_layers} layers; "
            "change the counts so that they add up"
        )
    return StageSplit.of_counts(given)


def _even(hf_config: PreTrainedConfig, num_stages: int) -> StageSplit:
    return StageSplit.of_counts(even_counts(count_layers(hf_config), num_stages))


def _by_cost(hf_config: PreTrainedConfig, num_stages: int) -> StageSplit:
    """The smallest possible cost of the dearest stage; among those, the smallest sum of squares."""
    sizes = model_sizes(hf_config)
    costs = [layer.active for layer in sizes.layers]
    costs[0] += sizes.before.active
    costs[-1] += sizes.after.active
    prefix = [0, *accumulate(costs)]

    @cache
    def best(stage: int, start: int) -> tuple[int, int, tuple[int, ...]]:
        """(dearest, sum of squares, counts) of the stages from ``stage`` on."""
        left = num_stages - stage
        if left == 1:
            cost = prefix[-1] - prefix[start]
            return cost, cost * cost, (len(costs) - start,)
        options = []
        for stop in range(start + 1, len(costs) - left + 2):
            cost = prefix[stop] - prefix[start]
            dearest, squares, counts = best(stage + 1, stop)
            options.append((max(cost, dearest), cost * cost + squares, (stop - start, *counts)))
        return min(options)

    return StageSplit.of_counts(best(0, 0)[2])


_SPLITTERS = {SplitKind.even: _even, SplitKind.cost: _by_cost}
