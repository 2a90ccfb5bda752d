"""A small model of which ranks hold parts, in stages, and Weft's engine on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.emulated_stage import EmulatedWork
from tests.engine.tiny import batches
from weft.conf.deepspeed import deepspeed_config
from weft.conf.schema import OptimizerConfig, ParallelConfig, PipelineConfig, TrainConfig, WeftConfig, ZeroConfig
from weft.engine.deepspeed.module import WeftModule
from weft.engine.distributed import device_bytes, from_rank_zero
from weft.engine.engine import WeftEngine
from weft.engine.initialize import PreparedRun
from weft.engine.layout import RankLayout
from weft.engine.models.sizes import ModelSizes, PartSize
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.cut import Cut
from weft.engine.parallel.functions import gather, scatter_sum, take_slice
from weft.engine.planning.facts import Facts, Links
from weft.engine.planning.joining import join
from weft.engine.planning.run_plan import settle_placement
from weft.pipeline.placement import Placement

WIDTH, LENGTH, LAYERS, VOCAB = 8, 12, 4, 64


class CutBlock(nn.Module):
    """A norm on the slice at hand, a matrix cut by rows and one cut by columns, whose bias is whole."""

    def __init__(self, number: int, axes: AxisGroups) -> None:
        super().__init__()
        self.group = axes.tensor
        index, count = self.group.index, self.group.size
        generator = torch.Generator().manual_seed(number)
        up, down = (torch.randn(*shape, generator=generator) / 3 for shape in ((4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)))
        self.cuts = {"up": Cut(tuple(up.shape), 0, index, count), "down": Cut(tuple(down.shape), 1, index, count)}
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Parameter(self.cuts["up"].take(up))
        self.down = nn.Parameter(self.cuts["down"].take(down))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """A slice [B, S/t, H] from one."""
        normed = nn.functional.rms_norm(hidden, (WIDTH,), self.norm)
        inner = torch.tanh(nn.functional.linear(gather(self.group, normed, 1), self.up))
        return hidden + scatter_sum(self.group, nn.functional.linear(inner, self.down), 1) + self.bias


class CutStage(nn.Module):
    """A virtual stage of such blocks, with what the engine uses of `weft.engine.stages.cutting.stage.Stage`."""

    tied: frozenset[str] = frozenset()
    hf_model = None

    def __init__(self, index: int, num_stages: int, axes: AxisGroups) -> None:
        super().__init__()
        each = LAYERS // num_stages
        self.index, self.is_last, self.axes = index, index == num_stages - 1, axes
        self.first_layer = index * each
        self.layers = nn.ModuleList(CutBlock(self.first_layer + number, axes) for number in range(each))
        self.cuts: dict[str, Cut] = {
            f"layers.{self.first_layer + number}.{name}": cut
            for number, layer in enumerate(self.layers)
            for name, cut in (layer.cuts.items() if axes.tensor.size > 1 else ())
        }
        generator = torch.Generator().manual_seed(77)
        self.register_buffer("embedding", torch.randn(VOCAB, WIDTH, generator=generator), persistent=False)

    def forward(self, hidden: Tensor | None, batch: Mapping[str, Tensor], num_items: Tensor | None = None) -> Tensor:
        """The next stage's slice; on the last stage the loss, of which this member's tokens have a part."""
        group = self.axes.tensor
        if hidden is None:
            hidden = take_slice(group, self.embedding[batch["input_ids"]], 1)
        for layer in self.layers:
            hidden = layer(hidden)
        if not self.is_last:
            return hidden
        wanted = take_slice(group, self.embedding[batch["labels"].clamp(min=0)], 1)
        counts = take_slice(group, batch["labels"] != -100, 1)
        part = ((hidden - wanted).square().sum(-1) * counts).sum() / num_items
        return part + group.all_reduce(part.detach().clone()).wait() - part.detach()

    def blocks(self) -> list[nn.Module]:
        """The layers, in order."""
        return list(self.layers)

    def hidden_spec(self, batch: Mapping[str, Tensor], *, leaving: bool = False) -> tuple[torch.Size, torch.dtype]:
        rows, length = batch["input_ids"].shape
        return torch.Size((rows, length // self.axes.tensor.size, WIDTH)), torch.float32

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their name in the whole model."""
        for number, layer in enumerate(self.layers):
            yield from ((f"layers.{self.first_layer + number}.{name}", p) for name, p in layer.named_parameters())


def cut_config(stages: int, tensor: int, zero: int, replicas: int) -> WeftConfig:
    """Four micro-batches per step, clipped, over all replicas."""
    config = WeftConfig(
        pipeline=PipelineConfig(stages=stages, microbatches=4 // replicas, debug=True),
        parallel=ParallelConfig(tensor=tensor),
        zero=ZeroConfig(stage=zero),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, clip=0.5),
        train=TrainConfig(microbatch_size=2),
    )
    config.supervise.compare_every = 2
    return config


def cut_engine(config: WeftConfig) -> WeftEngine:
    """Weft's engine on stages of the model."""
    device = join(config)
    layout = RankLayout.of(config, dist.get_world_size())
    layer = PartSize(8 * WIDTH * WIDTH, 8 * WIDTH * WIDTH)
    count = config.pipeline.stages
    facts = Facts(
        layout=layout,
        model=ModelSizes(PartSize(0, 0), (layer,) * LAYERS, PartSize(0, 0), hidden_size=WIDTH, vocab_size=1),
        flops_per_s=None,
        device_bytes=device_bytes(device, dist.get_world_size()),
        stage_costs={count: EmulatedWork().costs(LAYERS, count).stages},
        links=Links(),
        replica_nodes=(0,) * layout.data_ranks,
        sources=dict.fromkeys(("layout", "model", "stage_costs", "links"), "given by a test"),
    )
    placement = from_rank_zero(lambda: settle_placement(config, facts), Placement)
    run = PreparedRun.open(config, facts, placement, device)
    held = placement.rank_stages[layout.position(dist.get_rank()).stage]
    module = WeftModule([CutStage(index, count, run.stage_axes) for index in held], placement, layout)
    given: dict[str, Any] = dict.fromkeys(("args", "optimizer", "training_data", "lr_scheduler", "collate_fn"))
    settings = deepspeed_config(config, dist.get_world_size())
    return run.engine(config, settings, module, model_parameters=list(module.parameters()), **given)


def cut_losses(configs: list[WeftConfig], steps: int) -> list[list[tuple[float, float]]]:
    """Loss and gradient norm of each step, on this rank, for one run after the other."""
    runs = []
    for config in configs:
        engine = cut_engine(config)
        engine.set_dataiterator(iter(batches(engine.replica, engine.num_replicas)))
        runs.append([(float(engine.train_batch()), engine.get_global_grad_norm()) for _ in range(steps)])
        engine.destroy()
        dist.barrier()
    return runs


def alone(steps: int) -> list[tuple[float, float]]:
    """The same of one process, without an engine."""
    stage = CutStage(0, 1, AxisGroups())
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    data, found = batches(0, 1), []
    for _ in range(steps):
        step = list(itertools.islice(data, 4))
        items = torch.tensor(float(sum((batch["labels"][:, 1:] != -100).sum() for batch in step)))
        loss = sum(stage(None, batch, items) for batch in step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found
