"""Estimates of a layout: seconds and bytes of its stages, work of its ranks over replicas, memory per GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import inf
from typing import Any, TypeVar

from weft.conf.schema import OptimizerConfig, Precision, Recompute, ZeroConfig
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.memory import WEIGHT_BYTES, RankMemory, TrainedWeights, stepping_bytes, whole_weights, zero_memory
from weft.pipeline.planner.cluster import Cluster, Site
from weft.pipeline.planner.layout import Layout, Shape
from weft.pipeline.planner.memo import Memo, memo_of
from weft.pipeline.planner.network import Network, bytes_per_s, exchange_s, over_gpus_s
from weft.pipeline.workload import Division, LayerWork, ModelWork, received_work

Found = TypeVar("Found")
FIELDS = tuple(field.name for field in fields(LayerWork))
"""The fields of `LayerWork`."""
_ZERO = [ZeroConfig(stage=stage) for stage in range(4)]
_ADAMW = OptimizerConfig()
STEP_BYTES = 30
"""Bytes of memory traffic per stepped weight: reads and writes of fp32 weight and moments, gradient, bf16 weight."""


@dataclass(frozen=True)
class Estimates:
    """Costs of layouts of one model on one cluster."""

    cluster: Cluster
    work: ModelWork

    @cached_property
    def network(self) -> Network:
        """The cluster's links."""
        return Network(self.cluster)

    @cached_property
    def memo(self) -> Memo:
        """The values of the model that all its estimates share."""
        return memo_of(self.work)

    @cached_property
    def kinds(self) -> list[Hashable]:
        """By site, all that costs of a rank there depend on."""
        found = []
        for site in self.cluster.sites:
            gpu = site.gpu
            speeds = gpu.flops_per_s, gpu.bytes_per_s, gpu.scale_up_bytes_per_s, gpu.scale_up_latency_s
            kind = (self.cluster.efficiency, gpu.name, gpu.memory_bytes, *speeds, site.gpus_per_host, site.network_bps)
            found.append(self.memo.of(("kind", kind), object))
        return found

    @cached_property
    def known(self) -> Hashable:
        """All that values depend on besides the model: the kinds of estimates, of sites and of links, and prices."""
        sites = ((kind, site.hosts, site.price) for kind, site in zip(self.kinds, self.cluster.sites, strict=True))
        return self.memo.of(("cluster", type(self).__name__, *sites, *self.cluster.links.items()), object)

    @cached_property
    def _sums(self) -> dict[str, list[float]]:
        """By field, the sum over all layers before each layer."""
        return {
            name: list(accumulate((getattr(layer, name) for layer in self.work.layers), initial=0)) for name in FIELDS
        }

    @cached_property
    def _kinds(self) -> set[LayerWork]:
        return set(self.work.layers)

    def rank_work(self, layers: range, *, first: bool, last: bool) -> LayerWork:
        """Return the operations and bytes per sequence of a rank with these layers."""
        of: dict[str, Any] = {name: sums[layers.stop] - sums[layers.start] for name, sums in self._sums.items()}
        return LayerWork(**of) + self.ends(first=first, last=last)

    def ends(self, *, first: bool, last: bool) -> LayerWork:
        """Return the work of a stage outside of its layers.

        What it sends stays until the gradient of that arrives, which is as large and stays as long as the backward.
        """

        def compute() -> LayerWork:
            work, sent = self.work, self.work.message_bytes
            found = replace(work.before, outside_parameters=work.before.parameters) if first else work.received
            if not last:
                return found + replace(received_work(sent), unrecomputed_bytes=sent)
            if work.tied_parameters:
                return found + replace(work.after, outside_parameters=work.after.parameters)
            return found + replace(work.after, head_parameters=work.after.parameters)

        return self.memo.of(("ends", first, last), compute)

    @cached_property
    def _layers_are_alike(self) -> bool:
        return all(layer == self.work.layers[0] for layer in self.work.layers)

    def works(self, layout: Layout) -> list[LayerWork]:
        """Return the work of each pipeline rank."""
        return self.of_ranks(layout, ("alone",), lambda work, held, site: work)

    def of_ranks(
        self, layout: Layout, key: tuple[Hashable, ...], what: Callable[[LayerWork, int, Site], Found]
    ) -> list[Found]:
        """Return a function's value for each pipeline rank; its arguments are work, number of layers and site.

        Args:
            key: name of the function, and all else that its value depends on.
        """
        return self._of(layout, layout.placement.single.rank_stages, key, what)

    def _of(
        self,
        layout: Layout,
        parts: Sequence[tuple[int, ...]],
        key: tuple[Hashable, ...],
        what: Callable[[LayerWork, int, Site], Found],
    ) -> list[Found]:
        """Return a function's value for parts of the model; each part is some virtual stages of one rank.

        Parts with equal layers at one site, neither first nor last, are computed once.
        """
        end, ends, found = layout.virtual_stages - 1, [0, *accumulate(layout.layers)], []
        first: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        ranks, sites = layout.placement.stage_ranks, layout.site_of()
        for stages in parts:
            spans, site = tuple((ends[stage], ends[stage + 1]) for stage in stages), sites[ranks[stages[0]]]
            if self._layers_are_alike and stages[0] > 0 and stages[-1] < end:
                spans = first.setdefault((sum(stop - start for start, stop in spans), site), spans)
            name = (*key, self.kinds[site], spans)
            if (value := self.memo.get(name)) is None:
                value = what(self._work_of(spans), sum(stop - start for start, stop in spans), self.cluster.sites[site])
                self.memo.add(name, value)
            found.append(value)
        return found

    def _work_of(self, spans: tuple[tuple[int, int], ...]) -> LayerWork:
        """Return the work of some ranges of layers, each given as its first layer and the first after it."""

        def compute() -> LayerWork:
            end = len(self.work.layers)
            works = [self.rank_work(range(*span), first=span[0] == 0, last=span[1] == end) for span in spans]
            return sum(works[1:], works[0])

        return self.memo.of(("work", spans), compute)

    def stage_cost(self, work: LayerWork, num_layers: int, shape: Shape, site: Site) -> StageCost:
        """Return the seconds and bytes of one micro-batch on a pipeline rank."""
        seconds = self.stage_seconds(work, num_layers, shape, site)
        cost = self.work.stage_cost(work, num_layers, seconds, _division(shape))
        return replace(cost, output_bytes=self.work.message_bytes * shape.microbatch_size)  # of all of its GPUs

    def stage_seconds(self, work: LayerWork, num_layers: Any, shape: Shape, site: Site) -> tuple[Any, Any, Any]:
        """Return the seconds of a rank's forward, input gradients and weight gradients for one micro-batch.

        Fields of the work may be arrays, for many ranks at once.
        """
        speed = site.gpu.flops_per_s * self.cluster.efficiency * shape.gpus_per_rank / shape.microbatch_size
        gathered_s = self.weights_s(work, shape, site)
        forward_s, input_s, weight_s = work.seconds(
            speed,
            recompute=_recompute(shape.checkpointing),
            exchanged_s=self.layer_collectives_s(work, num_layers, shape, site),
            in_chunks=self.work.loss_in_chunks(_division(shape)),
        )
        return _larger(forward_s, gathered_s), _larger(input_s, gathered_s), weight_s

    def layer_collectives_s(self, work: LayerWork, num_layers: Any, shape: Shape, site: Site) -> Any:
        """Return the seconds of the collectives among GPUs that share a layer, in one direction, per micro-batch.

        Tensor parallelism: two all-gathers and two reduce-scatters of the residual stream per layer.
        Context parallelism: one collective of keys and values per layer. Expert parallelism: each GPU sends its tokens
        to experts and gets them back.
        """
        size, seconds = shape.microbatch_size, 0.0
        if (tensor := shape.tensor) > 1:
            each = self.work.message_bytes * size / shape.context * (tensor - 1) / tensor
            seconds += num_layers * 4 * exchange_s(each, tensor, tensor, site)
        if (context := shape.context) > 1:
            each = self.work.attended_bytes * size / shape.tensor * (context - 1) / context
            seconds += num_layers * exchange_s(each, context, shape.gpus_per_rank, site)
        if (expert := shape.expert) > 1:
            each = work.routed_bytes * size / shape.gpus_per_rank * (expert - 1) / expert
            layers = work.routed_layers
            seconds += 2 * (layers * exchange_s(0.0, expert, expert, site) + each / bytes_per_s(expert, site))
        return seconds

    def collective_s(self, work: LayerWork, shape: Shape, site: Site) -> float:
        """Return the seconds in which replicas reduce gradients and gather weights (Atlas's ``get_latency_dp``).

        Replicas on one host reduce first. Then hosts reduce the shards that are left (Centauri's group partition).
        """
        return self._over_holders_s(reduced_bytes(shape), self._trained(work, shape), shape, site)

    def across_s(self, work: LayerWork, shape: Shape, sites: Sequence[int]) -> float:
        """Return the seconds in which replicas at several sites reduce and gather what each site has reduced.

        Args:
            sites: sites of a pipeline rank, one for each route.
        """
        return self.network.over_sites_s(self.across_bytes(work, shape), sites)

    def least_across_s(self, work: LayerWork, shape: Shape) -> float:
        """Return the least `across_s` over all choices of routes."""
        if shape.routes == 1:
            return 0.0
        sent = self.across_bytes(work, shape)
        return min(
            (latency_s + sent * byte_s for latency_s, byte_s in self.network.best_sites(shape.routes)), default=inf
        )

    def across_bytes(self, work: LayerWork, shape: Shape) -> float:
        """Return the bytes that each GPU of a rank sends to each other site in a step, for gradients and weights."""
        if shape.routes == 1:
            return 0.0
        dense, experts = self._trained(work, shape)
        shared = dense / (shape.lines_of_route // shape.tensor) + experts / (shape.lines_of_route // shape.expert)
        return reduced_bytes(shape) * shared / shape.routes

    def weights_s(self, work: LayerWork, shape: Shape, site: Site) -> float:
        """Return the seconds of gathering a rank's weights for one pass of a micro-batch under ZeRO 3."""
        if shape.zero_stage < 3:
            return 0.0
        return self._over_holders_s(2.0, self._held(work, shape), shape, site)

    def _over_holders_s(self, moved: float, weights: tuple[float, float], shape: Shape, site: Site) -> float:
        """Return the seconds of reducing or gathering ``moved`` bytes per weight over the GPUs that hold the weight.

        Args:
            weights: dense weights and those of experts on each GPU.
        """
        dense, experts = weights
        seconds = over_gpus_s(moved * dense, shape.lines_of_route // shape.tensor, shape.tensor, site)
        if shape.expert > 1:
            seconds += over_gpus_s(moved * experts, shape.lines_of_route // shape.expert, shape.expert, site)
        return seconds

    def optimizer_s(self, work: LayerWork, shape: Shape, site: Site) -> float:
        """Return the seconds of a rank's optimiser, which memory bandwidth limits."""
        return self._stepped(work, shape) * STEP_BYTES / site.gpu.bytes_per_s

    def _stepped(self, work: LayerWork, shape: Shape) -> float:
        """Return the number of weights that a GPU's optimiser updates."""
        if shape.zero_stage:
            return work.trained_parameters / shape.lines
        return sum(self._trained(work, shape))

    def _trained(self, work: LayerWork, shape: Shape) -> tuple[float, float]:
        """Return the trained ones among the weights that `_held` returns."""
        return _on_each(work.trained_parameters, work.trained_expert_parameters, work.whole_parameters, shape)

    def parameters(self, work: LayerWork, shape: Shape) -> float:
        """Return the number of weights on each GPU of a rank."""
        return sum(self._held(work, shape))

    def _held(self, work: LayerWork, shape: Shape) -> tuple[float, float]:
        """Return the weights on each GPU: dense ones, most of them cut by tensor parallelism, and whole experts."""
        return _on_each(work.parameters, work.expert_parameters, work.whole_parameters, shape)

    def activation_bytes(self, work: LayerWork, num_layers: int, shape: Shape) -> float:
        """Return the bytes that a micro-batch leaves on each GPU of a rank until its backward."""
        return self.work.saved_bytes(work, num_layers, _division(shape))

    def memory(self, work: LayerWork, num_layers: int, shape: Shape, activations: float = 0.0) -> RankMemory:
        """Return the memory of a GPU of a rank with ``activations`` bytes of saved activations, without small bytes."""
        shards, held = shape.replicas * shape.context, self.parameters(work, shape)
        # experts that GPUs share have fewer holders than other weights
        share = work.parameters / shape.lines if shape.zero_stage else held / shards
        stepped = self._stepped(work, shape)
        largest, largest_trained = self._largest(shape)
        whole = whole_weights(
            work.outside_parameters / shape.tensor, largest, num_layers, work.head_parameters / shape.tensor
        )
        zero = zero_memory(
            round(held),
            _ZERO[shape.zero_stage],
            Precision.bf16,
            shards,
            largest_block=largest,
            whole=whole,
            microbatches=shape.microbatches,
            share=share,
            trained=TrainedWeights(sum(self._trained(work, shape)), stepped, largest_trained),
        )
        used = self.work.working_bytes(work, num_layers, _division(shape), WEIGHT_BYTES[Precision.bf16])
        working = used.most
        if shape.zero_stage == 3:
            # the last micro-batch of a step is alone, and its gradients are reduced
            others = max(0.0, activations - self.activation_bytes(work, num_layers, shape))
            reducing = max(0.0, zero.buffers - zero.gathering - others)
            working = max(working, used.layer + reducing + zero.gathering * (held > whole), zero.gathering)
        stepping = stepping_bytes(_ADAMW, stepped, largest, together=True)
        return RankMemory(zero, activations, working, self._messages(shape), stepping)

    def _messages(self, shape: Shape) -> float:
        """Return the bytes of a GPU's messages besides what it sends: two of each hop to the rank that gets most."""
        return 2 * most_received(shape) * _division(shape).of_rank(self.work.message_bytes)

    def _largest(self, shape: Shape) -> tuple[int, float]:
        """Return the weights of the largest layer on each GPU, and the trained weights of the layer with most."""
        key = shape.tensor, shape.expert
        if key not in self._known_largest:
            held = ((each.parameters - each.whole_parameters, each.whole_parameters) for each in self._kinds)
            trained = max(sum(self._trained(each, shape)) for each in self._kinds)
            self._known_largest[key] = max(cut // shape.tensor + whole for cut, whole in held), trained
        return self._known_largest[key]

    @cached_property
    def _known_largest(self) -> dict[tuple[int, int], tuple[int, float]]:
        return {}

    def costs(self, layout: Layout) -> CostModel:
        """Return the seconds and bytes of one pipeline of a layout."""
        parts = [(stage,) for stage in range(layout.virtual_stages)]
        key = ("stage", *timing_key(layout), layout.routes)
        stages = self._of(layout, parts, key, lambda work, held, site: self.stage_cost(work, held, layout, site))
        local, wan = self.network.links(layout)
        return CostModel(stages=tuple(stages), local=local, wan_links=wan)


def _division(shape: Shape) -> Division:
    return _divided(shape.microbatch_size, shape.tensor, shape.context, shape.checkpointing)


@lru_cache(maxsize=4096)
def _divided(size: int, tensor: int, context: int, recomputes: bool) -> Division:
    return Division(microbatch_size=size, tensor=tensor, context=context, recompute=_recompute(recomputes))


def _recompute(checkpointing: bool) -> Recompute:
    return Recompute.layers if checkpointing else Recompute.none


def timing_key(shape: Shape) -> tuple[Hashable, ...]:
    """Return the fields of a shape on which the time of a layer depends, as a cache key.

    Replicas count only at ZeRO stage 3, where they gather each layer's weights.
    """
    gathered_over = shape.replicas if shape.zero_stage == 3 else 0
    return shape.tensor, shape.context, shape.expert, shape.microbatch_size, shape.checkpointing, gathered_over


def memory_key(shape: Shape) -> tuple[Hashable, ...]:
    """Return the fields of a shape on which the time and memory of layers depend, as a cache key."""
    zero = shape.replicas, shape.routes, shape.zero_stage, shape.microbatches == 1
    return *timing_key(shape), *zero, most_received(shape)


def _larger(one: Any, other: Any) -> Any:
    """Return the larger of two numbers, or the elementwise maximum of two arrays."""
    return one.clip(other) if hasattr(one, "clip") else max(one, other)


def most_received(shape: Shape) -> int:
    """Return the number of virtual stages of a rank that get hidden states from other ranks, where it has most."""
    return len(shape.legs) * min(1, shape.num_stages - 1)


def reduced_bytes(shape: Shape) -> float:
    """Return the bytes per weight that a step reduces and gathers: fp32 gradients, bf16 weights."""
    return {0: 8.0, 3: 4.0}.get(shape.zero_stage, 4.0 + 2.0)


def _on_each(weights: Any, experts: Any, whole: Any, shape: Shape) -> tuple[Any, Any]:
    """Return the dense weights and the weights of experts on each GPU, from those of a rank.

    Args:
        weights: all weights, with those of experts.
        whole: weights that each GPU holds whole.
    """
    if shape.expert == 1:
        return (weights - whole) / shape.tensor + whole, 0.0
    return (weights - experts - whole) / shape.tensor + whole, experts / shape.expert
