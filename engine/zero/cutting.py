"""Cutting a rank's virtual stages into blocks and chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
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
    block, which can then be given back while others run; what is to stay whole lies in chunks
    of its own, which go as at stage 2. Weights that several virtual stages share, on one rank
    or on several, are chunks of their own, so that all holders cut them alike. Frozen weights
    are left where they are, but for stage 3, which shards them.

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
    room = zero.model_persistence_threshold if zero.stage == 3 else 0
    chunks: list[Chunk] = []
    seen: set[nn.Parameter] = set()
    for stage in stages:
        blocks = [
            [(name, p) for name, p in block if p not in seen and (p.requires_grad or zero.stage == 3)]
            for block in _by_block(stage)
        ]
        seen.update(p for block in blocks for _, p in block)
        whole = _stay_whole(stage, blocks, zero.param_persistence_threshold, room)
        room -= sum(p.numel() for _, p in whole)
        kept = {p for _, p in whole}
        rest = [[(name, p) for name, p in block if p not in kept] for block in blocks]
        if zero.stage < 3:
            rest = [[named for block in rest for named in block]]
        groups = [(whole, min(zero.stage, 2)), *((g, zero.stage) for g in _groups(stage, rest, cuts))]
        for group, zero_stage in groups:
            for run in _runs(group, limit):
                first = run[0][1]
                chunks.append(
                    Chunk(
                        run,
                        stages=frozenset(users[first]),
                        zero_stage=zero_stage,
                        collectives=collectives,
                        tied=tied.get(first),
                    )
                )
    return chunks


def _stay_whole(stage: ShardedStage, blocks: Sequence[Sequence[Named]], below: int, room: int) -> list[Named]:
    """Parameters of fewer than ``below`` elements, in the order of need, as long as there is room."""
    found = []
    for name, parameter in (named for block in blocks for named in block):
        if name not in stage.tied and parameter.numel() < below and parameter.numel() <= room:
            room -= parameter.numel()
            found.append((name, parameter))
    return found


def _groups(
    stage: ShardedStage, blocks: Sequence[Sequence[Named]], cuts: Mapping[int, Sequence[float]]
) -> Iterator[list[Named]]:
    """What may lie in one chunk: of one block each, between two cuts, tied parameters by themselves."""
    total = sum(p.numel() for block in blocks for name, p in block if name not in stage.tied)
    offset, ends = 0, cuts.get(stage.index, ())
    for block in blocks:
        keys = []
        for name, parameter in block:
            size = 0 if name in stage.tied else parameter.numel()
            piece = bisect_right(ends, (offset + size / 2) / max(total, 1))
            offset += size
            keys.append((name if name in stage.tied else "", piece))
        for _, group in groupby(zip(keys, block, strict=True), key=itemgetter(0)):
            yield [named for _, named in group]


def _runs(group: Sequence[Named], limit: int) -> Iterator[list[Named]]:
    """The group by dtype and by what is trained, in pieces of at most ``limit`` elements."""
    open_runs: dict[tuple[torch.dtype, bool], list[Named]] = {}
    for name, parameter in group:
        kind = parameter.dtype, parameter.requires_grad
        run = open_runs.setdefault(kind, [])
        if run and sum(p.numel() for _, p in run) + parameter.numel() > limit:
            yield run
            run = open_runs[kind] = []
        run.append((name, parameter))
    yield from open_runs.values()


def _by_block(stage: ShardedStage) -> Iterator[list[Named]]:
    """What lies outside of the blocks, then block by block."""
    place = {p: number for number, block in enumerate(stage.blocks()) for p in block.parameters()}
    place |= dict.fromkeys(outside_blocks(stage), -1)
    named = list(stage.named_global_parameters())
    for number in range(-1, len(stage.blocks())):
        yield [(name, p) for name, p in named if place.get(p, -1) == number]
