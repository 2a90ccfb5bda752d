"""`weft.initialize`: from a Hugging Face model and a configuration to a running engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig

from weft.conf.batch import check_world, fit_batch
from weft.conf.checks import check
from weft.conf.deepspeed import deepspeed_config
from weft.conf.schema import Partition, WeftConfig
from weft.conf.sites import ranks_per_site
from weft.engine.deepspeed.keys import split_deepspeed_config
from weft.engine.deepspeed.optimization import learning_rate, parameter_groups
from weft.engine.distributed import (
    device_bytes,
    from_rank_zero,
    init_distributed,
    leave_out_shm_operator,
    process_groups,
    ranks_on_this_host,
    together,
)
from weft.engine.engine import WeftEngine
from weft.engine.module import WeftModule
from weft.engine.planning.crossings import Seat, open_wan, with_probed_links
from weft.engine.planning.estimates import largest_block, planning_costs, settle_placement, stage_sizes
from weft.engine.planning.flops import EFFICIENCY, peak_flops
from weft.engine.planning.overlap import OverlapPlan, ZeroWork, plan_overlap
from weft.engine.planning.schedules import plan_cells
from weft.engine.precision import DTYPES
from weft.engine.stages import (
    Batch,
    Stage,
    StageSplit,
    load_hf_config,
    load_stages,
    refuse_partitioning,
    self_check,
    split_layers,
    stages_from_model,
)
from weft.engine.stages.objective import Objective
from weft.engine.stages.stage import hf_model
from weft.engine.zero import Collectives
from weft.pipeline.costs import CostModel
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule

NOMINAL_FLOPS = 1e12
"""FLOP/s that schedules of one site are planned for before anything is measured. Only ratios matter
there, and the same run is planned alike every time."""


def initialize(
    args: Any = None,
    model: nn.Module | str | None = None,
    optimizer: Optimizer | Callable[[Iterable], Optimizer] | None = None,
    model_parameters: Sequence[dict[str, Any]] | None = None,
    training_data: Any = None,
    lr_scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: WeftConfig | dict[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: dict[str, Any] | None = None,
    *,
    loss: Objective | Callable[[Any, Batch, torch.Tensor], torch.Tensor] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Like `deepspeed.initialize`, for a Hugging Face model in a pipeline.

    Args:
        model: a Hugging Face (or peft) model, the same on every rank; or its folder or hub
            name, of which every rank loads its own layers only; None takes ``config.model``.
        optimizer: an optimizer, or a function of parameter groups; None takes the one of the
            configuration.
        model_parameters: parameter groups; None makes them: no decay for norms and biases.
        training_data: dataset whose items are dictionaries of tensors; read on every rank.
        lr_scheduler: a scheduler, or a function of the optimizer.
        config: a `WeftConfig`, or a DeepSpeed configuration (dict or JSON file) with a section
            ``"weft": {"enabled": true, ...}``. Without that section, or with it switched off,
            this is `deepspeed.initialize`.
        loss: what to minimise instead of the model's own loss, on the last stage: a function
            ``(outputs, batch, num_items)`` that returns the sum over the micro-batch's label tokens
            divided by ``num_items``, those of the whole step; or an `Objective`, which counts otherwise.
        args, distributed_port, mpu, dist_init_required, collate_fn, mesh_param, config_params:
            as in `deepspeed.initialize`; a pipeline brings its own ``mpu``.

    Returns:
        Engine, optimizer, data loader of ``training_data`` (or None), learning-rate scheduler.

    Raises:
        ValueError: a setting or the model cannot be used; says which, why and what to do.
    """
    config = config if config is not None else config_params
    if config is None and getattr(args, "deepspeed_config", None) is not None:
        config, args.deepspeed_config = args.deepspeed_config, None
    if config is None:
        raise ValueError("config: missing; pass a WeftConfig, or a DeepSpeed dict or file with a `weft` section")
    user: dict[str, Any] = {}
    if not isinstance(config, WeftConfig):
        weft, user = split_deepspeed_config(config)
        if weft is None and loss is not None:
            raise ValueError("loss: deepspeed.initialize takes none; switch the `weft` section on, or leave it out")
        if weft is None:
            leave_out_shm_operator()
            return deepspeed.initialize(
                args=args,
                model=model,
                optimizer=optimizer,
                model_parameters=model_parameters,
                training_data=training_data,
                lr_scheduler=lr_scheduler,
                mpu=mpu,
                dist_init_required=dist_init_required,
                collate_fn=collate_fn,
                config=user,
                mesh_param=mesh_param,
            )
        config = weft
    if isinstance(model, str):
        config.model.path, model = model, None
    check(config)
    refuse_partitioning(model)
    if model is not None:
        hf_model(model)
    device = init_distributed(config.comm.timeout_s)
    check_world(config, dist.get_world_size())
    config = fit_batch(config, dist.get_world_size())
    settings = deepspeed_config(config, dist.get_world_size()) | user
    objective = loss if loss is None or isinstance(loss, Objective) else Objective.of(loss)
    return _build(
        args,
        device,
        config,
        settings,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        collate_fn,
        objective,
    )


def _build(
    args: Any,
    device: torch.device,
    config: WeftConfig,
    settings: dict[str, Any],
    model: nn.Module | None,
    optimizer: Any,
    model_parameters: Sequence[dict[str, Any]] | None,
    training_data: Any,
    lr_scheduler: Any,
    collate_fn: Callable | None,
    objective: Objective | None,
) -> tuple[WeftEngine, Any, Any, Any]:
    earlier = set(process_groups())
    hf_config = together(lambda: load_hf_config(config.model) if model is None else hf_model(model).config)
    placement = from_rank_zero(lambda: _placement(config, hf_config, device), Placement)
    split = together(
        lambda: split_layers(hf_config, placement.num_stages, config.pipeline.split, config.pipeline.layers)
    )
    if config.model.self_check and placement.num_stages > 1:
        checked = hf_config if model is None else model
        together(lambda: self_check(checked, own_loss=objective is None) if dist.get_rank() == 0 else None)
    wan = open_wan(placement, config.comm, device)
    costs = from_rank_zero(
        lambda: planning_costs(
            config, hf_config, split, flops_per_s=NOMINAL_FLOPS if wan is None else EFFICIENCY * peak_flops(device)
        ),
        CostModel,
    )
    if wan is not None:
        costs = with_probed_links(costs, config.cluster, placement, wan.profiles)
    num_replicas = dist.get_world_size() // placement.num_ranks
    pipe_rank, replica = divmod(dist.get_rank(), num_replicas)
    sizes = [seat.pipelines for seat in Seat.all(placement, num_replicas, config.comm.cell)]
    collectives = Collectives.open(config, placement.num_ranks, device)
    overlap = from_rank_zero(
        lambda: _plan_overlap(config, hf_config, split, placement, collectives, device), OverlapPlan
    )
    schedule = from_rank_zero(
        lambda: plan_cells(
            config.pipeline, placement, sizes, costs=costs, zero_stage=config.zero.stage, overlap=overlap
        ),
        Schedule,
    )[sizes[replica]]
    held = placement.rank_stages[pipe_rank]
    module = WeftModule(together(lambda: _make_stages(config, model, split, held)), placement)
    groups = model_parameters or parameter_groups(module.named_global_parameters(), config.optimizer.weight_decay)
    if lr_scheduler is None and optimizer is None and "scheduler" not in settings:
        lr_scheduler = learning_rate(config.optimizer, config.train.steps)
    deepspeed_settings = deepspeed.DeepSpeedConfig(settings, module.mpu())
    engine = WeftEngine(
        weft=config,
        schedule=schedule,
        costs=costs,
        collectives=collectives,
        overlap=overlap,
        wan=wan,
        objective=objective,
        args=args,
        model=module,
        optimizer=optimizer,
        model_parameters=groups,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=module.mpu(),
        collate_fn=collate_fn,
        config=settings,
        config_class=deepspeed_settings,
    )
    engine.groups = [group for group in process_groups() if group not in earlier]
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _plan_overlap(
    config: WeftConfig,
    hf_config: PreTrainedConfig,
    split: StageSplit,
    placement: Placement,
    collectives: Collectives,
    device: torch.device,
) -> OverlapPlan | None:
    """The three tiers' answers; None without measured costs, or where workloads are not to be partitioned."""
    if collectives.costs is None or config.zero.partition is not Partition.workload:
        return None
    elements = [size.parameters for size in stage_sizes(hf_config, split)]
    costs = planning_costs(config, hf_config, split, flops_per_s=EFFICIENCY * peak_flops(device))
    work = ZeroWork.of(
        config,
        collectives.group,
        collectives.costs,
        elements,
        stages=costs,
        placement=placement,
        largest_block=largest_block(hf_config),
        available=device_bytes(device, ranks_on_this_host()),
    )
    return plan_overlap(work, costs, placement, config.pipeline.microbatches)


def _placement(config: WeftConfig, hf_config: PreTrainedConfig, device: torch.device) -> Placement:
    sites = ranks_per_site(config)
    flops_per_s = EFFICIENCY * peak_flops(device) if len(sites) > 1 else NOMINAL_FLOPS
    replicas = dist.get_world_size() // config.pipeline.stages
    return settle_placement(config, hf_config, replicas=replicas, flops_per_s=flops_per_s)


def _make_stages(config: WeftConfig, model: nn.Module | None, split: StageSplit, held: Sequence[int]) -> list[Stage]:
    if model is not None:
        return stages_from_model(model, split, held)
    return load_stages(config.model, split, held, dtype=DTYPES[config.train.precision], seed=config.train.seed)
