"""Gather facts: before a run from the configuration, caches and this machine, and in a run from its ranks."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedConfig

from weft.comm.collectives import CollectiveCosts
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.probe import nodes_of_world
from weft.comm.exchange import gather
from weft.conf.features import entry, is_installed
from weft.conf.host.files import JsonCache
from weft.conf.host.measurements import Measurements
from weft.conf.hosts import most_ranks_of_a_host, working_hosts, world_size
from weft.conf.schema import (
    ClusterConfig,
    DataKind,
    Float8,
    OptimizerKind,
    OptimizerState,
    Partition,
    Recompute,
    WeftConfig,
)
from weft.engine.distributed import device_bytes, from_rank_zero, ranks_on_this_host
from weft.engine.layout import RankLayout
from weft.engine.models.sizes import meta_model, model_sizes
from weft.engine.models.skeleton import hf_model
from weft.engine.models.tracing import trace_model
from weft.engine.planning.axis_facts import with_axes, with_chunked_loss, with_exchange, with_float8
from weft.engine.planning.devices import host_copies, usable_flops, usable_memory
from weft.engine.planning.facts import Facts, Links, fact_kinds
from weft.engine.planning.memory import OptimizerMaker, state_bytes
from weft.engine.planning.schedules import open_placements, read_costs
from weft.engine.planning.state_pieces import int8_bytes, matrix_padding, muon_bytes, stepped_pieces
from weft.engine.planning.teacher_facts import teacher_facts
from weft.engine.precision import DTYPES
from weft.engine.stages.files.loading import quantization_of
from weft.engine.stages.teacher import teacher_model
from weft.pipeline.costs import CostModel, LinkCost
from weft.pipeline.workload import WORK_FORM, ModelWork

log = logging.getLogger(__name__)


def facts_before_start(
    config: WeftConfig,
    hf_config: PreTrainedConfig,
    *,
    num_nodes: int = 1,
    collectives: CollectiveCosts | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | OptimizerMaker | None = None,
) -> Facts:
    """Gather the facts that are available before a rank starts, for devices such as this machine's.

    Args:
        num_nodes: number of nodes of a stage's replicas. Ignored with a hostfile or several routes.
        collectives: costs of collectives over the replicas. None takes the costs that earlier runs and
            `python -m benchmarks collectives` have cached.
        model: the model that trains, or None if it is made from ``config``.
        optimizer: the model's optimiser, or None for the configured one.

    Raises:
        ValueError: ``pipeline.costs_file`` cannot be read, or replicas cannot be spread over so many nodes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = device_bytes(device, most_ranks_of_a_host(config.cluster))
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))  # as `weft launch` sets it for every rank
    machine = _Machine(world_size(config.cluster), device, available, threads, _world_nodes(config.cluster))
    facts = _known_facts(config, hf_config, machine, model, optimizer)
    nodes = _replica_nodes(config, facts.layout, num_nodes)
    facts = facts.with_nodes(nodes, "given by cluster.hostfile" if config.cluster.hostfile else f"{num_nodes} assumed")
    if collectives is not None:
        return with_collectives(config, facts, device, collectives, "given")
    cache = CostCache.in_folder(config.data.cache_dir)
    wanted = len(nodes) > 1 and config.zero.partition is not Partition.none
    known = cache.read(topology_key(facts.replicas, device.type)) if wanted else None
    return with_collectives(config, facts, device, known, f"cache {cache.path}")


def facts_of_ranks(
    config: WeftConfig,
    hf_config: PreTrainedConfig,
    device: torch.device,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | OptimizerMaker | None = None,
    own_loss: bool = True,
) -> Facts:
    """Gather the facts of a job's ranks before any link is opened. Collective call.

    `Facts.with_links` and `with_collectives` add measurements of links.

    Args:
        own_loss: whether the model's own loss is minimised.

    Raises:
        SharedError: ``pipeline.costs_file`` cannot be read.
    """
    available = min(gather(device_bytes(device, ranks_on_this_host())))
    shares = config.parallel.tensor * config.parallel.context * config.parallel.expert
    nodes = nodes_of_world() if shares > 1 or config.cluster.hostfile else ()
    machine = _Machine(dist.get_world_size(), device, available, torch.get_num_threads(), nodes)
    return from_rank_zero(
        lambda: _known_facts(config, hf_config, machine, model, optimizer, own_loss=own_loss), *fact_kinds()
    )


def with_collectives(
    config: WeftConfig, facts: Facts, device: torch.device, costs: CollectiveCosts | None, source: str
) -> Facts:
    """Add the costs of collectives over the replicas of a stage to the facts, or the reason why they are unknown."""
    if facts.layout.data_ranks == 1:
        source = "one replica: there is nothing to reduce"
    elif config.zero.partition is Partition.none:
        source = "zero.partition=none: collectives are carried out as they are"
    elif costs is None:
        source = "not measured; `python -m benchmarks collectives` does it"
    source = f"{topology_key(facts.replicas, device.type)}: {source}"
    return replace(facts, collectives=costs, sources=facts.sources | {"collectives": source})


@dataclass(frozen=True)
class _Machine:
    """The machine of the ranks.

    Attributes:
        threads: number of threads of a rank, if its device is the processor.
    """

    num_ranks: int
    device: torch.device
    device_bytes: float
    threads: int
    nodes: tuple[int, ...]


def _known_facts(
    config: WeftConfig,
    hf_config: PreTrainedConfig,
    machine: _Machine,
    model: nn.Module | None = None,
    optimizer: Optimizer | OptimizerMaker | None = None,
    *,
    own_loss: bool = True,
) -> Facts:
    layout = RankLayout.of(config, machine.num_ranks)
    own_loss = own_loss and config.data.kind is not DataKind.preference
    sources = _constant_sources(config, hf_config, machine)
    run = "" if layout.axis_groups else _run_name(config, hf_config)  # collectives inside of layers cost time, too
    links, flops = _given_links(config.cluster, _uplink_sharing(config.cluster, layout, machine.nodes)), None
    given: dict[int, CostModel] = {}
    if config.pipeline.costs_file:
        given = _given_costs(config, layout)
        links = replace(links, local=next(iter(given.values())).local)
        sources["stage_costs"] = sources["stage_pairs"] = f"given by pipeline.costs_file={config.pipeline.costs_file}"
    else:
        flops, sources["flops_per_s"] = usable_flops(machine.device, machine.threads, devices_cache(config), run)
    bytes_per_s, host_bps = _memory_speeds(config, machine, sources)
    trained = hf_config if model is None else model
    work, sources["work"] = _traced(config, hf_config, trained)
    work = work and with_float8(work, config.model.float8, machine.device)
    facts = Facts(
        layout=layout,
        model=model_sizes(
            trained,
            lora=config.model.lora,
            quantized=quantization_of(config.model) if model is None else None,
            tensor=layout.tensor,
            expert=layout.expert,
            dtype=DTYPES[config.train.precision],
        ),
        work=work,
        flops_per_s=flops,
        run=run,
        device_bytes=machine.device_bytes,
        device=machine.device.type,
        keeps_frozen=machine.device.type == "cpu" and _keeps_frozen(config, model),
        recomputes=config.pipeline.recompute is Recompute.layers
        or bool(getattr(model, "is_gradient_checkpointing", False)),
        stage_costs={count: costs.stages for count, costs in given.items()},
        stage_pairs={count: costs.pairs for count, costs in given.items() if costs.pairs is not None},
        links=links,
        bytes_per_s=bytes_per_s,
        host_bps=host_bps,
        replica_nodes=(0,) * layout.data_ranks,
        sources=sources,
    )
    if optimizer is None and config.optimizer.kind is OptimizerKind.muon:
        whole = meta_model(trained, config.model.lora)
        facts = replace(facts, optimizer_bytes=muon_bytes(whole), padding=matrix_padding(whole, config.zero, layout))
    elif optimizer is None and config.optimizer.state is OptimizerState.int8:
        facts = replace(facts, optimizer_bytes=int8_bytes(meta_model(trained, config.model.lora)))
    else:
        facts = replace(facts, optimizer_bytes=_optimizer_bytes(config, facts, machine.device, optimizer, trained))
    facts = with_axes(config, facts, machine.nodes, machine.device)
    if config.distill.enabled:
        own_loss, teacher = False, teacher_facts(config, facts.model.vocab_size, facts.device, _teacher_work)
        facts = replace(facts, teacher=teacher)
    facts = with_chunked_loss(config, with_exchange(config, hf_config, facts), own_loss=own_loss)
    if not is_installed("strands"):
        return facts
    return entry("strands").with_strands(
        config, trained, facts, machine.device, lambda: _speed(config, machine), own_loss=own_loss
    )


def _constant_sources(config: WeftConfig, hf_config: PreTrainedConfig, machine: _Machine) -> dict[str, str]:
    return {
        "layout": "given by cluster and pipeline.stages",
        "model": f"counted from the configuration of {config.model.path or f'a new {hf_config.model_type}'}",
        "device_bytes": f"memory of this machine's {machine.device.type}",
        "device": "this machine's",
        "optimizer_bytes": "counted for muon and 8-bit moments, or measured in a step of the caller's optimiser",
        "teacher": "counted from distill.teacher",
        "run": "named by the configuration",
        "links": "given by cluster.links",
    }


def _memory_speeds(config: WeftConfig, machine: _Machine, sources: dict[str, str]) -> tuple[float, float]:
    """Return the bytes per second of memory and of copies to the host, or infinity where no plan needs them."""
    bytes_per_s = host_bps = inf
    if config.pipeline.offload:
        host_bps, sources["host_bps"] = _host_bps(config, machine)
    if config.pipeline.recompute in (Recompute.elementwise, Recompute.auto):
        bytes_per_s = usable_memory(machine.device, machine.threads, devices_cache(config))
        sources["bytes_per_s"] = "by the data sheet, or a copy on this machine"
    return bytes_per_s, host_bps


def _host_bps(config: WeftConfig, machine: _Machine) -> tuple[float, str]:
    """Return the bits per second of copies to host memory, and their source."""
    if given := config.pipeline.offload_mbps:
        return given * 1e6, "given by pipeline.offload_mbps"
    return 8 * host_copies(machine.device, machine.threads, devices_cache(config)), "a copy on this machine"


def _run_name(config: WeftConfig, hf_config: PreTrainedConfig) -> str:
    """Return a readable name of all that a run's speed depends on, besides the device."""
    model = hashlib.sha256(hf_config.to_json_string(use_diff=False).encode()).hexdigest()[:8]
    shape = f"{config.train.microbatch_size} x {config.data.sequence_length} tokens"
    kind = config.pipeline.recompute
    again = "" if kind is Recompute.none else f", recompute {kind.name}"
    lora = ", lora" if config.model.lora.enabled else ""
    lora += ", 4 bits" if quantization_of(config.model) else ""
    alone = config.distill.enabled and not config.inference.scores.enabled
    float8 = "" if config.model.float8 is Float8.none else f", {config.model.float8.name} fp8"
    teacher = f", taught by {config.distill.teacher}" if alone else ""
    return f"{hf_config.model_type} {model}, {shape}, {config.train.precision.name}{float8}{lora}{again}{teacher}"


def _optimizer_bytes(
    config: WeftConfig,
    facts: Facts,
    device: torch.device,
    given: Optimizer | OptimizerMaker | None,
    model: PreTrainedConfig | nn.Module,
) -> tuple[float, ...] | None:
    """Return the bytes of state per weight of the caller's optimiser, or None if there is none or it fails.

    They are by part of the model: the embedding, each layer, and what follows the layers.
    """
    if given is None:
        return None
    pieces = stepped_pieces(meta_model(model, config.model.lora), config.zero, facts.layout)
    try:
        each = state_bytes(given, device, {shape for _, shape in pieces})
    except Exception as error:  # any: it is the caller's code, and may want the weights of the model
        log.warning("memory is predicted with the state of %s: %s", config.optimizer.kind.name, error)
        return None
    stored, counts = [0.0] * (len(facts.model.layers) + 2), [0] * (len(facts.model.layers) + 2)
    for (part, shape), count in pieces.items():
        stored[part] += each[shape] * count
        counts[part] += count
    return tuple(num_bytes / max(count, 1) for num_bytes, count in zip(stored, counts, strict=True))


def _speed(config: WeftConfig, machine: _Machine) -> tuple[float, float]:
    how = machine.device, machine.threads, devices_cache(config)
    return usable_flops(*how)[0], usable_memory(*how)


def devices_cache(config: WeftConfig) -> Measurements:
    """Return the cache of devices' speeds."""
    return Measurements(Path(config.data.cache_dir).expanduser() / "devices.json")


def _world_nodes(cluster: ClusterConfig) -> tuple[int, ...]:
    """Return the node of each rank on the run's initial hosts, or a single node without a hostfile."""
    slots = working_hosts(cluster).values() if cluster.hostfile else [world_size(cluster)]
    return tuple(node for node, held in enumerate(slots) for _ in range(held))


def _keeps_frozen(config: WeftConfig, model: nn.Module | None) -> bool:
    """True if frozen weights are cast and an export writes their original values. See `exported_frozen`."""
    dtype = DTYPES[config.train.precision]
    if model is None:
        return dtype is not torch.float32 and not config.model.path
    adapts_folder = hf_model(model) is not model and bool(hf_model(model).config.name_or_path)
    return not adapts_folder and any(p.dtype != dtype for p in model.parameters() if not p.requires_grad)


def _traced(
    config: WeftConfig, hf_config: PreTrainedConfig, trained: PreTrainedConfig | nn.Module
) -> tuple[ModelWork | None, str]:
    """Return the operations and bytes of each layer, cached between runs, and their source."""
    length, precision, lora = config.data.sequence_length, config.train.precision, None
    text = f"{length} {precision.name} {hf_config.to_json_string(use_diff=False)}"
    if isinstance(trained, nn.Module):
        text += "".join(f" {name}" for name, weight in trained.named_parameters() if not weight.requires_grad)
    elif config.model.lora.enabled:
        lora = config.model.lora
        text += f" {lora}"
    key = f"{WORK_FORM} {hashlib.sha256(text.encode()).hexdigest()}"
    cache = JsonCache(Path(config.data.cache_dir).expanduser() / "work.json")
    with contextlib.suppress(KeyError, TypeError):
        return ModelWork.from_dict(cache.read()[key]), f"traced before, cache {cache.path}"
    try:
        work = trace_model(trained, length, dtype=DTYPES[precision], lora=lora)
    except Exception as error:  # any, because this runs the model's own code. Sizes of weights must suffice
        return None, f"not known: {error}"
    with contextlib.suppress(OSError):  # it is traced again the next time
        cache.add({key: work.to_dict()})
    return work, "the model's forward, traced on the meta device"


def _teacher_work(config: WeftConfig, teacher: PreTrainedConfig) -> ModelWork | None:
    return _traced(replace(config, model=teacher_model(config)), teacher, teacher)[0]


def _given_costs(config: WeftConfig, layout: RankLayout) -> dict[int, CostModel]:
    """Return the costs of ``pipeline.costs_file`` for each possible placement, by its number of virtual stages."""
    found: dict[int, CostModel] = {}
    errors: list[ValueError] = []
    for placement in open_placements(config.pipeline, layout.sites_of(layout.reference)).values():
        try:
            found[placement.num_stages] = read_costs(config.pipeline, placement.num_stages)
        except ValueError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def _uplink_sharing(cluster: ClusterConfig, layout: RankLayout, nodes: tuple[int, ...]) -> int:
    """Return the number of a stage's ranks that share one host's uplink.

    Without a hostfile each stage of a replica is assumed to have a separate host, as on an emulated WAN.
    """
    if not cluster.hostfile:
        return layout.context * layout.tensor
    return max(Counter((rank // layout.lines_of_route, node) for rank, node in enumerate(nodes)).values())


def _given_links(cluster: ClusterConfig, sharing: int) -> Links:
    """Return each configured link in both directions. Pairs of sites without a link have the slowest one.

    Args:
        sharing: number of ranks that send parts of a micro-batch over one uplink at the same time.
    """
    number = {site.name: index for index, site in enumerate(cluster.sites)}
    links = []
    for link in cluster.links:
        cost = LinkCost(
            latency_s=link.latency_ms / 1e3,
            bandwidth_bps=link.bandwidth_mbps * 1e6 / sharing if link.bandwidth_mbps else float("inf"),
            pair_bps=link.pair_mbps * 1e6 / sharing if link.pair_mbps else float("inf"),
        )
        here, there = (number[name] for name in link.sites)
        links += [((here, there), cost), ((there, here), cost)]
    slowest = max((cost for _, cost in links), key=lambda cost: cost.transit_s(1.0), default=LinkCost())
    return Links(wan=slowest, pairs=tuple(links))


def _replica_nodes(config: WeftConfig, layout: RankLayout, num_nodes: int) -> tuple[int, ...]:
    """Return the node of each rank of the first data group."""
    count = layout.data_ranks
    if config.cluster.hostfile or layout.routes > 1:
        return layout.nodes_of(layout.data_groups(0)[0], _world_nodes(config.cluster))
    if num_nodes < 1 or count % num_nodes:
        raise ValueError(f"--nodes={num_nodes}: {count} replicas cannot be spread evenly over them; give a divisor")
    return tuple(replica * num_nodes // count for replica in range(count))
