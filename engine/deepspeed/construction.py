"""Construction of an engine's parts: methods that DeepSpeed's constructor calls, the loss and the executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import LAMB_OPTIMIZER, MUON_OPTIMIZER
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from weft.comm.collectives import Primitive
from weft.conf.features import entry
from weft.conf.schema import LrSchedule, OptimizerConfig, OptimizerState
from weft.engine.distributed import together
from weft.engine.execution.compute import Compute
from weft.engine.execution.executor import Executor
from weft.engine.execution.loss import StepLoss
from weft.engine.models.hidden_matrices import tag
from weft.engine.models.objective import Minimised, Objective
from weft.engine.models.seeding import seed_generators
from weft.engine.observability.watcher import BubbleObserver
from weft.engine.precision import compute_in
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.adapter import exported_frozen
from weft.engine.zero import Bf16AdamW, Lamb, ShardedOptimizer, Sharding, Skips
from weft.engine.zero.skipping import fuse
from weft.pipeline.action import Action, Op


def zero_optimization_stage(engine: PipelineEngine) -> int:
    """Return 0, so that DeepSpeed itself shards nothing. `weft.engine.zero` implements ``weft.zero.stage``."""
    return 0


def cast_module_mixed_precision(
    engine: PipelineEngine,
    param_dtype: torch.dtype | None,
    buffer_dtype: torch.dtype | None,
    *more: Any,
    **named: Any,
) -> None:
    """Cast weights as DeepSpeed does, except for trained ones. Buckets cast these after copying the masters."""
    if param_dtype is not None:
        frozen = [p for stage in engine.module.stages.values() for p in exported_frozen(stage)]
        compute_in(engine.module.parameters(), param_dtype, set(frozen))
    PipelineEngine._cast_module_mixed_precision(engine, None, buffer_dtype, *more, **named)


def broadcast_model(engine: PipelineEngine) -> None:
    """Broadcast the weights over replicas as DeepSpeed does. If replicas hold different experts, do nothing."""
    if engine.layout.expert == 1:
        PipelineEngine._broadcast_model(engine)


def configure_optimizer(
    engine: PipelineEngine, client_optimizer: Optimizer | Callable | None, model_parameters: list[dict[str, Any]]
) -> None:
    """Create the optimiser, and shard it. At every stage of ZeRO it updates the buckets of `weft.engine.zero`."""
    if client_optimizer is None:
        engine.basic_optimizer = _basic_optimizer(engine, model_parameters)
    elif isinstance(client_optimizer, Optimizer):
        engine.basic_optimizer = client_optimizer
    else:
        engine.basic_optimizer = client_optimizer(model_parameters)
    engine._check_for_duplicates(engine.basic_optimizer)
    fp16 = engine.fp16_enabled()
    check_overflow = fp16 or (engine.bfloat16_enabled() and engine._config.bfloat16_config.check_grad_overflow)
    skips = Skips(engine.weft.supervise.max_skips or 0, engine.weft.supervise.spike)
    if client_optimizer is None and engine.device.type == "cuda" and (check_overflow or skips.most):
        fuse(engine.basic_optimizer)
    overlap = engine.plan.overlap
    engine.sharding = Sharding(
        engine.module.stages.values(),
        engine.weft.zero,
        engine.collectives,
        engine.module.tied,
        overlap.cuts if overlap is not None else {},
    )
    if type(engine.basic_optimizer).__module__.startswith("bitsandbytes"):
        together(lambda: _check_blocks(engine.basic_optimizer, engine.sharding))
    grid = engine.module._grid
    engine.optimizer = ShardedOptimizer(
        engine.basic_optimizer,
        engine.sharding,
        loss_scaler=CreateLossScaler(
            torch.float16 if fp16 else torch.float32,
            engine.loss_scale(),
            engine.dynamic_loss_scale(),
            engine.dynamic_loss_scale_args(),
        ),
        clip=engine.gradient_clipping,
        waiting=engine.waiting,
        steps_done=lambda: engine.global_steps,
        stops=engine.is_asked_to_stop,
        skips=skips,
        check_overflow=check_overflow,
        replicas=engine.module.stage_group if engine.layout.lines > 1 else None,
        pipeline=grid.get_pipe_parallel_group() if grid.get_pipe_parallel_world_size() > 1 else None,
    )


def _basic_optimizer(engine: PipelineEngine, model_parameters: list[dict[str, Any]]) -> Optimizer:
    """Create the configured optimiser. LAMB is ours, because DeepSpeed's supports only whole parameters on GPUs."""
    if engine.optimizer_name() == MUON_OPTIMIZER:
        from weft.engine.zero.muon import Muon  # its import loads torch's compiler

        for stage in engine.module.stages.values():
            tag(stage.named_global_parameters())
        return Muon(model_parameters, engine.optimizer_params() or {})
    if engine.weft.optimizer.state is not OptimizerState.fp32:
        settings = engine.optimizer_params() or {}
        known = {name: settings[name] for name in ("lr", "betas", "eps", "weight_decay") if name in settings}
        if engine.weft.optimizer.state is OptimizerState.bf16:
            return Bf16AdamW(model_parameters, **known)
        from weft.engine.zero import int8_adamw

        for stage in engine.module.stages.values():
            int8_adamw.tag(stage.named_global_parameters())
        return int8_adamw.Int8AdamW(model_parameters, **known)
    if engine.optimizer_name() == LAMB_OPTIMIZER:
        return Lamb(model_parameters, **(engine.optimizer_params() or {}))
    return engine._configure_basic_optimizer(model_parameters)


def _check_blocks(optimizer: Any, sharding: Sharding) -> None:
    """Check that no shard cuts a parameter whose moments bitsandbytes stores in blocks, which no checkpoint could hold.

    Raises:
        ValueError: a shard does.
    """
    least = optimizer.args.min_8bit_size if optimizer.args.optim_bits == 8 else math.inf
    for fragment in sharding.fragments():
        if fragment.trained and not fragment.is_whole and fragment.tensor.numel() >= least:
            raise ValueError(
                f"{type(optimizer).__name__} of bitsandbytes: ZeRO's shards cut {fragment.name} and the blocks of its "
                "state, which checkpoints cannot store; set optimizer.state=int8 and give no optimizer, or set "
                "zero.stage=0"
            )


def configure_lr_scheduler(engine: PipelineEngine) -> None:
    """Create the learning-rate schedule. Store initial rates as torch's schedules do, because a resume reads them."""
    for group in engine.basic_optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))
    PipelineEngine._configure_lr_scheduler(engine)


def step_groups(engine: PipelineEngine) -> Iterator[tuple[dist.ProcessGroup, Collection[Primitive]]]:
    """Yield the groups that a step communicates over besides the replicas' communicators, with the collectives."""
    if dist.group.WORLD is not None:
        yield dist.group.WORLD, [Primitive.all_reduce]
    for group in dict.fromkeys((engine.module.data_group, engine.module.stage_group)):
        yield group, [Primitive.all_reduce]
    if engine.is_pipe_parallel:
        yield engine.grid.get_pipe_parallel_group(), [Primitive.broadcasts, Primitive.reduces]
    yield from ((group, [Primitive.all_reduce]) for _, group in engine.module.tied)


def make_loss(engine: PipelineEngine, objective: Objective | None, *, counts: bool) -> StepLoss:
    """Create the loss of a step, and pass the objective to the stage that computes it.

    Args:
        objective: minimised instead of the model's own loss.
        counts: see `StepLoss`.
    """
    placement = engine.schedule.placement
    minimised, last = None if objective is None else Minimised(objective), placement.num_stages - 1
    if engine.holds_loss:
        stage = engine.module.stages[last]
        stage.objective = minimised
        if engine.plan.facts.model.chunks_loss and isinstance(stage, Stage):  # tests and benchmarks have others
            stage.compute_loss_in_chunks(engine.weft.model.loss_chunk_mb * 1e6)
    return StepLoss(
        minimised=minimised,
        holds=engine.holds_loss,
        source=engine.grid.stage_to_global(placement.stage_ranks[-1]),
        replicas=engine.module.data_group if engine.layout.data_ranks > 1 else None,
        pipeline=engine.grid.get_pipe_parallel_group() if engine.is_pipe_parallel else None,
        device=engine.device,
        counts=counts,
    )


def make_executor(engine: PipelineEngine) -> Executor:
    """Create the executor of a rank's stages."""
    stages, sharding, pipeline = engine.module.stages, engine.sharding, engine.weft.pipeline
    return Executor(
        rank=engine.pipe_rank,
        stages=stages,
        compute=Compute(
            stages=stages,
            placement=engine.schedule.placement,
            seed_gradient=engine._seed_gradient,
            around=sharding.around,
            seed=partial(seed_forward, engine),
            host_bytes_per_s=pipeline.offload_mbps * 1e6 / 8,
        ),
        send_to=engine.neighbours.send_to,
        receive_from=engine.neighbours.receive_from,
        receive_ahead=pipeline.receive_ahead,
        stage_wide={
            Op.UNSHARD: lambda action: sharding.unshard(action.stage),
            Op.RESHARD: lambda action: sharding.reshard(action.stage),
            Op.REDUCE_GRAD: lambda action: sharding.reduce(action.stage),
        },
        debug=pipeline.debug,
        pairs=engine.pairs,
    )


def make_bubbles(engine: PipelineEngine) -> BubbleObserver | None:
    """Create what tells prefill workers of a rank's bubbles, or return None if there are no workers."""
    weft, plan, line = engine.weft, engine.plan, engine.line
    if not weft.inference.enabled:
        return None
    longest_row = max(map(len, plan.schedule(line).rows))
    if weft.pipeline.adapt:  # it may split B, and move as many micro-batches to this replica
        longest_row *= 2 if plan.layout.replicas == 1 else 4
    predicted = plan.predicted(line).compute[engine.pipe_rank]
    observer: BubbleObserver = entry("prefill").observe_bubbles(
        weft, engine.global_rank, engine.device, predicted=predicted, longest_row=longest_row
    )
    return observer


def seed_forward(engine: PipelineEngine, action: Action) -> None:
    """Seed the random numbers of a forward by step, micro-batch, stage and context member.

    Dropout uses it, for example. It depends neither on the schedule nor on the number of replicas, nor on the replica
    that computes the micro-batch, and is equal in a resumed run. Members of a tensor group share them, and
    `weft.engine.parallel.dropout` derives different ones for their parts.
    """
    assert action.microbatch is not None
    microbatch = engine.deal.number_of(action.microbatch)
    context = engine.axes.context.index
    name = f"step {engine.global_steps}, micro-batch {microbatch}, stage {action.stage}, part {context}"
    seed_generators(engine.weft.train.seed, name, engine.device)


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return trainable parameters in two groups: matrices with weight decay, vectors (norms, biases) without.

    A stage without trainable parameters has one empty group, whose learning rate follows the schedule.
    """
    trainable = [parameter for _, parameter in named if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]] or groups[:1]


def learning_rate(config: OptimizerConfig, total_steps: int) -> Callable[[Optimizer], LambdaLR]:
    """Return a function that creates the learning-rate schedule of an optimiser.

    The rate rises linearly over ``warmup_steps`` or a ``warmup_ratio`` of the steps. Then it decays as configured, to
    ``min_lr_ratio`` of the peak at ``total_steps``.
    """
    shapes: dict[LrSchedule, Callable[[float], float]] = {
        LrSchedule.constant: lambda _: 1.0,
        LrSchedule.linear: lambda done: 1.0 - done * (1.0 - config.min_lr_ratio),
        LrSchedule.cosine: lambda done: (
            config.min_lr_ratio + (1.0 - config.min_lr_ratio) * (1.0 + math.cos(math.pi * done)) / 2
        ),
    }
    shape = shapes[config.schedule]
    warmup = math.ceil(config.warmup_ratio * total_steps) or config.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return shape(min(1.0, (step - warmup) / max(1, total_steps - warmup)))

    return lambda optimizer: LambdaLR(optimizer, factor)
