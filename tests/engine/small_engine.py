"""An engine of small stages over thread ranks, for checkpoints and comparisons, with the real ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.engine.zero.replicas import SmallStage, whole_step
from tests.thread_ranks import at_end
from weft.conf.schema import CommConfig, DataConfig, Partition, ZeroConfig
from weft.engine.checkpoint.optimizer_state import collect
from weft.engine.checkpoint.origin import Origin
from weft.engine.checkpoint.pieces import cut_tensors, stored_name, whole_name
from weft.engine.deepspeed.grid import join
from weft.engine.layout import RankLayout
from weft.engine.zero import Collectives, ShardedOptimizer, Sharding, Skips
from weft.pipeline.action import Action, Op

MICROBATCHES = 6
"""Micro-batches of a step, over all replicas."""
TIED = "embed.weight"


def ids(step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randint(11, (2, 5), generator=generator)


class SmallPart(SmallStage):
    """A virtual stage whose loss is its own; its embedding may be all stages'. It has a buffer, too.

    One weight has a gradient from some micro-batches only, another one never has any.
    """

    def __init__(self, index: int, *, tied: bool) -> None:
        super().__init__(2)
        self.index, self.prefix = index, f"part{index}."
        self.tied = frozenset([TIED]) if tied else frozenset()
        self.register_buffer("seen", torch.zeros(3))
        self.rare, self.never = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(5))

    @property
    def model(self) -> nn.Module:
        return self

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.named_parameters():
            yield name if name in self.tied else self.prefix + name, parameter

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen[0] += 1
        loss = super().forward(tokens)
        return loss + self.rare.square().sum() if int(tokens.sum()) % 7 == 0 else loss


class SmallEngine:
    """A rank's part of a model that is being trained; see `weft.engine.checkpoint.trained.Trained`.

    The stages do not depend on each other, so that a pipeline of them needs no transfers.
    """

    def __init__(
        self,
        stages: int,
        zero: ZeroConfig,
        make: Callable[[list[nn.Parameter]], Optimizer],
        *,
        tied: bool = False,
        frozen: Sequence[str] = (),
        dynamic_scale: bool = False,
        tensor: int = 1,
    ) -> None:
        world, self.global_rank = dist.get_world_size(), dist.get_rank()
        self.device = torch.device("cpu")
        self.layout = RankLayout((stages,), world // stages // tensor, tensor=tensor)
        position = self.layout.position(self.global_rank)
        self.pipe_rank, self.replica, self.num_replicas = position.stage, position.replica, self.layout.replicas
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        part = self.make_part(tied and stages > 1)
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(name not in frozen)
        self.part = part
        self.module = SimpleNamespace(
            stages={self.pipe_rank: part},
            named_global_parameters=part.named_global_parameters,
            placement=SimpleNamespace(rank_stages=tuple((stage,) for stage in range(stages))),
        )
        replicas = [self.layout.lines_of(stage) for stage in range(stages)]
        self.replicas = self.module.data_group = join(replicas)[1]
        pipelines = join(zip(*replicas, strict=True))[1]
        together = [(part.embed.weight, pipelines)] if part.tied else []
        for parameter, _ in together:
            parameter.ds_pipe_replicated = self.pipe_rank > 0
        zero.partition, comm, data = Partition.none, CommConfig(), DataConfig()
        collectives = Collectives.open(
            self.layout, self.device, zero, cache_dir=data.cache_dir, timeout_s=comm.timeout_s
        )
        self.basic_optimizer = make([p for p in part.parameters() if p.requires_grad])
        self.sharding = Sharding([part], zero, collectives, together)
        at_end(self.sharding.close)
        scaler = DynamicLossScaler(4.0, 2.0, 3, 1.0, 2, True, False) if dynamic_scale else LossScaler(1.0)
        self.waited = 0
        self.optimizer = ShardedOptimizer(
            self.basic_optimizer,
            self.sharding,
            loss_scaler=scaler,
            clip=lambda: 0.5,
            waiting=self._waiting,
            steps_done=lambda: self.global_steps,
            skips=Skips(),
            check_overflow=dynamic_scale,
            replicas=self.replicas,
            pipeline=pipelines,
        )
        self.lr_scheduler = LambdaLR(self.basic_optimizer, lambda step: 1 / (1 + step))
        self.origin = Origin()
        self.before_update: list[Callable[[], None]] = []
        """Called where the optimiser is about to change what it steps."""

    def make_part(self, tied: bool) -> Any:
        """This rank's virtual stage."""
        return SmallPart(self.pipe_rank, tied=tied)

    def _waiting(self) -> Any:
        self.waited += 1
        return nullcontext()

    def check_finite(self) -> None:
        self.sharding.settle()
        self.optimizer.check_finite()

    def step(self) -> float:
        """Train on the next step; this rank's part of the loss."""
        mine, step, total = range(self.replica, MICROBATCHES, self.num_replicas), self.global_steps, 0.0
        self.sharding.begin_step([Action(op, self.pipe_rank, m) for m in mine for op in (Op.F, Op.B)])
        for m in mine:
            with self.sharding.around(Action(Op.F, self.pipe_rank, m)):
                loss = self.part(ids(step, m))
            with self.sharding.around(Action(Op.B, self.pipe_rank, m)):
                (loss * self.optimizer.cur_scale).backward()
            total += float(loss.detach())
        self.sharding.reduce(self.pipe_rank)
        for call in self.before_update:
            call()
        whole_step(self.optimizer)
        self.lr_scheduler.step()
        self.global_steps += 1
        self.global_samples += MICROBATCHES * 2
        self.micro_steps += len(mine)
        return total

    def held(self) -> dict[str, Any]:
        """Everything that this rank has of the state: pieces of tensors by name, and numbers."""
        self.sharding.settle()
        fragments = list(self.sharding.fragments())
        pieces = collect(fragments, self.basic_optimizer, [], lambda axis: (0, 1))
        with self.sharding.full_weights():
            cuts = self.part.cuts
            model = {
                stored_name(f"weight/{name}", cuts.get(name)): p.detach().clone()
                for name, p in self.part.named_global_parameters()
            }
        return {
            "pieces": [(p.name, tuple(p.shape), p.start, p.data.detach().clone().flatten()) for p in pieces],
            "model": model,
            "buffers": {self.part.prefix + name: value.clone() for name, value in self.part.named_buffers()},
            "rates": {group["lr"] for group in self.basic_optimizer.param_groups},
            "scheduler": self.lr_scheduler.last_epoch,
            "scale": self.optimizer.cur_scale,
            "counters": (self.global_steps, self.global_samples, self.skipped_steps),
        }

    def close(self) -> None:
        self.sharding.close()


def joined(held: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole state out of what ranks hold, each tensor in full; ranks have to agree where they hold the same."""
    whole: dict[str, Tensor] = {}
    for of_rank in held:
        for name, shape, start, data in of_rank["pieces"]:
            flat = whole.setdefault(name, torch.full((torch.Size(shape).numel(),), torch.nan))
            there = flat[start : start + data.numel()]
            assert bool((there.isnan() | (there == data)).all()), f"{name}: ranks hold different numbers"
            flat[start : start + data.numel()] = data
    for name, flat in whole.items():
        assert not flat.isnan().any(), f"{name}: nobody holds all of it"
    shapes = {name: tuple(shape) for of_rank in held for name, shape, _, _ in of_rank["pieces"]}
    models: dict[str, Tensor] = {}
    for of_rank in held:
        for name, weight in of_rank["model"].items():
            assert torch.equal(models.setdefault(name, weight), weight), f"{name}: replicas differ"
            assert torch.equal(whole[name], weight.float().flatten()), name
    buffers = {name: value for of_rank in held for name, value in of_rank["buffers"].items()}
    rest = {key: held[0][key] for key in ("rates", "scheduler", "scale", "counters")}
    assert all({key: of_rank[key] for key in rest} == rest for of_rank in held)
    return {"tensors": _without_parts(whole, shapes), "buffers": buffers} | rest


def _without_parts(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Flat tensors, those that are in parts put together."""
    found = {name: flat for name, flat in tensors.items() if whole_name(name) == name}
    for name, cuts in cut_tensors(shapes).items():
        whole = torch.full(cuts[0].shape, torch.nan)
        for cut in cuts:
            cut.put(tensors[stored_name(name, cut)].view(cut.held_shape), whole)
        found[name] = whole.flatten()
    return found


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any], *, exactly: bool = True) -> None:
    """Two whole states are the same, or as alike as sums in another order are."""
    for key in ("rates", "scheduler", "scale", "counters"):
        assert found[key] == expected[key], key
    for kind in ("tensors", "buffers"):
        assert found[kind].keys() == expected[kind].keys()
        for name, tensor in found[kind].items():
            tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-4, "atol": 1e-6}
            if exactly or kind == "tensors":
                torch.testing.assert_close(
                    tensor, expected[kind][name], msg=lambda m, name=name: f"{name}: {m}", **tolerance
                )
