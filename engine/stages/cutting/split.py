"""The split of a model's decoder layers into virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from transformers import PreTrainedConfig

from weft.conf.schema import SplitKind
from weft.engine.models.sizes import ModelSizes, model_sizes
from weft.engine.models.skeleton import num_layers as count_layers
from weft.pipeline.costs import even_counts


@dataclass(frozen=True)
class StageSplit:
    """Numbers of decoder layers of the virtual stages, in order.

    The first stage also has the embedding; the last stage also has the final norm and the head.
    """

    counts: tuple[int, ...]
    """Number of layers of each stage."""

    def __post_init__(self) -> None:
        assert self.counts and min(self.counts) > 0

    @cached_property
    def layers(self) -> tuple[range, ...]:
        """Layer indices of each stage."""
        ends = accumulate(self.counts)
        return tuple(range(stop - count, stop) for count, stop in zip(self.counts, ends, strict=True))

    @property
    def num_stages(self) -> int:
        """Number of virtual stages."""
        return len(self.counts)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the whole model."""
        return sum(self.counts)


def split_layers(
    hf_config: PreTrainedConfig, num_stages: int, kind: SplitKind, given: Sequence[int] = ()
) -> StageSplit:
    """Divide the model's decoder layers into virtual stages.

    Args:
        num_stages: virtual stages of the whole pipeline.
        kind: even counts, or counts balanced by the weights that a token uses (which are proportional to FLOPs),
            including the embedding and the head.
        given: configured numbers of layers of each virtual stage, which override ``kind``.

    Raises:
        ValueError: more stages than layers, or ``given`` does not fit.
    """
    return _split(count_layers(hf_config), lambda: model_sizes(hf_config), num_stages, kind, given)


def split_model(model: ModelSizes, num_stages: int, kind: SplitKind, given: Sequence[int] = ()) -> StageSplit:
    """Divide a model whose weights have been counted, as `split_layers` does."""
    return _split(len(model.layers), lambda: model, num_stages, kind, given)


def _split(
    num_layers: int, sizes: Callable[[], ModelSizes], num_stages: int, kind: SplitKind, given: Sequence[int]
) -> StageSplit:
    if given:
        return _by_hand(given, num_stages, num_layers)
    if num_stages > num_layers:
        raise ValueError(
            f"pipeline.stages: {num_stages} virtual stages, but the model has {num_layers} layers and every stage "
            "needs one; use fewer stages, or placement=straight (one stage per rank)"
        )
    counts = even_counts(num_layers, num_stages) if kind is SplitKind.even else _by_cost(sizes(), num_stages)
    return StageSplit(tuple(counts))


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
    return StageSplit(tuple(given))


def _by_cost(sizes: ModelSizes, num_stages: int) -> Sequence[int]:
    """Return layer counts with the lowest cost of the most expensive stage, then the lowest sum of squared costs."""
    costs = [layer.active for layer in sizes.layers]
    costs[0] += sizes.before.active
    costs[-1] += sizes.after.active
    prefix = [0, *accumulate(costs)]

    @cache
    def best(stage: int, start: int) -> tuple[int, int, tuple[int, ...]]:
        """Return (largest cost, sum of squares, counts) of the stages from ``stage`` on."""
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

    return best(0, 0)[2]
