"""Divide the parameters of a rank's virtual stages into buckets."""

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
from weft.engine.models.hidden_matrices import is_owned, place
from weft.engine.parallel.cut import Cut
from weft.engine.precision import computed_dtype
from weft.engine.zero.bucket import Bucket
from weft.engine.zero.collectives import Collectives
from weft.engine.zero.members import Named


class ShardedStage(Protocol):
    """The interface of a virtual stage that sharding needs."""

    index: int
    tied: frozenset[str]
    cuts: Mapping[str, Cut]

    def named_global_parameters(self) -> Iterator[Named]:
        """Parameters by their name in the whole model."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Every module of the stage."""
        ...

    def blocks(self) -> Sequence[nn.Module]:
        """Modules whose weights only their own forward uses, in the order in which they run."""
        ...


def outside_blocks(stage: ShardedStage) -> set[nn.Parameter]:
    """Return parameters that a module outside of the blocks owns, such as an embedding that is tied to the head."""
    inside = {module for block in stage.blocks() for module in block.modules()}
    return {p for module in stage.modules() if module not in inside for p in module.parameters(recurse=False)}


def divide(
    stages: Iterable[ShardedStage],
    zero: ZeroConfig,
    collectives: Collectives,
    tied: Mapping[nn.Parameter, dist.ProcessGroup],
    bucket_ends: Mapping[int, Sequence[float]],
) -> list[Bucket]:
    """Create the buckets of a rank, stage by stage in the order in which a forward uses them.

    A bucket ends at each of ``bucket_ends``. It has at most ``zero.reduce_bucket_size`` and
    ``zero.allgather_bucket_size`` elements, or a single parameter. At stage 3 all parameters of a bucket are in one
    block, so that the bucket can be released while other blocks run. Persistent parameters are in separate buckets,
    handled as at stage 2. Weights that several virtual stages share, on one or several ranks, are separate buckets,
    so that all holders divide them in the same way. All weights of a bucket are reduced and gathered over the same
    ranks. Frozen weights are in buckets only at stage 3, which shards them. From stage 1 on, matrices that an optimiser
    steps as a whole are in buckets of their own, whose shards end between matrices.

    Args:
        tied: group of holders, for parameters that other pipeline ranks also hold.
        bucket_ends: by virtual stage, the fractions of its elements at which buckets end, ascending. A
            parameter belongs to the bucket that contains its middle element.
    """
    stages = list(stages)
    users: dict[nn.Parameter, set[int]] = {}
    for stage in stages:
        for _, parameter in stage.named_global_parameters():
            users.setdefault(parameter, set()).add(stage.index)
    limit = min(zero.reduce_bucket_size, zero.allgather_bucket_size)
    room = zero.model_persistence_threshold if zero.stage == 3 else 0
    buckets: list[Bucket] = []
    loads = {kind: [0.0] * kind.num_replicas for kind in collectives.kinds}
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
        groups = [
            (whole, min(zero.stage, 2)),
            *((g, zero.stage) for g in _groups(stage, rest, bucket_ends.get(stage.index, ()))),
        ]
        for group, zero_stage in groups:
            for run in _runs(group, limit, stage.cuts, apart=zero_stage > 0):
                name, first = run[0]
                over = collectives.of(stage.cuts.get(name))
                # All holders of a tied weight, whose other weights differ, choose the same owner.
                load = [0.0] * over.num_replicas if name in stage.tied else loads[over]
                buckets.append(
                    Bucket(
                        run,
                        stages=frozenset(users[first]),
                        zero_stage=zero_stage,
                        collectives=over,
                        tied=tied.get(first),
                        cuts=stage.cuts,
                        owners=place([p.shape for _, p in run], load) if zero_stage and is_owned(first) else (),
                    )
                )
    return buckets


def _stay_whole(stage: ShardedStage, blocks: Sequence[Sequence[Named]], below: int, room: int) -> list[Named]:
    """Return the persistent parameters: those of fewer than ``below`` elements, in order of use, ``room`` in total."""
    found = []
    for name, parameter in (named for block in blocks for named in block):
        if name not in stage.tied and parameter.numel() < below and parameter.numel() <= room:
            room -= parameter.numel()
            found.append((name, parameter))
    return found


def _groups(stage: ShardedStage, blocks: Sequence[Sequence[Named]], ends: Sequence[float]) -> Iterator[list[Named]]:
    """Yield groups of parameters that may share a bucket: parameters of one block between two ends."""
    total = sum(p.numel() for block in blocks for name, p in block if name not in stage.tied)
    offset = 0
    for block in blocks:
        keys = []
        for name, parameter in block:
            size = 0 if name in stage.tied else parameter.numel()
            piece = bisect_right(ends, (offset + size / 2) / max(total, 1))
            offset += size
            keys.append((name if name in stage.tied else "", piece))
        for _, group in groupby(zip(keys, block, strict=True), key=itemgetter(0)):
            yield [named for _, named in group]


def _runs(group: Sequence[Named], limit: int, cuts: Mapping[str, Cut], *, apart: bool) -> Iterator[list[Named]]:
    """Split a group into runs of at most ``limit`` elements, by dtype, by trained or frozen, and by kind of cut.

    Args:
        apart: also split matrices with an owner from other parameters.
    """
    open_runs: dict[tuple[torch.dtype, bool, str, bool], list[Named]] = {}
    for name, parameter in group:
        axis = cuts[name].axis if name in cuts else ""
        kind = computed_dtype(parameter), parameter.requires_grad, axis, apart and is_owned(parameter)
        run = open_runs.setdefault(kind, [])
        if run and sum(p.numel() for _, p in run) + parameter.numel() > limit:
            yield run
            run = open_runs[kind] = []
        run.append((name, parameter))
    yield from open_runs.values()


def _by_block(stage: ShardedStage) -> Iterator[list[Named]]:
    """Yield the parameters outside of the blocks, then the parameters of each block."""
    place = {p: number for number, block in enumerate(stage.blocks()) for p in block.parameters()}
    place |= dict.fromkeys(outside_blocks(stage), -1)
    named = list(stage.named_global_parameters())
    for number in range(-1, len(stage.blocks())):
        yield [(name, p) for name, p in named if place[p] == number]
