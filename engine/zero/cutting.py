"""Cutting a rank's virtual stages into blocks and chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from weft.conf.schema import ZeroConfig
from weft.engine.zero.chunk import Chunk
from weft.engine.zero.collectives import Collectives

Named = tuple[str, nn.Parameter]


class ShardedStage(Protocol):
    """What is needed of a virtual stage."""

    index: int
    tied: frozenset[str]

    def named_global_parameters(self) -> Iterator[Named]:
        """Parameters by their name in the whole model."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Every module in it."""
        ...

    def blocks(self) -> Sequence[nn.Module]:
        """Modules whose weights only their own forward uses, in the order in which they run."""
        ...


def outside_blocks(stage: ShardedStage) -> set[nn.Parameter]:
    """Parameters that some module outside of the blocks owns; an embedding that is tied to the head is one."""
    inside = {module for block in stage.blocks() for module in block.modules()}
    return {p for module in stage.modules() if module not in inside for p in module.parameters(recurse=False)}


def cut(
    stages: Iterable[ShardedStage],
    zero: ZeroConfig,
    collectives: Collectives,
    tied: Mapping[nn.Parameter, dist.ProcessGroup],
    cuts: Mapping[int, Sequence[float]],
) -> list[Chunk]:
    """The chunks of a rank, stage by stage in the order in which a forward needs them.

    A chunk holds at most ``zero.reduce_bucket_size`` and ``zero.allgather_bucket_size``
    elements, or a single parameter, and ends where ``cuts`` say. At stage 3 it stays within one
    block, which can then be given back while others run. Weights that several virtual stages share, on one rank or on
    several, are chunks of their own, so that all holders cut them alike. Frozen weights are
    left where they are, but for stage 3, which shards them.

    Args:
        tied: for parameters that other pipeline ranks hold, too, the group of their holders.
        cuts: by virtual stage, shares of its elements at which chunks end, ascending; a
            parameter belongs where its middle is.
    """
    stages = list(stages)
    users: dict[nn.Parameter, set[int]] = {}
    for stage in stages:
        for _, parameter in stage.named_global_parameters():
            users.setdefault(parameter, set()).add(stage.index)
    limit = min(zero.reduce_bucket_size, zero.allgather_bucket_size)
    chunks: list[Chunk] = []
    seen: set[nn.Parameter] = set()

    def make(parameters: Sequence[Named]) -> None:
        first = parameters[0][1]
        chunks.append(
            Chunk(
                parameters,
                stages=frozenset(users[first]),
                zero_stage=zero.stage,
                collectives=collectives,
                tied=tied.get(first),
            )
        )

    for stage in stages:
        runs: dict[tuple[torch.dtype, bool], list[Named]] = {}
        blocks = [
            [(name, p) for name, p in block if p not in seen and (p.requires_grad or zero.stage == 3)]
            for block in _by_block(stage)
        ]
        total = sum(p.numel() for block in blocks for name, p in block if name not in stage.tied)
        offset = piece = 0
        for block in blocks:
            for name, parameter in block:
                seen.add(parameter)
                if name in stage.tied:
                    make([(name, parameter)])
                    continue
                middle = (offset + parameter.numel() / 2) / max(total, 1)
                offset += parameter.numel()
                if (here := bisect_right(cuts.get(stage.index, ()), middle)) != piece:
                    piece = here
                    _flush(runs, make)
                run = runs.setdefault((parameter.dtype, parameter.requires_grad), [])
                if run and sum(p.numel() for _, p in run) + parameter.numel() > limit:
                    make(run)
                    run.clear()
                run.append((name, parameter))
            if zero.stage == 3:
                _flush(runs, make)
        _flush(runs, make)
    return chunks


def _flush(runs: dict[tuple[torch.dtype, bool], list[Named]], make: Callable[[Sequence[Named]], None]) -> None:
    for run in runs.values():
        if run:
            make(run)
    runs.clear()


def _by_block(stage: ShardedStage) -> Iterator[list[Named]]:
    """What lies outside of the blocks, then block by block."""
    place = {p: number for number, block in enumerate(stage.blocks()) for p in block.parameters()}
    place |= dict.fromkeys(outside_blocks(stage), -1)
    named = list(stage.named_global_parameters())
    for number in range(-1, len(stage.blocks())):
        yield [(name, p) for name, p in named if place.get(p, -1) == number]
