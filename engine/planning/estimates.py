"""Costs of a model's stages before anything has run: from its weights, tokens and the device's speed."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from weft.conf.schema import ClusterConfig, WeftConfig
from weft.conf.sites import ranks_per_site
from weft.engine.planning.memory import WEIGHT_BYTES
from weft.engine.planning.schedules import plan_placement, read_costs
from weft.engine.stages.sizes import PartSize, model_sizes
from weft.engine.stages.split import StageSplit, split_layers
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.placement import Placement

SAVED_WIDTHS = 17
"""Hidden states that a layer saves for its backward, in widths of the model: 34 bytes per token
and width at 2 bytes each, with attention that keeps no scores (Korthikanti et al. 2022, section 4)."""
LOSS_BYTES = 8
"""Bytes per logit that the loss keeps: fp32 logits and their softmax."""


def stage_sizes(hf_config: PreTrainedConfig, split: StageSplit) -> list[PartSize]:
    """Weights of each virtual stage; tied ones count wherever they are held."""
    sizes = model_sizes(hf_config)
    stages = [sum((sizes.layers[layer] for layer in layers), PartSize(0, 0)) for layers in split.layers]
    stages[0] += sizes.before
    stages[-1] += sizes.after
    return stages


def largest_block(hf_config: PreTrainedConfig) -> int:
    """Weights of the largest decoder layer."""
    return max(layer.parameters for layer in model_sizes(hf_config).layers)


def planning_costs(
    config: WeftConfig, hf_config: PreTrainedConfig, split: StageSplit, *, flops_per_s: float
) -> CostModel:
    """Costs to plan with: those of ``pipeline.costs_file`` where one is named, else estimates.

    Raises:
        ValueError: the file cannot be read, or is for another number of virtual stages.
    """
    costs = estimate_costs(config, hf_config, split, flops_per_s=flops_per_s)
    if not config.pipeline.costs_file:
        return costs
    measured = read_costs(config.pipeline, split.num_stages)
    return replace(costs, stages=measured.stages, local=measured.local)


def settle_placement(
    config: WeftConfig, hf_config: PreTrainedConfig, *, replicas: int, flops_per_s: float
) -> Placement:
    """The placement of the configuration, or of the shortest step by `planning_costs`.

    Raises:
        ValueError: the model cannot be cut for any of them.
    """

    def costs_of(placement: Placement) -> CostModel:
        split = split_layers(hf_config, placement.num_stages, config.pipeline.split, config.pipeline.layers)
        return planning_costs(config, hf_config, split, flops_per_s=flops_per_s)

    sites = ranks_per_site(config)
    pipelines = min(config.comm.cell, replicas) if len(sites) > 1 else 1
    return plan_placement(config.pipeline, sites, costs_of=costs_of, pipelines=pipelines)


def estimate_costs(
    config: WeftConfig, hf_config: PreTrainedConfig, split: StageSplit, *, flops_per_s: float
) -> CostModel:
    """What the planner goes by until steps have been measured.

    A forward takes two operations per active weight and token, and attention's scores on top;
    the gradients of inputs and of weights take as much each. Recomputed layers add a forward
    to the input gradient.

    Args:
        flops_per_s: what a rank reaches in practice.
    """
    text = hf_config.get_text_config()
    tokens = config.train.microbatch_size * config.data.sequence_length
    element = WEIGHT_BYTES[config.train.precision]
    hidden_bytes = tokens * text.hidden_size * element
    recompute = config.model.gradient_checkpointing
    stages = []
    for index, (size, layers) in enumerate(zip(stage_sizes(hf_config, split), split.layers, strict=True)):
        scores = 2 * len(layers) * text.hidden_size * config.data.sequence_length  # causal: half of 4
        forward_s = tokens * (2 * size.active + scores) / flops_per_s
        saved = len(layers) * hidden_bytes * (1 if recompute else SAVED_WIDTHS)
        if index == split.num_stages - 1:
            saved += tokens * text.vocab_size * LOSS_BYTES
        stages.append(
            StageCost(
                forward_s=forward_s,
                input_s=forward_s * (2 if recompute else 1),
                weight_s=forward_s,
                activation_bytes=saved,
                # Inputs and output gradients of the matrices: about what the forward saved.
                weight_saved_bytes=saved,
                output_bytes=hidden_bytes,
            )
        )
    wan, links = wan_links(config.cluster)
    return CostModel(stages=tuple(stages), wan=wan, wan_links=links, pair_scale=config.pipeline.pair_scale)


def wan_links(cluster: ClusterConfig) -> tuple[LinkCost, tuple[tuple[tuple[int, int], LinkCost], ...]]:
    """The slowest link, for pairs of sites that none is given for, and each link both ways."""
    number = {site.name: index for index, site in enumerate(cluster.sites)}
    links = []
    for link in cluster.links:
        cost = LinkCost(
            latency_s=link.latency_ms / 1e3,
            bandwidth_bps=link.bandwidth_mbps * 1e6 if link.bandwidth_mbps else float("inf"),
            pair_bps=link.pair_mbps * 1e6 if link.pair_mbps else float("inf"),
        )
        here, there = (number[name] for name in link.sites)
        links += [((here, there), cost), ((there, here), cost)]
    slowest = max((cost for _, cost in links), key=lambda cost: cost.transit_s(1.0), default=LinkCost())
    return slowest, tuple(links)
