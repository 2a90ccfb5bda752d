"""Gathering of a virtual stage's weights, block by block as its computations use them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.models.lazy_logits import set_complete
from weft.engine.zero.bucket import Bucket, User
from weft.engine.zero.division import ShardedStage, outside_blocks


class StageWeights:
    """Gathers weights before use, waits at use, and at ZeRO stage 3 releases them after use.

    A forward runs through the blocks in order, a backward in reverse. While a block computes, the next block's
    weights are gathered. Storage is freed and allocated again under the same tensors, so the tensors that autograd
    saved stay valid. A forward and a backward of a stage may be interleaved in two threads. Neither releases
    weights that the other still needs.
    """

    def __init__(self, stage: ShardedStage, bucket_of: Mapping[nn.Parameter, Bucket]) -> None:
        """Hook the stage's blocks.

        Args:
            bucket_of: the bucket of each parameter that belongs to one.
        """
        blocks = list(stage.blocks())
        outside = outside_blocks(stage)
        self._rest = _buckets((p for _, p in stage.named_global_parameters() if p in outside), bucket_of)
        self._used = [_buckets(block.parameters(), bucket_of) for block in blocks]
        self._blocks = [[bucket for bucket in used if bucket not in self._rest] for used in self._used]
        self._index = stage.index
        self._direction = _Direction()
        self._last_direction = False
        self.buckets = list(dict.fromkeys([*self._rest, *(bucket for block in self._blocks for bucket in block)]))
        """Every bucket that the stage uses, in the order in which a forward uses them."""
        sharded = any(bucket.sharded for bucket in self.buckets)
        self._gathers = any(bucket.gathers for bucket in self.buckets)
        for number, block in enumerate(blocks if self._gathers else ()):
            block.register_forward_pre_hook(partial(self._before_forward, number))
            if sharded:
                block.register_forward_hook(partial(self._after_forward, number))
                set_complete(block, partial(self._complete, number))

    def prefetch(self, *, backward: bool = False) -> None:
        """Start to gather the weights that the next computation uses first."""
        for bucket in self._first(backward):
            bucket.gather()

    def begin(self, *, backward: bool) -> None:
        """Prepare a computation, in its thread: wait for the weights outside of the blocks."""
        if not self._gathers:
            return
        self._direction.backward = self._last_direction = backward
        for bucket in self._first(backward):
            bucket.gather(self._user)
        for bucket in self._rest:
            bucket.wait(self._user)

    def end(self, *, backward: bool) -> None:
        """End a computation in its thread, so that its weights may be released."""
        for bucket in self.buckets if self._gathers else ():
            bucket.users.discard((self._index, backward))

    def release(self) -> None:
        """Release all weights that are only gathered on demand."""
        for bucket in self.buckets:
            bucket.release()

    @contextmanager
    def _complete(self, number: int) -> Iterator[None]:
        """Provide a block's weights to a deferred weight gradient."""
        user = self._index, None
        for bucket in self._used[number]:
            bucket.wait(user)
        yield
        for bucket in self._used[number]:
            bucket.release(user)

    def _first(self, backward: bool) -> Iterator[Bucket]:
        yield from self._rest
        if self._blocks:
            yield from self._blocks[-1 if backward else 0]

    @property
    def _backward(self) -> bool:
        """True if this thread computes a backward. Autograd's own threads count for the computation that began last."""
        mine = self._direction.backward
        return self._last_direction if mine is None else mine

    @property
    def _user(self) -> User:
        return self._index, self._backward

    def _before_forward(self, number: int, module: nn.Module, args: Any) -> None:
        self._wait(number)
        if not self._backward:  # a checkpointed block runs its forward again in the backward
            self._gather(number + 1)

    def _after_forward(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._backward:
            return
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, number))
        self._release(number)

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        # Autograd runs the nodes of later blocks first, so the next block has finished.
        self._release(number + 1)
        self._wait(number)
        self._gather(number - 1)

    def _gather(self, number: int) -> None:
        if 0 <= number < len(self._blocks):
            for bucket in self._blocks[number]:
                bucket.gather(self._user)

    def _wait(self, number: int) -> None:
        for bucket in self._blocks[number]:
            bucket.wait(self._user)

    def _release(self, number: int) -> None:
        if number < len(self._blocks):
            for bucket in self._blocks[number]:
                bucket.release(self._user)


class _Direction(threading.local):
    """The direction of this thread's latest computation: True for a backward, or None before the first."""

    backward: bool | None = None

    def __reduce__(self) -> tuple[type[_Direction], tuple[()]]:
        """Copy without thread-local state."""
        return _Direction, ()


def _buckets(parameters: Iterable[nn.Parameter], bucket_of: Mapping[nn.Parameter, Bucket]) -> list[Bucket]:
    return list(dict.fromkeys(bucket_of[p] for p in parameters if p in bucket_of))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
