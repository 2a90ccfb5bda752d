"""A tiny model, its data, and two ways to train it: one process of plain Hugging Face, and Weft."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.zero.reference_lamb import ReferenceLamb
from tests.shapes import sizes
from weft.comm.collectives import AlphaBeta, CollectiveCosts, Group, LinkClass
from weft.comm.collectives.cache import CostCache, topology_key
from weft.conf.schema import (
    ClusterConfig,
    CommConfig,
    ContextExchange,
    Float8,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerKind,
    ParallelConfig,
    PipelineConfig,
    PlacementKind,
    Precision,
    ScheduleKind,
    SiteConfig,
    TrainConfig,
    WeftConfig,
    ZeroConfig,
)

VOCAB, LENGTH = 64, 12


def tiny_config(
    schedule: str = "1f1b",
    placement: str = "straight",
    *,
    stages: int = 2,
    microbatches: int = 4,
    sites: tuple[int, ...] = (),
    routes: list[list[str]] | None = None,
    zero: int = 0,
    precision: str = "fp32",
    tied: bool = False,
    lora: bool = False,
    layers: int = 8,
    cell: int = 1,
    compare_every: int = 0,
    context: int = 1,
    expert: int = 1,
    tensor: int = 1,
    exchange: str = "auto",
    offload_cap: int = 0,
    sent: str = "fp32",
    reduce_every: int = 0,
    optimizer: str = "adamw",
    float8: str = "none",
) -> WeftConfig:
    """A Llama of eight narrow layers, clipped, warmed up and decayed, so that all of it is compared.

    With experts to share out it is a Mixtral.
    """
    shape = sizes(hidden=32, inner=64, layers=layers, heads=4, groups=2, words=VOCAB)
    shape |= {"max_position_embeddings": 64, "tie_word_embeddings": tied}
    if expert > 1:
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = WeftConfig(
        model=ModelConfig(
            arch="mixtral" if expert > 1 else "llama",
            overrides=shape,
            self_check=False,
            lora=LoraConfig(enabled=lora),
            float8=Float8[float8],
        ),
        pipeline=PipelineConfig(
            stages=stages,
            schedule=ScheduleKind[schedule],
            placement=PlacementKind[placement],
            microbatches=microbatches,
            search_seconds=0.1,
            offload=offload_cap > 0,
            memory_cap_bytes=offload_cap,
            debug=True,
        ),
        cluster=ClusterConfig(
            sites=[SiteConfig(name=f"site{i}", ranks=ranks) for i, ranks in enumerate(sites)], routes=routes or []
        ),
        comm=CommConfig(connections=2, cell=cell),
        parallel=ParallelConfig(
            tensor=tensor, context=context, context_exchange=ContextExchange[exchange], expert=expert
        ),
        zero=ZeroConfig(stage=zero, communication_data_type=Precision[sent], reduce_every=reduce_every),
        optimizer=OptimizerConfig(kind=OptimizerKind[optimizer], lr=1e-3, weight_decay=0.1, clip=0.5, warmup_steps=3),
        train=TrainConfig(microbatch_size=2, steps=20, precision=Precision[precision]),
    )
    config.logging.progress = False
    config.supervise.compare_every = compare_every
    return config


def with_costs(config: WeftConfig, folder: Path) -> WeftConfig:
    """The same where collectives among ranks of this host are known to be slow.

    Strands are then paired by plans, buckets are cut, and collectives are divided, on any machine.
    """
    config.data.cache_dir = str(folder)
    costs = CollectiveCosts.of_links({LinkClass.intra: AlphaBeta(1e-3, 1e-9)})
    for ranks in (2, 4, 8):
        group = Group(tuple(range(ranks)), (0,) * ranks)
        CostCache.in_folder(str(folder)).write(topology_key(group, "cpu"), costs)
    return config


def batches(replica: int, num_replicas: int, batch_size: int = 2) -> Iterator[dict[str, Tensor]]:
    """Micro-batch k of a replica is number k * R + r of one global sequence; labels are uneven."""
    for k in itertools.count():
        generator = torch.Generator().manual_seed(1000 + k * num_replicas + replica)
        ids = torch.randint(VOCAB, (batch_size, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, : int(torch.randint(1, LENGTH - 2, (1,), generator=generator))] = -100
        yield {"input_ids": ids, "labels": labels}


def own_loss(model: Any, batch: dict[str, Tensor], items: Tensor, count: int) -> Tensor:
    """Return Hugging Face's own loss of one of ``count`` micro-batches, divided by the ``items`` of all of them."""
    return model(**batch, num_items_in_batch=items, use_cache=False).loss


_known: dict[str, list[float]] = {}


def reference_losses(
    config: WeftConfig,
    num_replicas: int,
    steps: int,
    device: str = "cpu",
    loss_of: Callable[[Any, dict[str, Tensor], Tensor, int], Tensor] = own_loss,
    data: Callable[[int, int], Iterator[dict[str, Tensor]]] = batches,
) -> list[float]:
    """Losses of one process that runs Hugging Face's own forward on the same data.

    Configurations that one process does not distinguish are trained once. In low precision the weights that train are
    fp32, rounded for each step's forwards.
    """
    settings = config.model, config.optimizer, config.train, config.pipeline.microbatches
    seen = repr((*settings, num_replicas, steps, device, loss_of, data))
    if seen not in _known:
        from weft.engine.precision import DTYPES
        from weft.engine.stages.files.loading import build_model

        torch.set_num_threads(1)
        model = build_model(config.model, dtype=torch.float32, seed=config.train.seed).train().to(device)
        low = DTYPES[config.train.precision]
        _known[seen] = train_alone(model, config, num_replicas, steps, data(0, 1), device, loss_of, low)
    return _known[seen]


def train_alone(
    model: torch.nn.Module,
    config: WeftConfig,
    num_replicas: int,
    steps: int,
    data: Iterator[dict[str, Tensor]],
    device: str = "cpu",
    loss_of: Callable[[Any, dict[str, Tensor], Tensor, int], Tensor] = own_loss,
    low: torch.dtype = torch.float32,
) -> list[float]:
    """Train a model in this process on the batches of all replicas, with forwards in the type ``low``."""
    from weft.engine.deepspeed.construction import learning_rate, parameter_groups

    groups = parameter_groups(model.named_parameters(), config.optimizer.weight_decay)
    make = ReferenceLamb if config.optimizer.kind is OptimizerKind.lamb else torch.optim.AdamW
    optimizer = make(groups, lr=config.optimizer.lr, betas=tuple(config.optimizer.betas), eps=config.optimizer.eps)
    scheduler = learning_rate(config.optimizer, config.train.steps)(optimizer)
    losses = []
    for _ in range(steps):
        step = list(itertools.islice(data, config.pipeline.microbatches * num_replicas))
        items = torch.tensor(sum(int((b["labels"][:, 1:] != -100).sum()) for b in step))
        working = model if low is torch.float32 else copy.deepcopy(model).to(low)
        total = 0.0
        for batch in step:
            moved = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = loss_of(working, moved, items.to(device), len(step))
            loss.backward()
            total += loss.item()
            if working is not model:
                _add_gradients(working, model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
    return losses


def _add_gradients(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Add low-precision gradients to the fp32 weights', then clear them."""
    for low, high in zip(source.parameters(), target.parameters(), strict=True):
        if low.grad is not None:
            high.grad = low.grad.float() if high.grad is None else high.grad + low.grad.float()
            low.grad = None


def begun(config: WeftConfig) -> Any:
    """Return this rank's engine, which trains on `batches`."""
    from weft.engine.initialize import initialize

    engine, *_ = initialize(config=config)
    engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
    return engine


def weft_losses(config: WeftConfig, steps: int) -> list[float]:
    """Losses of this rank's Weft engine; every rank reports the same."""
    engine = begun(config)
    losses = [float(engine.train_batch()) for _ in range(steps)]
    check_order(engine)
    engine.destroy()
    dist.barrier()
    return losses


def many_losses(configs: list[WeftConfig], steps: int) -> list[list[float]]:
    """`weft_losses` of several runs, one after the other in the same processes."""
    losses = []
    for config in configs:
        losses.append(weft_losses(config, steps))
        gc.collect()  # gloo polls for each group every 10 ms until its last reference is gone
    assert gc.get_freeze_count(), "what `run_ranks` froze is looked through again for every engine"
    return losses


def check_order(engine) -> None:
    """The measured order of a rank's slots is its row, exactly."""
    for record in engine.records:
        assert [mark.slot for mark in record.marks] == list(engine.schedule.rows[engine.pipe_rank])


def measured_peaks(configs: list[WeftConfig]) -> list[tuple]:
    """Per run and rank: live chunks as simulated, live chunks as measured, saved bytes as measured."""
    from weft.pipeline.costs import CostModel
    from weft.pipeline.simulation import simulate

    peaks = []
    for config in configs:
        engine = begun(config)
        engine.train_batch()
        predicted = simulate(engine.schedule, CostModel.unit(engine.schedule.placement.num_stages))
        measured = engine.measured_timelines()[-1]
        peaks.append((predicted.live_microbatches, measured.live_microbatches, measured.peak_bytes))
        engine.destroy()
    return peaks


def evaluate_between_steps(config: WeftConfig) -> tuple:
    """A step, an evaluation, a step: losses, evaluation loss, logits and what was measured."""
    engine = begun(config)
    losses = [float(engine.train_batch())]
    held_back = batches(engine.replica, engine.num_replicas)
    loss, logits = engine.eval_batch(held_back, return_logits=True, num_micro_batches=3)
    losses.append(float(engine.train_batch()))
    timelines = engine.measured_timelines()
    dist.barrier()
    spans = [(span.rank, span.lane, span.start_s, span.end_s) for span in timelines[-1].spans]
    return losses, float(loss), [x.numpy() for x in logits], engine.holds_loss, engine.replica, spans
