"""`weft.initialize`, which creates an engine from a Hugging Face model and a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig

from weft.comm.links import SiteNetwork
from weft.conf.batch import num_replicas
from weft.conf.checks import check
from weft.conf.deepspeed import deepspeed_sections
from weft.conf.features import entry, is_installed
from weft.conf.schema import (
    ChunkedLoss,
    CommConfig,
    ContextExchange,
    Float8,
    Kernels,
    OptimizerState,
    PairChoice,
    WeftConfig,
)
from weft.conf.trees import shown_tree
from weft.engine import distributed
from weft.engine.attempt import Attempt, known_to_any
from weft.engine.checkpoint.origin import Origin, flat, model_settings
from weft.engine.deepspeed.construction import learning_rate, parameter_groups
from weft.engine.deepspeed.keys import split_deepspeed_config, weft_section
from weft.engine.deepspeed.module import WeftModule
from weft.engine.distributed import from_rank_zero, leave_out_shm_operator, process_groups, together
from weft.engine.engine import WeftEngine
from weft.engine.execution.executor import SlotPairs
from weft.engine.execution.neighbours import open_wan
from weft.engine.models.batch import Batch
from weft.engine.models.float8 import require_float8, use_float8
from weft.engine.models.kernels import fuse, require_kernels
from weft.engine.models.objective import Objective
from weft.engine.models.recomputation import recompute
from weft.engine.models.skeleton import config_skeleton, hf_model, refuse_skipped_layers
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.communicated import open_axes
from weft.engine.planning.facts import Facts, fact_kinds
from weft.engine.planning.gathering import facts_of_ranks, with_collectives
from weft.engine.planning.joining import join, join_job
from weft.engine.planning.run_plan import RunPlan, plan_run, settle_placement
from weft.engine.precision import DTYPES, check_supported
from weft.engine.stages.checking.axis_check import check_axes, refuse_unshareable
from weft.engine.stages.checking.refusals import refuse_partitioning
from weft.engine.stages.checking.self_check import self_check
from weft.engine.stages.cutting.from_model import require_adapters_in_layers, stages_from_model
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.fingerprint import folder_fingerprint, model_fingerprint
from weft.engine.stages.files.loading import load_hf_config, load_stages
from weft.engine.stages.teacher import Teacher, load_teacher_config
from weft.engine.zero import Collectives
from weft.pipeline.placement import Placement


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
            name, of which every rank loads its own layers only. None takes ``config.model``.
        optimizer: an optimizer, or a function of parameter groups. None takes the one of the
            configuration.
        model_parameters: parameter groups. None creates them, with weight decay only for matrices.
        training_data: dataset whose items are dictionaries of tensors. Every rank reads it.
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
        ValueError: a setting or the model cannot be used. The message has the reason and the remedy.
    """
    given = {
        "args": args,
        "optimizer": optimizer,
        "model_parameters": model_parameters,
        "training_data": training_data,
        "lr_scheduler": lr_scheduler,
        "collate_fn": collate_fn,
    }
    weft, sections = _settings(args, config if config is not None else config_params)
    if weft is None:
        if loss is not None:
            raise ValueError("loss: deepspeed.initialize takes none; switch the `weft` section on, or leave it out")
        leave_out_shm_operator()
        more = {"mpu": mpu, "dist_init_required": dist_init_required, "mesh_param": mesh_param}
        return deepspeed.initialize(model=model, config=sections, **given, **more)
    if isinstance(model, str):
        weft.model.path, model = model, None
    objective = loss if loss is None or isinstance(loss, Objective) else Objective.of(loss)
    check(weft)
    refuse_partitioning(model)
    if model is not None:
        hf_model(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("model: every weight has requires_grad=False; set it for those to train, or add adapters")
    weft, device = join_job(weft)
    engine = build_engine(weft, device, sections=sections, model=model, objective=objective, **given)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


@dataclass(frozen=True)
class PreparedRun:
    """The state of a job before its engines are created: the plan, with its groups and links."""

    plan: RunPlan
    collectives: Collectives
    axes: AxisGroups
    pairs: SlotPairs | None
    wan: SiteNetwork | None

    @classmethod
    def open(
        cls,
        config: WeftConfig,
        facts: Facts,
        placement: Placement,
        device: torch.device,
        attempt: Attempt | None = None,
    ) -> PreparedRun:
        """Open and probe the links between the ranks of a placement, and plan with them. Collective call.

        Args:
            facts: facts without links.
            placement: from `settle_placement` on rank 0.
            attempt: keeps results of earlier attempts, and receives durations.

        Raises:
            ValueError: on every rank, if no schedule is possible, or a link cannot be opened.
        """
        attempt = attempt or Attempt()
        kept, done = attempt.kept, attempt.set_up.done
        between = config.cluster, config.comm, facts.layout, placement
        wan = open_wan(placement, facts.layout, config.comm, device, known=kept.find("links", between) or {})
        done("links between sites")
        collectives = Collectives.open(
            facts.layout, device, config.zero, cache_dir=config.data.cache_dir, timeout_s=config.comm.timeout_s
        )
        done("collectives of replicas")
        opened = open_axes(facts.layout.axis_groups, device, config.comm.timeout_s)
        axes = replace(opened, exchange=facts.exchange)
        done("groups inside of layers")
        if wan is not None:
            kept.put("links", between, wan.profiles)
            facts = facts.with_links(wan.profiles)
        planned_from = config, facts, placement
        facts = facts.with_nodes(collectives.group.nodes, "reported by the ranks")
        facts = with_collectives(config, facts, device, collectives.costs, collectives.source)
        # Rank 0's costs of collectives count for the run.
        kinds = RunPlan, *fact_kinds()
        plan = known_to_any(kept, "plan", planned_from, lambda: plan_run(config, facts, placement), *kinds)
        return cls(plan, collectives, axes, _open_pairs(config, plan, axes, device), wan)

    @property
    def stage_axes(self) -> AxisGroups:
        """The groups with which stages are created."""
        return self.axes if self.pairs is None else self.pairs.axes

    def engine(self, config: WeftConfig, settings: dict[str, Any], module: WeftModule, **given: Any) -> WeftEngine:
        """Create the engine of this rank's stages.

        Args:
            given: further arguments of `WeftEngine`.
        """
        return WeftEngine(
            weft=config,
            plan=self.plan,
            collectives=self.collectives,
            axes=self.axes,
            pairs=self.pairs,
            wan=self.wan,
            model=module,
            mpu=module.mpu(),
            config=settings,
            config_class=deepspeed.DeepSpeedConfig(settings, module.mpu()),
            **given,
        )


def _settings(args: Any, config: WeftConfig | dict[str, Any] | str | Path | None) -> tuple[WeftConfig | None, dict]:
    """Return Weft's configuration, or None without an enabled `weft` section, and the sections for DeepSpeed."""
    if config is None and getattr(args, "deepspeed_config", None) is not None:
        config, args.deepspeed_config = args.deepspeed_config, None
    if config is None:
        raise ValueError("config: missing; pass a WeftConfig, or a DeepSpeed dict or file with a `weft` section")
    return (config, {}) if isinstance(config, WeftConfig) else split_deepspeed_config(config)


def build_engine(
    config: WeftConfig,
    device: torch.device,
    *,
    sections: Mapping[str, Any] = MappingProxyType({}),
    model: nn.Module | None = None,
    objective: Objective | None = None,
    attempt: Attempt | None = None,
    args: Any = None,
    **given: Any,
) -> WeftEngine:
    """Check and plan a run, and create this rank's engine. The job must have been joined. Collective call.

    Args:
        config: the run's configuration, fitted to the job. `join_job` returns it with the ``device``.
        sections: sections of the user's DeepSpeed configuration, without the `weft` section.
        args, given: arguments of `deepspeed.initialize`.

    Raises:
        ValueError: on every rank, if a setting or the model cannot be used.
    """
    attempt, earlier = attempt or Attempt(), set(process_groups())
    kept, done = attempt.kept, attempt.set_up.done
    together(lambda: check_supported(config.train.precision))
    settings = {**deepspeed_sections(config, num_replicas(config, dist.get_world_size())), **sections}
    together(lambda: _check_state(config, given.get("optimizer")))
    hf_config = together(lambda: load_hf_config(config.model) if model is None else hf_model(model).config)
    model_config = model_settings(hf_config, getattr(model, "peft_config", {}))
    together(lambda: _check_model(config, hf_config, model))
    teacher = together(lambda: _open_teacher(config, hf_config, objective)) if config.distill.enabled else None
    objective = objective if teacher is None else teacher.objective
    base = from_rank_zero(lambda: folder_fingerprint(config.model) if model is None else model_fingerprint(model))
    done("fingerprint")
    facts = facts_of_ranks(
        config, hf_config, device, model=model, optimizer=given.get("optimizer"), own_loss=objective is None
    )
    done("facts")
    placement = known_to_any(kept, "placement", (config, facts), lambda: settle_placement(config, facts), Placement)
    done("placement")
    cut, own_loss = hf_config if model is None else model, objective is None
    together(lambda: _check_cut(config, cut, facts, placement, own_loss=own_loss) if dist.get_rank() == 0 else None)
    done("self-check")
    run = PreparedRun.open(config, facts, placement, device, attempt)
    done("plan")
    stages = together(lambda: _make_stages(config, model, run.plan, run.stage_axes, device))
    module = WeftModule(stages, placement, run.plan.layout)
    done("stages")
    if not given.get("model_parameters"):
        given["model_parameters"] = parameter_groups(module.named_global_parameters(), config.optimizer.weight_decay)
    if given.get("lr_scheduler") is None and given.get("optimizer") is None and "scheduler" not in settings:
        given["lr_scheduler"] = learning_rate(config.optimizer, config.train.steps)
    engine = run.engine(config, settings, module, objective=objective, set_up=attempt.set_up, args=args, **given)
    if teacher is not None:
        together(lambda: teacher.load(device) if engine.holds_loss else None)
        engine.teacher = teacher
    path = hf_config.name_or_path or ""
    shown = flat(shown_tree(config)) | flat(sections, "deepspeed.") | {"model.path": path}
    engine.origin = Origin(base, path, model_config | shown)
    engine.groups = [group for group in process_groups() if group not in earlier]
    return engine


def _check_model(config: WeftConfig, hf_config: PreTrainedConfig, model: nn.Module | None) -> None:
    """Check a model before it is planned. Raise ValueError if a setting does not suit it."""
    if model is not None:
        require_adapters_in_layers(model)
    if config.zero.stage:
        refuse_skipped_layers(hf_config, hf_config.model_type)
    if config.model.kernels is Kernels.fused:
        require_kernels(config_skeleton(hf_config) if model is None else hf_model(model))
    if config.model.float8 is not Float8.none:
        require_float8(config_skeleton(hf_config) if model is None else hf_model(model), config.model.float8)


def _check_cut(
    config: WeftConfig, model: PreTrainedConfig | nn.Module, facts: Facts, placement: Placement, *, own_loss: bool
) -> None:
    """Compare small copies of the model, in parts and whole. Raise ValueError if an axis or a stage cannot cut it."""
    if config.model.self_check and placement.num_stages > 1:
        self_check(model, own_loss=own_loss, chunks=config.model.chunked_loss is not ChunkedLoss.never)
    if config.model.self_check and config.distill.enabled:
        check_streamed_teacher(config)
    require_axes(config, model, facts.exchange)


def check_streamed_teacher(config: WeftConfig) -> None:
    """Run the self-check of a teacher that is used one layer at a time, if it is. Raise ValueError if it fails."""
    if not config.inference.scores.enabled:
        return
    try:
        self_check(load_teacher_config(config), own_loss=False)
    except ValueError as error:
        reason = str(error).partition("; ")[0]
        raise ValueError(
            f"distill.teacher={config.distill.teacher}: {reason}; set inference.scores.enabled=false, with which it "
            "is used whole"
        ) from error


def _open_teacher(config: WeftConfig, hf_config: PreTrainedConfig, objective: Objective | None) -> Teacher:
    if objective is not None:
        raise ValueError("distill.enabled=true: a loss is given, too; leave one of them out")
    return Teacher(config, hf_config.get_text_config().vocab_size)


def _check_state(config: WeftConfig, optimizer: Any) -> None:
    """Check that the configured number format of moments is that of the optimiser in use."""
    if optimizer is not None and config.optimizer.state is not OptimizerState.fp32:
        raise ValueError(
            f"optimizer.state={config.optimizer.state.value}: `initialize` was given an optimizer, which has state of "
            "its own; leave one out"
        )


def require_axes(config: WeftConfig, model: PreTrainedConfig | nn.Module, exchange: ContextExchange) -> None:
    """Check that the configured axes can divide the model's layers. Raise ValueError if they cannot."""
    sizes, packing = config.parallel, config.data.packing
    tensor, expert = sizes.tensor, sizes.expert
    if config.model.self_check:
        check_axes(model, tensor=tensor, context=sizes.context, expert=expert, exchange=exchange, packing=packing)
    else:
        refuse_unshareable(model, tensor=tensor, expert=expert)


def _open_pairs(config: WeftConfig, plan: RunPlan, axes: AxisGroups, device: torch.device) -> SlotPairs | None:
    """Return a runner of strand pairs, or None if the run's schedules have no strand pair."""
    if not plan.layout.axis_groups or config.pipeline.pairs is PairChoice.never or not is_installed("strands"):
        return None
    return entry("strands").StrandPairs.open(axes, device, plan.costs.pairs, strict=config.pipeline.debug)


def _make_stages(
    config: WeftConfig, model: nn.Module | None, plan: RunPlan, axes: AxisGroups, device: torch.device
) -> list[Stage]:
    held = plan.placement.rank_stages[plan.layout.position(dist.get_rank()).stage]
    if model is not None:
        stages = stages_from_model(model, plan.split, held, axes)
    else:
        dtype, seed = DTYPES[config.train.precision], config.train.seed
        stages = load_stages(config.model, plan.split, held, dtype=dtype, seed=seed, axes=axes, exact=True)
    for stage in stages:
        recompute(stage.hf_model, plan.recompute[stage.index])
        if config.model.kernels is Kernels.fused:
            fuse(stage.hf_model, device)
        if config.model.float8 is not Float8.none:
            use_float8(stage.hf_model, config.model.float8, device)
    return stages


def init_distributed(
    config: WeftConfig | Mapping[str, Any] | str | Path | None = None, *, timeout_s: float | None = None
) -> torch.device:
    """Join the process group that the launcher's environment describes. Idempotent.

    Call this before other code creates a process group.

    Args:
        config: the run's configuration, or a DeepSpeed configuration (a dictionary or a JSON file) with a section
            "weft". It is needed if ``cluster`` has several sites. None means a single site.
        timeout_s: timeout of process groups. None means ``comm.timeout_s``.

    Returns:
        This rank's device.

    Raises:
        ValueError: the configuration has an unknown key, or a value of the wrong type.
    """
    if not isinstance(config, WeftConfig):
        config = weft_section(config) if config is not None else None
    if config is None:
        return distributed.init_distributed(timeout_s or CommConfig.timeout_s)
    if timeout_s:
        config = replace(config, comm=replace(config.comm, timeout_s=timeout_s))
    return join(config)
