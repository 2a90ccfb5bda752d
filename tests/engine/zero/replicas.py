"""Replicas as threads of one process: ZeRO's buckets over collectives that meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.channel import Completed
from weft.comm.collectives import Primitive
from weft.comm.sums import ReplicaSum
from weft.engine.models.hidden_matrices import tag
from weft.engine.parallel.in_process import ExchangeBarrier
from weft.engine.zero import Collectives, ShardedOptimizer
from weft.engine.zero.muon import Muon

LIMIT_S = 20


class Meeting(ExchangeBarrier):
    """Where threads bring a tensor each, and see everyone's."""

    def __init__(self, count: int) -> None:
        super().__init__(count, timeout_s=LIMIT_S)
        self.count = count

    def exchange(self, number: int, tensor: Tensor, what: str = "tensor") -> list[Tensor]:
        return [brought.clone() for brought in super().exchange(number, tensor.clone(), what)]


class Late:
    """The handle of a collective that fills its target where it is waited for, and not before."""

    def __init__(self, fill: Callable[[], Tensor]) -> None:
        self._fill = fill

    def wait(self) -> Tensor:
        return self._fill()


class Meetings(Collectives):
    """Collectives of one of several threads; what is not waited for is not there."""

    def __init__(self, meeting: Meeting, number: int, **settings: Any) -> None:
        super().__init__(replica=number, num_replicas=meeting.count, **settings)
        self.meeting = meeting
        self.started: list[tuple[str, int]] = []

    def _start(self, over: Any, primitive: Primitive, source: Tensor, target: Tensor) -> Any:
        if self.num_replicas == 1:
            return Completed(target)
        self.started.append((primitive.name, max(source.numel(), target.numel())))
        everyones = self.meeting.exchange(self.replica, source)
        if primitive is Primitive.all_gather:
            result = torch.cat(everyones)
        else:
            result = torch.stack(everyones).sum(0)
            if primitive is Primitive.reduce_scatter:
                result = result.chunk(self.num_replicas)[self.replica]
        return Late(lambda: target.copy_(result))

    def sum(self, tensor: Tensor) -> None:
        self._start(None, Primitive.all_reduce, tensor, tensor).wait()


class MeetingOptimizer(ShardedOptimizer):
    """Sums the norm, and who has gradients, where its buckets meet."""

    def _started_sum(self, counts: Tensor) -> ReplicaSum:
        if counts.numel() and self.sharding.collectives.num_replicas > 1:
            self.sharding.collectives.sum(counts)
        return ReplicaSum(counts, None)

    def _summed(self, square: Tensor) -> ReplicaSum:
        collectives = self.sharding.collectives
        if collectives.num_replicas > 1:
            collectives.sum(square)
        return ReplicaSum(square, None)


def in_threads(count: int, run: Callable[[Meeting, int], Any]) -> list[Any]:
    """Return the results of ``run`` in ``count`` threads; raise the first error, if there is one."""
    meeting = Meeting(count)
    errors: list[BaseException] = []

    def call(number: int) -> Any:
        try:
            return run(meeting, number)
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(call, range(count)))
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


class Block(nn.Sequential):
    """A matrix and vectors; some blocks give their output in a tuple or a mapping, as models' own do."""

    def __init__(self, number: int) -> None:
        super().__init__(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())
        self.number = number

    def forward(self, hidden: Tensor) -> Any:
        hidden = super().forward(hidden)
        return (hidden, (hidden,), {"hidden": hidden})[self.number % 3]


class SmallStage(nn.Module):
    """An embedding, blocks of a matrix and vectors, a head; the head is the embedding where it is tied."""

    index = 0
    tied: frozenset[str] = frozenset()
    cuts = {}

    def __init__(self, blocks: int = 3, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(map(Block, range(blocks)))
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(7)  # threads share the default one
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        self.to(dtype)

    def named_global_parameters(self) -> Any:
        yield from self.named_parameters()

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the head's input."""
        hidden = self.embed(ids)
        for layer in self.layers:
            output = layer(hidden)
            hidden = hidden + {1: lambda o: o[0], 2: lambda o: o["hidden"]}.get(layer.number % 3, lambda o: o)(output)
        return hidden

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.hidden(ids)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.flatten(), reduction="sum")


def small_muon(parameters: Iterable[nn.Parameter]) -> Muon:
    """Muon of a `SmallStage`, whose embedding and head have 11 rows."""
    held = list(parameters)
    tag(("embed" if len(parameter) == 11 else "", parameter) for parameter in held)
    return Muon([{"params": held}], {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1})


def whole_step(optimizer: ShardedOptimizer, loss: Tensor | None = None) -> None:
    """The three parts of an optimiser's step, as the engine's `train_batch` calls them."""
    optimizer.reduce(loss)
    optimizer.clip()
    optimizer.step()
    optimizer.conclude()
